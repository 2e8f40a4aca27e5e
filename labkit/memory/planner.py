"""Which blocks stay, move or are computed again, so that a step fits its budget at the least cost. No torch.

Greedy with the simulator as the judge, then local improvement. It is not claimed to be optimal: tests hold it
against all plans of small profiles.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.errors import ConfigError
from labkit.memory.profile import Decision, Link, Profile
from labkit.memory.simulate import Outcome, simulate

_MOST_ROUNDS = 4
_MOST_PLANS = 1000  # looked at one by one
_MOST_PAIRED = 24  # decisions that are exchanged in pairs
_MOST_LOOKS = 400_000  # blocks looked at while improving: large profiles get fewer rounds, not more minutes


class Infeasible(ConfigError):
    """No plan fits the budget; `missing_bytes` says by how much.

    Attributes:
        budget_bytes: What there is.
        peak_bytes: What the best plan needs.
        missing_bytes: Bytes that the best plan is above the budget.
    """

    def __init__(self, budget_bytes: int, peak_bytes: int) -> None:
        self.budget_bytes, self.peak_bytes = budget_bytes, peak_bytes
        self.missing_bytes = peak_bytes - budget_bytes
        super().__init__(
            f"memory.device_budget must be at least {peak_bytes} bytes for this batch, got {budget_bytes}: "
            f"{self.missing_bytes} too few. Raise it, lower the batch, or raise memory.host_budget."
        )


@dataclass(frozen=True)
class Plan:
    """What becomes of each block.

    Attributes:
        decisions: By block; shape (blocks,).
        outcome: As simulated.
        window_bytes: Of copies under way in each direction; None: as the budget leaves room.
        link: It was made for.
    """

    decisions: tuple[Decision, ...]
    outcome: Outcome
    window_bytes: int | None
    link: Link

    def __str__(self) -> str:
        counts = {what: self.decisions.count(what) for what in Decision}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing saved"


def make_plan(
    profile: Profile,
    link: Link,
    *,
    budget_bytes: int | None,
    host_bytes: int | None = None,
    window_bytes: int | None = None,
    allowed: Sequence[Decision] = tuple(Decision),
    reserved_bytes: int = 0,
) -> Plan:
    """Choose.

    Args:
        profile: What a step saves and when.
        link: This worker's share of it.
        budget_bytes: Most bytes of blocks on the device; None: no limit, everything stays.
        host_bytes: Most bytes that may be offloaded; None: no limit.
        window_bytes: Of copies under way in each direction; None: as the budget leaves room.
        allowed: Decisions that may be made.
        reserved_bytes: On the device beside the budget, for the error to name the whole.

    Raises:
        Infeasible: nothing fits.
    """
    plan = _Search(profile, link, budget_bytes, host_bytes, window_bytes, tuple(allowed)).run()
    if budget_bytes is not None and plan.outcome.peak_bytes > budget_bytes:
        raise Infeasible(budget_bytes + reserved_bytes, plan.outcome.peak_bytes + reserved_bytes)
    return plan


class _Search:
    def __init__(
        self,
        profile: Profile,
        link: Link,
        budget_bytes: int | None,
        host_bytes: int | None,
        window_bytes: int | None,
        allowed: tuple[Decision, ...],
    ) -> None:
        self._profile, self._link, self._window_bytes = profile, link, window_bytes
        self._budget_bytes, self._host_bytes, self._allowed = budget_bytes, host_bytes, allowed
        self._items = list(items_of(profile))
        self._known: dict[tuple[Decision, ...], Outcome] = {}

    def run(self) -> Plan:
        chosen = self._all() if self._num_plans() <= _MOST_PLANS else self._search()
        outcome = self._outcome(chosen)
        return Plan(self._decisions(chosen), outcome, self._window_bytes, self._link)

    def _num_plans(self) -> int:
        return math.prod(len(self._options(item)) for item in self._items)

    def _all(self) -> list[Decision]:
        """The best of all plans, where there are few."""
        plans = (list(plan) for plan in itertools.product(*map(self._options, self._items)))
        return min(plans, key=lambda plan: self._score(plan))

    def _search(self) -> list[Decision]:
        """The best of what several beginnings lead to: keeping all, and moving or computing again all."""
        options = [self._options(item) for item in self._items]
        found = []
        for first in self._allowed:
            start = [first if first in own else own[0] for own in options]
            found.append(self._improve(self._fill(start)))
        return min(found, key=self._score)

    def _options(self, item: tuple[int, ...]) -> list[Decision]:
        return options_of(self._profile, item, self._allowed)

    def _decisions(self, chosen: Sequence[Decision]) -> tuple[Decision, ...]:
        return spread(self._profile, self._items, chosen)

    def _outcome(self, chosen: Sequence[Decision]) -> Outcome:
        key = tuple(chosen)
        if key not in self._known:
            self._known[key] = simulate(
                self._profile,
                self._decisions(key),
                self._link,
                budget_bytes=self._budget_bytes,
                window_bytes=self._window_bytes,
            )
        return self._known[key]

    def _score(self, chosen: Sequence[Decision]) -> tuple[int, float, int]:
        """Bytes above the budget first, then time, then bytes moved."""
        outcome = self._outcome(chosen)
        over = max(0, outcome.peak_bytes - (self._budget_bytes or outcome.peak_bytes))
        if self._host_bytes is not None:
            over += max(0, outcome.moved_bytes - self._host_bytes)
        return over, outcome.step_s, outcome.moved_bytes

    def _fill(self, chosen: list[Decision]) -> list[Decision]:
        """Take, one by one, the change that frees most for the time that it costs, until the step fits.

        What a change gains falls as others are made, so only those are looked at again that were best before
        (Minoux 1978, lazy greedy).
        """
        before = math.inf
        while 0 < self._excess(self._outcome(chosen)) < before:
            before = self._excess(self._outcome(chosen))
            chosen = self._fill_once(chosen)
        return chosen if self._score(chosen)[0] == 0 else self._fill_blindly(chosen)

    def _fill_once(self, chosen: list[Decision]) -> list[Decision]:
        queue = [(-math.inf, place, option) for place, option in self._changes(chosen)]
        while self._score(chosen)[0] > 0 and queue:
            _, place, option = heapq.heappop(queue)
            if chosen[place] is option:
                continue
            found = self._gain(chosen, place, option)
            if found <= 0:
                continue
            if queue and found < -queue[0][0]:
                heapq.heappush(queue, (-found, place, option))
                continue
            chosen = [*chosen[:place], option, *chosen[place + 1 :]]
        return chosen

    def _gain(self, chosen: list[Decision], place: int, option: Decision) -> float:
        """What a change frees above the budget for each second that it costs."""
        before = self._outcome(chosen)
        after = self._outcome([*chosen[:place], option, *chosen[place + 1 :]])
        freed = self._excess(before) - self._excess(after)
        return freed / (max(0.0, after.step_s - before.step_s) + 1e-9)

    def _excess(self, outcome: Outcome) -> float:
        """Bytes above the budget, for as long as they are there.

        The peak alone would not do: where it is reached twice, no single change lowers it.
        """
        limit = math.inf if self._budget_bytes is None else self._budget_bytes
        found = 0.0
        for (begin_s, live), (end_s, _) in itertools.pairwise(outcome.live):
            found += max(0.0, live - limit) * (end_s - begin_s + 1e-9)
        if self._host_bytes is not None:
            found += max(0, outcome.moved_bytes - self._host_bytes) * outcome.step_s
        return found

    def _fill_blindly(self, chosen: list[Decision]) -> list[Decision]:
        """Where no single change lowers the peak (it is reached twice), move what lies longest."""
        blocks = self._profile.blocks
        best = chosen
        by_gap = sorted(
            range(len(self._items)),
            key=lambda place: max(blocks[i].saved_s - blocks[i].needed_s for i in self._items[place]),
        )
        for place in by_gap:
            options = [option for option in self._options(self._items[place]) if option is not Decision.KEEP]
            tries = [[*chosen[:place], option, *chosen[place + 1 :]] for option in options]
            if not tries or chosen[place] is not Decision.KEEP:
                continue
            chosen = min(tries, key=self._score)
            if self._score(chosen) < self._score(best):
                best = chosen
            if self._score(chosen)[0] == 0:
                return chosen
        return best

    def _improve(self, chosen: list[Decision]) -> list[Decision]:
        """Change one decision, or exchange two, as long as that helps."""
        for _ in range(_MOST_ROUNDS):
            before = self._score(chosen)
            for place, option in self._changes(chosen):
                if len(self._known) * len(self._profile.blocks) > _MOST_LOOKS:
                    return chosen
                tried = [*chosen[:place], option, *chosen[place + 1 :]]
                if self._score(tried) < self._score(chosen):
                    chosen = tried
            if len(self._items) <= _MOST_PAIRED:
                chosen = self._exchange(chosen)
            if self._score(chosen) >= before:
                break
        return chosen

    def _exchange(self, chosen: list[Decision]) -> list[Decision]:
        for first, second in itertools.combinations(range(len(self._items)), 2):
            for one, other in itertools.product(
                self._options(self._items[first]), self._options(self._items[second])
            ):
                tried = list(chosen)
                tried[first], tried[second] = one, other
                if self._score(tried) < self._score(chosen):
                    chosen = tried
        return chosen

    def _changes(self, chosen: Sequence[Decision]) -> Iterator[tuple[int, Decision]]:
        for place, item in enumerate(self._items):
            for option in self._options(item):
                if option is not chosen[place]:
                    yield place, option


def items_of(profile: Profile) -> Iterator[tuple[int, ...]]:
    """What is decided about together: all blocks of a segment, or one block that belongs to none."""
    segments: dict[int, list[int]] = {}
    for index, block in enumerate(profile.blocks):
        if block.segment < 0:
            yield (index,)
        else:
            segments.setdefault(block.segment, []).append(index)
    yield from (tuple(indices) for indices in segments.values())


def options_of(profile: Profile, item: Sequence[int], allowed: Sequence[Decision]) -> list[Decision]:
    """Decisions that are possible for some blocks."""
    blocks = [profile.blocks[index] for index in item]
    found: list[Decision] = [what for what in allowed if what is Decision.KEEP]
    if Decision.OFFLOAD in allowed and any(block.is_movable for block in blocks):
        found.append(Decision.OFFLOAD)
    if Decision.RECOMPUTE in allowed and blocks[0].segment >= 0:
        found.append(Decision.RECOMPUTE)
    return found or [Decision.KEEP]


def spread(
    profile: Profile, items: Sequence[Sequence[int]], chosen: Sequence[Decision]
) -> tuple[Decision, ...]:
    """A decision for each block; what can't be moved stays; shape (blocks,)."""
    decisions = [Decision.KEEP] * len(profile.blocks)
    for item, what in zip(items, chosen, strict=True):
        for index in item:
            is_possible = what is not Decision.OFFLOAD or profile.blocks[index].is_movable
            decisions[index] = what if is_possible else Decision.KEEP
    return tuple(decisions)
