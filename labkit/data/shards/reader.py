"""Reads extents ahead into a buffer of fixed size, each with one request, and gathers rows from it.

The bytes of an extent are copied once from the file into memory of this process, checked there, and rows are
gathered from that memory. A mapping of the file would save the copy, but a file that is cut while it is
mapped kills the process (SIGBUS), and bytes that change after they were checked would be used unseen.
"""

import contextlib
import math
import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from labkit.data.sampler import Indices
from labkit.data.shards.index import Column, ShardError, ShardIndex
from labkit.errors import ConfigError

Values = npt.NDArray[np.generic] | list[bytes]
_ALIGNED = 64


@dataclass
class ReadCounts:
    """What a reader has done.

    Attributes:
        bytes_read: From files.
        requests: Extents that were read.
        repeats: Of them, read before: the buffer was too small to keep them.
        late: Extents that a batch had to wait for.
        bad_rows: Left out because they can't be read.
    """

    bytes_read: int = 0
    requests: int = 0
    repeats: int = 0
    late: int = 0
    bad_rows: int = 0


class ExtentReader:
    """Extents of a folder in memory, as many as fit; the least recently used one makes room."""

    def __init__(
        self,
        folder: Path,
        index: ShardIndex,
        *,
        buffer_bytes: int,
        num_threads: int = 2,
        is_bad_skipped: bool = False,
    ) -> None:
        """Reserve the buffer and start the threads; `close` ends them.

        Args:
            folder: Of the shards.
            index: Theirs.
            buffer_bytes: All that is read and not used yet, and what is kept: so many extents of the mean
                size, and two of the largest at least.
            num_threads: Requests under way at once.
            is_bad_skipped: Leave rows out that can't be read, and count them, instead of raising.

        Raises:
            ConfigError: the buffer is too small for two extents.
        """
        self._folder, self._index, self._is_bad_skipped = folder, index, is_bad_skipped
        largest = int(index.extent_bytes.max())
        self._slot_bytes = -(-largest // _ALIGNED) * _ALIGNED
        # A slot takes the largest extent, but only what is used of it takes up memory: one large row among
        # small ones must not cost the buffer its length.
        mean = -(-int(index.extent_bytes.sum()) // len(index.extents) // _ALIGNED) * _ALIGNED
        num_slots = min(max(2, buffer_bytes // max(mean, _ALIGNED)), len(index.extents))
        if buffer_bytes < min(2, len(index.extents)) * largest:
            raise ConfigError(
                f"data.buffer must hold two extents of {largest} bytes, got {buffer_bytes}. Raise it, or "
                "write the shards with smaller extents."
            )
        whole = np.empty(num_slots * self._slot_bytes + _ALIGNED, dtype=np.uint8)
        start = -whole.ctypes.data % _ALIGNED
        self._arena = whole[start : start + num_slots * self._slot_bytes]
        self._free = list(range(num_slots))[::-1]
        self._slots = np.full(len(index.extents), -1, dtype=np.int64)
        self._places = {column.name: np.zeros((len(index.extents), 2), np.int64) for column in index.columns}
        self._schema = index.schema
        self._used: OrderedDict[int, None] = OrderedDict()  # extents in memory, the latest last
        self._held: dict[int, int] = {}  # in use by a batch right now
        self._loading: set[int] = set()
        self._urgent: deque[int] = deque()
        self._ahead: deque[int] = deque()
        self._soon: set[int] = set()
        self._bad: dict[int, ShardError] = {}
        self._is_checked = np.zeros(len(index.extents), dtype=bool)
        self._stamps: dict[int, tuple[int, int]] = {}
        self._lock = threading.Condition()
        self._is_closed = False
        self.counts = ReadCounts()
        self._threads = [
            threading.Thread(target=self._work, name=f"labkit-reader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_slots(self) -> int:
        """Extents that fit."""
        return len(self._arena) // self._slot_bytes

    def close(self) -> None:
        """End the threads; a read that is under way is waited for."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "ExtentReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- reading ahead -----------------------------------------------------------------------------------

    def ahead(self, extents: Iterable[int]) -> None:
        """What will be needed next, in order; replaces what was said before. Returns at once."""
        wanted = list(dict.fromkeys(int(extent) for extent in extents))
        with self._lock:
            self._soon = set(wanted)
            self._ahead = deque(extent for extent in wanted if self._is_missing(extent))
            self._lock.notify_all()

    def _is_missing(self, extent: int) -> bool:
        return self._slots[extent] < 0 and extent not in self._loading and extent not in self._bad

    def _work(self) -> None:
        while True:
            with self._lock:
                job = self._next_job()
                while job is None and not self._is_closed:
                    self._lock.wait()
                    job = self._next_job()
                if self._is_closed or job is None:
                    return
            extent, slot = job
            error: ShardError | None = None
            try:
                self._load(extent, slot)
            except ShardError as fault:
                error = fault
            except Exception as fault:
                error = ShardError(f"{self._index.describe(extent)} can't be read: {fault!r}.")
            with self._lock:
                self._loading.discard(extent)
                if error is None:
                    self._slots[extent] = slot
                    self._used[extent] = None
                else:
                    self._bad[extent] = error
                    self._free.append(slot)
                self._lock.notify_all()

    def _next_job(self) -> tuple[int, int] | None:
        """What to read and where to, what a batch waits for first; called with the lock."""
        for queue, is_urgent in ((self._urgent, True), (self._ahead, False)):
            while queue and not self._is_missing(queue[0]):
                queue.popleft()
            if not queue:
                continue
            slot = self._take_slot(is_urgent)
            if slot is not None:
                extent = queue.popleft()
                self._loading.add(extent)
                return extent, slot
        return None

    def _take_slot(self, is_urgent: bool) -> int | None:
        if self._free:
            return self._free.pop()
        spare = next((e for e in self._used if e not in self._held and e not in self._soon), None)
        if spare is None and is_urgent:  # of what is needed soon, what was used last is needed last
            spare = next((e for e in reversed(self._used) if e not in self._held), None)
        if spare is None:
            return None
        del self._used[spare]
        slot, self._slots[spare] = int(self._slots[spare]), -1
        return slot

    def _load(self, extent: int, slot: int) -> None:
        number, place = self._index.extents[extent]
        base = slot * self._slot_bytes
        into = self._arena[base : base + place.size_bytes].data
        try:
            self._read(number, extent, place.offset, into)
            if not self._is_checked[extent] and zlib.crc32(into) != place.checksum:
                raise ShardError(
                    f"{self._index.describe(extent)} must have the checksum of the index "
                    f"({place.checksum:08x}), got {zlib.crc32(into):08x}: the file was damaged or changed. "
                    "Copy it again, write the shards again, or leave such rows out with data.on_bad=skip."
                )
            with self._lock:
                self.counts.requests += 1
                self.counts.bytes_read += place.size_bytes
                self.counts.repeats += int(self._is_checked[extent])
            if not self._is_checked[extent]:
                self._find_columns(extent, into)
            self._is_checked[extent] = True
        finally:
            into.release()

    def _read(self, number: int, extent: int, offset: int, into: memoryview) -> None:
        path = self._folder / self._index.shards[number].file
        done = 0
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                before = os.fstat(fd)
                while done < len(into):
                    count = os.preadv(fd, [into[done:]], offset + done)
                    if count == 0:
                        break
                    done += count
                after = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise ShardError(
                f"{self._index.describe(extent)} must be readable, got {error.strerror or error}."
            ) from error
        stamp = (before.st_mtime_ns, before.st_size)
        if done < len(into) or stamp != self._stamps.setdefault(number, stamp):
            what = "it was cut" if done < len(into) else "it was written to"
            raise ShardError(
                f"{self._index.describe(extent)} must not change while it is read: {what}. Write shards to a "
                "folder of their own, then start again."
            )
        if (after.st_mtime_ns, after.st_size) != stamp:
            raise ShardError(f"{self._index.describe(extent)} must not change while it is read.")

    def _find_columns(self, extent: int, data: memoryview) -> None:
        """Where the values of each column begin in the extent."""
        whole = pa.py_buffer(data)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(whole), self._schema)
        for column, values in zip(self._index.columns, batch.columns, strict=True):
            places = [buffer.address - whole.address for buffer in values.buffers() if buffer is not None]
            self._places[column.name][extent, : len(places)] = places

    # --- rows ----------------------------------------------------------------------------------------------

    def take(
        self, rows: Indices, columns: Sequence[str]
    ) -> tuple[dict[str, Values], npt.NDArray[np.bool_] | None]:
        """Values of some rows, in their order, in memory of their own.

        Args:
            rows: Counted through all shards; shape (n,).
            columns: Which values.

        Returns:
            By column an array of shape (n, ...), or a list of n encoded images; and which of the rows are
            there, when some had to be left out.

        Raises:
            ShardError: a row can't be read, and bad ones are not skipped.
        """
        rows = np.asarray(rows, dtype=np.int64)
        extents = self._index.extents_of(rows)
        needed = list(dict.fromkeys(extents.tolist()))
        outs: dict[str, Values] = {}
        if not needed:
            outs = {name: self._empty(self._index.column(name), 0) for name in columns}
        is_good = np.ones(len(rows), dtype=bool)
        at_once = max(1, self.num_slots - len(self._threads))
        for start in range(0, len(needed), at_once):
            part = needed[start : start + at_once]
            good = self._hold(part)
            try:
                if good == needed:
                    outs = {name: self._gather(name, rows, extents) for name in columns}
                    continue
                inside = np.flatnonzero(np.isin(extents, good))
                for name in columns:
                    out = outs.setdefault(name, self._empty(self._index.column(name), len(rows)))
                    _put(out, inside, self._gather(name, rows[inside], extents[inside]))
            finally:
                self._release(good)
            if len(good) < len(part):
                is_good &= ~np.isin(extents, list(set(part) - set(good)))
        if is_good.all():
            return outs, None
        with self._lock:
            self.counts.bad_rows += int((~is_good).sum())
        kept = {
            name: [v for v, ok in zip(out, is_good, strict=True) if ok]
            if isinstance(out, list)
            else out[is_good]
            for name, out in outs.items()
        }
        return kept, is_good

    def _hold(self, extents: Sequence[int]) -> list[int]:
        """Wait until extents are in memory, and keep them there; those that can be read."""
        with self._lock:
            for extent in extents:
                self._held[extent] = self._held.get(extent, 0) + 1
            missing = [extent for extent in extents if self._slots[extent] < 0]
            self.counts.late += sum(extent not in self._bad for extent in missing)
            self._urgent.extend(extent for extent in missing if self._is_missing(extent))
            self._lock.notify_all()
            while any(self._slots[e] < 0 and e not in self._bad for e in extents):
                if self._is_closed:
                    raise ShardError("the reader is closed")
                self._lock.wait(1.0)
                self._urgent.extend(e for e in extents if self._is_missing(e) and e not in self._urgent)
                self._lock.notify_all()
            bad = [extent for extent in extents if extent in self._bad]
            good = [extent for extent in extents if extent not in self._bad]
            for extent in bad:
                self._let_go(extent)
            if bad and not self._is_bad_skipped:
                for extent in good:
                    self._let_go(extent)
                raise self._bad[bad[0]]
            for extent in good:
                self._used.move_to_end(extent)
            return good

    def _release(self, extents: Sequence[int]) -> None:
        with self._lock:
            for extent in extents:
                self._let_go(extent)
            self._lock.notify_all()

    def _let_go(self, extent: int) -> None:
        self._held[extent] -= 1
        if not self._held[extent]:
            del self._held[extent]

    @staticmethod
    def _empty(column: Column, count: int) -> Values:
        if column.kind == "image":
            return [b""] * count
        return np.empty((count, *column.shape), dtype=column.dtype)

    def _gather(self, name: str, rows: Indices, extents: Indices) -> Values:
        """Values of rows whose extents are in memory."""
        column = self._index.column(name)
        places = self._places[name][extents] + self._slots[extents, None] * self._slot_bytes
        local = rows - self._index.extent_starts[extents]
        if column.kind == "image":
            found = zip(places.tolist(), local.tolist(), strict=True)
            return [self._bytes(offsets, values, row) for (offsets, values), row in found]
        row_bytes = column.row_bytes or 0
        if row_bytes == 0:
            return np.empty((len(rows), *column.shape), dtype=column.dtype)
        # One gather of whole rows: the arena as rows that begin at every multiple of `step`.
        step = math.gcd(8, row_bytes)
        kind = np.dtype(f"V{row_bytes}")
        table = np.ndarray(((len(self._arena) - row_bytes) // step + 1,), kind, self._arena.data, 0, (step,))
        chosen: npt.NDArray[Any] = table[(places[:, 0] + local * row_bytes) // step]
        values: npt.NDArray[Any] = chosen.view(column.dtype).reshape(len(rows), *column.shape)
        return values

    def _bytes(self, offsets: int, values: int, row: int) -> bytes:
        first, last = self._arena[offsets + 8 * row : offsets + 8 * row + 16].view(np.int64).tolist()
        return self._arena[values + first : values + last].tobytes()


def _put(out: Values, inside: Indices, values: Values) -> None:
    if isinstance(out, list):
        for position, value in zip(inside.tolist(), values, strict=True):
            out[position] = bytes(value)
    else:
        out[inside] = values


def drop_cache(paths: Iterable[Path]) -> None:
    """Have the system forget what it keeps of some files, so that the disk is read next (Linux)."""
    for path in paths:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                if hasattr(os, "posix_fadvise"):  # not on macOS
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
