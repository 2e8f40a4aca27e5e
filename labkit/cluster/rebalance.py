"""Re-divide the global batch when the workers' speeds change.

Once per step the rule gets the time that each worker computed, before any barrier. From the median over a
short window it knows how each worker compares with its device model, and so how long every other split would
take. If the best one gains more than a dead band for several steps in a row, it becomes the new split.

Three things keep it still. A hiccup does not move a median, and noise widens the dead band by its own size.
After a change some steps are not looked at, and the window starts empty. And whoever takes back what was just
given must be surer: each reversal doubles the steps in a row that the next change needs, until a long calm.

After LB-BSP (Chen et al., Semi-Dynamic Load Balancing, 2020, https://arxiv.org/abs/1806.02508), which resizes
batches at the barrier and keeps their sum, with a dead band as in OmniLearn (2025,
https://arxiv.org/abs/2503.17469). The robust window and the reversal rule are ours.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from labkit.cluster.device_model import DeviceModel
from labkit.cluster.partition import partition
from labkit.errors import ConfigError

_MOST_REVERSALS = 10  # doublings of the patience that are counted
_STANDARD_ERROR = 1.4826 * 1.2533  # of a median, in median absolute deviations / sqrt(n), for normal noise


@dataclass(frozen=True)
class RebalanceRule:
    """When a new split is worth it.

    Attributes:
        dead_band: Gain below which nothing changes, as a fraction of the new step time.
        window_steps: Steps that an estimate looks back.
        patience_steps: Steps in a row that must show the gain.
        cooldown_steps: Steps after a change that are not looked at.
        calm_patiences: Patiences without a change after which one reversal is forgotten.
    """

    dead_band: float = 0.05
    window_steps: int = 7
    patience_steps: int = 3
    cooldown_steps: int = 2
    calm_patiences: int = 32

    def __post_init__(self) -> None:
        for name, least in (("dead_band", 0), ("cooldown_steps", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}. Raise it.")
        for name in ("window_steps", "patience_steps", "calm_patiences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}. Raise it.")


class Rebalancer:
    """Proposes local batches from measured compute times; a function of what it was given, and nothing else.

    A worker that starts with 0 samples keeps 0; each other one keeps at least 1, so that its speed stays
    known. A step with a partial batch, at the end of an epoch, must not be fed in.

    Args:
        devices: The workers' device models by rank, whose scale is measured anew; shape (W,). None where they
            are unknown: times are then taken as proportional to the local batch. What this misjudges is
            mended by the next splits; where fixed costs far outweigh the samples, it may stop short of the
            best split (by up to a fifth in simulations). For caps alone: DeviceModel(0, 1, max_batch_size=c).
        global_batch_size: Samples of a step, at least 1.
        local_batch_sizes: The split of the first step; shape (W,).
        rule: When a new split is worth it.

    Raises:
        ConfigError: the split does not sum to the global batch, or exceeds a cap.
    """

    def __init__(
        self,
        devices: Sequence[DeviceModel] | None,
        global_batch_size: int,
        local_batch_sizes: Sequence[int],
        *,
        rule: RebalanceRule | None = None,
    ) -> None:
        self._devices = list(devices or [DeviceModel(0.0, 1.0)] * len(local_batch_sizes))
        _check(self._devices, global_batch_size, local_batch_sizes)
        self._global_batch_size = global_batch_size
        self._sizes = list(local_batch_sizes)
        self._working = [rank for rank, size in enumerate(self._sizes) if size]
        self._rule = rule or RebalanceRule()
        self._window: deque[list[float]] = deque(maxlen=self._rule.window_steps)
        self._moves = [0] * len(self._sizes)  # samples that a worker last got, or with a minus gave
        self._num_reversals = 0
        self._num_convincing = 0  # steps in a row that showed a gain
        self._num_ignored = 0  # steps of the cool-down that are still to come
        self._num_calm = 0  # steps since the last change, or since a reversal was forgotten

    @property
    def local_batch_sizes(self) -> list[int]:
        """The split in force; shape (W,)."""
        return list(self._sizes)

    def observe(self, busy_s: Sequence[float]) -> list[int] | None:
        """Take in one full step; give the next step's split if it should change.

        Args:
            busy_s: Seconds that each worker computed its local batch, without waiting for others; above 0
                where it has samples, else not looked at; shape (W,).

        Returns:
            The new split, in force from the next step on, or None; shape (W,).

        Raises:
            ConfigError: a time is missing or out of range.
        """
        self._check_times(busy_s)
        self._forget_after_calm()
        if self._num_ignored > 0:
            self._num_ignored -= 1
            return None
        self._window.append([busy_s[rank] for rank in self._working])
        if len(self._window) < self._rule.window_steps:
            return None
        sizes, gain, noise = self._best_split()
        self._num_convincing = self._num_convincing + 1 if gain > self._rule.dead_band + 2 * noise else 0
        if self._num_convincing < self._patience_steps:
            return None
        self._change_to(sizes)
        return list(sizes)

    @property
    def _patience_steps(self) -> int:
        return self._rule.patience_steps << self._num_reversals

    def _best_split(self) -> tuple[list[int], float, float]:
        """The split that would be fastest now, its predicted gain, and the relative error of that gain."""
        typical_s = [median(times) for times in zip(*self._window, strict=True)]
        errors = [
            _STANDARD_ERROR * median(abs(t - middle) for t in times) / middle / math.sqrt(len(times))
            for times, middle in zip(zip(*self._window, strict=True), typical_s, strict=True)
        ]
        devices = [
            self._devices[rank].scaled(time_s / self._devices[rank].time_s(self._sizes[rank]))
            for rank, time_s in zip(self._working, typical_s, strict=True)
        ]
        found = partition(devices, self._global_batch_size, min_local_batch_size=1)
        sizes = [0] * len(self._sizes)
        for rank, size in zip(self._working, found.local_batch_sizes, strict=True):
            sizes[rank] = size
        slowest_s, error = max(zip(typical_s, errors, strict=True))
        return sizes, slowest_s / found.step_time_s - 1, error

    def _change_to(self, sizes: list[int]) -> None:
        moves = [new - old for new, old in zip(sizes, self._sizes, strict=True)]
        pairs = list(zip(moves, self._moves, strict=True))
        if any(move * before < 0 and 2 * abs(move) >= abs(before) for move, before in pairs):
            self._num_reversals = min(self._num_reversals + 1, _MOST_REVERSALS)
        self._moves = [move or before for move, before in pairs]
        self._sizes = sizes
        self._window.clear()
        self._num_convincing = self._num_calm = 0
        self._num_ignored = self._rule.cooldown_steps

    def _forget_after_calm(self) -> None:
        self._num_calm += 1
        if self._num_reversals and self._num_calm >= self._rule.calm_patiences * self._patience_steps:
            self._num_reversals -= 1
            self._num_calm = 0

    def _check_times(self, busy_s: Sequence[float]) -> None:
        if len(busy_s) != len(self._sizes):
            raise ConfigError(
                f"busy_s must have one value per worker, got {len(busy_s)} for {len(self._sizes)}. Gather."
            )
        for rank in self._working:
            if not (math.isfinite(busy_s[rank]) and busy_s[rank] > 0):
                raise ConfigError(
                    f"busy_s[{rank}] must be finite and above 0, got {busy_s[rank]}. Leave such a step out."
                )


def _check(devices: Sequence[DeviceModel], total: int, sizes: Sequence[int]) -> None:
    if len(devices) != len(sizes):
        raise ConfigError(
            f"devices must have one value per worker, got {len(devices)} for {len(sizes)}. Pair."
        )
    if total < 1 or sum(sizes) != total:
        raise ConfigError(
            f"local_batch_sizes must sum to {total}, at least 1, got {list(sizes)}. Divide again."
        )
    for rank, (device, size) in enumerate(zip(devices, sizes, strict=True)):
        if not 0 <= size <= (device.max_batch_size or size):
            raise ConfigError(
                f"local_batch_sizes[{rank}] must be from 0 to its cap {device.max_batch_size}, got {size}."
                " Move samples to others."
            )
