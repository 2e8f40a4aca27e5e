"""A grid of runs: strategies x shapes of the cluster x rates of its links, one after the other."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.config import ExperimentConfig, from_overrides, from_parameters, load_cluster
from labkit.errors import ConfigError, did_you_mean
from labkit.lab._values import json_safe
from labkit.lab.report import Verdict
from labkit.lab.scaling._point import Point, memory_floor, run_point
from labkit.launch.emulation import check
from labkit.runfolder import runs_root, write_atomically

STRATEGIES: dict[str, dict[str, Any]] = {
    "parameter_server": {"sync.name": "parameter_server"},
    "allreduce": {"sync.name": "allreduce"},
    "hierarchical": {"sync.name": "hierarchical", "sync.wire": "float32"},
    "hierarchical_bfloat16": {"sync.name": "hierarchical", "sync.wire": "bfloat16"},
    "local_sgd": {"sync.name": "local_sgd"},
}
EXACT = ("parameter_server", "allreduce", "hierarchical")
"""They sum all gradients of every step in the parameters' own type, so they give the same weights."""

NEVER = 1_000_000_000  # steps: evaluated and saved at the end alone


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        base: What all runs have in common.
        strategies: Names of `STRATEGIES`.
        shapes: Clusters, as `4x2` or a cluster file.
        rates: Rate of every link, Mbit/s.
        samples_per_worker: Of every step; the global batch grows with the workers.
        remark: Whether links are shaped, in words.
    """

    base: ExperimentConfig
    strategies: tuple[str, ...]
    shapes: tuple[str, ...]
    rates: tuple[float, ...]
    samples_per_worker: int
    remark: str

    @classmethod
    def from_parameters(cls, namespace: Mapping[str, Any]) -> "Study":
        """From a notebook's parameters cell: `strategies`, `shapes`, `link_mbit`, `samples_per_worker`; every
        other name as in `labkit.from_parameters`.

        Where emulation is not allowed, the same runs take place on loopback, and `remark` says so.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        others = {name: value for name, value in namespace.items() if name not in (*_OWN, *_OF_THE_NOTEBOOK)}
        quiet = {"engine.eval_every_steps": NEVER, "engine.checkpoint_every_steps": NEVER}
        base = from_parameters(others, defaults={**quiet, "engine.global_batch_size": 1})
        for name in _OWN:
            if not namespace.get(name):
                raise ConfigError(f"{name} must be given, got {namespace.get(name)!r}. See the notebook.")
        for name in _OWN[:3]:
            if not isinstance(namespace[name], (list, tuple)):
                value = namespace[name]
                raise ConfigError(f"{name} must be a list, got {value!r}. Use [{value!r}].")
        study = cls(
            base=base,
            strategies=tuple(namespace["strategies"]),
            shapes=tuple(map(str, namespace["shapes"])),
            rates=tuple(float(rate) for rate in namespace["link_mbit"]),
            samples_per_worker=int(namespace["samples_per_worker"]),
            remark="",
        )
        study._check()
        return study._placed()

    def _check(self) -> None:
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ConfigError(
                    f"strategies must be some of {', '.join(STRATEGIES)}, got {name!r}. "
                    f"{did_you_mean(name, STRATEGIES)}"
                )
        self.configs()

    def _placed(self) -> "Study":
        """The study as it can be run here."""
        base, remark = emulated_or_loopback(self.configs()[-1], self.base)
        return Study(base, self.strategies, self.shapes, self.rates, self.samples_per_worker, remark)

    def config(self, strategy: str, shape: str, mbit: float | None) -> ExperimentConfig:
        """One run. A cluster of one node has no link, so that its rate does not count."""
        cluster = load_cluster(shape)
        return from_overrides(
            {
                "cluster": cluster.model_dump(mode="json"),
                "cluster.link_mbit": mbit if len(cluster.nodes) > 1 else None,
                "engine.global_batch_size": self.samples_per_worker * cluster.num_workers,
                **STRATEGIES[strategy],
            },
            base=self.base,
        )

    def configs(self) -> list[ExperimentConfig]:
        """All runs, the quick ones first."""
        return [
            self.config(strategy, shape, mbit)
            for shape in self.shapes
            for mbit in self._rates_of(shape)
            for strategy in self.strategies
        ]

    def _rates_of(self, shape: str) -> list[float]:
        falling = sorted(self.rates, reverse=True)
        return falling if len(load_cluster(shape).nodes) > 1 else falling[:1]

    def run(self, say: Callable[[str], object] = print) -> "Result":
        """Train everything that has not been trained before, one run at a time.

        Args:
            say: Takes a line for each run.

        Raises:
            RunFailed: a run did not finish.
        """
        alone = run_point(self.config("allreduce", "1x1", None))
        say(f"one worker alone: {alone.samples_per_s:,.0f} samples/s")
        configs = self.configs()
        points = []
        for index, config in enumerate(configs, start=1):
            points.append(run_point(config))
            say(f"{index}/{len(configs)} {point_text(points[-1], alone)}")
        floors = {(p.strategy, p.shape): memory_floor(c) for p, c in zip(points, configs, strict=True)}
        bases = {key: run_point(floor).node_bytes for key, floor in floors.items() if floor is not None}
        return Result(tuple(points), alone, bases, self.remark)

    def __str__(self) -> str:
        return (
            f"{', '.join(self.strategies)} on {', '.join(self.shapes)} at "
            f"{', '.join(f'{rate:g}' for rate in self.rates)} Mbit/s, {self.samples_per_worker} samples per "
            f"worker and step. {self.remark}"
        )


_OWN = ("strategies", "shapes", "link_mbit", "samples_per_worker")
_OF_THE_NOTEBOOK = ("is_ladder_run",)


def emulated_or_loopback(largest: ExperimentConfig, base: ExperimentConfig) -> tuple[ExperimentConfig, str]:
    """What to run where emulation may not be allowed.

    Args:
        largest: A run whose cluster is tried.
        base: What is changed to loopback if it must be.

    Returns:
        The configuration, and a plain remark on what the figures will mean.
    """
    if base.launch.is_emulated:
        try:
            check(largest.cluster)
        except ConfigError as error:
            loopback = from_overrides({"launch.is_emulated": False}, base=base)
            return loopback, f"LINKS ARE NOT SHAPED, everything runs on loopback: {error}"
        return base, "Every node is a network namespace with an address of its own; links are shaped."
    return base, (
        "LINKS ARE NOT SHAPED (is_emulated is false): all nodes are this machine and talk over loopback, so "
        "link rates have no effect, and bytes are by formula."
    )


def point_text(point: Point, alone: Point) -> str:
    """A run in one line."""
    link = f"{point.link_mbit:g} Mbit/s" if point.link_mbit else "no slow link"
    doubts = f"; doubtful: {'; '.join(point.doubts)}" if point.doubts else ""
    return (
        f"{point.strategy} on {point.shape}, {link}: {point.samples_per_s:,.0f} samples/s, "
        f"{efficiency(point, alone):.0%} of {point.num_workers} workers alone, "
        f"{point.busiest_bytes / 1e6:.2f} MB per step{doubts}"
    )


def efficiency(point: Point, alone: Point) -> float:
    """Throughput over that of as many workers that need not talk: 1 is perfect."""
    return point.samples_per_s / (point.num_workers * alone.samples_per_s)


def bound_samples_per_s(point: Point, alone: Point) -> float:
    """What no strategy can pass that sums all gradients each step: a step takes as long as its compute, or
    as the sum over the links."""
    return point.batch_size / max(alone.step_s, point.bound_s)


@dataclass(frozen=True)
class Result:
    """All points of a study.

    Attributes:
        points: In the order of the runs.
        alone: One worker.
        bases: Resident memory of a node without the model, by strategy and shape; {} if not measured.
        remark: Whether links were shaped.
    """

    points: tuple[Point, ...]
    alone: Point
    bases: Mapping[tuple[str, str], float]
    remark: str

    @property
    def strategies(self) -> list[str]:
        """In the order of the study."""
        return list(dict.fromkeys(point.strategy for point in self.points))

    @property
    def shapes(self) -> list[str]:
        """In the order of the study."""
        return list(dict.fromkeys(point.shape for point in self.points))

    @property
    def rates(self) -> list[float | None]:
        """Rates of links, falling; [None] on loopback."""
        rates = sorted({point.link_mbit for point in self.points if point.link_mbit}, reverse=True)
        return list(rates) or [None]

    def at(self, strategy: str, shape: str, rate: float | None) -> Point:
        """One point; a shape of one node is the same at every rate."""
        own = [point for point in self.points if (point.strategy, point.shape) == (strategy, shape)]
        return next((point for point in own if point.link_mbit == rate), own[0])

    def slowest_of(self, strategy: str) -> Point:
        """Its run on the last shape with the slowest links; of the last strategy when it took no part."""
        name = strategy if strategy in self.strategies else self.strategies[-1]
        return self.at(name, self.shapes[-1], self.rates[-1])

    def memory_bytes(self, point: Point) -> float:
        """Memory of a node for the model: parameters, gradients, optimizer and buffers."""
        return point.node_bytes - self.bases.get((point.strategy, point.shape), 0.0)

    def verdict(self) -> Verdict:
        """Whether the two-level strategy is the fastest that gives the same weights, wherever nodes talk."""
        shape, rate = self.shapes[-1], self.rates[-1]
        link = f" at {rate:g} Mbit/s" if rate else " on loopback"
        parts = [
            f"{name} {efficiency(self.at(name, shape, rate), self.alone):.0%}" for name in self.strategies
        ]
        beaten = self._beaten()
        also = f" It is not the fastest exact one on {', '.join(beaten)}." if beaten else ""
        text = (
            f"On {shape}{link}, of the throughput of workers that need not talk there is left: "
            f"{', '.join(parts)}.{also} {self.remark if not self.points[-1].is_emulated else ''}"
        )
        return Verdict(text.strip(), "hierarchical" in self.strategies and not beaten, time.time())

    def _beaten(self) -> list[str]:
        """Where another exact strategy was clearly faster than the two-level one."""
        found = []
        several = [shape for shape in self.shapes if self.at(self.strategies[0], shape, None).num_nodes > 1]
        for shape in several if "hierarchical" in self.strategies else []:
            for rate in self.rates:
                ours = self.at("hierarchical", shape, rate)
                others = [self.at(name, shape, rate) for name in self.strategies if name in EXACT]
                if any(other.step_s < 0.97 * ours.step_s for other in others):
                    found.append(f"{shape} at {rate:g} Mbit/s" if rate else shape)
        return found


def record(study: Study, result: Result) -> Verdict:
    """Write all numbers and the verdict to `scaling.json` in the experiment's folder under `runs/`.

    Returns:
        The verdict, to show as the cell's value.
    """
    final = result.verdict()
    content = {
        "verdict": asdict(final),
        "study": str(study),
        "alone": asdict(result.alone),
        "points": [asdict(point) for point in result.points],
        "memory_without_model": [
            {"strategy": strategy, "shape": shape, "bytes": held}
            for (strategy, shape), held in result.bases.items()
        ],
    }
    write_atomically(record_file(study.base.name), json.dumps(json_safe(content), indent=1, allow_nan=False))
    return final


def record_file(name: str) -> Path:
    """Where `record` writes."""
    return runs_root() / name / "scaling.json"
