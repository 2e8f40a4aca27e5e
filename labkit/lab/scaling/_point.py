"""One run of a comparison in a few numbers, read from its folder."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.cluster.cost import bound_s, sent_bytes, shape_text, slowest_mbit, wire_s
from labkit.config import ExperimentConfig, HierarchicalConfig, LocalSgdConfig, from_overrides
from labkit.lab.run_all import run_one
from labkit.runfolder import RunFolder, RunStatus

BYTES_TOLERANCE = 0.05
_NUM_WARM_UP_STEPS = 3
_NUM_BLOCKS = 5


@dataclass(frozen=True)
class Point:
    """What a run cost.

    Attributes:
        strategy: Its name, with the wire format where that is not float32.
        shape: Nodes and workers, such as `4x2`.
        num_nodes: Nodes.
        num_workers: Workers of all nodes.
        link_mbit: Rate of the slowest link; None without a limit.
        is_emulated: Links were shaped; otherwise all traffic was on loopback.
        batch_size: Samples per step.
        num_params: Parameters of the model.
        step_s: Time of a step: median over windows of one period of the strategy, first steps left out.
        block_step_s: The same for a few blocks of steps, to see the spread.
        sent_bytes: By each node over its link, per step, as the kernel counted; () on loopback.
        expected_bytes: The same by formula.
        wire_s: Shortest time that the strategy's bytes take.
        bound_s: Shortest time in which the nodes can sum the gradients in their own type.
        memory_bytes: Resident memory of the workers of each node, shared pages counted once; interpreter
            and torch included.
        accuracy: On the held-out samples, at the end.
        loss: On the held-out samples, at the end.
        key: The run's key.
        doubts: Why its times must not be believed.
    """

    strategy: str
    shape: str
    num_nodes: int
    num_workers: int
    link_mbit: float | None
    is_emulated: bool
    batch_size: int
    num_params: int
    step_s: float
    block_step_s: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    expected_bytes: tuple[float, ...]
    wire_s: float
    bound_s: float
    memory_bytes: tuple[float, ...]
    accuracy: float | None
    loss: float | None
    key: str
    doubts: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Throughput of all workers together."""
        return self.batch_size / self.step_s

    @property
    def busiest_bytes(self) -> float:
        """What the node that sends most sends per step; by formula where nothing could be counted."""
        return max(self.sent_bytes or self.expected_bytes)

    @property
    def all_bytes(self) -> float:
        """What all nodes send per step; by formula where nothing could be counted."""
        return sum(self.sent_bytes or self.expected_bytes)

    @property
    def node_bytes(self) -> float:
        """Memory of the middle node."""
        return statistics.median(self.memory_bytes)


def run_point(
    config: ExperimentConfig,
    *,
    is_repeat: bool = False,
    on_poll: Callable[[RunStatus], None] | None = None,
) -> Point:
    """Train one configuration, unless an equal run has finished before, and sum it up.

    Args:
        config: The experiment.
        is_repeat: Train it in any case.
        on_poll: Called about ten times a second with the run's state.

    Raises:
        RunFailed: it did not finish.
        ConfigError: the cluster can't be emulated here.
    """
    return sum_up(run_one(config, is_repeat=is_repeat, on_poll=on_poll).folder)


def sum_up(folder: RunFolder) -> Point:
    """Read what a finished run cost from its folder."""
    config = folder.read_config()
    begun = [(folder.history(rank, ("start",)) or [{}])[-1] for rank in folder.ranks()]
    ended = [(folder.history(rank, ("end",)) or [{}])[-1] for rank in folder.ranks()]
    num_params = begun[0]["num_params"]
    model_bytes = num_params * (8 if config.engine.dtype == "float64" else 4)
    num_steps = max(1, ended[0]["step"] - begun[0].get("start_step", 0))
    seconds = [event["step_s"] for event in folder.history(0, ("step",))]
    expected = tuple(sent_bytes(config, model_bytes, num_steps))
    counted = _counted_bytes(ended, num_steps, len(expected)) if config.launch.is_emulated else ()
    final = folder.read_json(folder.result_file).get("final", {})
    period = config.sync.period_steps if isinstance(config.sync, LocalSgdConfig) else 1
    return Point(
        strategy=strategy_name(config),
        shape=shape_text(config.cluster),
        num_nodes=len(config.cluster.nodes),
        num_workers=config.cluster.num_workers,
        link_mbit=slowest_mbit(config.cluster) if config.launch.is_emulated else None,
        is_emulated=config.launch.is_emulated,
        batch_size=config.engine.global_batch_size,
        num_params=num_params,
        step_s=typical_s(seconds, period),
        block_step_s=tuple(_blocks(seconds, period)),
        sent_bytes=counted,
        expected_bytes=expected,
        wire_s=wire_s(config, model_bytes) if config.launch.is_emulated else 0.0,
        bound_s=bound_s(config, model_bytes) if config.launch.is_emulated else 0.0,
        memory_bytes=_by_node(begun, [event.get("resident_bytes") for event in ended]),
        accuracy=final.get("val/accuracy"),
        loss=final.get("val/loss"),
        key=folder.key,
        doubts=(*_byte_doubts(counted, expected), *_pace_doubts(folder)),
    )


def strategy_name(config: ExperimentConfig) -> str:
    """The strategy, with its wire format where that is not float32."""
    is_short = isinstance(config.sync, HierarchicalConfig) and config.sync.wire != "float32"
    return f"{config.sync.name}_{config.sync.wire}" if is_short else config.sync.name  # type: ignore[union-attr]


def typical_s(seconds: Sequence[float], period: int = 1) -> float:
    """Time of a step: median over windows of `period` steps of their mean, without the first steps.

    Args:
        seconds: Time of each step, in order; at least one.
        period: Steps after which the strategy repeats itself.
    """
    return statistics.median(_windows(seconds, period))


def _windows(seconds: Sequence[float], period: int) -> list[float]:
    """Means over whole periods; the first ones are left out as long as one is left."""
    means = [statistics.fmean(seconds[i : i + period]) for i in range(0, len(seconds) - period + 1, period)]
    skipped = -(-_NUM_WARM_UP_STEPS // period)
    return means[skipped:] or means[-1:] or [statistics.fmean(seconds)]


def _blocks(seconds: Sequence[float], period: int) -> list[float]:
    windows = _windows(seconds, period)
    count = min(_NUM_BLOCKS, len(windows))
    cuts = [len(windows) * index // count for index in range(count + 1)]
    return [statistics.median(windows[low:high]) for low, high in zip(cuts, cuts[1:], strict=False)]


def _counted_bytes(ended: Sequence[dict[str, Any]], num_steps: int, num_nodes: int) -> tuple[float, ...]:
    """Per step and node; () unless every node has counted."""
    counts = [event.get("node_sent_bytes") for event in ended]
    found = [count / num_steps for count in counts if count is not None]
    return tuple(found) if len(found) == num_nodes else ()


def _by_node(begun: Sequence[dict[str, Any]], values: Sequence[float | None]) -> tuple[float, ...]:
    """Sums over the workers of each node, in the order of the nodes."""
    sums: dict[str, float] = {}
    for event, value in zip(begun, values, strict=True):
        sums[event["node"]] = sums.get(event["node"], 0.0) + (value or 0.0)
    return tuple(sums.values())


def _byte_doubts(counted: Sequence[float], expected: Sequence[float]) -> list[str]:
    return [
        f"node {node} sent {is_:,.0f} bytes per step where {should:,.0f} were expected"
        for node, (is_, should) in enumerate(zip(counted, expected, strict=False))
        if should and abs(is_ / should - 1) > BYTES_TOLERANCE
    ]


def _pace_doubts(folder: RunFolder) -> list[str]:
    texts = [event["text"] for rank in folder.ranks() for event in folder.history(rank, ("message",))]
    return sorted({"emulated compute was too short" for text in texts if "emulated compute was" in text})


def memory_floor(config: ExperimentConfig) -> ExperimentConfig | None:
    """The same workers and strategy with next to no model: what is resident without it; None when the data
    do not fit such a model."""
    if config.data.name != "digits":
        return None
    return from_overrides(
        {
            "model": {"name": "mlp", "hidden_sizes": [1]},
            "cluster.link_mbit": None,
            "engine.max_steps": 3,
            "engine.num_epochs": 1,
            "engine.step_padding_s": 0.0,
            "schedule.warmup_steps": 0,
        },
        base=config,
    )
