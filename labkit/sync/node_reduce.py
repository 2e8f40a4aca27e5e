"""The two-level sum of gradients: over a node's workers in shared memory, then between nodes in chunks.

Each worker leaves its gradient in its own row of a shared block. The sender of a chunk adds the rows of
that chunk while the chunks before it are on the wire, so that between nodes only the wire takes time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.comm import Communicator, Counters, Work

_TILE = 65536  # elements added at a time: 256 KiB of float32 stay in a core's cache
_LARGEST_IN_FLIGHT = 4
_LOOK_EVERY_S = 2e-3  # a chunk of 1 MiB takes 9 ms on a link of 1 Gbit/s; looking costs the processor


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
    """Cut a flat gradient into even chunks of at most a size, which the senders take in turn."""
    count = -(-num_elements // chunk_elements)
    borders = [num_elements * index // count for index in range(count + 1)]
    return [
        Chunk(start, end, index % num_senders)
        for index, (start, end) in enumerate(zip(borders[:-1], borders[1:], strict=True))
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
        is_overlapped: bool = False,
    ) -> None:
        """Prepare.

        Args:
            rows: A row per worker of the node, in shared memory; shape (R, n).
            chunks: How the row is cut; the same on all nodes.
            senders: For each sender its workers of all nodes; None where this worker is not that sender.
            ready: How many elements each worker has filled, over all rounds.
            done: How many chunks each worker has reduced, over all rounds.
            wire: Format between nodes; bfloat16 keeps the rounding error for the next round.
            is_overlapped: A thread sends what all have filled while this worker still computes; `close`
                ends it.
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
        self._in_flight: deque[tuple[Chunk, Work, Tensor | None]] = deque()
        self._background = _Background(self.pump) if is_overlapped and self._mine else None

    def _error_buffer(self, chunk: Chunk) -> Tensor | None:
        """What rounding has lost of the chunk; None where it travels as it is."""
        communicator = self._senders[chunk.sender]
        is_exact = self._wire == self._rows.dtype or chunk.is_exact
        if is_exact or communicator is None or communicator.world_size == 1:
            return None
        return torch.zeros(chunk.end - chunk.start, dtype=self._rows.dtype)

    @property
    def num_elements(self) -> int:
        """Elements of a row."""
        return self._rows.shape[1]

    def fill(self, num_elements: int) -> None:
        """This worker has filled its row up to here; chunks that all have filled go out."""
        self._ready.set(self._round * self.num_elements + num_elements)
        if self._background is not None:
            self._background.work()
        elif self._mine:
            self.pump()

    def pump(self) -> None:
        """Reduce and send what can be; see what has arrived. Never blocks."""
        while self._next < len(self._mine) and len(self._in_flight) < _LARGEST_IN_FLIGHT:
            chunk = self._mine[self._next]
            if self._ready.least() < self._round * self.num_elements + chunk.end:
                break
            self._send(self._next, chunk)
            self._next += 1
        while self._in_flight and self._in_flight[0][1].is_done():
            self._arrive()

    def _send(self, index: int, chunk: Chunk) -> None:
        began_at = time.perf_counter()
        total = self._rows[0, chunk.start : chunk.end]
        error = self._errors[index]
        packed = None if error is None else torch.empty_like(total, dtype=self._wire)
        for start in range(0, len(total), _TILE):
            inside = slice(start, start + _TILE)
            tile = total[inside]
            for row in self._rows[1:, chunk.start : chunk.end]:
                tile.add_(row[inside])
            if error is not None and packed is not None:
                round_(tile, error[inside], packed[inside])
        self.node_s += time.perf_counter() - began_at
        communicator = self._senders[chunk.sender]
        assert communicator is not None
        work = communicator.all_reduce_(total if packed is None else packed)
        self._in_flight.append((chunk, work, packed))

    def _arrive(self) -> None:
        chunk, work, packed = self._in_flight.popleft()
        work.wait()
        if packed is not None:
            self._rows[0, chunk.start : chunk.end].copy_(packed)
        self._num_done += 1

    def finish(self) -> None:
        """Wait until row 0 holds the sum over all workers.

        Raises:
            PeerError: another worker is gone or too late.
        """
        if self._background is not None:
            self._background.rest()
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

    def close(self) -> None:
        """End the thread; without one there is nothing to do."""
        if self._background is not None:
            self._background.close()


def round_(values: Tensor, error: Tensor, packed: Tensor) -> None:
    """Round to the wire's format and remember what was lost (error feedback; Seide et al., 2014)."""
    error.add_(values)
    packed.copy_(error)
    error.sub_(packed)


class _Background:
    """A thread that calls a function again and again while it is wanted.

    Back-propagation reaches Python only when a gradient is complete. Between two of them, which can take
    longer than the wire needs, nobody but this thread sees that a chunk has arrived or that the slowest
    worker of the node has filled the next one.
    """

    def __init__(self, pump: Callable[[], None]) -> None:
        self._pump = pump
        self._is_wanted = threading.Event()
        self._is_closed = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="labkit-reduce", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            if self._is_closed:
                return
            with self._lock:
                if self._is_wanted.is_set():
                    self._pump_once()
            time.sleep(_LOOK_EVERY_S)

    def _pump_once(self) -> None:
        try:
            self._pump()
        except Exception as error:  # raised where the worker can deal with it
            self._error = error
            self._is_wanted.clear()

    def work(self) -> None:
        """Go on; raises what has gone wrong."""
        self._raise()
        self._is_wanted.set()

    def rest(self) -> None:
        """Stop, and wait until it has; raises what has gone wrong."""
        self._is_wanted.clear()
        with self._lock:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._is_wanted.set()
        self._thread.join()
