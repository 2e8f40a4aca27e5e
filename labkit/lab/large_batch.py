"""What a large batch costs at equal epochs: SGD against LARS, with equal budgets for their learning rates."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.config import DigitsConfig, ExperimentConfig, from_overrides, from_parameters
from labkit.errors import ConfigError
from labkit.lab.report import Verdict
from labkit.lab.run_all import run_all
from labkit.launch import Run
from labkit.optim.schedule import scaled_learning_rate
from labkit.runfolder import runs_root, write_atomically

METHODS = {"sgd": "SGD", "lars": "LARS"}
RULES = {"scaled": "rate scaled linearly", "tuned": "rate tuned at each batch size"}

_NUM_DIGITS = 1797
_FIRST_TUNING_SEED = 1000  # beyond the seeds of the comparison
_NEVER = 1_000_000_000  # steps: evaluated and saved at the end alone


@dataclass(frozen=True)
class Score:
    """What runs of one configuration reached on the held-out samples, one entry for each seed."""

    accuracies: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def loss(self) -> float:
        """Mean over seeds; infinite when a run has diverged."""
        return statistics.fmean(self.losses)

    @property
    def standard_error(self) -> float:
        """Of the mean accuracy; 0 for one seed."""
        count = len(self.accuracies)
        return statistics.stdev(self.accuracies) / math.sqrt(count) if count > 1 else 0.0


@dataclass(frozen=True)
class Tuning:
    """What each rate reached.

    Attributes:
        scores: By method, batch size and rate.
    """

    scores: Mapping[tuple[str, int, float], Score]

    @property
    def batch_sizes(self) -> list[int]:
        """Tried batch sizes, rising."""
        return sorted({batch for _, batch, _ in self.scores})

    def rates(self, method: str) -> list[float]:
        """Tried rates of a method, rising."""
        return sorted({rate for own, _, rate in self.scores if own == method})

    def best(self, method: str, batch: int) -> float:
        """The rate of the highest mean accuracy, of equals the one of the lowest loss."""
        scores = {rate: self.scores[method, batch, rate] for rate in self.rates(method)}
        return max(scores, key=lambda rate: (scores[rate].accuracy, -scores[rate].loss))

    def scaled(self, method: str, batch: int) -> float:
        """The best rate of the smallest batch, scaled linearly."""
        base = self.batch_sizes[0]
        return scaled_learning_rate(self.best(method, base), base, batch)


@dataclass(frozen=True)
class Row:
    """One point of the comparison.

    Attributes:
        method: `sgd` or `lars`.
        rule: How the rate was found: `scaled` or `tuned`.
        batch: Samples per update.
        rate: Peak learning rate.
        score: What it reached, by seed.
    """

    method: str
    rule: str
    batch: int
    rate: float
    score: Score


@dataclass(frozen=True)
class Result:
    """The comparison: every method, rule and batch size."""

    rows: tuple[Row, ...]
    num_epochs: int

    @property
    def batch_sizes(self) -> list[int]:
        """Compared batch sizes, rising."""
        return sorted({row.batch for row in self.rows})

    def row(self, method: str, rule: str, batch: int) -> Row:
        """One point."""
        return next(r for r in self.rows if (r.method, r.rule, r.batch) == (method, rule, batch))

    def gaps(self, rule: str) -> list[float]:
        """Accuracy of LARS minus that of SGD at the largest batch, by seed."""
        lars, sgd = (self.row(method, rule, self.batch_sizes[-1]).score for method in ("lars", "sgd"))
        return [a - b for a, b in zip(lars.accuracies, sgd.accuracies, strict=True)]


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
        own = ("batch_sizes", "sgd_rates", "lars_rates", *_NUMBERS, "trust_coefficient", "num_samples")
        others = {name: value for name, value in namespace.items() if name not in own}
        quiet = {"engine.eval_every_steps": _NEVER, "engine.checkpoint_every_steps": _NEVER}
        base = from_parameters(others, defaults=quiet)
        study = cls(
            base=base,
            batch_sizes=tuple(int(size) for size in namespace["batch_sizes"]),
            rates={name: tuple(float(rate) for rate in namespace[f"{name}_rates"]) for name in METHODS},
            trust_coefficient=namespace["trust_coefficient"],
            num_samples=_num_samples(base, namespace.get("num_samples")),
            **{name: namespace[name] for name in _NUMBERS},
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
        for name in ("num_seeds", "num_tuning_seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}. Use 3.")
        for method in METHODS:
            for batch in sizes:
                self.config(method, batch, self.rates[method][0], 0)

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
        points = [
            (method, batch, rate)
            for method in METHODS
            for batch in self.batch_sizes
            for rate in self.rates[method]
        ]
        seeds = range(_FIRST_TUNING_SEED, _FIRST_TUNING_SEED + self.num_tuning_seeds)
        return Tuning(dict(zip(points, self._scores(points, seeds, say), strict=True)))

    def compare(self, tuning: Tuning, say: Callable[[str], object] = print) -> Result:
        """Train with the scaled and with the tuned rates, on seeds that chose neither.

        Args:
            tuning: What `tune` gave.
            say: Takes a line of progress for each point.
        """
        labels = [(method, rule, batch) for method in METHODS for rule in RULES for batch in self.batch_sizes]
        choose = {"scaled": tuning.scaled, "tuned": tuning.best}
        points = [(method, batch, choose[rule](method, batch)) for method, rule, batch in labels]
        scores = self._scores(points, range(self.num_seeds), say)
        rows = [
            Row(method, rule, batch, point[2], score)
            for (method, rule, batch), point, score in zip(labels, points, scores, strict=True)
        ]
        return Result(tuple(rows), self.base.engine.num_epochs)

    def _scores(
        self, points: Sequence[tuple[str, int, float]], seeds: range, say: Callable[[str], object]
    ) -> list[Score]:
        configs = [self.config(*point, seed) for point in points for seed in seeds]
        progress = _Progress(points, len(seeds), say)
        runs = run_all(configs, num_at_once=self.num_at_once, on_done=progress.count)
        return [_score(runs[i : i + len(seeds)]) for i in range(0, len(runs), len(seeds))]


_NUMBERS = ("warmup_epochs", "num_seeds", "num_tuning_seeds", "num_at_once")


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
    """Says a line whenever all seeds of a point are over."""

    def __init__(
        self, points: Sequence[tuple[str, int, float]], num_seeds: int, say: Callable[[str], object]
    ) -> None:
        self._points, self._num_seeds, self._say = points, num_seeds, say
        self._runs: dict[int, list[Run]] = {}
        self._num_done = 0
        self._began_at = time.monotonic()

    def count(self, index: int, run: Run) -> None:
        place = index // self._num_seeds
        runs = self._runs.setdefault(place, [])
        runs.append(run)
        if len(runs) < self._num_seeds:
            return
        self._num_done += 1
        method, batch, rate = self._points[place]
        self._say(
            f"{self._num_done}/{len(self._points)} {METHODS[method]} batch {batch} rate {rate:g}: "
            f"accuracy {_score(runs).accuracy:.4f} ({time.monotonic() - self._began_at:.0f} s)"
        )


def _score(runs: Sequence[Run]) -> Score:
    finals = [run.folder.read_json(run.folder.result_file)["final"] for run in runs]
    losses = [final["val/loss"] for final in finals]
    return Score(
        tuple(final["val/accuracy"] or 0.0 for final in finals),
        tuple(math.inf if loss is None else loss for loss in losses),
    )


# --- verdict ---------------------------------------------------------------------------------------


def verdict(result: Result) -> Verdict:
    """Whether LARS is ahead at the largest batch, by more than twice the standard error of the difference."""
    batch, base = result.batch_sizes[-1], result.batch_sizes[0]
    lead, error = _lead(result, "tuned")
    text = (
        f"At {batch} samples per update and {result.num_epochs} epochs, each rate tuned there, "
        f"{_compared(result, 'tuned', batch)}: {_judged(lead, error)}. With the rate scaled linearly from "
        f"{base}, {_compared(result, 'scaled', batch)}: {_judged(*_lead(result, 'scaled'))}. "
        f"At {base} samples, {_compared(result, 'tuned', base)}."
    )
    return Verdict(text, lead > 2 * error, time.time())


def _lead(result: Result, rule: str) -> tuple[float, float]:
    """Mean accuracy of LARS minus SGD's at the largest batch, and the standard error of that."""
    scores = [result.row(method, rule, result.batch_sizes[-1]).score for method in ("lars", "sgd")]
    return scores[0].accuracy - scores[1].accuracy, math.hypot(*(score.standard_error for score in scores))


def _compared(result: Result, rule: str, batch: int) -> str:
    lars, sgd = (result.row(method, rule, batch).score.accuracy for method in ("lars", "sgd"))
    return f"LARS reaches {lars:.4f} and SGD {sgd:.4f}"


def _judged(lead: float, error: float) -> str:
    if abs(lead) <= 2 * error or lead == 0:
        return f"no difference that {2 * 100 * error:.1f} points of seed noise would not explain"
    return f"LARS {'leads' if lead > 0 else 'trails'} by {abs(100 * lead):.1f} points"


def record(study: Study, tuning: Tuning, result: Result) -> Verdict:
    """Write all numbers and the verdict to `large_batch.json` in the experiment's folder under `runs/`.

    Returns:
        The verdict, to show as the cell's value.
    """
    final = verdict(result)
    content = {
        "verdict": asdict(final),
        "study": str(study),
        "comparison": [asdict(row) for row in result.rows],
        "tuning": [
            {"method": method, "batch": batch, "rate": rate, "score": asdict(score)}
            for (method, batch, rate), score in tuning.scores.items()
        ],
    }
    text = json.dumps(_without_infinities(content), indent=1, allow_nan=False)
    write_atomically(record_file(study.base.name), text)
    return final


def record_file(name: str) -> Path:
    """Where `record` writes."""
    return runs_root() / name / "large_batch.json"


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
