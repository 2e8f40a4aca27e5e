"""Run a probe and write what it found into a cluster file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.cluster.placement import Placement, placements
from labkit.cluster.profile import Round, describe_model, profile
from labkit.config import (
    ClusterConfig,
    ExperimentConfig,
    MeasuredLinkConfig,
    ProfileConfig,
    cluster_to_yaml,
    from_overrides,
)
from labkit.errors import ConfigError
from labkit.lab.failure import raise_if_failed
from labkit.lab.progress import wait_with_lines
from labkit.launch import Run, start
from labkit.runfolder import RunFolder, write_atomically

PROBE_NAME = "probe"
"""Folder under `runs/` of probes."""


@dataclass(frozen=True)
class WorkerProbe:
    """What was measured of one worker.

    Attributes:
        place: Where it runs.
        rounds: Seconds by batch size, round by round.
        profile: The line through them.
        reason: What a batch larger than `profile.max_micro_batch_size` failed with; "" if none did.
    """

    place: Placement
    rounds: tuple[Round, ...]
    profile: ProfileConfig
    reason: str = ""


@dataclass(frozen=True)
class Probe:
    """What a probe found.

    Attributes:
        config: The experiment that was probed.
        workers: By rank.
        links: Between nodes, both ways, and inside those with several workers.
        gradient_bytes: Of the model.
    """

    config: ExperimentConfig
    workers: tuple[WorkerProbe, ...]
    links: tuple[MeasuredLinkConfig, ...]
    gradient_bytes: int

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster with its profiles."""
        by_rank = iter(self.workers)
        nodes = tuple(
            node.model_copy(
                update={
                    "workers": tuple(
                        worker.model_copy(update={"profile": next(by_rank).profile})
                        for worker in node.workers
                    )
                }
            )
            for node in self.config.cluster.nodes
        )
        return self.config.cluster.model_copy(
            update={
                "nodes": nodes,
                "profiled_model": describe_model(self.config),
                "gradient_bytes": self.gradient_bytes,
                "measured_links": self.links,
            }
        )

    def applied_to(self, config: ExperimentConfig) -> ExperimentConfig:
        """An experiment on the cluster with its profiles."""
        return from_overrides({"cluster": self.cluster.model_dump(mode="json")}, base=config)

    def save(self, path: str | Path) -> Path:
        """Write the cluster with its profiles; comments at the top of an older file are kept.

        Raises:
            ConfigError: the file can't be written.
        """
        return save_cluster(self.cluster, path)


def save_cluster(cluster: ClusterConfig, path: str | Path) -> Path:
    """Write a cluster file; comments at the top of an older one are kept.

    Raises:
        ConfigError: the file can't be written.
    """
    path = Path(path)
    try:
        old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        head = []
        for line in old:
            if not line.startswith("#"):
                break
            head.append(line + "\n")
        write_atomically(path, "".join(head) + cluster_to_yaml(cluster))
    except OSError as error:
        raise ConfigError(
            f"--output must be a file that can be written, got {path}: {error.strerror}. Choose another."
        ) from None
    return path


def probe(
    config: ExperimentConfig,
    *,
    is_repeat: bool = True,
    wait: Callable[[Run], object] = wait_with_lines,
    rendezvous: str | None = None,
    node: str | None = None,
) -> Probe:
    """Measure every worker's time per batch, its memory's limit, and the links, on the experiment's cluster.

    Args:
        config: What will be trained there.
        is_repeat: Measure again although an equal probe has finished before.
        wait: Waits for the run that measures, and shows how far it is.
        rendezvous: As for `start`, on several machines.
        node: As for `start`.

    Raises:
        ConfigError: the model fails with a single sample, or two batch sizes could not be measured.
        RunFailed: a worker died.
    """
    return read_probe(run_probe(config, "probe", is_repeat, wait, rendezvous, node))


def run_probe(
    config: ExperimentConfig,
    purpose: str,
    is_repeat: bool,
    wait: Callable[[Run], object],
    rendezvous: str | None,
    node: str | None,
) -> RunFolder:
    """Run the workers of an experiment for another purpose than training."""
    asked = from_overrides(
        {"name": PROBE_NAME, "launch.purpose": purpose, "launch.is_tracked": False}, base=config
    )
    run = start(asked, is_repeat=is_repeat, rendezvous=rendezvous, node=node)
    wait(run)
    raise_if_failed(run)
    return run.folder


def read_probe(folder: RunFolder) -> Probe:
    """What a probe found, from its run folder.

    Raises:
        ConfigError: it measured fewer than two batch sizes.
    """
    config = folder.read_config()
    workers, links, gradient_bytes = [], [], 1
    for place in placements(config.cluster):
        events = folder.history(place.rank, ("start", "probe", "ceiling", "link"))
        of = {
            kind: [e for e in events if e["kind"] == kind] for kind in ("start", "probe", "ceiling", "link")
        }
        rounds = tuple({int(size): s for size, s in event["seconds"].items()} for event in of["probe"])
        ceiling = of["ceiling"][-1] if of["ceiling"] else {}
        gradient_bytes = of["start"][-1]["gradient_bytes"]
        found = profile(rounds, ceiling.get("max_micro_batch_size"))
        workers.append(WorkerProbe(place, rounds, found, ceiling.get("reason", "")))
        keys = ("source", "target", "mbit", "latency_s")
        links += [MeasuredLinkConfig(**{key: event[key] for key in keys}) for event in of["link"]]
    return Probe(config, tuple(workers), tuple(links), gradient_bytes)
