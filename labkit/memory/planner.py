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
_MOST_PAIRED = 40  # changes that are tried in pairs
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


Move = tuple[tuple[int, ...], Decision]
"""Some blocks, and what becomes of them."""


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
        self._groups = groups_of(profile)
        self._group_of = {index: group for group in self._groups for index in group}
        self._moves = list(self._all_moves())
        self._known: dict[tuple[Decision, ...], Outcome] = {}

    def run(self) -> Plan:
        chosen = self._least()
        if Decision.KEEP not in self._allowed or self._score(chosen)[0]:  # else nothing is better
            counts = [num_options(self._profile, group, self._allowed) for group in self._groups]
            chosen = self._all() if math.prod(counts) <= _MOST_PLANS else self._search()
        return Plan(tuple(chosen), self._outcome(chosen), self._window_bytes, self._link)

    def _all(self) -> list[Decision]:
        """The best of all plans, where there are few."""
        options = [options_of(self._profile, group, self._allowed) for group in self._groups]
        return min((self._put_together(parts) for parts in itertools.product(*options)), key=self._score)

    def _put_together(self, parts: Sequence[Sequence[Decision]]) -> list[Decision]:
        chosen = [Decision.KEEP] * len(self._profile.blocks)
        for group, part in zip(self._groups, parts, strict=True):
            for index, what in zip(group, part, strict=True):
                chosen[index] = what
        return chosen

    def _search(self) -> list[Decision]:
        """The best of what several beginnings lead to: keeping all, and moving or computing again all."""
        found = []
        for first in self._allowed:
            chosen = self._least()
            for move in self._moves:
                if move[1] is first:
                    chosen = self._after(chosen, move)
            found.append(self._improve(self._fill(chosen)))
        return min(found, key=self._score)

    def _least(self) -> list[Decision]:
        """Everything stays that may."""
        return self._put_together([least_option(self._profile, g, self._allowed) for g in self._groups])

    def _all_moves(self) -> Iterator[Move]:
        """One block, or all of a segment, becomes something else."""
        blocks = self._profile.blocks
        for group in self._groups:
            movable = tuple(index for index in group if blocks[index].is_movable)
            if Decision.RECOMPUTE in self._allowed and blocks[group[0]].segment >= 0:
                yield group, Decision.RECOMPUTE
            for part in dict.fromkeys([group, *((index,) for index in group)]):
                if Decision.KEEP in self._allowed:
                    yield part, Decision.KEEP
            for part in dict.fromkeys([movable, *((index,) for index in movable)]):
                if Decision.OFFLOAD in self._allowed and part:
                    yield part, Decision.OFFLOAD

    def _after(self, chosen: Sequence[Decision], move: Move) -> list[Decision]:
        """A plan with one thing changed; a segment is computed again as a whole or not at all."""
        indices, what = move
        group = self._group_of[indices[0]]
        changed = list(chosen)
        if what is not Decision.RECOMPUTE and chosen[group[0]] is Decision.RECOMPUTE:
            for index in group:
                changed[index] = Decision.KEEP
        for index in indices:
            changed[index] = what
        return changed

    def _outcome(self, chosen: Sequence[Decision]) -> Outcome:
        key = tuple(chosen)
        if key not in self._known:
            self._known[key] = simulate(
                self._profile,
                key,
                self._link,
                budget_bytes=self._budget_bytes,
                window_bytes=self._window_bytes,
            )
        return self._known[key]

    def _score(self, chosen: Sequence[Decision]) -> tuple[int, float, int]:
        """Bytes above the budget first, then time, then bytes moved."""
        outcome = self._outcome(chosen)
        over = 0
        if self._budget_bytes is not None:
            over += max(0, outcome.peak_bytes - self._budget_bytes)
        if self._host_bytes is not None:
            over += max(0, outcome.moved_bytes - self._host_bytes)
        return over, outcome.step_s, outcome.moved_bytes

    def _fill(self, chosen: list[Decision]) -> list[Decision]:
        """Take, one by one, the change that frees most for the time that it costs, until the step fits."""
        before = math.inf
        while 0 < self._excess(self._outcome(chosen)) < before:
            before = self._excess(self._outcome(chosen))
            chosen = self._fill_once(chosen)
        return chosen

    def _fill_once(self, chosen: list[Decision]) -> list[Decision]:
        """What a change gains falls as others are made, so only those are looked at again that were best
        before (Minoux 1978, lazy greedy)."""
        queue = [(-math.inf, place) for place in range(len(self._moves))]
        while self._excess(self._outcome(chosen)) > 0 and queue:
            _, place = heapq.heappop(queue)
            changed = self._after(chosen, self._moves[place])
            found = self._gain(chosen, changed)
            if found <= 0:
                continue
            if queue and found < -queue[0][0]:
                heapq.heappush(queue, (-found, place))
                continue
            chosen = changed
        return chosen

    def _gain(self, chosen: list[Decision], changed: list[Decision]) -> float:
        """What a change frees above the budget for each second that it costs."""
        before, after = self._outcome(chosen), self._outcome(changed)
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

    def _improve(self, chosen: list[Decision]) -> list[Decision]:
        """Change one thing, or two, as long as that helps."""
        for _ in range(_MOST_ROUNDS):
            before = self._score(chosen)
            for move in self._moves:
                if len(self._known) * len(self._profile.blocks) > _MOST_LOOKS:
                    return chosen
                tried = self._after(chosen, move)
                if self._score(tried) < self._score(chosen):
                    chosen = tried
            if len(self._moves) <= _MOST_PAIRED:
                chosen = self._exchange(chosen)
            if self._score(chosen) >= before:
                break
        return chosen

    def _exchange(self, chosen: list[Decision]) -> list[Decision]:
        for one, other in itertools.permutations(self._moves, 2):
            tried = self._after(self._after(chosen, one), other)
            if self._score(tried) < self._score(chosen):
                chosen = tried
        return chosen


def groups_of(profile: Profile) -> list[tuple[int, ...]]:
    """Blocks that are decided about together: those of a segment, or one that belongs to none."""
    groups: dict[int, list[int]] = {}
    loose = -1
    for index, block in enumerate(profile.blocks):
        if block.segment < 0:
            loose -= 1
        groups.setdefault(block.segment if block.segment >= 0 else loose, []).append(index)
    return [tuple(indices) for indices in groups.values()]


def _block_options(profile: Profile, index: int, allowed: Sequence[Decision]) -> list[Decision]:
    can_move = profile.blocks[index].is_movable and Decision.OFFLOAD in allowed
    found = [Decision.KEEP] if Decision.KEEP in allowed or not can_move else []
    return [*found, Decision.OFFLOAD] if can_move else found


def _can_repeat(profile: Profile, group: Sequence[int], allowed: Sequence[Decision]) -> bool:
    return Decision.RECOMPUTE in allowed and profile.blocks[group[0]].segment >= 0


def least_option(profile: Profile, group: Sequence[int], allowed: Sequence[Decision]) -> tuple[Decision, ...]:
    """What becomes of a group where nothing else is chosen."""
    return next(_options(profile, group, allowed))


def num_options(profile: Profile, group: Sequence[int], allowed: Sequence[Decision]) -> int:
    """How many things can become of a group."""
    can_repeat = _can_repeat(profile, group, allowed)
    if can_repeat and len(allowed) == 1:
        return 1
    return math.prod(len(_block_options(profile, index, allowed)) for index in group) + can_repeat


def options_of(
    profile: Profile, group: Sequence[int], allowed: Sequence[Decision]
) -> list[tuple[Decision, ...]]:
    """All that can become of a group: each block stays or moves, or all are computed again."""
    return list(_options(profile, group, allowed))


def _options(
    profile: Profile, group: Sequence[int], allowed: Sequence[Decision]
) -> Iterator[tuple[Decision, ...]]:
    can_repeat = _can_repeat(profile, group, allowed)
    if not can_repeat or len(allowed) > 1:
        yield from itertools.product(*(_block_options(profile, index, allowed) for index in group))
    if can_repeat:
        yield (Decision.RECOMPUTE,) * len(group)
