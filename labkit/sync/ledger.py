"""The book of a parameter server: who computes which samples on which version, what is applied when.

Pure: no clock, no network, no tensors. Whoever runs it says what time it is, moves the bytes and applies
what it decides. So its promises can be tested by themselves:

* Every sample of the data belongs to exactly one applied push. What a lost group had is given out again.
* Versions count applied updates. A push's staleness is the version at which it is applied less the version
  it was computed on; it is never above the bound, because no update is applied that would let another
  group's work under way become too old. A group that is too far ahead waits (Ho et al., Stale Synchronous
  Parallel, 2013).
* Where all that may go next depends on each other, it goes together, as one version. With a bound of 0 every
  version is one global batch, split over the groups that are here: plain synchronous SGD.
* A push weighs n / N / (1 + staleness) for n samples of a global batch of N (after Zhang et al.,
  Staleness-aware Async-SGD, 2016, https://arxiv.org/abs/1511.05950, with 1 for a fresh push). The last
  batch of an epoch may have fewer than N samples; then that is its N, as in synchronous training.
* A push that comes twice is applied once.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.cluster.partition import split_batch


@dataclass(frozen=True)
class Extent:
    """A contiguous run of samples in the order of one epoch, given to a group.

    Attributes:
        number: Counts what was given out, from 1.
        epoch: Whose order.
        start: First position.
        stop: One past the last.
        base_version: Version of the parameters that the group will compute on.
    """

    number: int
    epoch: int
    start: int
    stop: int
    base_version: int

    @property
    def num_samples(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class Push:
    """A group's gradient that is staged at all servers.

    Attributes:
        group: Whose.
        extent: What it was computed on.
        staleness: Version at which it is applied less its base version.
        share: Its samples over those of the global batch: n / N.
        weight: What its mean gradient is multiplied with.
    """

    group: int
    extent: Extent
    staleness: int
    share: float
    weight: float


@dataclass(frozen=True)
class Update:
    """Pushes that are applied together.

    Attributes:
        version: The version that they make.
        pushes: One, or several that could not go alone.
        step: The optimizer step it belongs to: one more than the global batches done before, from 1.
            Counted as in synchronous training, where the last batch of an epoch may be a partial one.
    """

    version: int
    pushes: tuple[Push, ...]
    step: int


@dataclass
class _Group:
    share: int
    is_here: bool = False
    seen_at: float = 0.0
    under_way: dict[int, Extent] = field(default_factory=dict)


class Ledger:
    """Gives out samples, orders pushes, bounds staleness and forgets groups that are lost."""

    def __init__(
        self,
        shares: Sequence[int],
        *,
        num_samples: int,
        total_samples: int,
        global_batch_size: int,
        staleness_bound: int | None,
        is_weighted: bool = True,
    ) -> None:
        """Start at version 0 with nothing given out.

        Args:
            shares: Samples of a push of each group.
            num_samples: Of an epoch.
            total_samples: Of the whole run.
            global_batch_size: N in the weight of a push.
            staleness_bound: None for no bound.
            is_weighted: Whether a stale push weighs less.
        """
        self._groups = [_Group(share) for share in shares]
        self._num_samples, self._total, self._batch = num_samples, total_samples, global_batch_size
        self._bound, self._is_weighted = staleness_bound, is_weighted
        self.version = 0
        self.applied_samples = 0
        self._num_given = 0
        self._position = 0  # samples of the run that were given out in order
        self._returned: deque[tuple[int, int, int]] = deque()  # (epoch, start, stop) of lost groups
        self._parts: dict[
            int, tuple[int, int, int]
        ] = {}  # with bound 0: of the batch that is being given out
        self._pending: dict[tuple[int, int], Extent] = {}  # in the order in which they came
        self.staleness: Counter[int] = Counter()
        self.num_repeated = 0
        self.num_dropped = 0  # extents that a lost group had under way

    # --- groups ------------------------------------------------------------------------------------------

    def join(self, group: int, now: float) -> None:
        """A group is here, for the first time or again. What it had under way before is given out anew."""
        self.leave(group)
        self._groups[group].is_here = True
        self._groups[group].seen_at = now

    def beat(self, group: int, now: float) -> None:
        """A group lives."""
        self._groups[group].seen_at = now

    def leave(self, group: int) -> list[Extent]:
        """A group is gone: its samples are given to others, its pending pushes forgotten."""
        own = self._groups[group]
        lost = list(own.under_way.values())
        for extent in lost:
            self._returned.append((extent.epoch, extent.start, extent.stop))
            self._pending.pop((group, extent.number), None)
        part = self._parts.pop(group, None)
        if part is not None:
            self._returned.append(part)
        self.num_dropped += len(lost)
        own.under_way.clear()
        own.is_here = False
        return lost

    def silent(self, now: float, limit_s: float) -> list[int]:
        """Groups that are here and have shown no life for so long."""
        return [index for index in self.here if now - self._groups[index].seen_at > limit_s]

    @property
    def here(self) -> list[int]:
        """Groups that take part now."""
        return [index for index, group in enumerate(self._groups) if group.is_here]

    # --- samples -----------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Every sample of the run was applied."""
        return self.applied_samples >= self._total

    @property
    def step(self) -> int:
        """Global batches that are done."""
        epoch, rest = divmod(self.applied_samples, self._num_samples)
        return epoch * -(-self._num_samples // self._batch) + rest // self._batch

    def take(self, group: int) -> Extent | None:
        """Give a group its next samples, to be computed on the version that is now.

        Returns:
            None while there is nothing to give: all is done, or what is left is under way elsewhere.
        """
        own = self._groups[group]
        # First a part that waits for this group alone: with bound 0 nothing is applied before it is taken.
        place = self._parts.pop(group, None) or self._returned_place(own.share)
        if place is None:
            place = self._next_place(own.share) if self._bound != 0 else self._next_part(group)
        if place is None:
            return None
        self._num_given += 1
        extent = Extent(self._num_given, *place, base_version=self.version)
        own.under_way[extent.number] = extent
        return extent

    def _returned_place(self, share: int) -> tuple[int, int, int] | None:
        if not self._returned:
            return None
        epoch, start, stop = self._returned.popleft()
        if stop - start > share:  # the group that was lost had a larger share
            self._returned.appendleft((epoch, start + share, stop))
            stop = start + share
        return epoch, start, stop

    def _next_place(self, share: int) -> tuple[int, int, int] | None:
        if self._position >= self._total:
            return None
        epoch, start = divmod(self._position, self._num_samples)
        count = min(share, self._num_samples - start, self._total - self._position)
        self._position += count
        return epoch, start, start + count

    def _next_part(self, group: int) -> tuple[int, int, int] | None:
        """With bound 0: this group's part of the next global batch, when the one before is applied."""
        is_busy = bool(self._parts) or any(each.under_way for each in self._groups)
        if not is_busy and self._position < self._total:
            epoch, start = divmod(self._position, self._num_samples)
            count = min(self._batch, self._num_samples - start, self._total - self._position)
            self._position += count
            shares = [each.share if each.is_here else 0 for each in self._groups]
            for index, size in enumerate(split_batch(count, shares)):
                if size:
                    self._parts[index] = (epoch, start, start + size)
                start += size
        return self._parts.pop(group, None)

    # --- pushes ------------------------------------------------------------------------------------------

    def offer(self, group: int, number: int) -> bool:
        """A push is staged at all servers and may be applied.

        Returns:
            False when it is known already or was given to another group meanwhile: it is not applied (again).
        """
        extent = self._groups[group].under_way.get(number)
        if extent is None or (group, number) in self._pending:
            self.num_repeated += 1
            return False
        self._pending[group, number] = extent
        return True

    def next_update(self) -> Update | None:
        """What may be applied now; None while it must wait. Call it until it gives None."""
        for key in self._pending:
            together = self._closure(key)
            if together is not None:
                return self._apply(together)
        return None

    def _closure(self, key: tuple[int, int]) -> list[tuple[int, int]] | None:
        """The pushes that must go with one: all work that another version would make too old.

        None while some of it is still being computed.
        """
        if self._bound is None:
            return [key]
        if self._parts:
            return None
        oldest = self.version - self._bound
        together = [key]
        for index, group in enumerate(self._groups):
            for number, extent in group.under_way.items():
                if (index, number) == key or extent.base_version > oldest:
                    continue
                if (index, number) not in self._pending:
                    return None
                together.append((index, number))
        return together

    def _apply(self, keys: Sequence[tuple[int, int]]) -> Update:
        pushes = []
        step = self.step + 1
        for group, number in keys:
            extent = self._pending.pop((group, number))
            del self._groups[group].under_way[number]
            staleness = self.version - extent.base_version
            share = self._share_of_batches(extent)
            weight = share / (1 + staleness) if self._is_weighted else share
            pushes.append(Push(group, extent, staleness, share, weight))
            self.staleness[staleness] += 1
            self.applied_samples += extent.num_samples
        self.version += 1
        return Update(self.version, tuple(pushes), step)

    def _share_of_batches(self, extent: Extent) -> float:
        """n / N, summed over the global batches in which the extent lies."""
        share, start = 0.0, extent.start
        while start < extent.stop:
            first = start // self._batch * self._batch
            last = min(first + self._batch, self._num_samples)
            stop = min(extent.stop, last)
            share += (stop - start) / (last - first)
            start = stop
        return share

    # --- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a restart needs; what is under way is to be given out again."""
        under_way = [extent for group in self._groups for extent in group.under_way.values()]
        places = [(extent.epoch, extent.start, extent.stop) for extent in under_way]
        places += self._parts.values()
        return {
            "version": self.version,
            "applied_samples": self.applied_samples,
            "num_given": self._num_given,
            "position": self._position,
            "returned": [list(place) for place in (*places, *self._returned)],
            "staleness": {str(value): count for value, count in self.staleness.items()},
            "num_repeated": self.num_repeated,
            "num_dropped": self.num_dropped,
        }

    def begin_at(self, version: int, position: int) -> None:
        """Go on where a synchronous strategy stopped: so many samples into the run, all of them applied."""
        self.version, self._position, self.applied_samples = version, position, position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.version = state["version"]
        self.applied_samples = state["applied_samples"]
        self._num_given = state["num_given"]
        self._position = state["position"]
        self._returned = deque((epoch, start, stop) for epoch, start, stop in state["returned"])
        self.staleness = Counter({int(value): count for value, count in state["staleness"].items()})
        self.num_repeated, self.num_dropped = state["num_repeated"], state["num_dropped"]
        self._pending.clear()
        self._parts.clear()
        for group in self._groups:
            group.under_way.clear()
            group.is_here = False
