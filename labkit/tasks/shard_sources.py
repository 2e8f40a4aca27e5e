"""What `labkit shards write` takes: a file or folder, a data set by name, or the user's own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.config import DigitsConfig, TextConfig
from labkit.data.shards.index import INDEX_FILE, ShardIndex, parse_index
from labkit.data.shards.sources import MapSource, Source, StreamSource, open_path
from labkit.data.shards.write import WriteOptions
from labkit.data.shards.write import write_shards as write
from labkit.errors import ConfigError
from labkit.tasks.data import Data, load_data
from labkit.tasks.entry_point import load_entry_point
from labkit.tasks.samples import Samples

Progress = Callable[[int, int | None], None]


class _Rows:
    """Samples of a data set as rows."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        inputs, targets = self._samples.batch([row])
        return inputs[0].numpy(), targets[0].numpy()


def open_source(
    what: str | Any,
    options: dict[str, Any] | None = None,
    *,
    inputs: Sequence[str] = (),
    target: str | None = None,
) -> Source | dict[str, Source]:
    """What a name, a path or an object stands for.

    Args:
        what: A path (images by class, .parquet, .csv, a folder that `datasets` saved), `digits`, `text`, a
            `module:function` that gives a data set, or a map-style or iterable data set of (input, target).
        options: Keyword arguments of the function, or settings of `digits` and `text`.
        inputs: Columns of a table that make the input; default: all but the target.
        target: Column of a table to learn; default: `label` or the last one.

    Returns:
        One source, or `train` and `val` where the data set says itself what is held out.

    Raises:
        ConfigError: it is none of these.
    """
    options = options or {}
    if isinstance(what, str) and what in ("digits", "text"):
        own = DigitsConfig(**options) if what == "digits" else TextConfig(**options)
        return _parts(what, load_data(own))
    if isinstance(what, str) and ":" in what and not Path(what).exists():
        function = load_entry_point(what, "source")
        made = function(**options)
        if isinstance(made, Data):
            return _parts(what, made)
        return _of_object(what, made, lambda: function(**options))
    if isinstance(what, (str, Path)):
        return open_path(Path(what), inputs, target)
    if isinstance(what, Data):
        return _parts("data", what)
    return _of_object(type(what).__name__, what, lambda: what)


def _parts(name: str, data: Data) -> dict[str, Source]:
    parts = (("train", data.train), ("val", data.val))
    return {part: MapSource(f"{part} of {name} ({len(s)} rows)", _Rows(s)) for part, s in parts}


def _of_object(name: str, made: Any, again: Callable[[], Iterable[Any]]) -> Source:
    is_stream = isinstance(made, torch.utils.data.IterableDataset)
    if hasattr(made, "__getitem__") and hasattr(made, "__len__") and not is_stream:
        return MapSource(f"{name} ({len(made)} rows)", made)
    if hasattr(made, "__iter__"):
        if iter(again()) is made:
            raise ConfigError(
                f"source must be iterable more than once, got {type(made).__name__} from {name}. Give a "
                "list, or module:function that makes it."
            )
        return StreamSource(name, again)
    raise ConfigError(
        f"source must be a map-style or iterable data set of (input, target), got {type(made).__name__} from "
        f"{name}. Return one."
    )


def write_shards(
    what: str | Any,
    folder: str | Path,
    options: WriteOptions | None = None,
    *,
    settings: dict[str, Any] | None = None,
    inputs: Sequence[str] = (),
    target: str | None = None,
    on_progress: Progress = lambda done, total: None,
) -> dict[str, ShardIndex]:
    """Write a data set as shards, for `data: {format: shards, path: FOLDER}` of an experiment.

    Args:
        what: See `open_source`.
        folder: Where the folders `train` and `val` come.
        options: How shards are cut, and how much is held out where the data set does not say it itself.
        settings: Keyword arguments of a data set's function.
        inputs: Columns of a table that make the input; default: all but the target.
        target: Column of a table to learn; default: `label` or the last one.
        on_progress: Called with rows done and, where it is known, of how many.

    Returns:
        The index of each part.

    Raises:
        ConfigError: the source, a row of it or the folder is not as it must be.
        ShardError: the source failed at a row; what was written until then can be used.
    """
    options = options or WriteOptions()
    source = open_source(what, settings, inputs=inputs, target=target)
    if not isinstance(source, dict):
        return write(source, Path(folder), options, on_progress=on_progress)
    if options.val_share != WriteOptions.val_share:
        raise ConfigError(
            f"val share must be left out where the data set says itself what is held out, got "
            f"{options.val_share:g}."
        )
    found: dict[str, ShardIndex] = {}
    total = sum(part.num_rows or 0 for part in source.values())
    for name, part in source.items():
        before = sum(index.num_rows for index in found.values())
        known = _written_before(part, Path(folder) / name)
        if known is not None:
            found[name] = known
            continue
        say = _after(before, total, on_progress)
        whole = replace(options, val_share=0.0)
        found[name] = write(part, Path(folder) / name, whole, on_progress=say)["train"]
    return found


def _written_before(part: Source, folder: Path) -> ShardIndex | None:
    """The index of a part that an earlier try has written whole."""
    file = folder / INDEX_FILE
    if not file.is_file():
        return None
    index = parse_index(file.read_text(encoding="utf-8"), str(file))
    is_same = index.source == part.name and index.columns == part.columns()
    return index if index.is_complete and is_same else None


def _after(before: int, total: int, on_progress: Progress) -> Progress:
    return lambda done, _: on_progress(before + done, total)


def targets_of(folder: Path, index: ShardIndex) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
    """The class of every row; None where targets are no classes."""
    from labkit.data.shards import ExtentReader

    column = index.column(index.target)
    if column.kind != "tensor" or column.shape or np.dtype(column.dtype).kind not in "iub":
        return None
    largest = int(index.extent_bytes.max())
    with ExtentReader(folder, index, buffer_bytes=8 * (largest + 64)) as reader:
        values, _ = reader.take(np.arange(index.num_rows), (index.target,))
    return np.asarray(values[index.target]).astype(np.int64)
