"""How long a device takes for a local batch: a fixed cost per micro-step and a cost per sample.

    t(0) = 0
    t(b) = alpha * ceil(b / max_micro) + beta * b

A device short of memory takes its batch in micro-steps and pays alpha for each. Chen et al., Semi-Dynamic
Load Balancing (LB-BSP), 2020, https://arxiv.org/abs/1806.02508, size batches by speed; with the fixed cost of
a pass, as in Cannikin (Nie et al., 2024, https://arxiv.org/abs/2402.05302), a split by speed is not the best.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from labkit.errors import ConfigError

_QUANTILE = 0.25  # a time above the line counts a third of one that far below it


@dataclass(frozen=True)
class DeviceModel:
    """What a device needs for a local batch.

    Attributes:
        alpha_s: Seconds of a micro-step, whatever its size; at least 0.
        beta_s: Seconds of a sample; above 0.
        max_micro_batch_size: Samples that fit into its memory at once; None for any number.
        max_batch_size: Samples it may get per step; None for any number.

    Raises:
        ConfigError: a value is out of its range.
    """

    alpha_s: float
    beta_s: float
    max_micro_batch_size: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha_s) and self.alpha_s >= 0):
            raise ConfigError(f"alpha_s must be finite and at least 0, got {self.alpha_s}. Measure it again.")
        if not (math.isfinite(self.beta_s) and self.beta_s > 0):
            raise ConfigError(f"beta_s must be finite and above 0, got {self.beta_s}. Measure it again.")
        for name in ("max_micro_batch_size", "max_batch_size"):
            cap = getattr(self, name)
            if cap is not None and cap < 1:
                raise ConfigError(f"{name} must be at least 1, got {cap}. Leave the device out instead.")

    def num_micro_steps(self, batch_size: int) -> int:
        """Micro-steps that a local batch is cut into."""
        return -(-batch_size // (self.max_micro_batch_size or max(1, batch_size)))

    def time_s(self, batch_size: int) -> float:
        """Seconds of a local batch of `batch_size` >= 0; grows with it, also in floating point."""
        return self.alpha_s * self.num_micro_steps(batch_size) + self.beta_s * batch_size

    @cached_property
    def speed(self) -> float:
        """The most samples/s that it can reach under its caps; without caps the limit for large batches."""
        caps = [cap for cap in (self.max_micro_batch_size, self.max_batch_size) if cap is not None]
        return 1 / (self.alpha_s / min(caps) + self.beta_s) if caps else 1 / self.beta_s

    def scaled(self, factor: float) -> "DeviceModel":
        """The same device when everything takes `factor` times as long."""
        return DeviceModel(
            self.alpha_s * factor, self.beta_s * factor, self.max_micro_batch_size, self.max_batch_size
        )


class Fit(NamedTuple):
    """A fitted device and how well its line meets the measurements.

    Attributes:
        device: Its alpha and beta; no caps.
        relative_residual: Mean over the sizes of |fastest time - line| / line; 0 for a perfect line.
    """

    device: DeviceModel
    relative_residual: float


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> Fit:
    """Fit alpha + beta * b to measured times of single micro-steps.

    Noise only adds time, so of each size the fastest time counts. Through these points goes the line with the
    least sum of *relative* deviations, those above the line weighted 1 to 3 against those below it (quantile
    regression), under alpha >= 0: a whole size measured during a hiccup hardly moves it. The best line passes
    through two points, or through one and the origin, so trying all of them is exact.

    Args:
        sizes: Samples of each measurement, at least 1, two or more distinct; shape (n,).
        times_s: Seconds of each measurement, above 0; shape (n,).

    Raises:
        ConfigError: fewer than two distinct sizes, a value out of range, or times that do not grow with size.

    References:
        Koenker and Bassett, Regression Quantiles, 1978.
    """
    fastest = _fastest(sizes, times_s)

    def cost(alpha_s: float, beta_s: float) -> float:
        total = 0.0
        for size, time_s in fastest.items():
            above = (time_s - alpha_s - beta_s * size) / time_s
            total += max(_QUANTILE * above, (_QUANTILE - 1) * above)
        return total

    lines = [(0.0, time_s / size) for size, time_s in fastest.items()]
    for (size, time_s), (larger, larger_time_s) in combinations(sorted(fastest.items()), 2):
        beta_s = (larger_time_s - time_s) / (larger - size)
        lines.append((time_s - beta_s * size, beta_s))
    best, alpha_s, beta_s = min((cost(*line), *line) for line in lines if line[0] >= 0 and line[1] > 0)
    if min(cost(time_s, 0.0) for time_s in fastest.values()) < best:
        raise ConfigError(
            f"times_s must grow with size, got {fastest} (fastest seconds by size). Measure larger batches."
        )
    device = DeviceModel(alpha_s, beta_s)
    deviations = [abs(time_s / device.time_s(size) - 1) for size, time_s in fastest.items()]
    return Fit(device, sum(deviations) / len(deviations))


def _fastest(sizes: Sequence[int], times_s: Sequence[float]) -> dict[int, float]:
    """The least time of each size."""
    if len(sizes) != len(times_s):
        raise ConfigError(
            f"times_s must have one value per size, got {len(times_s)} for {len(sizes)}. Pair them."
        )
    fastest: dict[int, float] = {}
    for size, time_s in zip(sizes, times_s, strict=True):
        if size < 1:
            raise ConfigError(f"sizes must be at least 1, got {size}. An empty batch tells nothing.")
        if not (math.isfinite(time_s) and time_s > 0):
            raise ConfigError(f"times_s must be finite and above 0, got {time_s}. Measure it again.")
        fastest[size] = min(time_s, fastest.get(size, math.inf))
    if len(fastest) < 2:
        raise ConfigError(f"sizes must have two distinct values, got {sorted(fastest)}. Measure another.")
    return fastest
