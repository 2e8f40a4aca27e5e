"""Memory that all workers of a node share: one region, mapped by each, without a name.

The region is an anonymous memory file that local rank 0 makes and the others open through /proc while it
lives. It never has a name, so there is nothing to unlink and nothing that a killed worker could leave
behind, and it is not bounded by the size of /dev/shm (64 MB in many containers). The kernel frees it with
the last process that maps it.
"""

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from labkit.comm.communicator import Communicator, PeerError
from labkit.errors import ConfigError

_PAGE_BYTES = 4096
_LINE_INT64S = 8  # counters of different workers lie on different cache lines
_SPINS = 100
_NAP_S = 50e-6
_LOOK_EVERY_S = 0.2


class Arena:
    """One shared region, cut into tensors in order of the calls to `tensor`, the same on every worker."""

    def __init__(self, node: Communicator, size_bytes: int) -> None:
        """Make the region on local rank 0 and map it on all workers of the node.

        Args:
            node: The workers of this node.
            size_bytes: Sum of the tensors to come; `padded_bytes` gives the size of one.

        Raises:
            ConfigError: the machine has not that much memory.
        """
        self._node = node
        self._used_bytes = 0
        self.size_bytes = -(-max(size_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
        fd = _make_file(self.size_bytes) if node.rank == 0 else -1
        where = torch.tensor([os.getpid(), fd], dtype=torch.int64)
        node.broadcast_(where)
        owner, owner_fd = where.tolist()
        if owner_fd < 0:
            raise ConfigError(
                f"model must fit in the node's memory, got an arena of {self.size_bytes / 2**20:.0f} MiB "
                f"with {psutil.virtual_memory().available / 2**20:.0f} MiB free. Use a smaller model or "
                "fewer workers per node."
            )
        if node.rank != 0:
            fd = os.open(f"/proc/{owner}/fd/{owner_fd}", os.O_RDWR)
        self._map = mmap.mmap(fd, self.size_bytes)
        node.barrier()  # the owner may close its descriptor only when all have opened theirs
        os.close(fd)

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next part of the region as a tensor; shape (numel,), zeros at first."""
        offset, size_bytes = self._used_bytes, padded_bytes(numel, dtype)
        if offset + size_bytes > self.size_bytes:
            raise ValueError(f"arena of {self.size_bytes} bytes is used up")
        self._used_bytes += size_bytes
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


def padded_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in an arena: whole cache lines."""
    return -(-numel * dtype.itemsize // 64) * 64


def _make_file(size_bytes: int) -> int:
    """An anonymous file of pages that are really there, or -1."""
    if size_bytes > psutil.virtual_memory().available:
        return -1
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("labkit")
    else:  # no such call (macOS): an unlinked file serves, though it may be written to disk
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        os.ftruncate(fd, size_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)  # now, not as a bus error in step 1
    except OSError:
        os.close(fd)
        return -1
    return fd


def give_back_memory() -> None:
    """Return freed memory to the system where the C library would keep it for later (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Counters:
    """Numbers that only grow, one per worker of a node, by which they wait for each other."""

    def __init__(self, arena: Arena, node: Communicator, names: list[str], timeout_s: float) -> None:
        """Take the counters' place in the arena. All workers pass the same arguments.

        Args:
            arena: Where they lie; see `bytes_for`.
            node: The workers of this node.
            names: How each worker is called in an error, by local rank.
            timeout_s: Longest wait.
        """
        self._values: npt.NDArray[np.int64] = (
            arena.tensor(len(names) * _LINE_INT64S, torch.int64).numpy().reshape(len(names), _LINE_INT64S)
        )
        self._own = node.rank
        self._names = names
        self._timeout_s = timeout_s
        pids = node.gather(torch.tensor([os.getpid()], dtype=torch.int64))
        self._pids = [int(pid) for pid in pids]

    @staticmethod
    def bytes_for(num_workers: int) -> int:
        """Place that the counters of a node take."""
        return padded_bytes(num_workers * _LINE_INT64S, torch.int64)

    def set(self, value: int) -> None:
        """Raise this worker's number."""
        self._values[self._own, 0] = value

    def least(self) -> int:
        """The smallest number of all workers."""
        return int(self._values[:, 0].min())

    def of(self, local_rank: int) -> int:
        """One worker's number."""
        return int(self._values[local_rank, 0])

    def wait(self, value: int, work: Callable[[], object] | None = None) -> None:
        """Wait until every worker's number is at least `value`.

        Args:
            value: What to wait for.
            work: Called while waiting.

        Raises:
            PeerError: a worker is gone, or does not get there in time; the message names it.
        """
        for _ in range(_SPINS):
            if self.least() >= value:
                return
            if work is not None:
                work()
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
        self._wait_slowly(value, work)

    def _wait_slowly(self, value: int, work: Callable[[], object] | None) -> None:
        began_at = looked_at = time.monotonic()
        while self.least() < value:
            if work is not None:
                work()
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - looked_at > _LOOK_EVERY_S:
                looked_at = now
                self._look_after_peers(value, now - began_at)

    def _look_after_peers(self, value: int, waited_s: float) -> None:
        for local_rank, pid in enumerate(self._pids):
            if self.of(local_rank) >= value:
                continue
            state = _state_of(pid)
            if state is None or state == psutil.STATUS_ZOMBIE:
                raise PeerError(f"{self._names[local_rank]} is gone")
            if waited_s > self._timeout_s:
                raise PeerError(
                    f"{self._names[local_rank]} is {waited_s:.0f} s late (its process is {state})"
                )


def _state_of(pid: int) -> str | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return None
