"""Laws of the rebalancer: it follows a lasting change within 20 steps, and nothing else; no clock is used."""

import random
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cluster.device_model import DeviceModel
from labkit.cluster.partition import Partition, partition
from labkit.cluster.rebalance import Rebalancer, RebalanceRule
from labkit.errors import ConfigError

FOUR = [DeviceModel(0, 0.25), DeviceModel(0, 0.25), DeviceModel(0, 1.0), DeviceModel(0, 1.0)]
WITH_ALPHA = [DeviceModel(2.0, 0.25), DeviceModel(1.0, 0.25), DeviceModel(0.5, 1.0), DeviceModel(0, 1.0)]

Slowness = Callable[[int, int], float]
"""From a step, counted from 1, and a rank to how many times as long everything takes."""


class Simulation:
    """Workers that take what their model says, times a slowness."""

    def __init__(
        self,
        devices: Sequence[DeviceModel],
        sizes: Sequence[int],
        *,
        is_known: bool,
        rule: RebalanceRule | None = None,
    ) -> None:
        self.devices, self.total = devices, sum(sizes)
        caps = [DeviceModel(0.0, 1.0, None, device.max_batch_size) for device in devices]
        self.rebalancer = Rebalancer(devices if is_known else caps, self.total, sizes, rule=rule)
        self.step = 0
        self.changes: list[int] = []

    def run(self, num_steps: int, slowness: Slowness) -> None:
        for _ in range(num_steps):
            self.step += 1
            sizes = self.rebalancer.local_batch_sizes
            pairs = zip(self.devices, sizes, strict=True)
            busy_s = [d.time_s(b) * slowness(self.step, rank) for rank, (d, b) in enumerate(pairs)]
            found = self.rebalancer.observe(busy_s)
            assert sum(self.rebalancer.local_batch_sizes) == self.total
            if found is not None:
                assert found == self.rebalancer.local_batch_sizes != sizes
                self.changes.append(self.step)

    def excess(self, slowness: Slowness) -> float:
        """The present step time above the best possible, as a fraction."""
        real = [device.scaled(slowness(self.step, rank)) for rank, device in enumerate(self.devices)]
        now = Partition(tuple(real), tuple(self.rebalancer.local_batch_sizes)).step_time_s
        return now / partition(real, self.total, min_local_batch_size=1).step_time_s - 1


def steady(step: int, rank: int) -> float:
    return 1.0


def noisy(seed: int, width: float, inner: Slowness = steady) -> Slowness:
    """Uniform noise of +- `width`, drawn anew for each step and worker, but always the same."""
    return lambda step, rank: (
        inner(step, rank) * random.Random(f"{seed} {step} {rank}").uniform(1 - width, 1 + width)
    )


def one_slow(slow_rank: int, factor: float) -> Slowness:
    return lambda step, rank: factor if rank == slow_rank else 1.0


# It follows what lasts


@pytest.mark.parametrize("is_known", [True, False], ids=["alpha known", "alpha unknown"])
@pytest.mark.parametrize("devices", [FOUR, WITH_ALPHA], ids=["no alpha", "alpha"])
@pytest.mark.parametrize("width", [0, 0.02], ids=["quiet", "noisy"])
@pytest.mark.parametrize("slow_rank", [0, 3])
def test_a_slowed_worker_and_its_recovery_are_followed_within_20_steps_and_then_all_is_calm(
    devices: list[DeviceModel], is_known: bool, width: float, slow_rank: int
) -> None:
    simulation = Simulation(devices, partition(devices, 256).local_batch_sizes, is_known=is_known)
    slow = one_slow(slow_rank, 3)
    simulation.run(30, noisy(1, width))
    assert simulation.changes == []
    for state in (slow, steady, slow, steady):
        before = len(simulation.changes)
        simulation.run(20, noisy(2, width, state))
        assert simulation.excess(state) < 0.1
        assert len(simulation.changes) > before
        calm_from = len(simulation.changes)
        simulation.run(200, noisy(3, width, state))
        assert len(simulation.changes) == calm_from
        assert simulation.excess(state) < 0.1


def test_the_first_answer_by_hand() -> None:
    simulation = Simulation(FOUR, [26, 26, 6, 6], is_known=True)
    simulation.run(10, steady)
    # Slow from step 11 on: the median turns at the 4th slow step, and 3 steps in a row must show the gain.
    simulation.run(20, one_slow(0, 4))
    assert simulation.changes == [16]
    assert simulation.rebalancer.local_batch_sizes == list(
        partition([FOUR[2], *FOUR[1:]], 64).local_batch_sizes
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_an_equal_split_becomes_the_best_one(is_known: bool) -> None:
    simulation = Simulation(WITH_ALPHA, [64] * 4, is_known=is_known)
    simulation.run(40, steady)
    assert simulation.excess(steady) < 0.06
    before = len(simulation.changes)
    simulation.run(200, steady)
    assert len(simulation.changes) == before


# It follows nothing else


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_noise_and_hiccups_change_nothing(seed: int, is_known: bool) -> None:
    def hiccups(step: int, rank: int) -> float:
        return 10.0 if random.Random(f"hiccup {seed} {step} {rank}").random() < 0.03 else 1.0

    simulation = Simulation(FOUR, [104, 104, 24, 24], is_known=is_known)
    simulation.run(1000, noisy(seed, 0.05, hiccups))
    assert simulation.changes == []


@pytest.mark.parametrize("block", [1, 2])
def test_a_short_alternation_changes_nothing(block: int) -> None:
    simulation = Simulation(FOUR, [26, 26, 6, 6], is_known=True)
    simulation.run(1000, lambda step, rank: 3.0 if rank == 0 and step // block % 2 else 1.0)
    assert simulation.changes == []


@pytest.mark.parametrize("block", range(3, 30))
def test_a_long_alternation_is_followed_ever_more_rarely(block: int) -> None:
    simulation = Simulation(FOUR, [26, 26, 6, 6], is_known=True)
    simulation.run(1000, lambda step, rank: 3.0 if rank == 0 and step // block % 2 else 1.0)
    first, last = (sum(low < step <= low + 250 for step in simulation.changes) for low in (0, 750))
    assert first <= 12 and last <= 4


def test_without_patience_an_alternation_would_oscillate() -> None:
    hasty = RebalanceRule(window_steps=1, patience_steps=1, cooldown_steps=0, calm_patiences=1)
    simulation = Simulation(FOUR, [26, 26, 6, 6], is_known=True, rule=hasty)
    simulation.run(1000, lambda step, rank: 3.0 if rank == 0 and step // 8 % 2 else 1.0)
    assert len(simulation.changes) > 50


def test_a_gain_inside_the_dead_band_is_left_alone() -> None:
    for factor, is_changed in ((1.04, False), (1.2, True)):
        simulation = Simulation([DeviceModel(0, 1.0)] * 2, [500, 500], is_known=False)
        simulation.run(100, one_slow(0, factor))
        assert bool(simulation.changes) == is_changed
    wide = Simulation(
        [DeviceModel(0, 1.0)] * 2, [500, 500], is_known=False, rule=RebalanceRule(dead_band=0.5)
    )
    wide.run(100, one_slow(0, 1.2))
    assert wide.changes == []


# What is kept


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5).filter(
        lambda p: any(b for b, _ in p)
    ),
    st.integers(0, 2**30),
)
def test_any_times_keep_the_total_the_caps_and_a_sample_for_each_that_works(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    sizes = [size for size, _ in pairs]
    devices = [DeviceModel(0.1, 1.0, 3, max(1, size + room)) for size, room in pairs]
    draw = random.Random(seed)
    rule = RebalanceRule(window_steps=2, patience_steps=1, cooldown_steps=0)
    rebalancer, twin = (Rebalancer(devices, sum(sizes), sizes, rule=rule) for _ in range(2))
    for _ in range(40):
        busy_s = [draw.choice([0.001, 1.0, 1000.0]) for _ in sizes]
        found = rebalancer.observe(busy_s)
        assert twin.observe(busy_s) == found  # the same times, the same answer
        now = rebalancer.local_batch_sizes
        assert sum(now) == sum(sizes)
        for first, size, device in zip(sizes, now, devices, strict=True):
            assert size <= (device.max_batch_size or 0)
            assert (size >= 1) == (first >= 1)


def test_a_worker_slow_beyond_use_keeps_one_sample_and_comes_back() -> None:
    simulation = Simulation(FOUR, [26, 26, 6, 6], is_known=False)
    simulation.run(60, one_slow(0, 1000))
    assert simulation.rebalancer.local_batch_sizes[0] == 1
    simulation.run(60, steady)
    assert simulation.rebalancer.local_batch_sizes[0] >= 24


def test_a_worker_without_samples_stays_so_and_its_time_is_not_looked_at() -> None:
    rebalancer = Rebalancer(None, 12, [6, 0, 6])
    for _ in range(30):
        rebalancer.observe([1.0, 0.0, 3.0])
    assert rebalancer.local_batch_sizes[1] == 0 < rebalancer.local_batch_sizes[2] < 6


def test_one_worker_never_changes() -> None:
    rebalancer = Rebalancer(None, 8, [8])
    assert [rebalancer.observe([1.0 + step % 5]) for step in range(50)] == [None] * 50


def test_what_it_gives_away_is_a_copy() -> None:
    rebalancer = Rebalancer(None, 8, [4, 4])
    rebalancer.local_batch_sizes[0] = 9
    assert rebalancer.local_batch_sizes == [4, 4]


# What is refused


@pytest.mark.parametrize(
    ("devices", "total", "sizes", "message"),
    [
        (None, 9, [4, 4], "local_batch_sizes must sum to 9, at least 1, got [4, 4]"),
        (None, 0, [0, 0], "local_batch_sizes must sum to 0, at least 1, got [0, 0]"),
        (None, 4, [5, -1], "local_batch_sizes[1] must be from 0 to its cap None, got -1"),
        ([DeviceModel(0, 1)], 8, [4, 4], "devices must have one value per worker, got 1 for 2"),
        ([DeviceModel(0, 1, None, 3)] * 2, 8, [4, 4], "local_batch_sizes[0] must be from 0 to its cap 3, got 4. Move"),
    ],
)  # fmt: skip
def test_refuses_a_split_that_is_none(
    devices: list[DeviceModel] | None, total: int, sizes: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Rebalancer(devices, total, sizes)


@pytest.mark.parametrize(
    ("busy_s", "message"),
    [
        ([1.0], "busy_s must have one value per worker, got 1 for 2. Gather"),
        ([1.0, 0.0], "busy_s[1] must be finite and above 0, got 0.0. Leave"),
        ([float("nan"), 1.0], "busy_s[0] must be finite and above 0, got nan"),
    ],
)
def test_refuses_times_that_are_none(busy_s: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Rebalancer(None, 8, [4, 4]).observe(busy_s)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"dead_band": -0.1}, "dead_band must be at least 0, got -0.1"),
        ({"window_steps": 0}, "window_steps must be at least 1, got 0"),
        ({"patience_steps": 0}, "patience_steps must be at least 1, got 0"),
        ({"cooldown_steps": -1}, "cooldown_steps must be at least 0, got -1"),
        ({"calm_patiences": 0}, "calm_patiences must be at least 1, got 0"),
    ],
)
def test_refuses_a_rule_that_cannot_be(rule: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RebalanceRule(**rule)  # type: ignore[arg-type]
