"""Laws of the partitioner: as fast as the best of all splits, exact, fair between equals, and it says why."""

import heapq
import itertools
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from labkit.cluster import partition as module
from labkit.cluster.device_model import DeviceModel
from labkit.cluster.partition import Partition, even_split, partition, rank_ranges
from labkit.errors import ConfigError

FOUR = [DeviceModel(0, 0.25), DeviceModel(0, 0.25), DeviceModel(0, 1.0), DeviceModel(0, 1.0)]

# Quarters, so that times are exact and ties are frequent; and any numbers.
coarse = st.builds(
    DeviceModel,
    st.integers(0, 8).map(lambda n: n / 4),
    st.integers(1, 6).map(lambda n: n / 4),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 12),
)
fine = st.builds(
    DeviceModel,
    st.just(0.0) | st.floats(0, 10),
    st.floats(0.01, 10),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 12),
)


def all_splits(devices: Sequence[DeviceModel], total: int, least: int = 0) -> Iterator[list[int]]:
    first, *others = devices
    most = min(total, first.max_batch_size or total)
    if not others:
        yield from ([[total]] if least <= total <= most else [])
        return
    for size in range(least, most + 1):
        for rest in all_splits(others, total - size, least):
            yield [size, *rest]


def slowest_first(devices: Sequence[DeviceModel], sizes: Sequence[int]) -> list[float]:
    return sorted((d.time_s(b) for d, b in zip(devices, sizes, strict=True)), reverse=True)


def feasible(devices: Sequence[DeviceModel], total: int) -> bool:
    return sum(min(total, d.max_batch_size or total) for d in devices) >= total


# By hand


@pytest.mark.parametrize(
    ("devices", "total", "sizes"),
    [
        (FOUR, 64, (26, 26, 6, 6)),
        (FOUR, 10, (4, 4, 1, 1)),
        ([DeviceModel(0, 1.0)] * 3, 8, (3, 3, 2)),
        ([DeviceModel(7, 3.0)], 5, (5,)),
        # 8 + b = 2 * (20 - b) at b = 10 2/3; a split by speed, 13 and 7, would take 21 s
        ([DeviceModel(8, 1.0), DeviceModel(0, 2.0)], 20, (11, 9)),
        # a fast device with memory for 2 pays 1 s per micro-step: 4 samples in 4 s, as the slow one's 4 in 4 s
        ([DeviceModel(1, 0.5, max_micro_batch_size=2), DeviceModel(0, 1.0)], 8, (4, 4)),
        # its cap leaves the rest to the slow one
        ([DeviceModel(0, 0.1, max_batch_size=3), DeviceModel(0, 1.0)], 8, (3, 5)),
        # the first sample of the second would take longer than the whole batch on the first
        ([DeviceModel(0, 1.0), DeviceModel(50, 1.0)], 8, (8, 0)),
        # the last sample ends at 4 s on either; given to the first, the second is done at once
        ([DeviceModel(0, 1.0), DeviceModel(0, 4.0)], 4, (4, 0)),
        # 4 s on either; given to the second, the first is done at 2 s, else the second at 3 s
        ([DeviceModel(0, 2.0), DeviceModel(0, 1.0)], 5, (1, 4)),
    ],
)
def test_by_hand(devices: list[DeviceModel], total: int, sizes: tuple[int, ...]) -> None:
    assert partition(devices, total).local_batch_sizes == sizes


def test_what_a_partition_says_by_hand() -> None:
    found = partition(FOUR, 64)
    assert found.times_s == (6.5, 6.5, 6.0, 6.0)
    assert found.step_time_s == 6.5
    assert found.utilisation == (1, 1, 6 / 6.5, 6 / 6.5)
    assert found.samples_per_s == 64 / 6.5
    assert found.limit_samples_per_s == 10
    assert found.equal_split_step_time_s == 16
    assert found.gain == 16 / 6.5
    assert found.global_batch_size == 64


def test_the_fixed_cost_matters() -> None:
    slow_start = [DeviceModel(8, 1.0), DeviceModel(0, 2.0)]
    by_speed = Partition(tuple(slow_start), (13, 7))
    assert partition(slow_start, 20).step_time_s == 19 < by_speed.step_time_s == 21


def test_a_fast_device_short_of_memory_gets_micro_steps_not_a_smaller_share() -> None:
    short = [DeviceModel(0.1, 0.1, max_micro_batch_size=8), DeviceModel(0.1, 1.0)]
    found = partition(short, 64)
    assert found.local_batch_sizes == (58, 6)
    assert short[0].num_micro_steps(58) == 8


# Against every other split


@settings(max_examples=150, deadline=None)
@given(st.lists(coarse, min_size=1, max_size=4) | st.lists(fine, min_size=1, max_size=4), st.integers(1, 14))
@example([DeviceModel(0.25, 0.25, 2), DeviceModel(0.5, 0.25), DeviceModel(0, 0.5)], 9)
def test_none_of_all_splits_is_better_worker_by_worker(devices: list[DeviceModel], total: int) -> None:
    assume(feasible(devices, total))
    found = partition(devices, total)
    best = min(slowest_first(devices, sizes) for sizes in all_splits(devices, total))
    assert found.step_time_s == best[0]
    assert slowest_first(devices, found.local_batch_sizes) == best


@settings(max_examples=40, deadline=None)
@given(st.lists(coarse | fine, min_size=5, max_size=5), st.integers(1, 24))
def test_five_workers_and_up_to_24_samples_take_the_least_time(
    devices: list[DeviceModel], total: int
) -> None:
    assume(feasible(devices, total))
    times = [
        [device.time_s(b) for b in range(min(total, device.max_batch_size or total) + 1)]
        for device in devices
    ]
    # the least time for n samples on the first workers, one worker after the other: every split is covered
    best = [0.0] + [float("inf")] * total
    for own in times:
        best = [
            min(max(best[n - b], own[b]) for b in range(min(n, len(own) - 1) + 1)) for n in range(total + 1)
        ]
    assert partition(devices, total).step_time_s == best[total]


@settings(max_examples=60, deadline=None)
@given(st.lists(coarse, min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 3))
def test_with_a_minimum_for_each_none_is_faster(devices: list[DeviceModel], total: int, least: int) -> None:
    splits = list(all_splits(devices, total, least))
    assume(splits)
    found = partition(devices, total, min_local_batch_size=least)
    assert min(found.local_batch_sizes) >= least
    assert found.step_time_s == min(slowest_first(devices, sizes)[0] for sizes in splits)


# What is kept


@settings(deadline=None)
@given(st.lists(fine, min_size=1, max_size=12), st.integers(1, 5000))
def test_the_sum_is_exact_the_caps_hold_and_more_samples_never_take_from_a_worker(
    devices: list[DeviceModel], total: int
) -> None:
    assume(feasible(devices, total + 1))
    found, larger = (partition(devices, size).local_batch_sizes for size in (total, total + 1))
    assert sum(found) == total
    for device, size, more in zip(devices, found, larger, strict=True):
        assert 0 <= size <= (device.max_batch_size or total)
        assert more in (size, size + 1)


@settings(deadline=None)
@given(fine, st.integers(1, 12), st.integers(1, 2000))
def test_equal_devices_differ_by_at_most_one_and_the_lower_rank_has_it(
    device: DeviceModel, count: int, total: int
) -> None:
    assume(feasible([device] * count, total))
    sizes = list(partition([device] * count, total).local_batch_sizes)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert sizes == list(even_split([device] * count, total).local_batch_sizes)


@settings(deadline=None)
@given(st.lists(fine, min_size=1, max_size=6), st.integers(1, 500))
def test_between_the_even_split_and_the_limit(devices: list[DeviceModel], total: int) -> None:
    assume(feasible(devices, total))
    found = partition(devices, total)
    assert found.gain >= 1
    assert found.samples_per_s <= found.limit_samples_per_s * (1 + 1e-9)
    assert max(found.utilisation) == 1 and min(found.utilisation) >= 0


def test_a_large_batch_reaches_the_limit() -> None:
    devices = [DeviceModel(1, 0.25), DeviceModel(3, 1.0, max_micro_batch_size=4), DeviceModel(0, 2.0)]
    found = partition(devices, 10**6)
    assert found.samples_per_s == pytest.approx(found.limit_samples_per_s, rel=1e-4)


def test_an_even_split_heeds_caps() -> None:
    capped = [DeviceModel(0, 1.0, max_batch_size=1), DeviceModel(0, 2.0), DeviceModel(0, 3.0)]
    assert even_split(capped, 8).local_batch_sizes == (1, 4, 3)
    assert even_split(FOUR, 6).local_batch_sizes == (2, 2, 1, 1)


def test_a_thousand_devices_are_handed_only_the_last_samples_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed, replace = itertools.count(), heapq.heapreplace

    def counted(heap: list[object], item: object) -> object:
        next(handed)
        return replace(heap, item)

    monkeypatch.setattr(module.heapq, "heapreplace", counted)
    devices = [
        DeviceModel((7 * i % 11) / 100, (1 + 5 * i % 13) / 1000, (None, 8, 32)[i % 3], (None, 500)[i % 2])
        for i in range(1000)
    ]
    found = partition(devices, 100_000)
    assert sum(found.local_batch_sizes) == 100_000
    assert next(handed) <= 2 * len(devices)
    # One device so slow that the last bound is far from the first.
    assert sum(partition([*devices, DeviceModel(0, 1e9)], 100_000).local_batch_sizes) == 100_000
    assert next(handed) <= 4 * len(devices)


# It explains itself


def test_explains_who_gets_what_and_why() -> None:
    assert partition(FOUR, 64).explain().splitlines() == [
        "64 samples in 6.5 s: 9.846 samples/s, 98% of the 10 that the devices could reach",
        "an equal split would take 16 s, 2.46 times as long",
        "workers 0-1, each: 26 samples in 6.5 s, busy 100%",
        "workers 2-3, each: 6 samples in 6 s, busy 92%",
    ]
    limited = [
        DeviceModel(0.5, 0.25, max_micro_batch_size=2),
        DeviceModel(0, 0.1, max_batch_size=3),
        DeviceModel(9, 1.0),
    ]
    assert partition(limited, 9).explain().splitlines()[2:] == [
        "worker 0: 6 samples in 3 s, busy 100%; 3 micro-steps of at most 2",
        "worker 1: 3 samples in 0.3 s, busy 10%; at its cap",
        "worker 2: 0 samples, as the first alone would take 10 s",
    ]


def test_an_explanation_stays_short() -> None:
    many = [DeviceModel(0, 1 + rank) for rank in range(100)]
    lines = partition(many, 1000).explain().splitlines()
    assert len(lines) <= 15 and lines[-1] == "and 88 more kinds of worker"


def test_ranks_are_shortened() -> None:
    assert rank_ranges([0, 1, 2, 3, 6]) == "0-3, 6"
    assert rank_ranges([4, 5]) == "4-5"
    assert rank_ranges([]) == ""


# What is refused


@pytest.mark.parametrize(
    ("devices", "total", "least", "message"),
    [
        ([], 4, 0, "devices must not be empty, got none. Give"),
        (FOUR, 0, 0, "global_batch_size must be at least 1, got 0. Give"),
        (FOUR, 4, -1, "min_local_batch_size must be at least 0, got -1. Use 0"),
        (FOUR, 7, 2, "global_batch_size must be at least 8, 2 for each of 4 workers, got 7. Raise"),
        (
            [DeviceModel(0, 1, max_batch_size=3), DeviceModel(0, 1, max_batch_size=5)], 12, 0,
            "global_batch_size must be at most 8, the sum of the workers' max_batch_size, got 12: 4 too many. Lower",
        ),
        (
            [DeviceModel(0, 1, max_batch_size=1), DeviceModel(0, 1)], 12, 2,
            "max_batch_size must be at least min_local_batch_size 2, got 1. Raise",
        ),
    ],
)  # fmt: skip
def test_refuses_what_has_no_split(devices: list[DeviceModel], total: int, least: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        partition(devices, total, min_local_batch_size=least)


def test_an_even_split_refuses_what_the_caps_do() -> None:
    with pytest.raises(ConfigError, match="got 9: 5 too many"):
        even_split([DeviceModel(0, 1, max_batch_size=2)] * 2, 9)
