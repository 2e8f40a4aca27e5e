"""Laws of the parameter server's book: every sample once, no push too stale, nobody waits for ever."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.sync.ledger import Extent, Ledger, Update

BOUNDS = [None, 0, 1, 2, 4]


def _ledger(shares: list[int], bound: int | None, *, n: int = 10, total: int = 20, batch: int = 4, is_weighted: bool = True) -> Ledger:  # fmt: skip
    return Ledger(
        shares, num_samples=n, total_samples=total, global_batch_size=batch, staleness_bound=bound,
        is_weighted=is_weighted,
    )  # fmt: skip


# --- a run with every order of events ------------------------------------------------------------------


@dataclass
class _Case:
    """One configuration, and a source of decisions."""

    shares: list[int]
    num_samples: int
    total: int
    batch: int
    bound: int | None
    most_under_way: int
    seed: int


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    shares = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    num_samples = draw(st.integers(1, 40))
    batch = sum(shares)
    # The end of a run lies where a global batch ends.
    epochs, batches = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    total = epochs * num_samples + min(num_samples, batches * batch) or num_samples
    bound, most = draw(st.sampled_from(BOUNDS)), draw(st.integers(1, 2))
    return _Case(shares, num_samples, total, batch, bound, most, draw(st.integers(0, 2**32)))


@dataclass
class _World:
    """Groups that take, compute and offer as chance decides, and what came of it."""

    case: _Case
    ledger: Ledger = field(init=False)
    computing: dict[int, list[Extent]] = field(default_factory=dict)  # taken, not offered yet; by group
    unapplied: Counter[int] = field(default_factory=Counter)  # under way, by group
    applied: Counter[tuple[int, int]] = field(default_factory=Counter)  # samples by epoch and position
    updates: list[Update] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.case.seed)
        self.ledger = self.new_ledger()

    def new_ledger(self) -> Ledger:
        case = self.case
        return _ledger(case.shares, case.bound, n=case.num_samples, total=case.total, batch=case.batch)

    def join(self, group: int) -> None:
        self.ledger.join(group, 0.0)
        self.computing[group], self.unapplied[group] = [], 0
        self.apply()

    def leave(self, group: int) -> None:
        self.ledger.leave(group)
        self.computing.pop(group, None)
        self.apply()  # others may have waited for it

    def take(self, group: int) -> bool:
        if self.unapplied[group] >= self.case.most_under_way:
            return False
        extent = self.ledger.take(group)
        if extent is None:
            return False
        assert (
            0 < extent.num_samples <= max(self.case.shares[group], self.case.batch * (self.case.bound == 0))
        )
        self.computing[group].append(extent)
        self.unapplied[group] += 1
        return True

    def offer(self, group: int) -> bool:
        if not self.computing[group]:
            return False
        extent = self.computing[group].pop(self.random.randrange(len(self.computing[group])))
        assert self.ledger.offer(group, extent.number)
        assert not self.ledger.offer(group, extent.number)  # it comes twice
        self.apply()
        assert not self.ledger.offer(group, extent.number)  # and once more, maybe after it was applied
        return True

    def apply(self) -> None:
        while (update := self.ledger.next_update()) is not None:
            assert update.version == self.ledger.version == self.version_before + 1
            self.version_before = update.version
            self.updates.append(update)
            for push in update.pushes:
                assert push.staleness == update.version - 1 - push.extent.base_version
                assert 0 <= push.staleness and (self.case.bound is None or push.staleness <= self.case.bound)
                assert push.weight == push.share / (1 + push.staleness)
                self.applied.update(
                    (push.extent.epoch, at) for at in range(push.extent.start, push.extent.stop)
                )
                self.unapplied[push.group] -= 1

    version_before = 0

    def restart(self) -> None:
        """Everything is lost but the ledger's state as it is now, through JSON."""
        state = json.loads(json.dumps(self.ledger.state_dict()))
        self.ledger = self.new_ledger()
        self.ledger.load_state_dict(state)
        self.computing.clear()
        assert self.ledger.here == []

    def one_event(self, chance_of_trouble: float) -> None:
        here, away = self.ledger.here, sorted(set(range(len(self.case.shares))) - set(self.ledger.here))
        if self.random.random() < chance_of_trouble:
            trouble = self.random.choice(["leave", "restart", "rejoin"])
            if trouble == "restart":
                self.restart()
            elif here:
                group = self.random.choice(here)
                self.leave(group) if trouble == "leave" else self.join(group)
        elif away and self.random.random() < 0.3:
            self.join(self.random.choice(away))
        elif here:
            group = self.random.choice(here)
            self.random.choice([self.take, self.offer])(group)

    def settle(self) -> None:
        """Without trouble, whoever is here gets to the end: nobody waits for ever."""
        if not self.ledger.here:
            self.join(0)
        while not self.ledger.is_done:
            moves = [self.take(group) for group in self.ledger.here]
            moves += [self.offer(group) for group in self.ledger.here]
            assert any(moves), "everybody waits"

    def assert_all_applied_once(self) -> None:
        assert self.ledger.is_done and self.ledger.applied_samples == self.case.total
        wanted = Counter(divmod(at, self.case.num_samples) for at in range(self.case.total))
        assert self.applied == wanted
        assert all(self.ledger.take(group) is None for group in self.ledger.here)


@settings(max_examples=300, deadline=None)
@given(_cases(), st.integers(0, 150), st.sampled_from([0.0, 0.05, 0.3]))
def test_every_sample_is_applied_once_and_none_too_stale_whatever_happens(
    case: _Case, num_events: int, chance_of_trouble: float
) -> None:
    world = _World(case)
    for group in range(len(case.shares)):
        world.join(group)
    for _ in range(num_events):
        world.one_event(chance_of_trouble)
        assert sum(world.applied.values()) == world.ledger.applied_samples
    world.settle()
    world.assert_all_applied_once()
    assert sum(world.ledger.staleness.values()) == sum(len(update.pushes) for update in world.updates)


@settings(max_examples=200, deadline=None)
@given(_cases(), st.integers(0, 100), st.sampled_from([0.0, 0.2]))
def test_when_all_that_is_under_way_is_offered_something_is_applied(
    case: _Case, num_events: int, chance_of_trouble: float
) -> None:
    world = _World(case)
    for _ in range(num_events):
        world.one_event(chance_of_trouble)
        if world.case.bound == 0:  # then everybody must have the part that is meant for it
            while any(world.take(group) for group in world.ledger.here):
                pass
        for group in world.ledger.here:
            while world.computing[group]:
                world.offer(group)
        assert all(world.unapplied[group] == 0 for group in world.ledger.here)


@settings(max_examples=200, deadline=None)
@given(_cases(), st.integers(0, 150))
def test_with_bound_0_and_all_groups_here_every_version_is_one_global_batch(
    case: _Case, num_events: int
) -> None:
    case.bound = 0
    world = _World(case)
    for group in range(len(case.shares)):
        world.join(group)
    for _ in range(num_events):
        world.one_event(0.0)
    world.settle()
    places = []
    for update in world.updates:
        parts = sorted((push.extent.epoch, push.extent.start, push.extent.stop) for push in update.pushes)
        assert all(a[2] == b[1] for a, b in zip(parts, parts[1:], strict=False))  # contiguous
        assert {push.staleness for push in update.pushes} == {0}
        assert sum(push.weight for push in update.pushes) == pytest.approx(1.0)
        places.append((parts[0][0], parts[0][1], parts[-1][2]))
    wanted = [
        (epoch, start, min(start + case.batch, case.num_samples))
        for epoch in range(-(-case.total // case.num_samples))
        for start in range(0, case.num_samples, case.batch)
    ]
    assert places == wanted[: len(places)]
    assert [update.step for update in world.updates] == list(range(1, len(places) + 1))


@settings(max_examples=200, deadline=None)
@given(_cases(), st.integers(0, 100), st.sampled_from([0.0, 0.2]))
def test_weights_of_fresh_pushes_sum_to_one_per_global_batch(
    case: _Case, num_events: int, trouble: float
) -> None:
    world = _World(case)
    for _ in range(num_events):
        world.one_event(trouble)
    world.settle()
    shares = sum(push.share for update in world.updates for push in update.pushes)
    assert shares == pytest.approx(world.ledger.step)
    per_epoch = -(-case.num_samples // case.batch)
    epochs, rest = divmod(case.total, case.num_samples)
    assert world.ledger.step == epochs * per_epoch + -(-rest // case.batch)


# --- by hand -------------------------------------------------------------------------------------------


def _take(ledger: Ledger, group: int) -> Extent:
    extent = ledger.take(group)
    assert extent is not None
    return extent


def test_two_groups_share_a_global_batch_synchronously() -> None:
    ledger = _ledger([3, 1], bound=0)
    ledger.join(0, 0.0)
    ledger.join(1, 0.0)
    first, second = _take(ledger, 1), _take(ledger, 0)
    assert (second.start, second.stop, first.start, first.stop) == (0, 3, 3, 4)
    assert ledger.take(0) is None  # the next batch waits for this one
    assert ledger.offer(1, first.number)
    assert ledger.next_update() is None  # and this one for the other part
    assert ledger.offer(0, second.number)
    update = ledger.next_update()
    assert update is not None and update.version == 1 and update.step == 1
    assert {push.group: push.weight for push in update.pushes} == {0: 0.75, 1: 0.25}


def test_the_last_batch_of_an_epoch_counts_as_a_whole_step() -> None:
    ledger = _ledger([4], bound=0, n=10, total=14)
    ledger.join(0, 0.0)
    seen = []
    while not ledger.is_done:
        extent = _take(ledger, 0)
        ledger.offer(0, extent.number)
        update = ledger.next_update()
        assert update is not None
        seen.append((update.step, extent.epoch, extent.start, extent.stop, update.pushes[0].weight))
    assert seen == [(1, 0, 0, 4, 1.0), (2, 0, 4, 8, 1.0), (3, 0, 8, 10, 1.0), (4, 1, 0, 4, 1.0)]
    assert ledger.step == 4


def test_a_push_over_the_border_of_two_batches_weighs_by_both() -> None:
    ledger = _ledger([3, 1], bound=None)
    ledger.join(0, 0.0)
    _take(ledger, 0)
    _take(ledger, 0)  # samples 3 to 6: one of the first batch, two of the second
    extent = _take(ledger, 0)  # 6 to 9: two of the second and one of the last, which has two
    ledger.offer(0, extent.number)
    update = ledger.next_update()
    assert update is not None and update.pushes[0].weight == 2 / 4 + 1 / 2


def test_a_fast_group_waits_at_the_bound_for_a_slow_one() -> None:
    ledger = _ledger([1, 1], bound=2, n=100, total=100)
    ledger.join(0, 0.0)
    ledger.join(1, 0.0)
    slow = _take(ledger, 1)
    for version in (1, 2):
        ledger.offer(0, _take(ledger, 0).number)
        update = ledger.next_update()
        assert update is not None and update.version == version
    waiting = _take(ledger, 0)
    ledger.offer(0, waiting.number)
    assert ledger.next_update() is None  # version 3 would make the slow one's push 3 old
    ledger.offer(1, slow.number)
    update = ledger.next_update()
    assert update is not None
    assert [(push.group, push.staleness, push.weight) for push in update.pushes] == [
        (0, 0, 0.25),
        (1, 2, 0.25 / 3),
    ]
    assert ledger.next_update() is None and ledger.version == 3


def test_a_lost_group_blocks_nobody_and_its_samples_go_to_others() -> None:
    ledger = _ledger([2, 2], bound=0, n=4, total=4)
    ledger.join(0, 0.0)
    ledger.join(1, 0.0)
    own, lost = _take(ledger, 0), _take(ledger, 1)
    ledger.offer(0, own.number)
    assert ledger.next_update() is None
    assert ledger.leave(1) == [lost]
    assert ledger.next_update() is not None
    assert not ledger.offer(1, lost.number)  # it was given back, whatever still comes
    again = _take(ledger, 0)
    assert (again.start, again.stop, again.base_version) == (lost.start, lost.stop, 1)
    ledger.offer(0, again.number)
    assert ledger.next_update() is not None
    assert ledger.is_done


def test_a_group_takes_its_own_part_before_that_of_a_lost_one() -> None:
    """With bound 0, whoever computes a lost part first would wait for ever for itself."""
    ledger = _ledger([2, 2], bound=0, n=4, total=4)
    ledger.join(0, 0.0)
    ledger.join(1, 0.0)
    lost = _take(ledger, 1)
    ledger.leave(1)
    own = _take(ledger, 0)
    assert (own.start, own.stop) == (0, 2)
    ledger.offer(0, own.number)
    assert ledger.next_update() is not None
    assert _take(ledger, 0).start == lost.start


def test_a_smaller_group_takes_a_lost_extent_in_pieces() -> None:
    ledger = _ledger([5, 2], bound=None, n=10, total=10, batch=7)
    ledger.join(0, 0.0)
    ledger.join(1, 0.0)
    _take(ledger, 0)
    ledger.leave(0)
    pieces = [_take(ledger, 1) for _ in range(4)]
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 2), (2, 4), (4, 5), (5, 7)]


def test_silent_groups_are_told() -> None:
    ledger = _ledger([1, 1, 1], bound=4)
    for group in range(3):
        ledger.join(group, 10.0)
    ledger.beat(1, 14.0)
    ledger.leave(2)
    assert ledger.silent(15.0, 5.0) == []
    assert ledger.silent(15.1, 5.0) == [0]


def test_it_goes_on_where_a_synchronous_strategy_stopped() -> None:
    ledger = _ledger([4], bound=0, n=10, total=20)
    ledger.begin_at(5, 18)  # the second batch of the second epoch is done
    assert ledger.step == 5
    ledger.join(0, 0.0)
    extent = _take(ledger, 0)
    assert (extent.epoch, extent.start, extent.stop, extent.base_version) == (1, 8, 10, 5)


def test_without_weights_a_stale_push_counts_in_full() -> None:
    ledger = _ledger([2, 2], bound=None, is_weighted=False)
    ledger.join(0, 0.0)
    ledger.join(1, 0.0)
    stale = _take(ledger, 1)
    ledger.offer(0, _take(ledger, 0).number)
    ledger.next_update()
    ledger.offer(1, stale.number)
    update = ledger.next_update()
    assert update is not None
    assert (update.pushes[0].staleness, update.pushes[0].weight) == (1, 0.5)
