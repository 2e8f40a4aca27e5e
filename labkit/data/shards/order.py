"""Extents in random order, and rows in random order inside a window of them.

A full shuffle reads every row from another place. Here a window of extents, each read with one request, is in
memory at a time, and rows are drawn from it. The order depends on the seed and the epoch alone, like that of
a full shuffle, so it is the same on any cluster. How good it is, is a number: `shuffle_quality`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from labkit.data.sampler import FullShuffle, Indices, Order
from labkit.seeding import stream_seed

_MOST_BATCHES = 200  # looked at for the quality
_FIRST = 16  # of the window's size is the first one


class WindowShuffle:
    """The order of an epoch, window by window; only what is asked for is drawn."""

    def __init__(
        self, extent_rows: npt.ArrayLike, extent_bytes: npt.ArrayLike, window_bytes: int, seed: int
    ) -> None:
        """Prepare.

        Args:
            extent_rows: Rows of each extent; shape (E,).
            extent_bytes: Bytes of each; shape (E,).
            window_bytes: Extents are added to a window as long as they fit; it has one at least. In epoch 0
                windows begin with a sixteenth of it and double.
            seed: The experiment's.
        """
        self._rows = np.asarray(extent_rows, dtype=np.int64)
        self._bytes = np.asarray(extent_bytes, dtype=np.int64)
        self._starts = np.cumsum([0, *self._rows], dtype=np.int64)
        self._window_bytes, self._seed = window_bytes, seed
        self.num_samples = int(self._starts[-1])
        self._epoch = -1
        self._extents: Indices = np.empty(0, np.int64)  # in the epoch's order
        self._rank: Indices = np.empty(0, np.int64)  # where each stands in it
        self._first: Indices = np.empty(0, np.int64)  # first extent of each window, and their number
        self._begins: Indices = np.empty(0, np.int64)  # first position of each window, and the end
        self._drawn: dict[int, Indices] = {}

    def _begin(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        generator = _generator(self._seed, "extents", epoch)
        self._extents = generator.permutation(len(self._rows))
        self._rank = np.empty_like(self._extents)
        self._rank[self._extents] = np.arange(len(self._extents))
        # The first batch of a run waits for its whole window, so the first windows of all are small.
        most = self._window_bytes if epoch else self._window_bytes / _FIRST
        first, filled = [0], 0
        for place, size_bytes in enumerate(self._bytes[self._extents]):
            if place > first[-1] and filled + size_bytes > most:
                first.append(place)
                filled, most = 0, min(2 * most, self._window_bytes)
            filled += int(size_bytes)
        self._first = np.array([*first, len(self._extents)], dtype=np.int64)
        ends = np.cumsum([0, *self._rows[self._extents]], dtype=np.int64)
        self._begins = ends[self._first]
        self._epoch, self._drawn = epoch, {}

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        """Rows at some positions of an epoch's order; shape (stop - start,)."""
        self._begin(epoch)
        parts = []
        window = int(np.searchsorted(self._begins, start, "right")) - 1
        while start < stop:
            begin, end = int(self._begins[window]), int(self._begins[window + 1])
            parts.append(self._window(window)[start - begin : min(stop, end) - begin])
            start, window = end, window + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _window(self, window: int) -> Indices:
        if window not in self._drawn:
            extents = self._extents[self._first[window] : self._first[window + 1]]
            rows = np.concatenate([np.arange(self._starts[e], self._starts[e + 1]) for e in extents])
            drawn = _generator(self._seed, "window", self._epoch, window).permutation(rows)
            near = {key: value for key, value in self._drawn.items() if abs(key - window) <= 2}
            self._drawn = {**near, window: drawn}
        return self._drawn[window]

    def arrange(self, epoch: int, batch: Indices) -> Indices:
        """The same rows so that those of one extent stand together, in the order in which extents are read.

        Each worker takes a contiguous part of a batch. So over a window it needs extents in proportion to its
        share, and shares those at the borders of its part, which move a little from batch to batch: the
        more of them, the smaller batch and window are. The page cache gives them to a node once.
        """
        self._begin(epoch)
        extents = np.searchsorted(self._starts, batch, "right") - 1
        return batch[np.lexsort((batch, self._rank[extents]))]


def _generator(seed: int, *names: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(stream_seed(seed, *names)))


@dataclass(frozen=True)
class ShuffleQuality:
    """How well an order mixes, beside a full shuffle of the same rows.

    Attributes:
        rank_correlation: Spearman's, between a row's place in the files and its place in the order: 1 as they
            stand, about 0 for a full shuffle.
        neighbours: How much more often than in a full shuffle two rows that stand next to each other in the
            files come in the same batch: 1 is as good.
        class_imbalance: Mean distance (total variation) of a batch's classes from those of the whole, over
            that of a full shuffle: 1 is as good; None where classes are not known.
    """

    rank_correlation: float
    neighbours: float
    class_imbalance: float | None


def shuffle_quality(
    order: Order, batch_size: int, targets: npt.NDArray[np.int64] | None = None
) -> ShuffleQuality:
    """Measure an epoch of an order, the second: in the first one windows may still grow.

    Args:
        order: Of all rows.
        batch_size: Global batch.
        targets: Class of each row; shape (num_samples,).
    """
    count = order.num_samples
    drawn = order.slice(1, 0, count)
    place = np.empty(count, np.int64)
    place[drawn] = np.arange(count)
    spread = np.arange(count) - (count - 1) / 2
    norm = float((spread**2).sum())
    correlation = float((spread * (place - (count - 1) / 2)).sum()) / norm if norm else 1.0
    batches = place // batch_size
    together = float((batches[1:] == batches[:-1]).mean()) if count > 1 else 1.0
    expected = max(1, min(batch_size, count) - 1) / max(1, count - 1)
    imbalance = None
    if targets is not None:
        full = FullShuffle(count, 0).slice(0, 0, count)
        ours, theirs = (_imbalance(targets[rows], batch_size) for rows in (drawn, full))
        imbalance = ours / theirs if theirs else 1.0
    return ShuffleQuality(correlation, together / expected, imbalance)


def _imbalance(targets: npt.NDArray[np.int64], batch_size: int) -> float:
    """Mean total variation between the classes of a batch and those of all rows."""
    _, targets = np.unique(targets, return_inverse=True)
    num_classes = int(targets.max()) + 1
    whole = np.bincount(targets, minlength=num_classes) / len(targets)
    num_batches = max(1, len(targets) // batch_size)
    chosen = np.linspace(0, num_batches - 1, min(num_batches, _MOST_BATCHES)).astype(np.int64)
    distances = []
    for index in chosen:
        part = targets[index * batch_size : (index + 1) * batch_size]
        share = np.bincount(part, minlength=num_classes) / len(part)
        distances.append(0.5 * float(np.abs(share - whole).sum()))
    return float(np.mean(distances))
