"""Batches are split in whole samples, exactly, and the same on every worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.cluster.partition import largest_remainder, split_batch
from labkit.cluster.placement import placements
from labkit.config import from_overrides
from labkit.errors import ConfigError


def test_four_fast_and_slow_workers_by_hand() -> None:
    assert largest_remainder([25.6, 25.6, 6.4, 6.4], 64) == [26, 26, 6, 6]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), st.integers(0, 500))
def test_always_sums_to_the_total_and_stays_within_one_of_the_share(weights: list[int], total: int) -> None:
    split = split_batch(total, weights)
    assert sum(split) == total
    for part, weight in zip(split, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1


@given(st.integers(1, 20), st.integers(0, 500))
def test_equal_weights_differ_by_at_most_one(count: int, total: int) -> None:
    split = split_batch(total, [3] * count)
    assert max(split) - min(split) <= 1
    assert split == sorted(split, reverse=True)  # ties go to the lower rank


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_a_full_batch_is_split_as_given(weights: list[int]) -> None:
    assert split_batch(sum(weights), weights) == weights


def test_refuses_a_negative_share() -> None:
    with pytest.raises(ConfigError, match=r"shares\[1\] must be at least 0, got -1.0. Use 0"):
        largest_remainder([3.0, -1.0], 2)


def test_refuses_shares_of_another_total() -> None:
    with pytest.raises(ConfigError, match="shares must sum to 5, got 4.0"):
        largest_remainder([2.0, 2.0], 5)


def test_refuses_weights_without_samples() -> None:
    with pytest.raises(ConfigError, match="weights must have a sum above 0"):
        split_batch(3, [0, 0])


def test_ranks_run_through_the_nodes_of_any_shape() -> None:
    cluster = from_overrides(
        [
            "cluster={nodes: [{name: a, workers: 1}, {name: b, workers: 3, device: cpu}, {name: c, workers: 2}]}"
        ]
    ).cluster
    found = placements(cluster)
    assert [p.rank for p in found] == list(range(6))
    assert [(p.node, p.node_index, p.local_rank) for p in found] == [
        ("a", 0, 0), ("b", 1, 0), ("b", 1, 1), ("b", 1, 2), ("c", 2, 0), ("c", 2, 1),
    ]  # fmt: skip
    assert [p.local_world_size for p in found] == [1, 3, 3, 3, 2, 2]
    assert {p.world_size for p in found} == {6}
    assert [p.device for p in found] == ["auto", "cpu", "cpu", "cpu", "auto", "auto"]
