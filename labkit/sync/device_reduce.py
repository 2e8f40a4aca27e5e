"""The two-level sum of gradients on accelerators, bucket by bucket, while back-propagation still runs.

A bucket that is complete is reduce-scattered inside the node: every worker gets the node's sum of one part
of it. As soon as that is done the part is all-reduced between nodes, every worker its own, in parallel.

Every worker starts the same collectives in the same order, bucket by bucket, whenever its gradients come.
On a GPU both are enqueued at once, the second from a side stream that alone waits for the first, so that
back-propagation never does (NCCL's `wait` blocks a stream, not the process). On a CPU it is a thread that
waits for the first and starts the second.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from labkit.comm import Communicator, Work
from labkit.sync.node_reduce import round_


class DeviceReducer:
    """Sums a flat gradient over all workers of all nodes.

    Attributes:
        parts: This worker's part of every bucket, in memory of its own; after `finish` the sums.
    """

    def __init__(
        self,
        row: Tensor,
        buckets: Sequence[tuple[int, int]],
        node: Communicator,
        between: Communicator,
        *,
        wire: torch.dtype,
    ) -> None:
        """Prepare.

        Args:
            row: This worker's gradient; shape (n,).
            buckets: How it is cut, from 0 to n; equal parts for the node's workers.
            node: The workers of this node.
            between: The workers that have the same parts on other nodes.
            wire: Format between nodes; bfloat16 keeps the rounding error for the next step.
        """
        self._buckets = [row[start:end] for start, end in buckets]
        self._ends = [end for _, end in buckets]
        self._node, self._between = node, between
        sizes = [len(bucket) // node.world_size for bucket in self._buckets]
        # Kept from step to step: memory that several streams use must not go back to the allocator between.
        self.parts = _zeros(sizes, row, row.dtype)
        self._packed = self.parts
        self._errors: list[Tensor] | None = None
        if wire != row.dtype and between.world_size > 1:
            self._packed = _zeros(sizes, row, wire)
            self._errors = _zeros(sizes, row, row.dtype)
        self._started: list[Callable[[], Work]] = []  # between nodes, by bucket
        self._side = torch.cuda.Stream(row.device) if row.is_cuda else None
        self._thread = ThreadPoolExecutor(1, "labkit-reduce")

    def fill(self, num_elements: int) -> None:
        """The row is complete up to here; buckets that are complete go out. Never blocks."""
        while len(self._started) < len(self._ends) and self._ends[len(self._started)] <= num_elements:
            index = len(self._started)
            work = self._node.reduce_scatter_(self.parts[index], self._buckets[index])
            self._started.append(self._follow(index, work))

    def _follow(self, index: int, work: Work) -> Callable[[], Work]:
        """Have the part go out between nodes when the node has summed it."""
        if self._side is None:
            return self._thread.submit(self._send, index, work).result
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            sent = self._send(index, work)
        return lambda: sent

    def _send(self, index: int, work: Work) -> Work:
        work.wait()
        if self._errors is not None:
            round_(self.parts[index], self._errors[index], self._packed[index])
        return self._between.all_reduce_(self._packed[index])

    def finish(self) -> None:
        """Wait until the parts hold the sums over all workers; the whole row has been filled.

        Raises:
            PeerError: another worker is gone or too late.
        """
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        for part, packed, started in zip(self.parts, self._packed, self._started, strict=True):
            started().wait()
            if packed is not part:
                part.copy_(packed)
        self._started.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _zeros(sizes: Sequence[int], like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One tensor of each size, next to each other in memory."""
    return list(torch.zeros(sum(sizes), dtype=dtype, device=like.device).split(list(sizes)))
