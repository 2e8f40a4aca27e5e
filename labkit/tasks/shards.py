"""Training data in shards: batches of rows, read ahead and decoded beside the computing."""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from labkit.config import ShardsConfig
from labkit.data.decode import Decoders
from labkit.data.sampler import Indices, Order
from labkit.data.shards import INDEX_FILE, ExtentReader, ReadCounts, ShardIndex, WindowShuffle, read_index
from labkit.errors import ConfigError
from labkit.tasks.entry_point import load_entry_point
from labkit.tasks.samples import Batch, DataInfo

_VAL_BUFFER_BYTES = 16 * 2**20
_TOGETHER_BYTES = 4 * 2**20


class ShardSamples:
    """Rows of a folder of shards. Threads and memory begin with the first batch and end with `close`."""

    def __init__(self, folder: Path, config: ShardsConfig, seed: int, *, is_training: bool) -> None:
        """Open the index.

        Args:
            folder: Of the shards.
            config: How they are read.
            seed: Of the random streams of `config.transform`.
            is_training: Whether they are read in windows, and transforms are random.

        Raises:
            ConfigError: there are no shards, or the transform is not there.
            ShardError: a shard is missing or has another size.
        """
        self.index: ShardIndex = read_index(folder)
        self.folder = folder
        self._config, self._seed, self._is_training = config, seed, is_training
        self._transform = (
            load_entry_point(config.transform, "data.transform") if config.transform is not None else None
        )
        self._column = self.index.column(self.index.input)
        if self._column.kind == "image" and config.image_size is None and self._transform is None:
            raise ConfigError(
                "data.image_size must be given for encoded images, which may differ in size, got nothing. "
                "For example data.image_size=[64, 64]."
            )
        self._reader: ExtentReader | None = None
        self._decoders: Decoders | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._seen: Batch | None = None

    def __len__(self) -> int:
        return self.index.num_rows

    @property
    def _is_decoded(self) -> bool:
        """Rows are not what models take in, as they stand."""
        return self._column.kind == "image" or self._transform is not None

    @property
    def window_bytes(self) -> int:
        """Of extents that rows are drawn from."""
        return min(self._config.window, self.index.size_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Of memory for what is read."""
        largest = int(self.index.extent_bytes.max())
        if not self._is_training:
            return max(_VAL_BUFFER_BYTES, (self._config.num_readers + 2) * largest)
        least = 2 * self.window_bytes + (self._config.num_readers + 2) * largest
        return self._config.buffer or least

    def order(self, seed: int) -> Order:
        """The order of training."""
        return WindowShuffle(self.index.extent_rows, self.index.extent_bytes, self._config.window, seed)

    def _open(self) -> tuple[ExtentReader, Decoders]:
        with self._lock:
            if self._reader is None or self._decoders is None or self._pid != os.getpid():
                config = self._config
                is_bad_skipped = config.on_bad == "skip"
                self._reader = ExtentReader(
                    self.folder,
                    self.index,
                    buffer_bytes=self.buffer_bytes,
                    num_threads=config.num_readers,
                    is_bad_skipped=is_bad_skipped,
                )
                self._decoders = Decoders(
                    self._seed,
                    is_image=self._column.kind == "image",
                    image_size=config.image_size,
                    transform=self._transform,
                    count=config.num_decoders,
                    kind=config.decoders,
                    is_bad_skipped=is_bad_skipped,
                )
                self._pid = os.getpid()
            return self._reader, self._decoders

    def batch(self, indices: Sequence[int]) -> Batch:
        """Inputs and targets of some rows as in validation; shapes (b, ...), (b, ...)."""
        return self.batch_at(None, np.asarray(indices, dtype=np.int64))

    def batch_at(self, epoch: int | None, rows: Indices) -> Batch:
        """Inputs and targets of some rows; fewer than asked for where bad ones are skipped.

        Args:
            epoch: Of the training, for the random streams of transforms; None: as in validation.
            rows: Counted through all shards; shape (b,).

        Raises:
            ShardError: a row can't be read.
            ConfigError: inputs have different shapes.
        """
        reader, decoders = self._open()
        names = (self.index.input, self.index.target)
        values, is_good = reader.take(rows, names)
        kept = rows if is_good is None else rows[is_good]
        inputs, targets = values[names[0]], values[names[1]]
        if len(kept):
            inputs, targets = decoders(epoch, kept.tolist(), inputs, targets)
            reader.counts.bad_rows += len(kept) - len(targets)
        if len(targets) == 0:
            return self._none
        return _tensor(inputs), _tensor(targets)

    @property
    def _none(self) -> Batch:
        """No row, in the form that rows have."""
        inputs, targets = self._look()
        return inputs[:0], targets[:0]

    def _look(self) -> Batch:
        """A row that can be read, to see its form.

        Raises:
            ConfigError: there is none.
        """
        if self._seen is None:
            reader, decoders = self._open()
            names = (self.index.input, self.index.target)
            for row in (0, *self.index.extent_starts[1:-1].tolist()):
                values, is_good = reader.take(np.array([row]), names)
                if is_good is not None:
                    continue
                inputs, targets = decoders(None, [row], values[names[0]], values[names[1]])
                if len(targets):
                    self._seen = _tensor(inputs), _tensor(targets)
                    break
            else:
                raise ConfigError(f"shards must have rows that can be read, got none in {self.folder}.")
        return self._seen

    def extents_of(self, rows: Indices) -> list[int]:
        """Where some rows lie, each extent once, in order."""
        return list(dict.fromkeys(self.index.extents_of(rows).tolist()))

    def ahead(self, extents: Iterable[int]) -> None:
        """What will be needed next, in order."""
        self._open()[0].ahead(extents)

    @property
    def num_ahead(self) -> int:
        """Extents that may be asked for ahead: what fits beside those in use."""
        return max(1, self._open()[0].num_slots - self._config.num_readers)

    @property
    def num_together(self) -> int:
        """Rows that are best asked for at once: several small batches."""
        if self._config.on_bad == "skip" or self._is_decoded:  # what takes long is done batch by batch
            return 1
        return _TOGETHER_BYTES * self.index.num_rows // self.index.size_bytes

    @property
    def counts(self) -> ReadCounts:
        """What was read so far."""
        return self._reader.counts if self._reader is not None else ReadCounts()

    def info(self) -> DataInfo:
        """What a model must know.

        Raises:
            ConfigError: targets are no numbers of classes.
        """
        index = self.index
        target = index.column(index.target)
        if target.kind != "tensor" or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(
                f"target column {index.target!r} must hold whole numbers (classes), got {target.dtype}. "
                "Write the shards with another target, or use a data set of your own (module:function)."
            )
        shape = tuple(self._look()[0].shape[1:]) if self._is_decoded else self._column.shape
        return DataInfo(shape, (index.largest_target or 0) + 1)

    def close(self) -> None:
        """End threads and processes."""
        if self._pid == os.getpid():
            if self._decoders is not None:
                self._decoders.close()
            if self._reader is not None:
                self._reader.close()
        self._reader = self._decoders = None


def _tensor(values: object) -> torch.Tensor:
    found = torch.from_numpy(np.ascontiguousarray(values))
    is_small = found.dtype in (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)
    return found.long() if is_small else found


def shard_folders(config: ShardsConfig) -> tuple[Path, Path]:
    """Where the shards of training and validation lie.

    Raises:
        ConfigError: no validation shards are named.
    """
    folder = Path(config.path)
    if (folder / "train" / INDEX_FILE).is_file():
        return folder / "train", Path(config.val_path) if config.val_path else folder / "val"
    if config.val_path is None:
        read_index(folder)  # says what is wrong where there are no shards at all
        raise ConfigError(
            f"data.val_path must be given where data.path has no train/ and val/, got nothing with {folder}. "
            "Write shards with a held-out part: labkit shards write SOURCE DIR --val-share 0.1"
        )
    return folder, Path(config.val_path)
