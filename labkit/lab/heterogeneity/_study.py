"""Does a plan get what all devices could do together? Probe, plan, train with and without, throttle one."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit.cluster.placement import placements
from labkit.cluster.plan import make_plan, predict
from labkit.config import ExperimentConfig, from_overrides, from_parameters
from labkit.errors import ConfigError
from labkit.lab._values import json_safe
from labkit.lab.heterogeneity._probe import Probe, probe
from labkit.lab.report import Verdict
from labkit.lab.run_all import run_one
from labkit.lab.scaling import Point, run_point
from labkit.lab.scaling._study import NEVER, emulated_or_loopback
from labkit.lab.series import read_series
from labkit.runfolder import find_run, runs_root, write_atomically

AIM_OF_LIMIT = 0.95

RUNS: dict[str, dict[str, Any]] = {
    "equal split": {"shares.name": "even"},
    "planned": {"shares.name": "planned"},
    "planned, throttled": {"shares.name": "planned"},
    "planned, throttled, rebalanced": {"shares.name": "planned", "shares.is_rebalanced": True},
}
"""What is trained, in this order; "throttled" slows one worker down from the middle of the run on."""


COMPARED: dict[str, dict[str, Any]] = {
    "allreduce, equal split": {"sync": "allreduce", "shares.name": "even"},
    "hierarchical, planned": {"sync": "hierarchical", "shares.name": "planned"},
    "hybrid, planned": {"sync": "hybrid", "shares.name": "planned"},
}
"""What is trained to see accuracy against time."""


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        base: The experiment, its cluster without profiles.
        throttled_rank: The worker that slows down.
        throttle_factor: How many times as long it then takes.
        remark: Whether links are shaped, in words.
        hybrid: What the hybrid is to have of its own, by dotted key: stale pushes weigh less, and asynchrony
            acts like momentum.
    """

    base: ExperimentConfig
    throttled_rank: int
    throttle_factor: float
    remark: str
    hybrid: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_parameters(cls, namespace: Mapping[str, Any]) -> "Study":
        """From a notebook's parameters cell: `throttled_rank`, `throttle_factor`, `hybrid`; every other name
        as in `labkit.from_parameters`. Runs end after `max_steps`.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        own = ("throttled_rank", "throttle_factor", "hybrid")
        others = {name: value for name, value in namespace.items() if name not in own}
        quiet = {
            "engine.eval_every_steps": NEVER,
            "engine.checkpoint_every_steps": NEVER,
            "engine.num_epochs": NEVER,
        }
        base = from_parameters(others, defaults=quiet)
        rank, factor = namespace["throttled_rank"], namespace["throttle_factor"]
        if not 0 <= rank < base.cluster.num_workers:
            raise ConfigError(
                f"throttled_rank must be one of the {base.cluster.num_workers} workers, got {rank}. Count "
                "from 0."
            )
        if factor <= 0:
            raise ConfigError(f"throttle_factor must be above 0, got {factor}. 3 is three times as slow.")
        placed, remark = emulated_or_loopback(base, base)
        return cls(placed, int(rank), float(factor), remark, dict(namespace["hybrid"]))

    def probe(self) -> Probe:
        """Measure the cluster, unless an equal probe has finished before."""
        return probe(self.base, is_repeat=False)

    def planned(self, found: Probe) -> ExperimentConfig:
        """The experiment on the probed cluster."""
        return found.applied_to(self.base)

    def config(self, name: str, found: Probe) -> ExperimentConfig:
        """One of `RUNS`."""
        config = from_overrides(RUNS[name], base=self.planned(found))
        if "throttled" not in name:
            return config
        values = config.cluster.model_dump(mode="json")
        place = placements(config.cluster)[self.throttled_rank]
        worker = values["nodes"][place.node_index]["workers"][place.local_rank]
        worker["throttle"] = {"factor": self.throttle_factor, "from_step": self.throttled_from}
        return from_overrides({"cluster": values}, base=config)

    @property
    def throttled_from(self) -> int:
        """First slow step: the middle of the run."""
        return max(2, (self.base.engine.max_steps or 40) // 2)

    def run(self, found: Probe, say: Callable[[str], object] = print) -> "Result":
        """Train what has not been trained before, one run at a time.

        Raises:
            RunFailed: a run did not finish.
        """
        points, steps = {}, {}
        for name in RUNS:
            config = self.config(name, found)
            points[name] = run_point(config)
            history = find_run(points[name].key).history(0, ("step",))
            steps[name] = tuple(event["step_s"] for event in history)
            say(f"{name}: {1e3 * statistics.median(steps[name][-len(steps[name]) // 4 :]):.4g} ms per step")
        planned = self.planned(found)
        prediction = predict(planned, make_plan(planned))
        assert prediction is not None  # a probe gives every worker a profile
        return Result(
            points,
            steps,
            prediction.limit_samples_per_s,
            prediction.step_s,
            self.throttled_from,
            self.remark,
        )

    def compare(self, found: Probe, say: Callable[[str], object] = print) -> dict[str, str]:
        """Train what has not been trained before, evaluated after every epoch.

        Returns:
            Keys of the runs by the names of `COMPARED`.

        Raises:
            RunFailed: a run did not finish.
        """
        keys = {}
        for name, changes in COMPARED.items():
            config = from_overrides({**changes, "engine.eval_every_steps": None}, base=self.planned(found))
            if config.sync.name == "hybrid":
                config = from_overrides(dict(self.hybrid), base=config)
            run = run_one(config)
            keys[name] = run.key
            say(f"{name}: accuracy {read_series(run).last('val/accuracy') or 0.0:.3f} at the end")
        return keys


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        points: What each of `RUNS` cost.
        step_s: Time of every step of each, as worker 0 saw it.
        limit_samples_per_s: The sum of the devices' own speeds, as probed.
        predicted_step_s: Of the planned run.
        throttled_from: First slow step of the throttled runs.
        remark: Whether links were shaped.
    """

    points: Mapping[str, Point]
    step_s: Mapping[str, tuple[float, ...]]
    limit_samples_per_s: float
    predicted_step_s: float
    throttled_from: int
    remark: str

    @property
    def of_limit(self) -> float:
        """Throughput of the planned run over the sum of the devices' own speeds."""
        return self.points["planned"].samples_per_s / self.limit_samples_per_s

    @property
    def gain(self) -> float:
        """Throughput of the planned run over that of an equal split."""
        return self.points["planned"].samples_per_s / self.points["equal split"].samples_per_s

    @property
    def prediction_error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.predicted_step_s / self.points["planned"].step_s - 1

    @property
    def recovery(self) -> float:
        """Step time at the end of the throttled run, without rebalancing over with."""
        return self.final_step_s("planned, throttled") / self.final_step_s("planned, throttled, rebalanced")

    def final_step_s(self, name: str) -> float:
        """Median over the last quarter of a run's steps."""
        seconds = self.step_s[name]
        return statistics.median(seconds[-max(1, len(seconds) // 4) :])

    def verdict(self) -> Verdict:
        """Whether the plan gets what the devices could do together, and the rebalancer holds it."""
        text = (
            f"The plan reaches {self.of_limit:.0%} of the sum of all devices' own speeds, {self.gain:.2f} "
            f"times an equal split; its step was predicted within {abs(self.prediction_error):.1%}. With one "
            f"worker slowed down, rebalancing makes a step {self.recovery:.2f} times as fast as the fixed "
            "plan."
        )
        doubtful = {name: point.doubts for name, point in self.points.items() if point.doubts}
        if doubtful:
            first = next(iter(doubtful.values()))[0]
            text += f" Doubtful: {', '.join(doubtful)} ({first})."
        if not self.points["planned"].is_emulated:
            text += f" {self.remark}"
        is_met = self.of_limit >= AIM_OF_LIMIT and self.gain > 1 and self.recovery > 1
        return Verdict(text, is_met, time.time())


def record(study: Study, result: Result) -> Verdict:
    """Write the verdict and its figures beside the runs, as `heterogeneity.json`.

    Returns:
        The verdict, which shows itself in a notebook.
    """
    verdict = result.verdict()
    file = runs_root() / study.base.name / "heterogeneity.json"
    content = {
        "verdict": asdict(verdict),
        "of_limit": result.of_limit,
        "gain": result.gain,
        "prediction_error": result.prediction_error,
        "recovery": result.recovery,
        "points": {name: asdict(point) for name, point in result.points.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(json_safe(content), indent=1))
    return verdict
