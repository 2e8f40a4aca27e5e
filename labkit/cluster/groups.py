"""Group like workers: synchronous inside a group, asynchronous between groups through a server.

A group waits for its slowest worker in every step; its all-reduce and the servers' traffic hide behind its
computing as far as the links carry them. Both are predicted, in seconds, and the groups with the most
samples/s of all are taken:

    samples/s = sum over groups of  batch / max(compute, sync_s(workers, nodes) + server_s(groups, nodes))

Candidates are the runs of workers sorted by speed, as in natural breaks: in one dimension the best groups are
runs. What a run yields depends on the run and on the number of groups alone, so dynamic programming finds the
best for each number.

After Kim et al., Towards an Optimized Distributed Deep Learning Framework for a Heterogeneous Multi-GPU
Cluster, 2020 (abstract), who join all-reduce and an asynchronous parameter server; the choice of groups is
ours. Natural breaks: Fisher, On Grouping for Maximum Homogeneity, 1958.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from labkit.cluster.device_model import DeviceModel
from labkit.cluster.partition import Partition, even_split, rank_ranges
from labkit.errors import ConfigError

Split = Callable[[Sequence[DeviceModel], int], Partition]
"""How a group divides its batch: `even_split`, or `partition`."""

_MOST_BLOCKS = 32  # workers, or blocks of like ones, between which every cut is tried
_BITS_PER_MBIT = 1e6


@dataclass(frozen=True)
class LinkModel:
    """What a gradient costs on its way.

    Attributes:
        gradient_bytes: Bytes of a gradient, and of the parameters that come back; at least 0.
        link_mbit: Bandwidth of each node's link to the others, each way; above 0.
        latency_s: Seconds of a message between nodes, whatever its size; at least 0.
        local_mbit: Bandwidth between workers of a node; None where it costs nothing.

    Raises:
        ConfigError: a value is out of its range.
    """

    gradient_bytes: int
    link_mbit: float
    latency_s: float = 0.0
    local_mbit: float | None = None

    def __post_init__(self) -> None:
        for name in ("gradient_bytes", "latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be finite and at least 0, got {getattr(self, name)}. Measure it."
                )
        for name in ("link_mbit", "local_mbit"):
            mbit = getattr(self, name)
            if mbit is not None and not mbit > 0:
                raise ConfigError(f"{name} must be above 0, got {mbit}. Measure the link.")

    @property
    def _link_s(self) -> float:
        return self.gradient_bytes * 8 / (self.link_mbit * _BITS_PER_MBIT)

    @property
    def _local_s(self) -> float:
        return (
            0.0 if self.local_mbit is None else self.gradient_bytes * 8 / (self.local_mbit * _BITS_PER_MBIT)
        )

    def sync_s(self, num_workers: int, num_nodes: int) -> float:
        """Seconds of a two-level all-reduce: a ring inside the nodes, then one between `num_nodes` of them.

        References:
            2 (n - 1) / n of the bytes each way, the lower bound: Patarasuk and Yuan, Bandwidth Optimal
            All-reduce Algorithms, 2009.
        """
        local = -(-num_workers // num_nodes)
        inside_s = 2 * (local - 1) / local * self._local_s
        return inside_s + 2 * (num_nodes - 1) * (self.latency_s + self._link_s / num_nodes)

    def share_s(self, num_nodes: int) -> float:
        """Seconds that handing what was pulled to a group's workers on other nodes keeps a link busy."""
        return math.ceil(math.log2(num_nodes)) * (self.latency_s + self._link_s)

    def server_s(self, num_groups: int, num_nodes: int) -> float:
        """Seconds per step that pushes and pulls keep a node's link busy; 0 for one group, which needs none.

        The server is sharded over all `num_nodes` nodes. A node sends its group's push to the other nodes'
        servers, and its server's part to every other group that pulls; what comes in is as much. Never
        cheaper than one all-reduce over as many nodes: what a server saves is waiting.
        """
        if num_groups == 1:
            return 0.0
        parts = num_nodes - 1 + (num_groups - 1 if num_nodes > 1 else 0)
        return parts * (self.latency_s + self._link_s / num_nodes) + 2 * self._local_s


@dataclass(frozen=True)
class Grouping:
    """Groups of workers and what they are predicted to yield.

    Attributes:
        groups: Ranks of each group, ascending; groups by their lowest rank; shape (G,) of (n,).
        partitions: How each group divides its batch, in the order of its ranks; shape (G,).
        nodes: Nodes that each group spans; shape (G,).
        sync_s: Seconds per step that each group keeps its links busy: gradient sums, and beside a server the
            parameters that its first worker pulls; shape (G,).
        server_s: Seconds per step that pushing and pulling keeps a link busy.
    """

    groups: tuple[tuple[int, ...], ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[tuple[int, ...], ...]
    sync_s: tuple[float, ...]
    server_s: float

    @cached_property
    def step_times_s(self) -> tuple[float, ...]:
        """Predicted seconds of a step of each group: computing, or what hides behind it; shape (G,)."""
        pairs = zip(self.partitions, self.sync_s, strict=True)
        return tuple(max(part.step_time_s, sync_s + self.server_s) for part, sync_s in pairs)

    @cached_property
    def samples_per_s(self) -> float:
        """Predicted samples/s of all groups."""
        pairs = zip(self.partitions, self.step_times_s, strict=True)
        return math.fsum(part.global_batch_size / step_s for part, step_s in pairs)

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each worker, by rank; shape (W,)."""
        found = {rank: index for index, ranks in enumerate(self.groups) for rank in ranks}
        return tuple(found[rank] for rank in range(len(found)))

    def explain(self) -> str:
        """Which workers synchronise and what each group's step is made of, a line per group."""
        limit = sum(part.limit_samples_per_s for part in self.partitions)
        lines = [
            f"{_count(len(self.group_of), 'worker')} in {_count(len(self.groups), 'group')}: "
            f"{self.samples_per_s:.4g} samples/s, "
            f"{self.samples_per_s / limit:.0%} of the {limit:.4g} that the devices could reach"
        ]
        for index, ranks in enumerate(self.groups):
            part = self.partitions[index]
            speeds = sorted(
                size / time_s
                for size, time_s in zip(part.local_batch_sizes, part.times_s, strict=True)
                if size
            )
            lines.append(
                f"group {index}: {_count(len(ranks), 'worker')} ({rank_ranges(ranks)}) on "
                f"{_count(len(self.nodes[index]), 'node')}, {speeds[0]:.4g} to {speeds[-1]:.4g} samples/s "
                f"each: {part.global_batch_size} samples in {self.step_times_s[index]:.4g} s"
                f" (computing {part.step_time_s:.4g}, synchronising {self.sync_s[index]:.4g},"
                f" server {self.server_s:.4g})"
            )
        return "\n".join(lines)


def predict_groups(
    groups: Sequence[Sequence[int]],
    devices: Sequence[DeviceModel],
    nodes: Sequence[int],
    global_batch_size: int,
    link: LinkModel,
    *,
    split: Split = even_split,
) -> Grouping:
    """What given groups are predicted to yield; `group_workers` finds the best.

    Each worker brings the mean local batch into its group, the nearest whole number to B / W and at least 1,
    so that a prediction does not hang on remainders; a group whose caps are lower takes what they allow.

    Args:
        groups: Ranks of each group; every rank once.
        devices: The workers' devices by rank; shape (W,), not empty.
        nodes: The node of each worker; shape (W,).
        global_batch_size: Samples of a step of all workers, at least 1.
        link: What communication costs.
        split: How a group divides its batch.

    Raises:
        ConfigError: a value is out of range, or the groups are not a division of the workers.
    """
    _check(devices, nodes, global_batch_size)
    if sorted(rank for ranks in groups for rank in ranks) != list(range(len(devices))) or not all(groups):
        raise ConfigError(f"groups must hold each of {len(devices)} ranks once, got {groups}. Divide them.")
    local_batch_size = _mean_local_batch_size(global_batch_size, len(devices))
    ordered = sorted(tuple(sorted(ranks)) for ranks in groups)
    spanned = [tuple(sorted({nodes[rank] for rank in ranks})) for ranks in ordered]
    return Grouping(
        groups=tuple(ordered),
        partitions=tuple(_split([devices[r] for r in ranks], local_batch_size, split) for ranks in ordered),
        nodes=tuple(spanned),
        sync_s=tuple(
            _sync_s(link, len(ranks), len(own), len(ordered))
            for ranks, own in zip(ordered, spanned, strict=True)
        ),
        server_s=link.server_s(len(ordered), len(set(nodes))),
    )


def group_workers(
    devices: Sequence[DeviceModel],
    nodes: Sequence[int],
    global_batch_size: int,
    link: LinkModel,
    *,
    split: Split = even_split,
    min_gain: float = 0.0,
) -> Grouping:
    """The groups with the most predicted samples/s; of equal ones the fewest groups.

    Workers of a node that do the mean local batch in the same time stay together. With `even_split`, where
    local batches are equal inside a group, a group runs at the speed of its slowest worker, and waiting is
    what divides workers. With `partition` a group hardly waits, so that one group is nearly always best.

    Up to 32 blocks of like workers every cut is tried; beyond that the 31 largest steps in log-speed, and all
    cuts at once. Never fewer samples/s than one group or each worker alone, up to `min_gain`.

    Args:
        devices: The workers' devices by rank; shape (W,), not empty.
        nodes: The node of each worker; shape (W,).
        global_batch_size: Samples of a step of all workers, at least 1.
        link: What communication costs.
        split: How a group divides its batch.
        min_gain: What more groups must gain over fewer, as a fraction. Measured speeds scatter: give the
            residual of the fit, or like workers are taken apart for what is noise.

    Raises:
        ConfigError: a value is out of range.
    """
    _check(devices, nodes, global_batch_size)
    if not min_gain >= 0:
        raise ConfigError(f"min_gain must be at least 0, got {min_gain}. Use 0 for the most samples/s.")
    atoms = _atoms(devices, nodes, _mean_local_batch_size(global_batch_size, len(devices)))
    blocks = _blocks(atoms)
    if len(set(devices)) == 1:
        everybody = list(range(len(devices)))  # nobody waits for anybody: there is nothing to divide
        return predict_groups([everybody], devices, nodes, global_batch_size, link, split=split)
    candidates = _best_runs([[rank for atom in block for rank in atom.ranks] for block in blocks], devices,
                            nodes, global_batch_size, link, split)  # fmt: skip
    candidates.append([list(atom.ranks) for atom in atoms])
    found = [
        predict_groups(groups, devices, nodes, global_batch_size, link, split=split) for groups in candidates
    ]
    most = max(grouping.samples_per_s for grouping in found)
    return next(g for g in found if g.samples_per_s * (1 + min_gain) * (1 + 1e-12) >= most)


@dataclass(frozen=True)
class _Atom:
    """Workers that are never taken apart: of one node, with the same time for the mean local batch."""

    speed: float
    node: int
    time_s: float
    ranks: tuple[int, ...]


def _atoms(devices: Sequence[DeviceModel], nodes: Sequence[int], local_batch_size: int) -> list[_Atom]:
    """Like workers, the fastest first; then by node."""
    alike: dict[tuple[float, int, float], list[int]] = {}
    for rank, (device, node) in enumerate(zip(devices, nodes, strict=True)):
        size = min(local_batch_size, device.max_batch_size or local_batch_size)
        time_s = device.time_s(size)
        alike.setdefault((-size / time_s, node, time_s), []).append(rank)
    return [_Atom(-key[0], key[1], key[2], tuple(ranks)) for key, ranks in sorted(alike.items())]


def _blocks(atoms: list[_Atom]) -> list[list[_Atom]]:
    """Atoms joined at the smallest steps in log-speed until few enough are left."""
    steps = [math.log(a.speed / b.speed) for a, b in zip(atoms, atoms[1:], strict=False)]
    largest = sorted(range(len(steps)), key=lambda i: (-steps[i], i))[: _MOST_BLOCKS - 1]
    edges = [0, *(i + 1 for i in sorted(largest)), len(atoms)]
    return [atoms[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def _best_runs(
    blocks: list[list[int]],
    devices: Sequence[DeviceModel],
    nodes: Sequence[int],
    global_batch_size: int,
    link: LinkModel,
    split: Split,
) -> list[list[list[int]]]:
    """For each number of groups, the division of the blocks into runs with the most samples/s."""
    count = len(blocks)
    local_batch_size = _mean_local_batch_size(global_batch_size, len(devices))
    batch = np.zeros((count, count + 1))
    compute_s = np.full((count, count + 1), np.inf)  # of the run from a block up to, not including, another
    sync_s = np.zeros((count, count + 1))  # among several groups
    for start in range(count):
        for end in range(start + 1, count + 1):
            ranks = [rank for block in blocks[start:end] for rank in block]
            part = _split([devices[rank] for rank in ranks], local_batch_size, split)
            batch[start, end] = part.global_batch_size
            compute_s[start, end] = part.step_time_s
            sync_s[start, end] = _sync_s(link, len(ranks), len({nodes[rank] for rank in ranks}), 2)
    found = []
    for num_groups in range(1, count + 1):
        rates = batch / np.maximum(compute_s, sync_s + link.server_s(num_groups, len(set(nodes))))
        edges = _best_edges(rates, num_groups)
        runs = [blocks[start:end] for start, end in zip(edges, edges[1:], strict=False)]
        found.append([[rank for block in run for rank in block] for run in runs])
    return found


def _best_edges(rates: NDArray[np.float64], num_runs: int) -> list[int]:
    """Where to cut 0..n into `num_runs` runs so that the sum of their rates is largest; the first of equals.

    Args:
        rates: What the run from i up to, not including, j yields, where i < j; shape (n, n + 1).
        num_runs: Runs, 1 to n.

    Returns:
        Edges from 0 to n, ascending; shape (num_runs + 1,).
    """
    count = len(rates)
    possible = np.where(np.arange(count)[:, None] < np.arange(count + 1), rates, -np.inf)
    best = np.where(np.arange(count + 1) == 0, 0.0, -np.inf)  # of no run, up to each edge
    starts = []
    for _ in range(num_runs):
        sums = best[:count, None] + possible
        starts.append(sums.argmax(axis=0))
        best = sums.max(axis=0)
    edges = [count]
    for layer in reversed(starts):
        edges.append(int(layer[edges[-1]]))
    return edges[::-1]


def _sync_s(link: LinkModel, num_workers: int, num_nodes: int, num_groups: int) -> float:
    """Seconds per step that a group keeps its links busy with itself."""
    share_s = link.share_s(num_nodes) if num_groups > 1 else 0.0
    return link.sync_s(num_workers, num_nodes) + share_s


def _split(devices: Sequence[DeviceModel], local_batch_size: int, split: Split) -> Partition:
    """A group's batch: the mean local batch of each of its workers, as far as their caps allow."""
    total = local_batch_size * len(devices)
    caps = sum(min(total, device.max_batch_size or total) for device in devices)
    return split(devices, min(total, caps))


def _mean_local_batch_size(global_batch_size: int, num_workers: int) -> int:
    return max(1, round(global_batch_size / num_workers))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _check(devices: Sequence[DeviceModel], nodes: Sequence[int], global_batch_size: int) -> None:
    if not devices:
        raise ConfigError("devices must not be empty, got none. Give a device per worker.")
    if len(nodes) != len(devices):
        raise ConfigError(
            f"nodes must have one value per worker, got {len(nodes)} for {len(devices)}. Pair them."
        )
    if global_batch_size < 1:
        raise ConfigError(
            f"global_batch_size must be at least 1, got {global_batch_size}. Give the step a sample."
        )
