"""What a run's worker reported of its memory."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.cluster.placement import placements
from labkit.config import ClusterConfig
from labkit.errors import ConfigError
from labkit.lab.series import folder_of
from labkit.memory.recorded import Recorded
from labkit.memory.simulate import Outcome

NUM_SETTLING = 3  # steps that are recorded, planned, and first moved


@dataclass(frozen=True)
class MemoryRun:
    """One worker's memory in a run.

    Attributes:
        key: Of the run.
        report: As `labkit.memory.Report` at the run's end.
        recorded: Profile and plan.
        predicted: The plan, simulated.
        live: Seconds since a step began and bytes of blocks on the device from then on, measured.
        copies: Direction, bytes, begin and end in seconds, measured in the same step.
        step_s: Median of the steps that went by a plan.
        samples_per_s: Of all workers.
        num_sharing: Workers of the node behind the same link, by the cluster file.
    """

    key: str
    report: Mapping[str, Any]
    recorded: Recorded
    predicted: Outcome
    live: tuple[tuple[float, int], ...]
    copies: tuple[tuple[str, int, float, float], ...]
    step_s: float
    samples_per_s: float
    num_sharing: int = 1


def read_memory(run: Any, rank: int = 0) -> MemoryRun:
    """Read it.

    Args:
        run: A run, its folder, its key, the beginning of its key, or `latest`.
        rank: The worker.

    Raises:
        ConfigError: there is no such run, or nothing of its memory was planned.
    """
    folder = folder_of(run)
    plans, reports = folder.history(rank, ("memory_plan",)), folder.history(rank, ("memory",))
    if not plans or not reports:
        raise ConfigError(
            f"run must have planned its memory, got {folder.key} with no plan of worker {rank}. Set "
            "memory.device_budget, and train for 3 steps or more."
        )
    recorded = Recorded.from_mapping(plans[-1])
    steps = folder.history(0, ("step",))[NUM_SETTLING:]
    step_s = statistics.median(event["step_s"] for event in steps) if steps else 0.0
    config = folder.read_config()
    batch = config.engine.global_batch_size
    return MemoryRun(
        folder.key,
        reports[-1],
        recorded,
        recorded.predicted(),
        tuple((at, size) for at, size in plans[-1]["live"]),
        tuple((way, size, begin, end) for way, size, begin, end in plans[-1]["copies"]),
        step_s,
        batch / step_s if step_s else 0.0,
        _num_sharing(config.cluster, rank),
    )


def _num_sharing(cluster: ClusterConfig, rank: int) -> int:
    place = placements(cluster)[rank]
    node = cluster.nodes[place.node_index]
    links = (*node.uplinks, *(link for link in cluster.measured_uplinks if link.node == node.name))
    behind = (link.behind(place.local_world_size) for link in links)
    return next((len(ranks) for ranks in behind if place.local_rank in ranks), 1)
