"""Split a batch over workers in whole samples: in proportion, or so that all finish together."""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from labkit.cluster.device_model import DeviceModel
from labkit.errors import ConfigError

_MOST_LINES = 12  # kinds of worker that an explanation names


def largest_remainder(shares: Sequence[float | Fraction], total: int) -> list[int]:
    """Round fractional shares to integers that sum to `total`.

    Each worker first gets the floor of its share; what is left goes, one each, to the
    largest fractions. Ties go to the lower rank, so every worker computes the same split.

    Args:
        shares: Samples per worker, fractional, summing to `total`; shape (W,).
        total: Samples to hand out.

    Returns:
        Integers summing to `total`, each within 1 of its share; shape (W,).

    Raises:
        ConfigError: a share is negative, or the shares do not sum to `total`.

    References:
        Hamilton's method of apportionment; Balinski and Young, Fair Representation, 1982.
    """
    exact = [Fraction(share) for share in shares]
    for rank, share in enumerate(exact):
        if share < 0:
            raise ConfigError(f"shares[{rank}] must be at least 0, got {float(share)}. Use 0 for no samples.")
    if abs(float(sum(exact)) - total) > 1e-6 * max(1, total):
        raise ConfigError(f"shares must sum to {total}, got {float(sum(exact))}. Scale them.")
    floors = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda rank: (floors[rank] - exact[rank], rank))
    for rank in order[: total - sum(floors)]:
        floors[rank] += 1
    return floors


def split_batch(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` samples in proportion to whole weights, exactly (no floating point).

    Args:
        total: Samples to hand out; a partial last batch may be smaller than the sum of weights.
        weights: A worker's usual local batch; shape (W,), not all 0.

    Returns:
        Samples per worker, summing to `total`; equal to `weights` when they sum to it; shape (W,).

    Raises:
        ConfigError: all weights are 0.
    """
    whole = sum(weights)
    if whole <= 0:
        raise ConfigError(f"weights must have a sum above 0, got {list(weights)}. Give a worker samples.")
    return largest_remainder([Fraction(total * weight, whole) for weight in weights], total)


@dataclass(frozen=True)
class Partition:
    """A split of a global batch over devices, and what it is predicted to cost.

    Any split may be looked at so; `partition` finds the best one, `even_split` the usual one.

    Attributes:
        devices: The workers' devices by rank; shape (W,).
        local_batch_sizes: Samples of each worker; shape (W,).
    """

    devices: tuple[DeviceModel, ...]
    local_batch_sizes: tuple[int, ...]

    @property
    def global_batch_size(self) -> int:
        """Samples of all workers."""
        return sum(self.local_batch_sizes)

    @cached_property
    def times_s(self) -> tuple[float, ...]:
        """Predicted seconds that each worker computes per step; shape (W,)."""
        pairs = zip(self.devices, self.local_batch_sizes, strict=True)
        return tuple(device.time_s(size) for device, size in pairs)

    @cached_property
    def step_time_s(self) -> float:
        """Predicted seconds of a step without communication: all wait for the last."""
        return max(self.times_s)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Part of the step that each worker computes, 0 to 1; shape (W,)."""
        return tuple(time_s / self.step_time_s for time_s in self.times_s)

    @property
    def samples_per_s(self) -> float:
        """Predicted samples/s of all workers."""
        return self.global_batch_size / self.step_time_s

    @property
    def limit_samples_per_s(self) -> float:
        """What no split can exceed: the sum of the devices' own speeds."""
        return sum(device.speed for device in self.devices)

    @cached_property
    def equal_split_step_time_s(self) -> float:
        """Predicted seconds of a step with the same batch for all, as far as caps allow."""
        return even_split(self.devices, self.global_batch_size).step_time_s

    @property
    def gain(self) -> float:
        """How many times as long an equal split would take; 1 where there is nothing to gain."""
        return self.equal_split_step_time_s / self.step_time_s

    def explain(self) -> str:
        """Who gets what and why, in a few lines; workers of the same kind share one."""
        limit = self.limit_samples_per_s
        lines = [
            f"{self.global_batch_size} samples in {self.step_time_s:.4g} s: "
            f"{self.samples_per_s:.4g} samples/s, "
            f"{self.samples_per_s / limit:.0%} of the {limit:.4g} that the devices could reach",
            f"an equal split would take {self.equal_split_step_time_s:.4g} s, {self.gain:.2f} times as long",
        ]
        alike: dict[tuple[DeviceModel, int], list[int]] = {}
        for rank, kind in enumerate(zip(self.devices, self.local_batch_sizes, strict=True)):
            alike.setdefault(kind, []).append(rank)
        kinds = list(alike.items())
        lines += [self._explain_kind(*kind, ranks) for kind, ranks in kinds[:_MOST_LINES]]
        if len(kinds) > _MOST_LINES:
            lines.append(f"and {len(kinds) - _MOST_LINES} more kinds of worker")
        return "\n".join(lines)

    def _explain_kind(self, device: DeviceModel, size: int, ranks: list[int]) -> str:
        who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {rank_ranges(ranks)}, each"
        if size == 0:
            first_s = device.time_s(1)
            return f"{who}: 0 samples, as the first alone would take {first_s:.4g} s"
        text = f"{who}: {size} samples in {device.time_s(size):.4g} s, busy {self.utilisation[ranks[0]]:.0%}"
        if device.num_micro_steps(size) > 1:
            text += f"; {device.num_micro_steps(size)} micro-steps of at most {device.max_micro_batch_size}"
        if size == device.max_batch_size:
            text += "; at its cap"
        return text


def partition(
    devices: Sequence[DeviceModel], global_batch_size: int, *, min_local_batch_size: int = 0
) -> Partition:
    """The split whose slowest worker is done first: the least max_i t_i(b_i) with sum b_i = B.

    The samples go, one after the other, to the worker whose time after it is least. As times grow with the
    batch, this takes the B smallest of all "time after the b-th sample of worker i", so no split is faster:
    any other gives some worker a sample that it would finish no earlier. Between equal times the sample goes
    to the worker that was busy longer before it, then to the lower rank. So among all fastest splits it is
    one whose second-slowest worker is done first too, and so on (without a `min_local_batch_size`), and equal
    devices differ by at most one sample. Same answer on every worker.

    To be fast, it starts with the samples that any fastest split contains, found by bisecting the step time,
    and hands out one by one only the rest, about one per worker.

    Args:
        devices: The workers' devices by rank; shape (W,), not empty.
        global_batch_size: Samples to hand out, at least 1.
        min_local_batch_size: Samples that each worker gets at least.

    Raises:
        ConfigError: a value is out of range, or the caps leave no split.

    References:
        Greedy allocation for monotone costs: Fox, Discrete Optimization via Marginal Analysis, 1966;
        Ibaraki and Katoh, Resource Allocation Problems, 1988.
    """
    _check(devices, global_batch_size, min_local_batch_size)
    return Partition(tuple(devices), tuple(_fill(devices, global_batch_size, min_local_batch_size)))


def even_split(devices: Sequence[DeviceModel], global_batch_size: int) -> Partition:
    """The same batch for all, whatever their speed; what a worker's cap refuses goes evenly to the others.

    Raises:
        ConfigError: a value is out of range, or the caps leave no split.
    """
    _check(devices, global_batch_size, 0)
    alike = [DeviceModel(0.0, 1.0, max_batch_size=device.max_batch_size) for device in devices]
    return Partition(tuple(devices), tuple(_fill(alike, global_batch_size, 0)))


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, shortened: 0-3, 6."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _check(devices: Sequence[DeviceModel], total: int, least: int) -> None:
    if not devices:
        raise ConfigError("devices must not be empty, got none. Give a device per worker.")
    if total < 1:
        raise ConfigError(f"global_batch_size must be at least 1, got {total}. Give the step a sample.")
    if least < 0:
        raise ConfigError(f"min_local_batch_size must be at least 0, got {least}. Use 0 for no minimum.")
    if least * len(devices) > total:
        raise ConfigError(
            f"global_batch_size must be at least {least * len(devices)}, {least} for each of"
            f" {len(devices)} workers, got {total}. Raise it or use fewer workers."
        )
    caps = [_cap(device, total) for device in devices]
    if sum(caps) < total:
        raise ConfigError(
            f"global_batch_size must be at most {sum(caps)}, the sum of the workers' max_batch_size,"
            f" got {total}: {total - sum(caps)} too many. Lower it or raise a cap."
        )
    if min(caps) < least:
        raise ConfigError(
            f"max_batch_size must be at least min_local_batch_size {least}, got {min(caps)}. Raise the cap."
        )


def _cap(device: DeviceModel, total: int) -> int:
    return total if device.max_batch_size is None else min(total, device.max_batch_size)


def _fill(devices: Sequence[DeviceModel], total: int, least: int) -> list[int]:
    """Hand out `total` samples, each to the worker whose time after it is least."""
    sizes = _safe_start(devices, total, least)

    def next_sample(rank: int) -> tuple[float, float, int]:
        device, size = devices[rank], sizes[rank]
        return device.time_s(size + 1), -device.time_s(size), rank

    ranks = range(len(devices))
    heap = [next_sample(rank) for rank in ranks if sizes[rank] < _cap(devices[rank], total)]
    heapq.heapify(heap)
    for _ in range(total - sum(sizes)):
        rank = heap[0][2]
        sizes[rank] += 1
        if sizes[rank] < _cap(devices[rank], total):
            heapq.heapreplace(heap, next_sample(rank))
        else:
            heapq.heappop(heap)
    return sizes


def _safe_start(devices: Sequence[DeviceModel], total: int, least: int) -> list[int]:
    """What each worker finishes by a time at which all together finish at most `total` samples.

    Each of these samples is among the `total` earliest, so the one-by-one rule would hand it out too. The
    time is estimated with arrays; the samples done by it are then counted with `time_s` itself, and where
    rounding let the estimate pass `total`, the time is drawn back.
    """
    bound_s = _estimated_time_s(devices, total, least)
    retreat = 1e-9
    while True:
        sizes = [max(least, _most_within(device, bound_s, _cap(device, total))) for device in devices]
        if sum(sizes) <= total:
            return sizes
        bound_s = max(0.0, bound_s * (1 - retreat))
        retreat = min(1.0, 2 * retreat)


def _most_within(device: DeviceModel, bound_s: float, cap: int) -> int:
    """The largest batch up to `cap` that takes at most `bound_s`."""
    return bisect.bisect_right(range(1, cap + 1), bound_s, key=device.time_s)


def _estimated_time_s(devices: Sequence[DeviceModel], total: int, least: int) -> float:
    """A time by which all together finish at most `total` samples, and fewer by about one per worker."""
    alpha_s = np.array([device.alpha_s for device in devices])
    beta_s = np.array([device.beta_s for device in devices])
    caps = np.array([_cap(device, total) for device in devices], dtype=np.float64)
    micro = np.array([min(total, device.max_micro_batch_size or total) for device in devices])
    micro_step_s = alpha_s + micro * beta_s

    def num_done(time_s: float) -> int:
        full = np.minimum(np.floor(time_s / micro_step_s), caps)
        rest = np.floor((time_s - full * micro_step_s - alpha_s) / beta_s)
        done = full * micro + np.clip(rest, 0, micro)
        return int(np.maximum(least, np.minimum(done, caps)).sum())

    low, high = 0.0, max(device.time_s(_cap(device, total)) for device in devices)
    with np.errstate(over="ignore"):
        while low < (middle := (low + high) / 2) < high:
            done = num_done(middle)
            if done > total:
                high = middle
            else:
                low = middle
                if total - done <= len(devices):
                    break
    return low
