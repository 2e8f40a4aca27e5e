"""The runs of a study of large batches, and how their learning rates are found."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.config import DigitsConfig, ExperimentConfig, from_overrides, from_parameters
from labkit.errors import ConfigError
from labkit.lab.large_batch._result import METHODS, RULES, Result, Row, Score, Tuning
from labkit.lab.run_all import run_all
from labkit.launch import Run

_NUM_DIGITS = 1797
_FIRST_TUNING_SEED = 1000  # beyond the seeds of the comparison
_NEVER = 1_000_000_000  # steps: evaluated and saved at the end alone


@dataclass(frozen=True)
class Study:
    """What is compared, and how.

    Attributes:
        base: What all runs have in common.
        batch_sizes: Samples per update, rising; linear scaling starts from the first.
        rates: Learning rates that are tried, by method; equally many for each.
        trust_coefficient: That of LARS.
        warmup_epochs: Linear warm-up; after it the rate falls as (1 - t)^2.
        num_samples: Training samples.
        num_seeds: Runs of each point of the comparison.
        num_tuning_seeds: Runs of each rate that is tried; their seeds are not used again.
        num_at_once: Runs side by side.
    """

    base: ExperimentConfig
    batch_sizes: tuple[int, ...]
    rates: Mapping[str, tuple[float, ...]]
    trust_coefficient: float
    warmup_epochs: float
    num_samples: int
    num_seeds: int
    num_tuning_seeds: int
    num_at_once: int

    @classmethod
    def from_parameters(cls, namespace: Mapping[str, Any]) -> "Study":
        """From a notebook's parameters cell: the names of this class, `sgd_rates` and `lars_rates`; every
        other name as in `labkit.from_parameters`.

        Raises:
            ConfigError: an unknown name, a bad value, or unequal numbers of rates.
        """
        own = {name: namespace[name] for name in (*_OWN, *_OPTIONAL) if name in namespace}
        for name in sorted(set(_OWN) - set(own)):
            raise ConfigError(f"{name} must be given, got nothing. Add it to the parameters cell.")
        others = {name: value for name, value in namespace.items() if name not in own}
        quiet = {"engine.eval_every_steps": _NEVER, "engine.checkpoint_every_steps": _NEVER}
        base = from_parameters(others, defaults=quiet)
        study = cls(
            base=base,
            batch_sizes=tuple(int(size) for size in own.pop("batch_sizes")),
            rates={name: tuple(float(rate) for rate in own.pop(f"{name}_rates")) for name in METHODS},
            num_samples=_num_samples(base, own.pop("num_samples", None)),
            **own,
        )
        study._check()
        return study

    def _check(self) -> None:
        sizes = self.batch_sizes
        if not sizes or list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"batch_sizes must rise, got {list(sizes)}. For example [64, 256, 1024].")
        counts = {name: len(rates) for name, rates in self.rates.items()}
        if counts["sgd"] != counts["lars"] or not counts["sgd"]:
            raise ConfigError(
                f"lars_rates must be as many as sgd_rates ({counts['sgd']}), got {counts['lars']}. "
                "Both methods get the same number of tries."
            )
        for name in ("num_seeds", "num_tuning_seeds", "num_at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}. Use 2.")
        for point in self._tries():  # a bad one shall not be found an hour later
            self.config(*point, 0)

    def _tries(self) -> list[tuple[str, int, float]]:
        return [(m, batch, rate) for m in METHODS for batch in self.batch_sizes for rate in self.rates[m]]

    @property
    def num_runs(self) -> int:
        """Runs of the whole study at the most; a rate that is tuned and scaled alike is measured once."""
        points = len(METHODS) * len(self.batch_sizes)
        return points * (len(self.rates["sgd"]) * self.num_tuning_seeds + len(RULES) * self.num_seeds)

    def __str__(self) -> str:
        tries, seeds = len(self.rates["sgd"]), self.num_tuning_seeds
        return (
            f"{', '.join(METHODS.values())} at {', '.join(map(str, self.batch_sizes))} samples per update, "
            f"{self.base.engine.num_epochs} epochs each; tuning: {tries} rates x {seeds} seeds; comparison: "
            f"{self.num_seeds} other seeds. At most {self.num_runs} runs, {self.num_at_once} at once."
        )

    def config(self, method: str, batch: int, rate: float, seed: int) -> ExperimentConfig:
        """One run of the study.

        Args:
            method: `sgd` or `lars`.
            batch: Samples per update.
            rate: Peak learning rate.
            seed: Counted from the study's own.
        """
        steps_per_epoch = -(-self.num_samples // batch)
        changes = {
            "optimizer.name": method,
            "optimizer.learning_rate": rate,
            "engine.global_batch_size": batch,
            "schedule.name": "polynomial",
            "schedule.power": 2.0,
            "schedule.warmup_steps": round(self.warmup_epochs * steps_per_epoch),
            "seed": self.base.seed + seed,
        }
        if method == "lars":
            changes["optimizer.trust_coefficient"] = self.trust_coefficient
        return from_overrides(changes, base=self.base)

    def tune(self, say: Callable[[str], object] = print) -> Tuning:
        """Try every rate of both methods at every batch size.

        Args:
            say: Takes a line of progress for each method and batch size.
        """
        points = self._tries()
        seeds = range(_FIRST_TUNING_SEED, _FIRST_TUNING_SEED + self.num_tuning_seeds)
        names = [f"{METHODS[method]} at {batch}" for method, batch, _ in points]
        return Tuning(dict(zip(points, self._scores(points, seeds, names, say), strict=True)))

    def compare(self, tuning: Tuning, say: Callable[[str], object] = print) -> Result:
        """Train with the scaled and with the tuned rates, on seeds that chose neither.

        Args:
            tuning: What `tune` gave.
            say: Takes a line of progress for each point.
        """
        labels = [(method, rule, batch) for method in METHODS for rule in RULES for batch in self.batch_sizes]
        choose = {"scaled": tuning.scaled, "tuned": tuning.best}
        points = [(method, batch, choose[rule](method, batch)) for method, rule, batch in labels]
        names = [f"{METHODS[method]} at {batch}, {RULES[rule]}" for method, rule, batch in labels]
        scores = self._scores(points, range(self.num_seeds), names, say)
        rows = [
            Row(method, rule, batch, point[2], score)
            for (method, rule, batch), point, score in zip(labels, points, scores, strict=True)
        ]
        return Result(tuple(rows), self.base.engine.num_epochs)

    def _scores(
        self,
        points: Sequence[tuple[str, int, float]],
        seeds: range,
        names: Sequence[str],
        say: Callable[[str], object],
    ) -> list[Score]:
        configs = [self.config(*point, seed) for point in points for seed in seeds]
        progress = _Progress([name for name in names for _ in seeds], say)
        runs = run_all(configs, num_at_once=self.num_at_once, on_done=progress.count)
        return [_score(runs[i : i + len(seeds)]) for i in range(0, len(runs), len(seeds))]


_OWN = (
    "batch_sizes",
    "sgd_rates",
    "lars_rates",
    "trust_coefficient",
    "warmup_epochs",
    "num_seeds",
    "num_tuning_seeds",
    "num_at_once",
)
_OPTIONAL = ("num_samples",)


def _num_samples(base: ExperimentConfig, given: int | None) -> int:
    if isinstance(base.data, DigitsConfig):
        return _NUM_DIGITS - base.data.num_val
    if given is None:
        raise ConfigError(
            f"num_samples must be given with data.name {base.data.name!r}, got None. "
            "It is the number of training samples, and says how many steps an epoch has."
        )
    return given


class _Progress:
    """Says a line whenever all runs of one name are over."""

    def __init__(self, names: Sequence[str], say: Callable[[str], object]) -> None:
        self._names, self._say = names, say
        self._left = Counter(names)
        self._best: dict[str, float] = {}
        self._began_at = time.monotonic()

    def count(self, index: int, run: Run) -> None:
        """Take a run that is over."""
        name = self._names[index]
        self._left[name] -= 1
        self._best[name] = max(self._best.get(name, 0.0), _score([run]).accuracy)
        if self._left[name]:
            return
        num_done = sum(left == 0 for left in self._left.values())
        self._say(
            f"{num_done}/{len(self._left)} {name}: best accuracy {self._best[name]:.4f} "
            f"({time.monotonic() - self._began_at:.0f} s)"
        )


def _score(runs: Sequence[Run]) -> Score:
    finals = [run.folder.read_json(run.folder.result_file)["final"] for run in runs]
    losses = [final["val/loss"] for final in finals]
    return Score(
        tuple(final["val/accuracy"] or 0.0 for final in finals),
        tuple(math.inf if loss is None else loss for loss in losses),
    )
