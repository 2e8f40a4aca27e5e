"""Devices behind one link take turns: a token for each direction, in memory that their processes share.

Only worth it where less comes through when several copy at once than from one alone; see `Uplink.falls`.
Copies hold the token for a chunk at a time, so those that computing waits for overtake the others, though
only so often in a row. A process that dies, however it dies, holds up nobody: the kernel drops its locks, and
by them the others see that it is gone.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from labkit.memory.uplink import Uplink

_MOST_SLOTS = 64
_MOST_OVERTAKEN = 4  # turns in a row that go to urgent copies while others wait
_NAP_S = 50e-6
_LOOK_EVERY_S = 0.05
_STALE_S = 1.0
_SLACK_S = 0.002  # sleeping ends late by less: what it is late, the next chunk has less to wait
_WAYS = {"out": 0, "in": 1}
_ALIVE_AT = 16  # offset of the locks that say who is alive; those before it guard the table
_TABLE = np.dtype([("free_at", "f8"), ("holder", "i8"), ("next_ticket", "i8"), ("overtaken", "i8")])
_SLOT = np.dtype([("active_at", "f8"), ("ticket", "i8"), ("is_urgent", "i8")])
_BYTES = 2 * (_TABLE.itemsize + _MOST_SLOTS * _SLOT.itemsize)


class LinkState:
    """What the processes behind one link know of each other; one object in each of them."""

    def __init__(self, fd: int, slot: int) -> None:
        """Take a place.

        Args:
            fd: A file of this link alone, from `make_state` or `open_state`; it stays open.
            slot: Which device of the link this process drives; no other one has it.
        """
        self.slot, self._fd = slot, fd
        self._map = mmap.mmap(fd, _BYTES)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self._tables = whole[: 2 * _TABLE.itemsize].view(_TABLE)
        self._slots = whole[2 * _TABLE.itemsize :].view(_SLOT).reshape(2, _MOST_SLOTS)
        # A process that waited for one lock while it holds another could look like a deadlock to the kernel,
        # which knows processes and no threads: so it never does.
        self._own = threading.Lock()
        with self._guard(0):
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, _ALIVE_AT + slot)
            if not any(self._is_alive(other) for other in range(_MOST_SLOTS) if other != slot):
                whole[:] = 0  # of a run before this one
            for way in (0, 1):
                self._slots[way, slot] = (0.0, 0, 0)
                if self._tables[way]["holder"] == slot + 1:  # this worker, before it was started again
                    self._tables[way]["holder"] = 0

    @contextlib.contextmanager
    def _guard(self, way: int) -> Iterator[None]:
        """Nobody else changes the table of a direction meanwhile."""
        with self._own:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, way)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, way)

    def _is_alive(self, slot: int) -> bool:
        if slot == self.slot:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _ALIVE_AT + slot)
        except OSError:
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _ALIVE_AT + slot)
        return False

    # --- turns -------------------------------------------------------------------------------------------

    def take_turn(self, direction: str, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Wait for this process's turn to copy a chunk.

        Args:
            direction: `out` or `in`.
            is_urgent: Whether computing waits for it by now: it overtakes those for which nobody waits yet.
        """
        way = _WAYS[direction]
        with self._guard(way):
            table = self._tables[way]
            table["next_ticket"] += 1
            self._slots[way, self.slot]["ticket"] = table["next_ticket"]
        looked_at = time.monotonic()
        while True:
            self._slots[way, self.slot]["is_urgent"] = is_urgent()
            now = time.monotonic()
            is_looking = now - looked_at > _LOOK_EVERY_S
            with self._guard(way):
                if self._is_next(way, is_looking):
                    self._tables[way]["holder"] = self.slot + 1
                    self._slots[way, self.slot]["ticket"] = 0
                    return
            if is_looking:
                looked_at = now
            time.sleep(_NAP_S)

    def end_turn(self, direction: str) -> None:
        """Let the next one copy."""
        way = _WAYS[direction]
        with self._guard(way):
            self._tables[way]["holder"] = 0

    def _is_next(self, way: int, is_looking: bool) -> bool:
        table, slots = self._tables[way], self._slots[way]
        holder = int(table["holder"])
        if holder and is_looking and not self._is_alive(holder - 1):
            table["holder"] = holder = 0
        if holder:
            return False
        waiting = np.flatnonzero(slots["ticket"])
        if is_looking:
            dead = [slot for slot in waiting if not self._is_alive(int(slot))]
            slots["ticket"][dead] = 0
            waiting = np.flatnonzero(slots["ticket"])
        urgent = [slot for slot in waiting if slots["is_urgent"][slot]]
        first = min(waiting, key=lambda slot: slots["ticket"][slot])
        chosen = first
        if urgent and table["overtaken"] < _MOST_OVERTAKEN:
            chosen = min(urgent, key=lambda slot: slots["ticket"][slot])
        if chosen != self.slot:
            return False
        table["overtaken"] = table["overtaken"] + 1 if chosen != first else 0
        return True

    # --- an emulated link --------------------------------------------------------------------------------

    def pass_through(self, size_bytes: int, direction: str, uplink: Uplink) -> None:
        """Wait as long as bytes take through a link that its devices share (a token bucket for all)."""
        way = _WAYS[direction]
        with self._guard(way):
            now = time.monotonic()
            self._slots[way, self.slot]["active_at"] = now
            counts = [int((self._slots[w]["active_at"] > now - _STALE_S).sum()) for w in (way, 1 - way)]
            rate = uplink.rate(direction, max(1, counts[0]), counts[1])
            free_at = float(self._tables[way]["free_at"])
            begin = free_at if 0 <= now - free_at < _SLACK_S or free_at > now else now
            end = begin + size_bytes / rate
            self._tables[way]["free_at"] = end
        time.sleep(max(0.0, end - time.monotonic()))

    def rest(self, direction: str) -> None:
        """This process copies nothing in a direction for now."""
        self._slots[_WAYS[direction], self.slot]["active_at"] = 0.0

    def close(self) -> None:
        """Leave."""
        for direction in _WAYS:
            self.rest(direction)
        del self._tables, self._slots
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def make_state() -> int:
    """A file without a name, for processes that are forked from this one or open it through /proc."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("labkit-link")
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, _BYTES)
    return fd


def open_state(path: Path) -> int:
    """A named file, made by whoever comes first; what is in it is forgotten when nobody is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, _BYTES)
    return fd


class EmulatedLink:
    """An uplink with the rates that it is said to have."""

    def __init__(self, uplink: Uplink, state: LinkState) -> None:
        """Join the others behind it."""
        self.uplink, self.state = uplink, state

    def __call__(self, size_bytes: int, direction: str) -> None:
        """Wait as long as a chunk takes."""
        self.state.pass_through(size_bytes, direction, self.uplink)
