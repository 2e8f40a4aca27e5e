"""Copies between a device and the host beside the computing, each direction in its own order."""

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Whether all bytes have arrived, for the host to know."""
        ...

    def wait(self) -> None:
        """Have the computing wait for it; returns when what is computed next sees all bytes."""
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

    def close(self) -> None:
        """Wait for all copies and end."""
        ...


class _ThreadCopy:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class CpuAdapter:
    """The device is this process's memory: a thread for each direction copies to and from the host tier."""

    device = torch.device("cpu")

    def __init__(self, pace: Callable[[int, str], None] = lambda size_bytes, direction: None) -> None:
        """Start the threads.

        Args:
            pace: Called before a copy with its bytes and `out` or `in`; returns when an emulated link would
                have brought them.
        """
        self._pace = pace
        self._queues: dict[str, queue.SimpleQueue[Any]] = {}
        self._threads = []
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
        future: Future[None] = Future()
        self._queues[direction].put((future, source, target, after))
        return _ThreadCopy(future)

    def _work(self, direction: str) -> None:
        while True:
            job = self._queues[direction].get()
            if job is None:
                return
            future, source, target, after = job
            try:
                if after is not None:
                    after.wait()
                self._pace(source.numel(), direction)
                self._copy(source, target)
                del job, source, target, after  # whoever hears that it is done may count on this being gone
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del future

    @staticmethod
    def _copy(source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def now(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()


class _StreamCopy:
    def __init__(self, event: "torch.cuda.Event", device: torch.device) -> None:
        self._event, self._device = event, device

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        # The stream that computes now, asked for each time: it may be another one than at the last copy.
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait_on(self, stream: "torch.cuda.Stream") -> None:
        stream.wait_event(self._event)


class CudaAdapter:
    """A CUDA device: a stream for each direction, ordered by events. Host memory should be page-locked."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_out(self, source: Tensor, target: Tensor) -> Copy:
        compute = torch.cuda.current_stream(self.device)  # before the other one becomes current
        self._out.wait_stream(compute)
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._out)
        return _StreamCopy(event, self.device)

    def copy_in(self, source: Tensor, target: Tensor, after: Copy | None) -> Copy:
        compute = torch.cuda.current_stream(self.device)
        self._in.wait_stream(compute)  # the target was allocated there, in memory that it may still use
        if isinstance(after, _StreamCopy):
            after.wait_on(self._in)
        with torch.cuda.stream(self._in):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._in)
        return _StreamCopy(event, self.device)

    def now(self) -> float:
        torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


class Pace:
    """An emulated link: copies take as long as their bytes would on it, one after the other.

    Processes that are forked after it was made share it.
    """

    def __init__(self, out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        self._rates = {"out": out_bytes_per_s, "in": in_bytes_per_s}
        self._free_at = {direction: multiprocessing.Value("d", 0.0) for direction in self._rates}

    def __call__(self, size_bytes: int, direction: str) -> None:
        free_at = self._free_at[direction]
        with free_at.get_lock():
            now = time.monotonic()
            end = max(now, free_at.value) + size_bytes / self._rates[direction]
            free_at.value = end
        time.sleep(max(0.0, end - now))
