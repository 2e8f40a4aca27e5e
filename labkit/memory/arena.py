"""Host memory of fixed size, whose pages are there before they are used; first fit, neighbours are joined."""

import errno
import mmap
import os
import tempfile
import threading
from pathlib import Path

import psutil
import torch
from torch import Tensor

from labkit.errors import ConfigError

_ALIGNED = 4096


class NoRoom(ConfigError):
    """The tier is there, and has too little room."""


class HostArena:
    """One region; what does not fit is refused, never anything worse."""

    def __init__(self, size_bytes: int, tier: str = "ram", num_sharing: int = 1) -> None:
        """Reserve the region and touch its pages.

        Args:
            size_bytes: Of it; 0: everything is refused.
            tier: `ram`, `pinned` (page-locked for a CUDA device) or `mmap:FOLDER` (a file that has no name).
            num_sharing: Processes of this machine that reserve as much.

        Raises:
            NoRoom: there is too little.
            ConfigError: the folder can't be written.
        """
        self.size_bytes = size_bytes // _ALIGNED * _ALIGNED
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)] if self.size_bytes else []
        self.used_bytes = 0
        self._is_registered = False
        self._num_sharing = num_sharing
        self._region = self._make(tier) if self.size_bytes else torch.empty(0, dtype=torch.uint8)

    def _make(self, tier: str) -> Tensor:
        if tier.startswith("mmap:"):
            fd = _file(Path(tier.removeprefix("mmap:")), self.size_bytes)
            # Its pages are there before they are used, where that does not push out others.
            is_small = self.size_bytes * self._num_sharing < psutil.virtual_memory().available // 2
            populate = getattr(mmap, "MAP_POPULATE", 0) if is_small else 0
            self._map = mmap.mmap(fd, self.size_bytes, flags=mmap.MAP_SHARED | populate)
            os.close(fd)
            return torch.frombuffer(self._map, dtype=torch.uint8)
        free_bytes = psutil.virtual_memory().available
        if self.size_bytes * self._num_sharing > free_bytes:
            raise NoRoom(
                f"memory.host_budget must be at most {free_bytes // self._num_sharing} bytes, which are free "
                f"for each of {self._num_sharing}, got {self.size_bytes}. Lower it, or name a folder: "
                "memory.tier=mmap:FOLDER."
            )
        # Touched: the first touch of a page costs more than a copy.
        region = torch.zeros(self.size_bytes, dtype=torch.uint8)
        if tier == "pinned":
            # One region, locked once: locking tensor by tensor takes milliseconds each and rounds sizes up.
            code = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), self.size_bytes, 0)
            if int(code) != 0:
                raise NoRoom(
                    f"memory.host_budget must be memory that can be page-locked, got {self.size_bytes} "
                    f"bytes: CUDA error {int(code)}. Lower it, or raise the limit (ulimit -l)."
                )
            self._is_registered = True
        return region

    def take(self, size_bytes: int) -> Tensor | None:
        """A part of the region; shape (size_bytes,), uint8; None when there is none of that size."""
        wanted = -(-max(size_bytes, 1) // _ALIGNED) * _ALIGNED
        with self._lock:
            for place, (start, length) in enumerate(self._free):
                if length < wanted:
                    continue
                if length == wanted:
                    del self._free[place]
                else:
                    self._free[place] = (start + wanted, length - wanted)
                self.used_bytes += wanted
                return self._region[start : start + size_bytes]
        return None

    def give_back(self, part: Tensor) -> None:
        """Free a part that `take` gave."""
        start = int(part.storage_offset())
        length = -(-max(part.numel(), 1) // _ALIGNED) * _ALIGNED
        with self._lock:
            self._free.append((start, length))
            self._free.sort()
            self.used_bytes -= length
            joined: list[tuple[int, int]] = []
            for begin, size in self._free:
                if joined and joined[-1][0] + joined[-1][1] == begin:
                    joined[-1] = (joined[-1][0], joined[-1][1] + size)
                else:
                    joined.append((begin, size))
            self._free = joined

    def close(self) -> None:
        """Let go of the region; nothing of it may be in use."""
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._region.data_ptr())
            self._is_registered = False
        self._region = torch.empty(0, dtype=torch.uint8)
        self._map = None
        self._free = []


def _file(folder: Path, size_bytes: int) -> int:
    """A file without a name, all of whose blocks are there."""
    fd = -1
    try:
        fd, path = tempfile.mkstemp(dir=folder, prefix="labkit-")
        os.unlink(path)
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        kind = NoRoom if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ConfigError
        raise kind(
            f"memory.tier must be a folder with {size_bytes} bytes of room, got {folder}: "
            f"{error.strerror or error}. Name another one, or lower memory.host_budget."
        ) from None
    return fd
