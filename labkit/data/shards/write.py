"""Write shards: in parallel where rows can be read by number, resumable, each file whole or not there."""

import errno
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from labkit.data.sampler import FullShuffle
from labkit.data.shards.index import (
    INDEX_FILE,
    Column,
    Extent,
    Shard,
    ShardError,
    ShardIndex,
    check_size,
    shard_from,
)
from labkit.data.shards.sources import Row, Source, row_bytes
from labkit.errors import ConfigError, LabkitError
from labkit.processes import die_with_parent

_WRITING = ".writing"
_FIRST_MESSAGE = 8  # after the magic of an Arrow file
_SAMPLED_ROWS = 16
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class WriteOptions:
    """How shards are cut.

    Attributes:
        shard_bytes: Largest shard, but for what Arrow adds.
        extent_bytes: Of one request; a larger row is an extent of its own.
        val_share: Part of the rows that is held out, into a folder of its own; 0: none.
        shuffle_seed: Of the order in which rows are written, where they can be read by number; None: as they
            stand. Rows that lie by class, as in a folder of images, should not stay so.
        num_processes: That read and write at once, where rows can be read by number.
    """

    shard_bytes: int = 64 * 2**20
    extent_bytes: int = 2**20
    val_share: float = 0.1
    shuffle_seed: int | None = 0
    num_processes: int = 2

    def __post_init__(self) -> None:
        if self.extent_bytes < 1 or self.shard_bytes < self.extent_bytes:
            raise ConfigError(
                f"shard size must be at least the extent size ({self.extent_bytes} bytes), got "
                f"{self.shard_bytes}. Raise one or lower the other."
            )
        if not 0 <= self.val_share < 1:
            raise ConfigError(f"val share must be from 0 to below 1, got {self.val_share:g}. Try 0.1.")
        if self.num_processes < 1:
            raise ConfigError(f"processes must be at least 1, got {self.num_processes}.")


def write_shards(
    source: Source,
    folder: Path,
    options: WriteOptions | None = None,
    *,
    on_progress: Progress = lambda done, total: None,
) -> dict[str, ShardIndex]:
    """Write a source as shards; an interrupted writing of the same source goes on where it was.

    Args:
        source: Rows of input and target.
        folder: Where the folders `train` and `val` come, or, without a held-out part, the shards themselves.
        options: How they are cut.
        on_progress: Called with rows done and, where it is known, of how many.

    Returns:
        The index of each part, by its name (`train`, `val`).

    Raises:
        ConfigError: the folder can't be written or holds something else, or a row is larger than a shard.
        ShardError: the source failed at a row; what was written until then can be used.
    """
    options = options or WriteOptions()
    columns = source.columns()
    names = ("train", "val") if options.val_share else ("train",)
    parts = {name: folder / name if options.val_share else folder for name in names}
    _claim(folder, parts, source, columns, options)
    try:
        if source.num_rows is None:
            failure = _write_stream(source, columns, parts, options, on_progress)
        else:
            failure = _write_parallel(source, columns, parts, options, on_progress)
        found = {
            name: _finish(path, source, columns, str(failure) if failure else "")
            for name, path in parts.items()
        }
    except OSError as error:
        raise ConfigError(
            f"folder must be writable, got {folder}: {error.strerror or error}. Make room there, or name "
            "another folder."
        ) from None
    if failure:
        raise failure
    for path in parts.values():
        shutil.rmtree(path / _WRITING)
    return found


def _claim(
    folder: Path, parts: dict[str, Path], source: Source, columns: Sequence[Column], options: WriteOptions
) -> None:
    """Make the folders; refuse those that hold something else than the beginning of the same writing."""
    own = asdict(replace(options, num_processes=1))
    plan = json.dumps({"source": source.name, "columns": [asdict(c) for c in columns], **own}, indent=1)
    for path in parts.values():
        record = path / _WRITING / "plan.json"
        try:
            known = record.read_text(encoding="utf-8") if record.is_file() else None
            if known is not None and json.loads(known) != json.loads(plan):
                raise ConfigError(
                    f"folder must be empty or hold the beginning of the same shards, got {path}, which was "
                    "begun from another source or with other sizes. Name another folder, or delete it."
                )
            if known is None:
                if path.is_dir() and any(path.iterdir()) and any(p.name != _WRITING for p in path.iterdir()):
                    raise ConfigError(
                        f"folder must be empty, got {path}, which holds something. Name another folder."
                    )
                record.parent.mkdir(parents=True, exist_ok=True)
                _write_text(record, plan)
        except OSError as error:
            raise ConfigError(
                f"folder must be writable, got {folder}: {error.strerror or error}. Name another one."
            ) from None


# --- rows that can be read by number ---------------------------------------------------------------------


def _write_parallel(
    source: Source, columns: Sequence[Column], parts: dict[str, Path], options: WriteOptions, say: Progress
) -> LabkitError | None:
    total = source.num_rows or 0
    if options.shuffle_seed is None:
        order = np.arange(total)
    else:
        order = FullShuffle(total, options.shuffle_seed).slice(0, 0, total)
    num_val = min(total - 1, round(total * options.val_share)) if "val" in parts else 0
    if "val" in parts and num_val < 1:
        raise ConfigError(f"val share must hold out at least one of {total} rows, got {options.val_share:g}.")
    step = _rows_per_shard(source, columns, order, next(iter(parts.values())) / _WRITING / "step", options)
    # Of rows that stand by class, the held-out ones must not be the last class alone.
    is_held = np.zeros(total, dtype=bool)
    is_held[(np.arange(num_val) * total) // max(1, num_val)] = True
    jobs = []
    for name, path in parts.items():
        rows = order[is_held] if name == "val" else order[~is_held]
        for number, start in enumerate(range(0, len(rows), step)):
            jobs.append((path, name, number, rows[start : start + step]))
    done, failure = 0, None
    pool = ProcessPoolExecutor(
        min(options.num_processes, len(jobs)),
        mp_context=get_context("fork"),
        initializer=_begin_process,
        initargs=(os.getpid(), source, tuple(columns), options),
    )
    with pool:
        futures = [pool.submit(_write_job, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                rows_done, failure = future.result()
                done += rows_done
                if failure:
                    break
                say(done, total)
        finally:
            for future in futures:
                future.cancel()
    return failure


def _rows_per_shard(
    source: Source,
    columns: Sequence[Column],
    order: "np.ndarray[Any, Any]",
    record: Path,
    options: WriteOptions,
) -> int:
    """From the sizes of some rows, once: a writing that goes on must cut where it did before."""
    if record.is_file():
        return int(record.read_text(encoding="utf-8"))
    sizes = []
    for row in order[:_SAMPLED_ROWS].tolist():
        try:
            sizes.append(row_bytes(columns, source.row(row)))
        except Exception as fault:
            raise _row_failed(row, fault) from fault
    step = max(1, options.shard_bytes // max(1, sum(sizes) // max(1, len(sizes))))
    _write_text(record, str(step))
    return step


_inherited: tuple[Source, tuple[Column, ...], WriteOptions] | None = None


def _begin_process(parent_pid: int, *inherited: Any) -> None:
    """A writer's own process: by forking it has the source, which may not be picklable."""
    global _inherited
    die_with_parent(parent_pid)
    _inherited = inherited


def _write_job(
    path: Path, part: str, number: int, rows: "np.ndarray[Any, Any]"
) -> tuple[int, LabkitError | None]:
    """Write some rows; returns how many there are in files, and what went wrong."""
    assert _inherited is not None
    source, columns, options = _inherited
    record = path / _WRITING / f"{number:06d}.json"
    if record.is_file() and sum(shard.rows for shard in _read_record(record)) == len(rows):
        return len(rows), None
    writer = _Writer(path, f"{part}-{number:06d}", columns, options)
    failure: LabkitError | None = None
    for row in rows.tolist():
        try:
            writer.add(source.row(row))
        except Exception as fault:
            failure = _row_failed(row, fault)
            break
    shards = writer.close()
    _write_text(record if failure is None else record.with_suffix(".part"), _record(shards))
    return sum(shard.rows for shard in shards), failure


def _row_failed(row: int, fault: Exception) -> LabkitError:
    """What is wrong with a row: of itself, or with its source."""
    if isinstance(fault, ConfigError):
        return ConfigError(f"row {row:,} of the source: {fault}")
    return ShardError(
        f"source must give row {row:,}, got {type(fault).__name__}: {fault}. Rows before it are written and "
        "can be used; repair the source and write again to go on."
    )


# --- rows that come one after the other --------------------------------------------------------------------


def _write_stream(
    source: Source, columns: Sequence[Column], parts: dict[str, Path], options: WriteOptions, say: Progress
) -> LabkitError | None:
    """One process; what an earlier try has written whole is read over."""
    writers = {name: _Stream(path, name, columns, options) for name, path in parts.items()}
    share = options.val_share
    number, failure, rows = 0, None, iter(source)
    while failure is None:
        try:
            row = next(rows)
            is_held = int((number + 1) * share) > int(number * share)
            writers["val" if is_held else "train"].add(row)
        except StopIteration:
            break
        except OSError as fault:
            if fault.errno == errno.ENOSPC:
                raise
            failure = _row_failed(number, fault)
        except Exception as fault:
            failure = _row_failed(number, fault)
        else:
            number += 1
            if number % 256 == 0:
                say(number, None)
    if failure is None and share and int(number * share) in (0, number):
        raise ConfigError(f"val share must leave rows in both parts of {number} rows, got {share:g}.")
    for writer in writers.values():
        writer.close(is_partial=failure is not None)
    say(number, number)
    return failure


class _Stream:
    """Shards of rows that come one by one."""

    def __init__(self, path: Path, part: str, columns: Sequence[Column], options: WriteOptions) -> None:
        self._path, self._part, self._columns, self._options = path, part, columns, options
        self._known = [
            _read_record(record)
            for record in sorted((path / _WRITING).glob("*.json"))
            if record.stem.isdigit()
        ]
        self._num_known = sum(shard.rows for shards in self._known for shard in shards)
        self._number = len(self._known)
        self._writer: _Writer | None = None
        self._seen = 0

    def add(self, row: Row) -> None:
        self._seen += 1
        if self._seen <= self._num_known:
            return
        if self._writer is None:
            self._writer = _Writer(
                self._path, f"{self._part}-{self._number:06d}", self._columns, self._options
            )
        self._writer.add(row)
        if self._writer.num_shards > 1 or self._writer.is_full:
            self._end(".json")

    def close(self, *, is_partial: bool) -> None:
        if self._writer is not None:
            self._end(".part" if is_partial else ".json")

    def _end(self, suffix: str) -> None:
        assert self._writer is not None
        shards = self._writer.close()
        _write_text(self._path / _WRITING / f"{self._number:06d}{suffix}", _record(shards))
        self._number += 1
        self._writer = None


# --- files ----------------------------------------------------------------------------------------------


class _Writer:
    """Writes rows into files of at most a size, cut into extents."""

    def __init__(self, path: Path, stem: str, columns: Sequence[Column], options: WriteOptions) -> None:
        self._path, self._stem, self._columns, self._options = path, stem, tuple(columns), options
        self._schema = pa.schema([column.arrow_field() for column in columns])
        self._rows: list[Row] = []
        self._extent_bytes = self._file_bytes = 0
        self._file: pa.OSFile | None = None
        self._sink: pa.RecordBatchFileWriter | None = None
        self._counts: Counter[int] = Counter()
        self._largest: int | None = None
        self._shards: list[Shard] = []

    @property
    def num_shards(self) -> int:
        return len(self._shards) + (self._sink is not None)

    @property
    def is_full(self) -> bool:
        """The next row of the size of the last ones would begin another file."""
        mean = self._extent_bytes / max(1, len(self._rows))
        return self._file_bytes + self._extent_bytes + mean > self._options.shard_bytes

    def add(self, row: Row) -> None:
        checked = tuple(_checked(column, value) for column, value in zip(self._columns, row, strict=True))
        size_bytes = row_bytes(self._columns, checked)
        options = self._options
        if size_bytes > options.shard_bytes:
            raise ConfigError(
                f"a row must fit into a shard of {options.shard_bytes} bytes, got one of {size_bytes}. Raise "
                "the shard size."
            )
        if self._rows and self._extent_bytes + size_bytes > options.extent_bytes:
            self._flush()
        if self._file_bytes and self._file_bytes + self._extent_bytes + size_bytes > options.shard_bytes:
            self._flush()
            self._end_file()
        self._rows.append(checked)
        self._extent_bytes += size_bytes

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._sink is None:
            self._file = pa.OSFile(str(self._temporary), "wb")
            self._sink = pa.ipc.new_file(self._file, self._schema)
        arrays = [
            _to_arrow(column, values)
            for column, values in zip(self._columns, zip(*self._rows, strict=True), strict=True)
        ]
        self._sink.write_batch(pa.record_batch(arrays, schema=self._schema))
        target = self._columns[1]
        if target.kind == "tensor" and np.dtype(target.dtype).kind in "iub":
            if not target.shape:
                self._counts.update(int(row[1]) for row in self._rows)
            largest = max((int(np.max(row[1])) for row in self._rows if np.size(row[1])), default=0)
            self._largest = max(largest, self._largest if self._largest is not None else largest)
        self._file_bytes += self._extent_bytes
        self._rows, self._extent_bytes = [], 0

    @property
    def _temporary(self) -> Path:
        return self._path / _WRITING / f"{self._stem}.arrow"

    def _end_file(self) -> None:
        if self._sink is None or self._file is None:
            return
        self._sink.close()
        self._file.close()
        suffix = f".{len(self._shards)}" if self._shards else ""
        final = self._path / f"{self._stem}{suffix}.arrow"
        extents = _extents(self._temporary)
        size_bytes = self._temporary.stat().st_size
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, final)
        self._shards.append(Shard(final.name, size_bytes, extents, dict(self._counts), self._largest))
        self._sink = self._file = None
        self._file_bytes, self._counts, self._largest = 0, Counter(), None

    def close(self) -> tuple[Shard, ...]:
        """End the last file."""
        self._flush()
        self._end_file()
        return tuple(self._shards)


def _checked(column: Column, value: Any) -> Any:
    """A value in the form of its column."""
    if column.kind == "image":
        if not isinstance(value, bytes):
            raise ConfigError(f"{column.name} must be an encoded image, got {type(value).__name__}.")
        return value
    array = np.asarray(value)
    if array.shape != column.shape:
        raise ConfigError(
            f"{column.name} must have the shape {column.shape} of the first row, got {array.shape}. Bring "
            "all rows to one shape first."
        )
    if not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise ConfigError(
            f"{column.name} must be of type {column.dtype} as in the first row, got {array.dtype}. Convert "
            "it."
        )
    return array.astype(column.dtype, copy=False)


def _to_arrow(column: Column, values: Sequence[Any]) -> pa.Array:
    if column.kind == "image":
        return pa.array(values, pa.large_binary())
    whole = np.ascontiguousarray(np.stack(values))
    flat = pa.array(whole.ravel(), from_pandas=False)
    return pa.FixedSizeListArray.from_arrays(flat, whole[0].size) if column.shape else flat


def _extents(path: Path) -> tuple[Extent, ...]:
    """Where the record batches of an Arrow file lie, and their checksums, read back from the file."""
    found: list[Extent] = []
    with pa.OSFile(str(path)) as file:
        file.seek(_FIRST_MESSAGE)
        schema = pa.ipc.read_schema(pa.ipc.read_message(file))
        while True:
            offset = file.tell()
            try:
                message = pa.ipc.read_message(file)
            except EOFError:
                return tuple(found)
            end = file.tell()
            rows = pa.ipc.read_record_batch(message, schema).num_rows
            file.seek(offset)
            found.append(Extent(offset, end - offset, rows, zlib.crc32(file.read(end - offset))))
            file.seek(end)


def _record(shards: Iterable[Shard]) -> str:
    return ShardIndex((), "", "", tuple(shards)).to_json()


def _read_record(path: Path) -> tuple[Shard, ...]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return tuple(shard_from(shard) for shard in content["shards"])


def _finish(path: Path, source: Source, columns: Sequence[Column], note: str) -> ShardIndex:
    """Write the index of all that is there."""
    # A file that ended with an error counts until it has been written again in full.
    records = [record for kind in ("part", "json") for record in (path / _WRITING).glob(f"[0-9]*.{kind}")]
    by_number = {record.stem: _read_record(record) for record in records}
    shards = tuple(shard for key in sorted(by_number) for shard in by_number[key])
    index = ShardIndex(tuple(columns), columns[0].name, columns[1].name, shards, source.name, not note, note)
    _write_text(path / INDEX_FILE, index.to_json())
    return index


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def check_shards(folder: Path, index: ShardIndex) -> Iterator[tuple[Shard, str]]:
    """Read every shard and compare it with the index.

    Yields:
        Each shard, and what is wrong with it; "" for nothing.
    """
    first = 0
    for shard in index.shards:
        fault = ""
        try:
            check_size(folder, shard)
            with open(folder / shard.file, "rb") as file:
                row = first
                for extent in shard.extents:
                    file.seek(extent.offset)
                    if zlib.crc32(file.read(extent.size_bytes)) != extent.checksum:
                        fault = fault or f"rows {row} to {row + extent.rows - 1} have another checksum"
                    row += extent.rows
            if not fault:
                with pa.memory_map(str(folder / shard.file)) as mapped:
                    if not pa.ipc.open_file(mapped).schema.equals(index.schema):
                        fault = "has other columns than the index says"
        except ShardError as error:
            fault = str(error)
        except (OSError, pa.ArrowInvalid) as error:
            fault = f"can't be read: {error}"
        first += shard.rows
        yield shard, fault
