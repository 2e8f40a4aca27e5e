"""Batches that are ready when the computing wants them: read, decoded and moved beside it."""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import torch

from labkit.data.sampler import Indices
from labkit.engine.device import to_device
from labkit.tasks import Batch, StreamedSamples

Piece = tuple[int, Indices]  # epoch, rows
_NUM_READY = 2  # one that is computed on, one that comes next
_PLANNED_AT_ONCE = 32  # pieces: the first one must not wait for a long look ahead
_MOST_PLANNED = 512


class Feed:
    """Gives out the pieces of a sequence in turn; a thread prepares the next ones.

    It also tells the samples what will be needed later than that, as far as their memory reaches, so that
    reading goes on in large requests ahead of gathering.
    """

    def __init__(
        self,
        samples: StreamedSamples,
        pieces: Iterator[Piece],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        """Begin.

        Args:
            samples: What the pieces are of.
            pieces: In the order in which they will be taken; used by the thread alone.
            device: Where batches are wanted.
            dtype: Of inputs, but for whole numbers; None: as they are stored.
        """
        self._samples, self._pieces, self._device, self._dtype = samples, pieces, device, dtype
        self._ready: queue.Queue[tuple[Indices, Batch]] = queue.Queue(_NUM_READY - 1)
        self._planned: deque[tuple[Piece, list[int]]] = deque()
        self._wanted: Counter[int] = Counter()
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._is_begun = False  # the first piece is waited for: it comes alone
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._work, name="labkit-feed", daemon=True)
        self._thread.start()

    def take(self, rows: Indices) -> tuple[Batch, float] | None:
        """The next piece, on the device.

        Args:
            rows: What it should be.

        Returns:
            The batch and the seconds of waiting for it; None when another piece is next, since the order
            of what was asked for has changed.

        Raises:
            ShardError: a row can't be read.
        """
        began_at = time.perf_counter()
        while True:
            try:
                found, batch = self._ready.get(timeout=0.2)
                break
            except queue.Empty:
                if self._thread.is_alive() or not self._ready.empty():
                    continue
                if self._error is not None:
                    raise self._error from None
                return None
        if not np.array_equal(found, rows):
            return None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return batch, time.perf_counter() - began_at

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # it may wait for room
            except queue.Empty:
                self._thread.join(0.01)

    def _work(self) -> None:
        try:
            while not self._is_over.is_set():
                self._plan()
                if not self._planned:
                    return
                pieces = self._next_together()
                for (_, rows), batch in zip(pieces, self._prepare(pieces), strict=True):
                    self._hand_over(rows, batch)
        except BaseException as error:
            self._error = error

    def _next_together(self) -> list[Piece]:
        """The next piece, and more of its epoch that are best gathered at the same time."""
        taken: list[Piece] = []
        num_rows = 0
        while self._planned and (not taken or self._is_begun):
            (epoch, rows), extents = self._planned[0]
            if taken and (epoch != taken[0][0] or num_rows + len(rows) > self._samples.num_together):
                break
            self._planned.popleft()
            self._wanted.subtract(extents)
            taken.append((epoch, rows))
            num_rows += len(rows)
        self._wanted += Counter()  # without what nobody wants any more
        self._is_begun = True
        return taken

    def _hand_over(self, rows: Indices, batch: Batch) -> None:
        while not self._is_over.is_set():
            try:
                self._ready.put((rows, batch), timeout=0.1)
                return
            except queue.Full:
                continue

    def _plan(self) -> None:
        """Look as far ahead as what is read fits into memory, a bit further each time; one piece at least."""
        is_new = False
        for _ in range(_PLANNED_AT_ONCE):
            is_far = len(self._wanted) >= self._samples.num_ahead or len(self._planned) >= _MOST_PLANNED
            if self._planned and is_far:
                break
            piece = next(self._pieces, None)
            if piece is None:
                break
            extents = self._samples.extents_of(piece[1])
            self._planned.append((piece, extents))
            self._wanted.update(extents)
            is_new = True
        if is_new:
            self._samples.ahead(list(self._wanted))  # in the order in which they were first wanted

    def _prepare(self, pieces: list[Piece]) -> list[Batch]:
        """Batches on the device; several pieces are gathered at once and cut without a copy."""
        epoch = pieces[0][0]
        inputs, targets = self._samples.batch_at(epoch, np.concatenate([rows for _, rows in pieces]))
        counts = [len(rows) for _, rows in pieces]
        if len(pieces) == 1:
            return [self._move((inputs, targets))]
        batches = zip(inputs.split(counts), targets.split(counts), strict=True)
        return [self._move(batch) for batch in batches]

    def _move(self, batch: Batch) -> Batch:
        if self._stream is None:
            return to_device(batch, self._device, self._dtype)
        inputs, targets = (tensor.pin_memory() for tensor in batch)
        with torch.cuda.stream(self._stream):
            moved = to_device((inputs, targets), self._device, self._dtype)
            self._stream.synchronize()  # of this thread's own stream: pinned memory may go then
        return moved
