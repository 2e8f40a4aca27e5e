"""The two-level sum of gradients: over a node's workers in shared memory, then between nodes in chunks.

Each worker leaves its gradient in its own row of a shared block. The sender of a chunk adds the rows of
that chunk while the chunks before it are on the wire, so that between nodes only the wire takes time.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.comm import Communicator, Counters, Work

_TILE = 65536  # elements added at a time: 256 KiB of float32 stay in a core's cache
_LARGEST_IN_FLIGHT = 4


@dataclass(frozen=True)
class Chunk:
    """A piece of the flat gradient that is reduced as a whole.

    Attributes:
        start: First element.
        end: One past the last.
        sender: Which of the node's senders reduces it.
        is_exact: It travels as it is, whatever the wire's format: counts and sums.
    """

    start: int
    end: int
    sender: int
    is_exact: bool = False


def cut(num_elements: int, chunk_elements: int, num_senders: int) -> list[Chunk]:
    """Cut a flat gradient into chunks that the senders take in turn."""
    starts = range(0, num_elements, chunk_elements)
    return [
        Chunk(start, min(start + chunk_elements, num_elements), index % num_senders)
        for index, start in enumerate(starts)
    ]


class NodeReducer:
    """Sums one flat block of gradients over all workers of all nodes, into row 0."""

    def __init__(
        self,
        rows: Tensor,
        chunks: Sequence[Chunk],
        senders: Sequence[Communicator | None],
        ready: Counters,
        done: Counters,
        *,
        wire: torch.dtype,
    ) -> None:
        """Prepare.

        Args:
            rows: A row per worker of the node, in shared memory; shape (R, n).
            chunks: How the row is cut; the same on all nodes.
            senders: For each sender its workers of all nodes; None where this worker is not that sender.
            ready: How many elements each worker has filled, over all rounds.
            done: How many chunks each worker has reduced, over all rounds.
            wire: Format between nodes; bfloat16 keeps the rounding error for the next round.
        """
        self._rows = rows
        self._chunks = chunks
        self._mine = [chunk for chunk in chunks if senders[chunk.sender] is not None]
        self._senders = senders
        self._ready = ready
        self._done = done
        self._wire = wire
        self._errors = [self._error_buffer(chunk) for chunk in self._mine]
        self.node_s = 0.0  # spent adding up rows, over all rounds
        self._round = 0
        self._next = 0
        self._num_done = 0
        self._in_flight: deque[tuple[int, Chunk, Work, Tensor | None]] = deque()

    def _error_buffer(self, chunk: Chunk) -> Tensor | None:
        if not self._is_compressed(chunk):
            return None
        return torch.zeros(chunk.end - chunk.start, dtype=self._rows.dtype)

    def _is_compressed(self, chunk: Chunk) -> bool:
        communicator = self._senders[chunk.sender]
        is_other = self._wire != self._rows.dtype and not chunk.is_exact
        return is_other and communicator is not None and communicator.world_size > 1

    @property
    def num_elements(self) -> int:
        """Elements of a row."""
        return self._rows.shape[1]

    def fill(self, num_elements: int) -> None:
        """This worker has filled its row up to here; chunks that all have filled go out."""
        self._ready.set(self._round * self.num_elements + num_elements)
        if self._mine:
            self.pump()

    def pump(self) -> None:
        """Reduce and send what can be; see what has arrived. Never blocks."""
        while self._next < len(self._mine) and len(self._in_flight) < _LARGEST_IN_FLIGHT:
            chunk = self._mine[self._next]
            if self._ready.least() < self._round * self.num_elements + chunk.end:
                break
            self._send(self._next, chunk)
            self._next += 1
        while self._in_flight and self._in_flight[0][2].is_done():
            self._arrive()

    def _send(self, index: int, chunk: Chunk) -> None:
        began_at = time.perf_counter()
        total = self._rows[0, chunk.start : chunk.end]
        for start in range(0, len(total), _TILE):
            tile = total[start : start + _TILE]
            for row in self._rows[1:]:
                tile.add_(row[chunk.start + start : chunk.start + start + len(tile)])
        self.node_s += time.perf_counter() - began_at
        communicator = self._senders[chunk.sender]
        assert communicator is not None
        packed = self._compress(index, total) if self._is_compressed(chunk) else None
        work = communicator.all_reduce_(total if packed is None else packed)
        self._in_flight.append((index, chunk, work, packed))

    def _compress(self, index: int, total: Tensor) -> Tensor:
        """Round to the wire's format and remember what was lost (error feedback; Seide et al., 2014)."""
        error = self._errors[index]
        assert error is not None
        error.add_(total)
        packed = error.to(self._wire)
        error.sub_(packed)
        return packed

    def _arrive(self) -> None:
        _, chunk, work, packed = self._in_flight.popleft()
        work.wait()
        if packed is not None:
            self._rows[0, chunk.start : chunk.end].copy_(packed)
        self._num_done += 1

    def finish(self) -> None:
        """Wait until row 0 holds the sum over all workers.

        Raises:
            PeerError: another worker is gone or too late.
        """
        while self._num_done < (self._round + 1) * len(self._mine):
            self.pump()
            if self._in_flight and (
                self._next == len(self._mine) or len(self._in_flight) == _LARGEST_IN_FLIGHT
            ):
                self._arrive()
            elif self._next < len(self._mine):
                chunk = self._mine[self._next]
                self._ready.wait(self._round * self.num_elements + chunk.end, self.pump)
        self._round += 1
        self._next = 0
        self._done.set(self._round)
        self._done.wait(self._round)

    def errors(self) -> list[Tensor]:
        """What the wire's format has lost so far and will add again, by own chunk; empty for float32."""
        return [error for error in self._errors if error is not None]
