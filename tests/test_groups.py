"""Laws of the groups: like with like, never worse than the two simple ways, and stable."""

import re
from collections.abc import Iterator
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cluster.device_model import DeviceModel
from labkit.cluster.groups import Grouping, LinkModel, group_workers, predict_groups
from labkit.cluster.partition import even_split, partition
from labkit.errors import ConfigError

T = TypeVar("T")

FAST, SLOW = DeviceModel(0, 0.25), DeviceModel(0, 1.0)
FREE = LinkModel(0, 1000)  # nothing to send
MEGABIT = LinkModel(125_000, 1)  # a gradient takes 1 s

few = st.sampled_from(
    [FAST, SLOW, DeviceModel(0.5, 0.25), DeviceModel(1, 1, 2), DeviceModel(0, 0.5, None, 3)]
)
any_device = st.builds(
    DeviceModel,
    st.floats(0, 5),
    st.floats(0.05, 5),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 20),
)
links = st.builds(
    LinkModel,
    st.sampled_from([0, 1000, 125_000, 10**7]),
    st.floats(1, 10_000),
    st.sampled_from([0.0, 1e-4, 0.1]),
    st.none() | st.floats(10_000, 100_000),
)
clusters = st.lists(st.tuples(few | any_device, st.integers(0, 3)), min_size=1, max_size=7)


def all_divisions(items: list[T]) -> Iterator[list[list[T]]]:
    if not items:
        yield []
        return
    first, *others = items
    for rest in all_divisions(others):
        yield [[first], *rest]
        for index in range(len(rest)):
            yield [*rest[:index], [first, *rest[index]], *rest[index + 1 :]]


# The link by hand


def test_synchronising_by_hand() -> None:
    assert MEGABIT.sync_s(1, 1) == 0
    assert MEGABIT.sync_s(4, 1) == 0  # inside a node it costs nothing here
    assert MEGABIT.sync_s(2, 2) == 1  # 2 * 1/2 of the gradient each way
    assert MEGABIT.sync_s(8, 4) == 1.5
    assert LinkModel(125_000, 1, latency_s=0.1).sync_s(4, 4) == pytest.approx(1.5 + 0.6)
    assert LinkModel(125_000, 1, local_mbit=10).sync_s(8, 2) == pytest.approx(1 + 2 * 3 / 4 * 0.1)


def test_the_server_by_hand() -> None:
    assert MEGABIT.server_s(1, 4) == 0  # one group needs none
    assert MEGABIT.server_s(2, 1) == 0
    assert MEGABIT.server_s(2, 2) == 1  # half a gradient to the other server, half to the other group
    assert MEGABIT.server_s(3, 4) == (3 + 2) / 4
    assert LinkModel(125_000, 1, 0.1, 10).server_s(2, 2) == pytest.approx(2 * 0.1 + 1 + 0.2)


@given(links, st.integers(1, 8), st.integers(2, 8))
def test_groups_never_need_the_link_less_than_one_all_reduce(
    link: LinkModel, per_group: int, num_groups: int
) -> None:
    nodes = per_group * num_groups  # of one worker each
    link = LinkModel(link.gradient_bytes, link.link_mbit)  # latencies of pulls and pushes overlap
    together_s = link.sync_s(per_group, per_group) + link.server_s(num_groups, nodes)
    assert together_s >= link.sync_s(nodes, nodes) * (1 - 1e-9) - 1e-12


# The groups by hand


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 0, 1]])
def test_two_fast_and_two_slow_are_two_groups(nodes: list[int]) -> None:
    link = LinkModel(10**6, 1000, 1e-4)  # 8 ms
    found = group_workers([FAST, FAST, SLOW, SLOW], nodes, 64, link)
    assert found.groups == ((0, 1), (2, 3)) and found.group_of == (0, 0, 1, 1)
    assert group_workers([SLOW, FAST, SLOW, FAST], nodes, 64, link).groups == ((0, 2), (1, 3))


def test_what_two_groups_yield_by_hand() -> None:
    free = group_workers([FAST, FAST, SLOW, SLOW], [0, 0, 1, 1], 64, FREE)
    assert free.samples_per_s == 10  # 2 * 4 + 2 * 1; one group 4 * 1
    one = predict_groups([[0, 1, 2, 3]], [FAST, FAST, SLOW, SLOW], [0, 0, 1, 1], 64, FREE)
    assert one.samples_per_s == 4
    # 16 samples each: 4 s, 16 s; the server's 6 s hide behind the second alone
    paid = group_workers([FAST, FAST, SLOW, SLOW], [0, 0, 1, 1], 64, LinkModel(750_000, 1))
    assert paid.step_times_s == (6, 16) and paid.samples_per_s == pytest.approx(32 / 6 + 32 / 16)
    assert paid.sync_s == (0, 0) and paid.server_s == 6


def test_a_dear_server_leaves_one_group() -> None:
    assert len(group_workers([FAST, FAST, SLOW, SLOW], [0, 0, 1, 1], 64, LinkModel(10**8, 1)).groups) == 1


def test_unequal_batches_in_a_group_make_a_server_needless() -> None:
    link = LinkModel(10**6, 1000, 1e-4)
    found = group_workers([FAST, FAST, SLOW, SLOW], [0, 0, 1, 1], 640, link, split=partition)
    assert found.groups == ((0, 1, 2, 3),)
    assert found.partitions[0].local_batch_sizes == (256, 256, 64, 64)


def test_a_gain_within_the_noise_does_not_take_like_workers_apart() -> None:
    noisy = [DeviceModel(0, beta_s) for beta_s in (1.0, 1.02, 0.99, 4.0, 4.1)]
    assert len(group_workers(noisy, range(5), 50, FREE).groups) == 5
    assert group_workers(noisy, range(5), 50, FREE, min_gain=0.05).groups == ((0, 1, 2), (3, 4))


# What is kept


@settings(deadline=None)
@given(few | any_device, st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 100), links)
def test_equal_workers_are_one_group(
    device: DeviceModel, nodes: list[int], total: int, link: LinkModel
) -> None:
    for split in (even_split, partition):
        found = group_workers([device] * len(nodes), nodes, total, link, split=split)
        assert found.groups == (tuple(range(len(nodes))),)


@settings(deadline=None, max_examples=150)
@given(
    clusters, st.integers(1, 80), links, st.sampled_from([even_split, partition]), st.sampled_from([0, 0.1])
)
def test_never_worse_than_one_group_or_each_worker_alone(cluster, total, link, split, min_gain) -> None:  # type: ignore[no-untyped-def]
    devices, nodes = [device for device, _ in cluster], [node for _, node in cluster]
    found = group_workers(devices, nodes, total, link, split=split, min_gain=min_gain)
    one = predict_groups([range(len(nodes))], devices, nodes, total, link, split=split)
    alone = predict_groups([[rank] for rank in range(len(nodes))], devices, nodes, total, link, split=split)
    reached = found.samples_per_s * (1 + min_gain) * (1 + 1e-9)
    assert reached >= one.samples_per_s and reached >= alone.samples_per_s
    assert sorted(rank for ranks in found.groups for rank in ranks) == list(range(len(nodes)))
    for first in range(len(nodes)):  # equal workers of a node stay together
        for second in range(first):
            if cluster[first] == cluster[second]:
                assert found.group_of[first] == found.group_of[second]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=6, unique=True), st.integers(6, 60))
def test_without_communication_no_division_at_all_is_better(betas: list[float], total: int) -> None:
    devices, nodes = [DeviceModel(0, beta_s) for beta_s in betas], list(range(len(betas)))
    most = max(
        predict_groups(groups, devices, nodes, total, FREE).samples_per_s for groups in all_divisions(nodes)
    )
    assert group_workers(devices, nodes, total, FREE).samples_per_s >= most * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(few, min_size=1, max_size=6), st.integers(1, 60), st.sampled_from([1e3, 1e5, 1e6]))
def test_one_worker_per_node_no_division_of_runs_is_better(
    devices: list[DeviceModel], total: int, gradient_bytes: float
) -> None:
    nodes, link = list(range(len(devices))), LinkModel(int(gradient_bytes), 10)
    batch = max(1, round(total / len(devices)))

    def speed(rank: int) -> float:
        size = min(batch, devices[rank].max_batch_size or batch)
        return size / devices[rank].time_s(size)

    order = sorted(nodes, key=lambda rank: (-speed(rank), rank))
    divisions = []
    for cuts in range(2 ** (len(nodes) - 1)):
        groups = [[order[0]]]
        for position, rank in enumerate(order[1:]):
            if cuts >> position & 1:
                groups.append([])
            groups[-1].append(rank)
        divisions.append(groups)
    most = max(predict_groups(groups, devices, nodes, total, link).samples_per_s for groups in divisions)
    assert group_workers(devices, nodes, total, link).samples_per_s >= most * (1 - 1e-9)


@given(st.permutations(range(6)))
def test_the_order_of_the_workers_does_not_matter(order: list[int]) -> None:
    devices = [DeviceModel(0, beta_s) for beta_s in (1.0, 1.1, 2.0, 2.1, 8.0, 8.4)]
    link = LinkModel(10**6, 10)

    def members(order: list[int]) -> set[frozenset[int]]:
        found = group_workers([devices[i] for i in order], order, 60, link)
        return {frozenset(order[rank] for rank in ranks) for ranks in found.groups}

    assert members(order) == members(list(range(6)))


def test_many_unlike_workers_are_cut_at_the_largest_steps() -> None:
    unlike = [DeviceModel(0, (1 + rank / 1e5) * (1, 10, 100)[rank % 3]) for rank in range(120)]
    found = group_workers(unlike, range(120), 1200, LinkModel(1000, 10_000), min_gain=0.01)
    assert [len(ranks) for ranks in found.groups] == [40, 40, 40]
    assert all(len({rank % 3 for rank in ranks}) == 1 for ranks in found.groups)


# It explains itself


def test_explains_the_groups() -> None:
    found = group_workers([FAST, FAST, SLOW, SLOW], [0, 0, 1, 1], 64, MEGABIT)
    assert isinstance(found, Grouping)
    assert found.explain().splitlines() == [
        "4 workers in 2 groups: 10 samples/s, 100% of the 10 that the devices could reach",
        "group 0: 2 workers (0-1) on 1 node, 4 to 4 samples/s each: 32 samples in 4 s"
        " (computing 4, synchronising 0, server 1)",
        "group 1: 2 workers (2-3) on 1 node, 1 to 1 samples/s each: 32 samples in 16 s"
        " (computing 16, synchronising 0, server 1)",
    ]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], 4), "devices must not be empty, got none"),
        (([FAST], [0, 1], 4), "nodes must have one value per worker, got 2 for 1"),
        (([FAST], [0], 0), "global_batch_size must be at least 1, got 0"),
    ],
)
def test_refuses_what_is_no_cluster(arguments, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=re.escape(message)):
        group_workers(*arguments, FREE)


def test_refuses_a_negative_gain_and_groups_that_are_no_division() -> None:
    with pytest.raises(ConfigError, match=re.escape("min_gain must be at least 0, got -0.1. Use 0")):
        group_workers([FAST], [0], 4, FREE, min_gain=-0.1)
    for groups in ([[0]], [[0, 1], [1]], [[0, 1], []]):
        with pytest.raises(ConfigError, match="groups must hold each of 2 ranks once"):
            predict_groups(groups, [FAST, SLOW], [0, 0], 4, FREE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10), "gradient_bytes must be finite and at least 0, got -1"),
        ((1, 0), "link_mbit must be above 0, got 0"),
        ((1, float("nan")), "link_mbit must be above 0, got nan"),
        ((1, 10, -0.1), "latency_s must be finite and at least 0, got -0.1"),
        ((1, 10, 0.1, 0), "local_mbit must be above 0, got 0"),
    ],
)
def test_refuses_a_link_that_cannot_be(arguments: tuple[int, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LinkModel(*arguments)
