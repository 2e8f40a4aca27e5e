"""Copies between a device and the host beside the computing, each direction in its own order."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.memory.turns import EmulatedLink, LinkState

_CHUNK_BYTES = 8 * 2**20
_EMULATED_CHUNK_BYTES = 2**20
_LEAST_BYTES = 4 * 2**20  # before a rate is believed
_NUM_RECENT = 1024

Mark = Any
"""A moment in the computing: seconds, or an event."""


class Copy(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Whether all bytes have arrived, for the host to know."""
        ...

    def wait(self) -> tuple[Mark, Mark] | None:
        """Have the computing wait for it.

        What is computed next sees all bytes.

        Returns:
            Marks before and after the wait; None when there was nothing to wait for.
        """
        ...


class Adapter(Protocol):
    """One device. Copies of one direction are done one after the other, in the order of the calls."""

    device: torch.device

    def copy_out(self, source: Tensor, target: Tensor) -> Copy:
        """From the device into host memory; both uint8, shape (n,)."""
        ...

    def copy_in(self, source: Tensor, target: Tensor, after: Copy | None) -> Copy:
        """From host memory to the device, when the copy that filled it is done."""
        ...

    def now(self) -> float:
        """Seconds from some point on, when all that was given to the device to compute is done."""
        ...

    def mark(self) -> Mark:
        """This moment in the computing."""
        ...

    def between(self, begin: Mark, end: Mark) -> float | None:
        """Seconds between two marks; None while that isn't known."""
        ...

    def rates(self) -> dict[str, float]:
        """Bytes a second of the copies so far, by direction, where enough were made."""
        ...

    def recent(self) -> "list[tuple[str, int, Mark, Mark]]":
        """Direction, bytes, begin and end of the latest copies that are done, oldest first."""
        ...

    def close(self) -> None:
        """Wait for all copies and end."""
        ...


class _Rates:
    """Bytes a second of late; older copies count less."""

    def __init__(self) -> None:
        self._bytes = {"out": 0.0, "in": 0.0}
        self._seconds = {"out": 0.0, "in": 0.0}

    def add(self, direction: str, size_bytes: int, seconds: float) -> None:
        if self._bytes[direction] > 16 * _LEAST_BYTES:
            self._bytes[direction] /= 2
            self._seconds[direction] /= 2
        self._bytes[direction] += size_bytes
        self._seconds[direction] += seconds

    def get(self) -> dict[str, float]:
        return {
            direction: size_bytes / max(self._seconds[direction], 1e-9)
            for direction, size_bytes in self._bytes.items()
            if size_bytes >= _LEAST_BYTES
        }


class _ThreadCopy:
    def __init__(self, future: "Future[None]", mark: Callable[[], Mark]) -> None:
        self._future, self._mark = future, mark
        self.is_urgent = False

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> tuple[Mark, Mark] | None:
        if self._future.done():
            self._future.result()  # raises what the copy did
            return None
        begin = self._mark()
        self.is_urgent = True
        self._future.result()
        return begin, self._mark()


class _ThreadAdapter:
    """A thread for each direction, which can take turns with other processes, chunk by chunk."""

    device: torch.device

    def __init__(
        self,
        pace: Callable[[int, str], None] | None,
        state: LinkState | None,
        ways_in_turns: Collection[str],
    ) -> None:
        self._pace, self._state, self._ways = pace, state, ways_in_turns
        self._queues: dict[str, queue.SimpleQueue[Any]] = {}
        self._threads = []
        self._rates = _Rates()
        self._recent: deque[tuple[str, int, Mark, Mark]] = deque(maxlen=_NUM_RECENT)
        self._is_closed = False
        self._chunk_bytes = _CHUNK_BYTES if ways_in_turns else 2**62
        if isinstance(pace, EmulatedLink):
            self._chunk_bytes = _EMULATED_CHUNK_BYTES
        for direction in ("out", "in"):
            self._queues[direction] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(direction,), name=f"labkit-copy-{direction}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def copy_out(self, source: Tensor, target: Tensor) -> Copy:
        return self._ask("out", source, target, None)

    def copy_in(self, source: Tensor, target: Tensor, after: Copy | None) -> Copy:
        return self._ask("in", source, target, after)

    def _ask(self, direction: str, source: Tensor, target: Tensor, after: Copy | None) -> Copy:
        if self._is_closed:
            raise RuntimeError(
                "hybrid memory must be open until the last backward pass, got a copy after close(). Close it "
                "later."
            )
        future: Future[None] = Future()
        copy = _ThreadCopy(future, self.mark)
        self._queues[direction].put((copy, source, target, after, self._ready()))
        return copy

    def _work(self, direction: str) -> None:
        while True:
            job = self._queues[direction].get()
            if job is None:
                return
            copy, source, target, after, ready = job
            try:
                if isinstance(after, _ThreadCopy):
                    after._future.result()
                self._wait_until(ready)
                begin = self._mark_copy(direction)
                self._copy_in_chunks(copy, source, target, direction)
                end = self._mark_copy(direction)
                self._rates.add(direction, source.numel(), self.between(begin, end) or 0.0)
                self._recent.append((direction, source.numel(), begin, end))
                del job, source, target, after  # whoever hears that it is done may count on this being gone
                copy._future.set_result(None)
            except BaseException as error:
                copy._future.set_exception(error)
            del copy

    def _copy_in_chunks(self, copy: _ThreadCopy, source: Tensor, target: Tensor, direction: str) -> None:
        if isinstance(self._pace, EmulatedLink):
            time.sleep(self._pace.uplink.latency_s)
        for begin in range(0, source.numel(), self._chunk_bytes):
            end = min(begin + self._chunk_bytes, source.numel())
            with self._turn(direction, copy):
                if self._pace is not None:
                    self._pace(end - begin, direction)
                self._copy(source[begin:end], target[begin:end])
        if self._state is not None and self._queues[direction].empty():
            self._state.rest(direction)

    @contextlib.contextmanager
    def _turn(self, direction: str, copy: _ThreadCopy) -> Iterator[None]:
        if self._state is None or direction not in self._ways:
            yield
            return
        self._state.take_turn(direction, lambda: copy.is_urgent)
        try:
            yield
        finally:
            self._state.rest(direction)  # whose turn it is has the link to itself
            self._state.end_turn(direction)

    def _ready(self) -> Any:
        """What the copy has to wait for in the computing."""
        return None

    def _wait_until(self, ready: Any) -> None:
        pass

    def _copy(self, source: Tensor, target: Tensor) -> None:
        raise NotImplementedError

    def _mark_copy(self, direction: str) -> Mark:
        return self.mark()

    def mark(self) -> Mark:
        return time.perf_counter()

    def between(self, begin: Mark, end: Mark) -> float | None:
        seconds: float = end - begin
        return seconds

    def rates(self) -> dict[str, float]:
        return self._rates.get()

    def recent(self) -> list[tuple[str, int, Mark, Mark]]:
        return list(self._recent)

    def close(self) -> None:
        self._is_closed = True
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        emulated = self._pace.state if isinstance(self._pace, EmulatedLink) else None
        for state in {id(state): state for state in (self._state, emulated) if state is not None}.values():
            state.close()


class CpuAdapter(_ThreadAdapter):
    """The device is this process's memory: a thread for each direction copies to and from the host tier."""

    device = torch.device("cpu")

    def __init__(
        self,
        pace: Callable[[int, str], None] | None = None,
        state: LinkState | None = None,
        ways_in_turns: Collection[str] = (),
    ) -> None:
        """Start the threads.

        Args:
            pace: Called before a chunk of a copy with its bytes and `out` or `in`; returns when an emulated
                link would have brought them.
            state: Of the link, shared with the others behind it; closed with this.
            ways_in_turns: Directions in which copies take turns with theirs.
        """
        super().__init__(pace, state, ways_in_turns)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def now(self) -> float:
        return time.perf_counter()


def _event(stream: "torch.cuda.Stream") -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class _CudaClock:
    """Moments in what a CUDA device computes."""

    device: torch.device

    def now(self) -> float:
        torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def mark(self) -> Mark:
        return _event(torch.cuda.current_stream(self.device))

    def between(self, begin: Mark, end: Mark) -> float | None:
        if not (begin.query() and end.query()):
            return None
        return float(begin.elapsed_time(end)) / 1e3


class TurnsCudaAdapter(_CudaClock, _ThreadAdapter):
    """A CUDA device behind a link on which it takes turns: a thread issues each chunk when it may."""

    def __init__(self, device: torch.device, state: LinkState, ways_in_turns: Collection[str]) -> None:
        """Make the streams; arguments as for `CpuAdapter`."""
        self.device = device
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}
        super().__init__(None, state, ways_in_turns)

    def _ready(self) -> Any:
        # The stream that computes now: the source is made there, the target's memory was used there before.
        return _event(torch.cuda.current_stream(self.device))

    def _wait_until(self, ready: Any) -> None:
        ready.synchronize()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        stream = self._streams["in" if target.is_cuda else "out"]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def _mark_copy(self, direction: str) -> Mark:
        event = _event(self._streams[direction])
        event.synchronize()
        return event


class _StreamCopy:
    def __init__(self, event: "torch.cuda.Event", device: torch.device) -> None:
        self._event, self._device = event, device

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> tuple[Mark, Mark] | None:
        if self._event.query():
            return None
        # The stream that computes now, asked for each time: it may be another one than at the last copy.
        compute = torch.cuda.current_stream(self._device)
        begin = _event(compute)
        compute.wait_event(self._event)
        return begin, _event(compute)

    def wait_on(self, stream: "torch.cuda.Stream") -> None:
        stream.wait_event(self._event)


class CudaAdapter(_CudaClock):
    """A CUDA device: a stream for each direction, ordered by events. Host memory should be page-locked."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self.device = device
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}
        self._timed: deque[tuple[str, int, Mark, Mark]] = deque(maxlen=_NUM_RECENT)
        self._recent: deque[tuple[str, int, Mark, Mark]] = deque(maxlen=_NUM_RECENT)
        self._rates = _Rates()

    def copy_out(self, source: Tensor, target: Tensor) -> Copy:
        return self._copy("out", source, target, None)

    def copy_in(self, source: Tensor, target: Tensor, after: Copy | None) -> Copy:
        return self._copy("in", source, target, after)

    def _copy(self, direction: str, source: Tensor, target: Tensor, after: Copy | None) -> Copy:
        stream = self._streams[direction]
        # Taken before the other stream becomes current. The source is made on it; the target was allocated
        # on it, in memory that it may still use.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if isinstance(after, _StreamCopy):
            after.wait_on(stream)
        with torch.cuda.stream(stream):
            begin = _event(stream)
            target.copy_(source, non_blocking=True)
            end = _event(stream)
        self._timed.append((direction, source.numel(), begin, end))
        return _StreamCopy(end, self.device)

    def rates(self) -> dict[str, float]:
        while self._timed:
            direction, size_bytes, begin, end = self._timed[0]
            seconds = self.between(begin, end)
            if seconds is None:
                break
            self._rates.add(direction, size_bytes, seconds)
            self._recent.append(self._timed.popleft())
        return self._rates.get()

    def recent(self) -> list[tuple[str, int, Mark, Mark]]:
        self.rates()
        return list(self._recent)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        self._timed.clear()
