"""What shards are written from: anything with rows of an input and a target."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from labkit.data.shards.index import Column, common_columns
from labkit.errors import ConfigError

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
Row = tuple[Any, ...]


class Source(Protocol):
    """Rows, each a tuple with one value per column.

    Attributes:
        name: What it is, for the index; another one when the rows are others.
        num_rows: None where they can only be read one after the other.
    """

    name: str

    @property
    def num_rows(self) -> int | None: ...

    def columns(self) -> tuple[Column, ...]:
        """Input and target, in this order."""
        ...

    def row(self, number: int) -> Row:
        """Any row, where `num_rows` is known."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """All rows in order."""
        ...


def column_of(name: str, value: Any) -> Column:
    """The column for a value such as a row has it.

    Raises:
        ConfigError: it is no number, array, tensor or encoded image.
    """
    if isinstance(value, bytes):
        return Column(name, "image", "uint8")
    if isinstance(value, str):
        raise ConfigError(
            f"{name} must be a number, an array or an encoded image, got the text {value[:40]!r}. Turn it "
            "into numbers first, for example the number of its class."
        )
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{name} must be a number, an array or an encoded image, got {type(value).__name__}. Turn it "
            "into an array first."
        )
    dtype = "uint8" if array.dtype == bool else array.dtype.name  # Arrow packs truth values into bits
    return Column(name, "tensor", dtype, array.shape)


def as_row(item: Any) -> Row:
    """Input and target of a data set's item.

    Raises:
        ConfigError: it is no pair.
    """
    if isinstance(item, dict):
        item = tuple(item.values())
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ConfigError(
            f"each row must be a pair of input and target, got {type(item).__name__}. Return (input, target)."
        )
    return tuple(item)


@dataclass
class MapSource:
    """A map-style data set, `dataset[i] -> (input, target)`."""

    name: str
    dataset: Any

    @property
    def num_rows(self) -> int | None:
        return len(self.dataset)

    def columns(self) -> tuple[Column, ...]:
        row = self.row(0)
        return column_of("input", row[0]), column_of("target", row[1])

    def row(self, number: int) -> Row:
        return as_row(self.dataset[number])

    def __iter__(self) -> Iterator[Row]:
        return (self.row(number) for number in range(len(self.dataset)))


@dataclass
class StreamSource:
    """An iterable data set of (input, target); `make` gives a fresh pass over it."""

    name: str
    make: Callable[[], Iterable[Any]]
    num_rows: int | None = None

    def columns(self) -> tuple[Column, ...]:
        for row in self:
            return column_of("input", row[0]), column_of("target", row[1])
        raise ConfigError(f"source must have at least one row, got none from {self.name}. Check it.")

    def row(self, number: int) -> Row:
        raise NotImplementedError("a stream has no rows by number")

    def __iter__(self) -> Iterator[Row]:
        return (as_row(item) for item in self.make())


class ImageFolder:
    """Images in a folder for each class; the classes are counted in the order of their names."""

    def __init__(self, path: Path) -> None:
        """List the files.

        Raises:
            ConfigError: there are none.
        """
        self.classes = sorted(child.name for child in path.iterdir() if child.is_dir())
        self._files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in _IMAGES
        ]
        if not self._files:
            raise ConfigError(
                f"folder must hold images in a folder for each class, got none in {path}. Image files end in "
                f"{', '.join(sorted(_IMAGES))}."
            )
        known = "".join(f"{file} {number} {file.stat().st_size} " for file, number in self._files)
        digest = hashlib.blake2b(known.encode(), digest_size=8).hexdigest()
        self.name = f"{path} ({len(self._files)} images of {len(self.classes)} classes, {digest})"
        self.num_rows: int | None = len(self._files)

    def columns(self) -> tuple[Column, ...]:
        return Column("input", "image", "uint8"), Column("target", "tensor", "int64")

    def row(self, number: int) -> Row:
        file, label = self._files[number]
        return file.read_bytes(), label

    def __iter__(self) -> Iterator[Row]:
        return (self.row(number) for number in range(len(self._files)))


class ArrowRows:
    """Rows of an Arrow table, whose columns are put together to one input."""

    def __init__(self, name: str, table: pa.Table, inputs: Sequence[str], target: str | None) -> None:
        """Choose the columns.

        Raises:
            ConfigError: a column is missing, or none is left for the input.
        """
        self.name = name
        self.num_rows: int | None = table.num_rows
        self._target, self._inputs = choose_columns(table.column_names, inputs, target)
        self._table = table.select([*self._inputs, self._target])
        if table.num_rows == 0:
            raise ConfigError(f"source must have at least one row, got none from {name}. Check it.")

    def columns(self) -> tuple[Column, ...]:
        value, target = self.row(0)
        return column_of("input", value), column_of(self._target, target)

    def row(self, number: int) -> Row:
        return to_row({name: self._table.column(name)[number].as_py() for name in self._table.column_names})

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches():
            for values in batch.to_pylist():
                yield to_row(values)


def choose_columns(
    names: Sequence[str], inputs: Sequence[str], target: str | None
) -> tuple[str, tuple[str, ...]]:
    """The target's column, and those of the input: by default the last one (or `label`, `target`), and the
    rest.

    Raises:
        ConfigError: one is not there, or nothing is left for the input.
    """
    for name in [*inputs, *([target] if target else [])]:
        if name not in names:
            raise ConfigError(f"column must be one of {', '.join(names)}, got {name!r}. Name another one.")
    known = [name for name in ("label", "labels", "target", "class", "y") if name in names]
    chosen = target or (known or list(names)[-1:])[0]
    rest = tuple(inputs) or tuple(name for name in names if name != chosen)
    if not rest:
        raise ConfigError(f"source must have a column beside the target {chosen!r}, got none. Add inputs.")
    return chosen, rest


def to_row(values: dict[str, Any]) -> Row:
    """A row of a table whose last column is the target: several numbers become one vector."""
    *inputs, target = values.values()
    parts = [_plain(value) for value in inputs]
    if len(parts) == 1:
        return parts[0], target
    for name, part in zip(values, parts, strict=False):
        if not isinstance(part, (int, float, np.ndarray)):
            raise ConfigError(
                f"column {name!r} must hold numbers to be put together with others, got {part!r}. Leave it "
                "out: --input names the columns to use."
            )
    return np.concatenate([np.atleast_1d(np.asarray(part, np.float32)).ravel() for part in parts]), target


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and "bytes" in value:  # an image, as Hugging Face stores it
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    if isinstance(value, list):
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype == np.float64 else array
    return value


def arrow_folder(path: Path, inputs: Sequence[str], target: str | None) -> ArrowRows:
    """A folder that `datasets.Dataset.save_to_disk` wrote, memory-mapped; that library is not needed.

    Raises:
        ConfigError: it is none, or holds a selection of rows that is not written out.
    """
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{path} must hold its rows in order, got a selection of rows. Call flatten_indices() before "
            "save_to_disk()."
        )
    tables = []
    for entry in state["_data_files"]:
        with pa.memory_map(str(path / entry["filename"])) as source:
            tables.append(pa.ipc.open_stream(source).read_all())
    return ArrowRows(str(path), pa.concat_tables(tables), inputs, target)


class TableFiles:
    """Rows of Parquet or CSV files, read one after the other."""

    num_rows: int | None = None

    def __init__(self, paths: Sequence[Path], inputs: Sequence[str], target: str | None) -> None:
        """Look at the files' columns.

        Raises:
            ConfigError: one can't be read, or their columns differ.
        """
        self.name = ", ".join(f"{path} ({path.stat().st_size} bytes)" for path in paths)
        self._paths, self._inputs, self._target = list(paths), list(inputs), target
        found = [(str(path), self._columns_of(path)) for path in paths]
        self._columns = common_columns(found)

    def columns(self) -> tuple[Column, ...]:
        return self._columns

    def _columns_of(self, path: Path) -> tuple[Column, ...]:
        for value, target in self._rows_of(path):
            return column_of("input", value), column_of("target", target)
        raise ConfigError(f"source must have at least one row, got none from {path}. Check it.")

    def row(self, number: int) -> Row:
        raise NotImplementedError("a table file is read in order")

    def __iter__(self) -> Iterator[Row]:
        for path in self._paths:
            yield from self._rows_of(path)

    def _rows_of(self, path: Path) -> Iterator[Row]:
        try:
            if path.suffix == ".parquet":
                file = pyarrow.parquet.ParquetFile(path)
                target, inputs = choose_columns(file.schema_arrow.names, self._inputs, self._target)
                batches: Iterable[pa.RecordBatch] = file.iter_batches(1024, columns=[*inputs, target])
            else:
                reader = pyarrow.csv.open_csv(path)
                target, inputs = choose_columns(reader.schema.names, self._inputs, self._target)
                batches = reader
            for batch in batches:
                for values in batch.select([*inputs, target]).to_pylist():
                    yield to_row(values)
        except (pa.ArrowInvalid, csv.Error) as error:
            raise ConfigError(f"{path} must be a table that Arrow reads, got: {error}. Repair it.") from None


def open_path(path: Path, inputs: Sequence[str] = (), target: str | None = None) -> Source:
    """The source that a file or folder is: images by class, a table, or a Hugging Face folder.

    Raises:
        ConfigError: it is none of them.
    """
    if path.is_dir():
        if (path / "state.json").is_file():
            return arrow_folder(path, inputs, target)
        files = sorted([*path.glob("*.parquet"), *path.glob("*.csv")])
        return TableFiles(files, inputs, target) if files else ImageFolder(path)
    if path.suffix in (".parquet", ".csv") and path.is_file():
        return TableFiles([path], inputs, target)
    raise ConfigError(
        f"source must be a folder of images by class, a .parquet or .csv file, or a folder that datasets "
        f"saved to disk, got {path}. Name one, or a data set such as digits or module:function."
    )


def row_bytes(columns: Sequence[Column], row: Row) -> int:
    """Bytes of one row's values."""
    sizes = [
        len(value) + 8 if column.row_bytes is None else column.row_bytes
        for column, value in zip(columns, row, strict=True)
    ]
    return sum(sizes)
