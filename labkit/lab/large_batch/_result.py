"""What a study found: scores of the rates that were tried, and the comparison on other seeds."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.optim.schedule import scaled_learning_rate

METHODS = {"sgd": "SGD", "lars": "LARS"}
RULES = {"scaled": "rate scaled linearly", "tuned": "rate tuned at each batch size"}


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
        """Of the mean accuracy; infinite for one seed, which cannot tell."""
        count = len(self.accuracies)
        return statistics.stdev(self.accuracies) / math.sqrt(count) if count > 1 else math.inf


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
        """The rate of the lowest mean loss: it still tells rates apart where all predictions are right."""
        return min(self.rates(method), key=lambda rate: self.scores[method, batch, rate].loss)

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
