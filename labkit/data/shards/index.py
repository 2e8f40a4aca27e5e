"""What a folder of shards holds: files, extents in them, their checksums, and the form of a row.

A shard is an Arrow IPC file; an extent is one record batch in it: rows that lie next to each other and are
read with one request. The index is the last thing that is written, so a folder with one is whole.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from labkit.errors import ConfigError, LabkitError

INDEX_FILE = "index.json"
_FORMAT, _VERSION = "labkit shards", 1


class ShardError(LabkitError):
    """Shards that are not what their index says; the message names shard and rows."""


@dataclass(frozen=True)
class Column:
    """One value of a row.

    Attributes:
        name: Of the column in the files.
        kind: tensor, of one type and shape in all rows; or image, an encoded file.
        dtype: Of a tensor's elements, as numpy names it; uint8 for an image.
        shape: Of a tensor; empty for a number. Nothing is known of an image's.
    """

    name: str
    kind: Literal["tensor", "image"]
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row's value; None where they differ."""
        if self.kind == "image":
            return None
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shape))

    def arrow_field(self) -> pa.Field:
        """As it stands in the files, readable by whoever reads Arrow."""
        about = {"labkit.kind": self.kind, "labkit.shape": json.dumps(self.shape)}
        if self.kind == "image":
            return pa.field(self.name, pa.large_binary(), nullable=False, metadata=about)
        item = pa.from_numpy_dtype(np.dtype(self.dtype))
        kind = pa.list_(item, math.prod(self.shape)) if self.shape else item
        return pa.field(self.name, kind, nullable=False, metadata=about)


@dataclass(frozen=True)
class Extent:
    """Rows that lie next to each other in one shard.

    Attributes:
        offset: Of its first byte in the file.
        size_bytes: From there.
        rows: How many.
        checksum: CRC-32 of the bytes.
    """

    offset: int
    size_bytes: int
    rows: int
    checksum: int


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file: Name in the folder of the index.
        size_bytes: Of the file.
        extents: In the order of the file.
        class_counts: Rows of each class; empty where the target is no single whole number.
        largest_target: Of whole numbers of any shape; None where they are none.
    """

    file: str
    size_bytes: int
    extents: tuple[Extent, ...]
    class_counts: Mapping[int, int] = field(default_factory=dict)
    largest_target: int | None = None

    @property
    def rows(self) -> int:
        """In all extents."""
        return sum(extent.rows for extent in self.extents)


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a folder; rows are counted through them in order.

    Attributes:
        columns: Of a row, in order.
        input: Name of the column that a model takes in.
        target: Name of the column that it learns.
        shards: In order.
        source: What they were written from.
        is_complete: False while writing goes on, or where it ended with an error.
        note: Why it is not complete.
    """

    columns: tuple[Column, ...]
    input: str
    target: str
    shards: tuple[Shard, ...]
    source: str = ""
    is_complete: bool = True
    note: str = ""

    def column(self, name: str) -> Column:
        """By name."""
        return next(column for column in self.columns if column.name == name)

    @property
    def schema(self) -> pa.Schema:
        """Of every shard."""
        return pa.schema([column.arrow_field() for column in self.columns])

    @property
    def num_rows(self) -> int:
        """In all shards."""
        return int(self.extent_starts[-1])

    @property
    def size_bytes(self) -> int:
        """Of all extents, without what Arrow adds at a file's beginning and end."""
        return int(self.extent_bytes.sum())

    @cached_property
    def extents(self) -> tuple[tuple[int, Extent], ...]:
        """Extents that have rows, through all shards, each with its shard's number; shape (E,)."""
        return tuple(
            (number, extent)
            for number, shard in enumerate(self.shards)
            for extent in shard.extents
            if extent.rows > 0
        )

    @cached_property
    def extent_starts(self) -> npt.NDArray[np.int64]:
        """The first row of each extent, and the number of rows; shape (E + 1,)."""
        return np.cumsum([0, *(extent.rows for _, extent in self.extents)], dtype=np.int64)

    @cached_property
    def extent_rows(self) -> npt.NDArray[np.int64]:
        """Shape (E,)."""
        return np.diff(self.extent_starts)

    def extents_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The extent of each row; shape (n,)."""
        return np.searchsorted(self.extent_starts, rows, "right") - 1

    @cached_property
    def extent_bytes(self) -> npt.NDArray[np.int64]:
        """Shape (E,)."""
        return np.array([extent.size_bytes for _, extent in self.extents], dtype=np.int64)

    @property
    def class_counts(self) -> dict[int, int]:
        """Rows of each class, over all shards."""
        counts: dict[int, int] = {}
        for shard in self.shards:
            for name, count in shard.class_counts.items():
                counts[name] = counts.get(name, 0) + count
        return dict(sorted(counts.items()))

    @property
    def largest_target(self) -> int | None:
        """Of whole numbers, over all shards; None where targets are none."""
        known = [shard.largest_target for shard in self.shards if shard.rows]
        return None if not known or None in known else max(value for value in known if value is not None)

    def describe(self, extent: int) -> str:
        """Name an extent in an error: shard, and rows counted through all shards."""
        number, _ = self.extents[extent]
        first, last = self.extent_starts[extent], self.extent_starts[extent + 1] - 1
        return f"shard {self.shards[number].file}, rows {first} to {last},"

    def to_json(self) -> str:
        """As it stands in the folder."""
        content = asdict(self)
        for shard in content["shards"]:
            shard["extents"] = [list(extent.values()) for extent in shard["extents"]]
        return json.dumps({"format": _FORMAT, "version": _VERSION, **content}, indent=1)


def parse_index(text: str, where: str) -> ShardIndex:
    """Read what `to_json` wrote.

    Raises:
        ConfigError: it is no index, or one of another version.
    """
    try:
        content = json.loads(text)
        name, version = content.pop("format"), content.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError(
            f"{where} must be the index of shards, got something else. Write the shards again."
        ) from None
    if name != _FORMAT or version != _VERSION:
        raise ConfigError(
            f"{where} must be of version {_VERSION} of {_FORMAT!r}, got version {version} of {name!r}. "
            "Write the shards again with this labkit."
        )
    try:
        content["columns"] = tuple(
            Column(**{**column, "shape": tuple(column["shape"])}) for column in content["columns"]
        )
        content["shards"] = tuple(shard_from(shard) for shard in content["shards"])
        return ShardIndex(**content)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} must be a whole index of shards, got one that can't be read ({error!r}). Write them "
            "again."
        ) from None


def shard_from(content: Mapping[str, Any]) -> Shard:
    """Read one shard's part of an index."""
    return Shard(
        str(content["file"]),
        int(content["size_bytes"]),
        tuple(Extent(*map(int, extent)) for extent in content["extents"]),
        {int(name): int(count) for name, count in content["class_counts"].items()},
        content.get("largest_target"),
    )


def read_index(folder: Path) -> ShardIndex:
    """The index of a folder, checked against the files that are there.

    Raises:
        ConfigError: there is none, it is of another version, or the folder holds no rows.
        ShardError: a shard is missing or has another size.
    """
    path = folder / INDEX_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        inside = sorted(child.parent.name for child in folder.glob(f"*/{INDEX_FILE}"))
        hint = f" It has {' and '.join(inside)} inside: name one of them." if inside else ""
        raise ConfigError(
            f"folder must hold shards and their {INDEX_FILE}, got {folder}: {error.strerror or error}.{hint} "
            "Write shards with: labkit shards write SOURCE DIR"
        ) from None
    index = parse_index(text, str(path))
    for shard in index.shards:
        check_size(folder, shard)
    if index.num_rows == 0:
        raise ConfigError(f"shards must hold at least one row, got none in {folder}. Write them again.")
    return index


def check_size(folder: Path, shard: Shard) -> None:
    """Refuse a file that is missing, cut or grown.

    Raises:
        ShardError: it is.
    """
    try:
        size_bytes = (folder / shard.file).stat().st_size
    except OSError as error:
        raise ShardError(
            f"shard {shard.file} must be in {folder}, got {error.strerror or error}. Copy it there, or write "
            "the shards again."
        ) from None
    if size_bytes != shard.size_bytes:
        raise ShardError(
            f"shard {shard.file} must have {shard.size_bytes} bytes, got {size_bytes}: it was cut or "
            "changed. Copy it again, or write the shards again."
        )


def common_columns(found: Sequence[tuple[str, Sequence[Column]]]) -> tuple[Column, ...]:
    """The columns that all of several files have.

    Raises:
        ConfigError: they differ; the message names the file.
    """
    first, columns = found[0]
    for name, others in found[1:]:
        if list(others) != list(columns):
            raise ConfigError(
                f"all files must have the same columns as {first} ({', '.join(c.name for c in columns)}), "
                f"got {', '.join(c.name for c in others)} in {name}, or other types. Convert them one by one."
            )
    return tuple(columns)
