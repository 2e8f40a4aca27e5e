"""Choose how a node talks to the others by measuring it at the start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labkit.cluster.cost import CHUNK_BYTES, overlapped_chunk_bytes
from labkit.comm import Communicator
from labkit.config import HierarchicalConfig

_TRIAL_BYTES = 4 * 2**20
_PATIENCE_S = 0.5
_CLEAR_GAIN = 0.05


@dataclass(frozen=True)
class Plan:
    """How gradients travel between nodes.

    Attributes:
        num_senders: Workers per node that talk to other nodes.
        chunk_bytes: Bytes per collective.
    """

    num_senders: int
    chunk_bytes: int

    def __str__(self) -> str:
        who = "one sender" if self.num_senders == 1 else f"{self.num_senders} senders"
        return f"{who} per node, chunks of {self.chunk_bytes / 2**20:g} MiB"


def candidates(config: HierarchicalConfig, nodes: Sequence[Sequence[int]], size_bytes: int) -> list[Plan]:
    """The plans worth a trial, the usual one first; one only when nothing is left to choose.

    While back-propagation runs, many senders share the work of adding up, and chunks are small: the first
    one leaves sooner, and the last one is shorter. Trials measure the sum alone and would not see that.

    Args:
        config: What is fixed by the user.
        nodes: Ranks of each node.
        size_bytes: Gradient bytes.
    """
    fewest = min(len(node) for node in nodes)
    if len(nodes) == 1:
        # No wire: every worker adds up an equal part.
        senders = config.num_senders or fewest
        return [Plan(senders, config.chunk_bytes or max(2**18, -(-size_bytes // senders)))]
    counts = sorted({1, fewest}, reverse=config.is_overlapped)
    if config.num_senders:
        counts = [config.num_senders]
    usual_bytes = overlapped_chunk_bytes(size_bytes) if config.is_overlapped else CHUNK_BYTES
    sizes = [config.chunk_bytes or usual_bytes]
    if not config.is_overlapped and not config.chunk_bytes and size_bytes > CHUNK_BYTES:
        sizes.append(4 * CHUNK_BYTES)
    return [Plan(count, size) for count in counts for size in sizes]


def choose(
    plans: Sequence[Plan], comm: Communicator, seconds: Callable[[Plan, int], float]
) -> tuple[Plan, str]:
    """Measure the plans and take the fastest; the first one unless another is clearly faster.

    Args:
        plans: What to choose from.
        comm: All workers; they decide together.
        seconds: Time that a plan takes for so many bytes, the same answer on all workers.

    Returns:
        The plan, and why.
    """
    if len(plans) == 1:
        return plans[0], f"{plans[0]} (nothing to choose)"
    size_bytes = _TRIAL_BYTES if 4 * seconds(plans[0], _TRIAL_BYTES // 4) < _PATIENCE_S else _TRIAL_BYTES // 4
    times = [min(seconds(plan, size_bytes) for _ in range(2)) for plan in plans]
    best = min(range(len(plans)), key=lambda index: times[index])
    if times[best] > times[0] * (1 - _CLEAR_GAIN):
        best = 0
    decision = torch.tensor([best], dtype=torch.int64)
    comm.broadcast_(decision)
    chosen = plans[int(decision)]
    trials = "; ".join(f"{plan}: {1e3 * t:.1f} ms" for plan, t in zip(plans, times, strict=True))
    return chosen, f"{chosen}, measured with {size_bytes / 2**20:g} MiB ({trials})"
