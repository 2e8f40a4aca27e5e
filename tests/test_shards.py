"""Shards: what is written is read, every sample once on any cluster, and damage is named before it is used."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from labkit.config import ShardsConfig, parse_bytes
from labkit.data.decode import Decoders, decode_image
from labkit.data.sampler import FullShuffle, GlobalSampler, SamplerState, own_part
from labkit.data.shards import (
    ExtentReader,
    ShardError,
    ShardIndex,
    WindowShuffle,
    WriteOptions,
    read_index,
    shuffle_quality,
    write_shards,
)
from labkit.data.shards.sources import MapSource, StreamSource, open_path
from labkit.data.shards.write import check_shards
from labkit.engine.feed import Feed
from labkit.errors import ConfigError, LabkitError
from labkit.tasks import load_data
from labkit.tasks.shards import ShardSamples

KIB = 1024


class Numbered:
    """Row i holds the number i, some bytes wide."""

    def __init__(self, count: int, width: int = 64) -> None:
        self._count, self._width = count, width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return np.full(self._width, row % 251, np.uint8), row


def _write(folder: Path, count: int, **options: Any) -> ShardIndex:
    """Numbered rows in small shards, as they stand, none held out."""
    options = {"shard_bytes": 4 * KIB, "extent_bytes": KIB, "val_share": 0.0, "shuffle_seed": None} | options
    source = MapSource(f"numbered {count}", Numbered(count))
    return write_shards(source, folder, WriteOptions(**options, num_processes=1))["train"]


def _read_all(folder: Path) -> list[int]:
    index = read_index(folder)
    with ExtentReader(folder, index, buffer_bytes=8 * KIB) as reader:
        values, _ = reader.take(np.arange(index.num_rows), ("target",))
    return [int(value) for value in values["target"]]


# --- writing ---------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_and_any_arrow_program_reads_it(tmp_path: Path) -> None:
    index = _write(tmp_path, 200)
    assert index.num_rows == 200 and index.is_complete and len(index.shards) == 4
    assert index.class_counts == dict.fromkeys(range(200), 1)
    assert _read_all(tmp_path) == list(range(200))
    with pa.memory_map(str(tmp_path / index.shards[0].file)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column("target").to_pylist() == list(range(len(table)))
    assert table.column("input")[7].as_py() == [7] * 64
    assert all(shard.size_bytes <= 4 * KIB + 3 * KIB for shard in index.shards)  # and what Arrow adds
    assert not (tmp_path / ".writing").exists()


@pytest.mark.parametrize("num_processes", [1, 3])
def test_held_out_rows_are_in_a_folder_of_their_own_and_the_order_is_the_seeds(
    tmp_path: Path, num_processes: int
) -> None:
    source = MapSource("numbered", Numbered(300))
    options = WriteOptions(4 * KIB, KIB, val_share=0.2, shuffle_seed=3, num_processes=num_processes)
    found = write_shards(source, tmp_path, options)
    train, val = _read_all(tmp_path / "train"), _read_all(tmp_path / "val")
    assert (len(train), len(val)) == (240, 60) == (found["train"].num_rows, found["val"].num_rows)
    assert sorted(train + val) == list(range(300)) and train != sorted(train)


def test_rows_of_any_size_that_come_one_by_one(tmp_path: Path) -> None:
    pictures = [_png(size, size) for size in range(1, 40)]
    source = StreamSource("pictures", lambda: ((data, i) for i, data in enumerate(pictures)))
    found = write_shards(source, tmp_path, WriteOptions(2 * KIB, KIB, val_share=0.25))
    assert (found["train"].num_rows, found["val"].num_rows) == (30, 9)
    with ExtentReader(tmp_path / "val", found["val"], buffer_bytes=16 * KIB) as reader:
        values, _ = reader.take(np.array([8, 0, 3]), ("input", "target"))
    assert [int(t) for t in values["target"]] == [35, 3, 15]
    assert values["input"] == [pictures[35], pictures[3], pictures[15]]


def test_images_in_a_folder_for_each_class(tmp_path: Path) -> None:
    for name, count in (("cats", 3), ("dogs", 5)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(_png(8 + number, 10))
    index = write_shards(open_path(tmp_path / "images"), tmp_path / "shards", WriteOptions(val_share=0))[
        "train"
    ]
    assert index.class_counts == {0: 3, 1: 5}
    samples = ShardSamples(tmp_path / "shards", _config(tmp_path, image_size=(6, 6)), 0, is_training=True)
    inputs, targets = samples.batch(range(8))
    assert inputs.shape == (8, 3, 6, 6) and sorted(targets.tolist()) == [0] * 3 + [1] * 5
    assert samples.info().input_shape == (3, 6, 6) and samples.info().num_classes == 2
    samples.close()


@pytest.mark.parametrize("kind", ["csv", "parquet", "folder of parquet"])
def test_tables(tmp_path: Path, kind: str) -> None:
    table = pa.table({"a": [1.0, 2.0, 3.0], "label": [0, 1, 0], "b": [4.0, 5.0, 6.0]})
    path = tmp_path / ("table.csv" if kind == "csv" else "table.parquet")
    if kind == "csv":
        path.write_text("a,label,b\n1,0,4\n2,1,5\n3,0,6\n")
    else:
        pyarrow.parquet.write_table(table, path)
    source = open_path(tmp_path if kind.startswith("folder") else path)
    index = write_shards(source, tmp_path / "shards", WriteOptions(val_share=0))["train"]
    with ExtentReader(tmp_path / "shards", index, buffer_bytes=4 * KIB) as reader:
        values, _ = reader.take(np.arange(3), ("input", "target"))
    assert np.asarray(values["input"]).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert np.asarray(values["target"]).tolist() == [0, 1, 0]


def test_a_folder_that_hugging_face_datasets_saved(tmp_path: Path) -> None:
    table = pa.table({"image": [{"bytes": _png(4, 4), "path": None}] * 3, "label": [2, 0, 1]})
    with pa.OSFile(str(tmp_path / "data-00000-of-00001.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
    (tmp_path / "state.json").write_text(json.dumps(state))
    source = open_path(tmp_path)
    assert source.num_rows == 3
    index = write_shards(source, tmp_path / "shards", WriteOptions(val_share=0, shuffle_seed=None))["train"]
    assert index.class_counts == {0: 1, 1: 1, 2: 1} and index.column("input").kind == "image"


def test_hugging_face_datasets_opens_them(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="pip install datasets, to see that it opens shards")
    index = _write(tmp_path / "shards", 50)
    files = [str(tmp_path / "shards" / shard.file) for shard in index.shards]
    code = (
        "import sys, datasets\n"
        "data = datasets.load_dataset('arrow', data_files=sys.argv[2:], cache_dir=sys.argv[1], split='train')\n"
        "assert list(data['target']) == list(range(50)), data['target']\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), *files]
    subprocess.run(command, env=environment, check=True)


def test_a_killed_writing_goes_on_and_gives_the_same(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\nsys.path.insert(0, sys.argv[2])\nfrom test_shards import *\n"
        "class Slow(Numbered):\n"
        "    def __getitem__(self, row):\n"
        "        time.sleep(0.002)\n"
        "        return super().__getitem__(row)\n"
        "options = WriteOptions(4 * KIB, KIB, 0.0, None, 2)\n"
        "write_shards(MapSource('numbered 1000', Slow(1000)), Path(sys.argv[1]), options)\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "shards"), str(Path(__file__).parent)]
    process = subprocess.Popen(command)
    while len(list((tmp_path / "shards").glob("*.arrow"))) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with pytest.raises(ConfigError, match="folder must hold shards and their index.json"):
        read_index(tmp_path / "shards")  # no index, no data set
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.arrow")}
    _write(tmp_path / "shards", 1000)
    assert _read_all(tmp_path / "shards") == list(range(1000))
    kept = [path for path, stamp in before.items() if path.stat().st_mtime_ns == stamp]
    assert len(kept) >= len(before) - 2  # those under way when it was killed


class Failing(Numbered):
    def __getitem__(self, row: int) -> tuple[Any, int]:
        if row == 1234:
            raise OSError("bad sector")
        return super().__getitem__(row)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_source_that_fails_at_a_row_leaves_what_was_written_usable_and_goes_on(
    tmp_path: Path, kind: str
) -> None:
    def source(data: Numbered) -> Any:
        if kind == "map":
            return MapSource("numbered", data)
        return StreamSource("numbered", lambda: (data[row] for row in range(len(data))))

    options = WriteOptions(4 * KIB, KIB, 0.0, None, 1)
    with pytest.raises(ShardError, match="source must give row 1,234, got OSError: bad sector"):
        write_shards(source(Failing(2000)), tmp_path, options)
    index = read_index(tmp_path)
    assert not index.is_complete and "1,234" in index.note
    found = _read_all(tmp_path)
    assert found[:1234] == list(range(1234)) and 1234 not in found
    write_shards(source(Numbered(2000)), tmp_path, options)
    assert read_index(tmp_path).is_complete and _read_all(tmp_path) == list(range(2000))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: _write(p, 10, shard_bytes=32, extent_bytes=32), "a row must fit into a shard of 32 bytes, got one of 72"),
        (lambda p: _write(p, 10, shard_bytes=KIB, extent_bytes=2 * KIB), "shard size must be at least the extent size"),
        (lambda p: _write(p, 10, val_share=1.0), "val share must be from 0 to below 1, got 1"),
        (lambda p: (_write(p, 10), _write(p, 10)), "folder must be empty"),
        (lambda p: open_path(p / "nothing.txt"), "source must be a folder of images by class"),
        (lambda p: open_path(p), "folder must hold images in a folder for each class"),
        (lambda p: write_shards(MapSource("m", ["no pair"]), p), "each row must be a pair of input and target, got str"),
        (lambda p: write_shards(MapSource("m", [("text", 1)]), p), "must be a number, an array or an encoded image, got the text"),
        (lambda p: write_shards(MapSource("m", [(np.zeros(2), 1), (np.zeros(3), 1)]), p, WriteOptions(val_share=0, shuffle_seed=None)), r"must have the shape \(2,\) of the first row, got \(3,\)"),
        (lambda p: write_shards(StreamSource("s", list), p), "source must have at least one row"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(tmp_path: Path, act: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        act(tmp_path)


def test_tables_of_mixed_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,0\n")
    (tmp_path / "b.csv").write_text("x,y,label\n1,2,0\n")
    with pytest.raises(ConfigError, match="all files must have the same columns"):
        open_path(tmp_path)
    with pytest.raises(ConfigError, match="column must be one of x, label, got 'z'"):
        open_path(tmp_path / "a.csv", ["z"])


def test_a_target_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder must be writable, got"):
        _write(tmp_path / "file" / "inside", 10)


def test_a_writing_that_goes_on_cuts_where_it_did_though_a_sampled_row_has_grown(tmp_path: Path) -> None:
    pictures = [_png(8, 8) for _ in range(60)]

    class Breaks:
        def __init__(self, at: int) -> None:
            self.at = at

        def __len__(self) -> int:
            return len(pictures)

        def __getitem__(self, row: int) -> tuple[bytes, int]:
            if row == self.at:
                raise OSError("gone")
            return pictures[row], row

    options = WriteOptions(2 * KIB, KIB, 0.0, None, 1)
    with pytest.raises(ShardError, match="row 40"):
        write_shards(MapSource("pictures", Breaks(40)), tmp_path, options)
    pictures[0] = pictures[0] + bytes(900)
    write_shards(MapSource("pictures", Breaks(-1)), tmp_path, options)
    assert _read_all(tmp_path) == list(range(60))


@pytest.mark.parametrize(("share", "held"), [(0.1, 10), (0.4, 40), (0.7, 70)])
def test_the_share_held_out_of_a_stream_is_what_was_asked_for(
    tmp_path: Path, share: float, held: int
) -> None:
    data = Numbered(100)
    source = StreamSource("numbered", lambda: (data[row] for row in range(100)))
    found = write_shards(source, tmp_path, WriteOptions(4 * KIB, KIB, share))
    assert (found["train"].num_rows, found["val"].num_rows) == (100 - held, held)
    few = StreamSource("few", lambda: (data[row] for row in range(3)))
    with pytest.raises(ConfigError, match="val share must leave rows in both parts of 3 rows"):
        write_shards(few, tmp_path / "few", WriteOptions(4 * KIB, KIB, 0.1))


def test_a_row_that_does_not_fit_leaves_what_was_written_usable(tmp_path: Path) -> None:
    rows: list[Any] = [(np.zeros(8, np.uint8), 0)] * 9 + [(np.zeros(9, np.uint8), 0)]
    with pytest.raises(ConfigError, match="row 9 of the source: input must have the shape"):
        write_shards(MapSource("m", rows), tmp_path, WriteOptions(4 * KIB, KIB, 0.0, None, 1))
    assert read_index(tmp_path).num_rows == 9
    with pytest.raises(ShardError, match="source must give row 1, got FileNotFoundError"):
        missing = [(b"x", 0)] + [None]  # among the rows whose size is looked at

        class Sampled(MapSource):
            def row(self, number: int) -> Any:
                if missing[number] is None:
                    raise FileNotFoundError("link")
                return missing[number]

        write_shards(Sampled("m", missing), tmp_path / "other", WriteOptions(4 * KIB, KIB, 0.0, None, 1))


def test_targets_of_any_shape_tell_how_many_classes_there_are(tmp_path: Path) -> None:
    rows = [(np.zeros(4, np.int64), np.full(4, row % 7)) for row in range(50)]
    write_shards(MapSource("tokens", rows), tmp_path, WriteOptions(4 * KIB, KIB))
    data = load_data(_config(tmp_path))
    assert data.info.num_classes == 7 and data.info.input_shape == (4,)
    data.close()


def test_a_column_of_text_among_several_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,name,label\n1,ann,0\n")
    with pytest.raises(ConfigError, match="column 'name' must hold numbers .*, got 'ann'"):
        open_path(tmp_path / "a.csv")


# --- the order -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(1, 50),
    st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    st.integers(1, 2000),
)
def test_every_row_once_per_epoch_for_any_extents_workers_and_shares(
    extent_rows: list[int], batch: int, sizes: list[int], window_bytes: int
) -> None:
    order = WindowShuffle(extent_rows, [10 * rows for rows in extent_rows], window_bytes, 1)
    total = sum(extent_rows)
    for epoch in (0, 1):
        sampler = GlobalSampler(order, batch)
        state, seen, steps = SamplerState(epoch, 0), [], 0
        while state.epoch == epoch:
            rows, state = sampler.batch(state)
            parts = [own_part(rows, sizes, rank) for rank in range(len(sizes))]
            assert np.concatenate(parts).tolist() == rows.tolist()
            seen += rows.tolist()
            steps += 1
        assert sorted(seen) == list(range(total)) and steps == -(-total // batch)


def test_the_order_is_of_seed_and_epoch_alone_and_positions_can_be_asked_for_in_any_order() -> None:
    make = lambda seed: WindowShuffle([10] * 20, [100] * 20, 300, seed)  # noqa: E731
    whole = make(0).slice(1, 0, 200).tolist()
    other = make(0)
    assert other.slice(1, 150, 200).tolist() == whole[150:]
    assert other.slice(1, 0, 25).tolist() == whole[:25]
    assert whole != make(0).slice(0, 0, 200).tolist() and whole != make(1).slice(1, 0, 200).tolist()


def test_a_window_holds_whole_extents_up_to_its_size() -> None:
    order = WindowShuffle([10] * 20, [100] * 20, 399, 0)  # three extents a window
    rows = order.slice(1, 0, 200)
    for begin in range(0, 180, 30):
        assert len(set((rows[begin : begin + 30] // 10).tolist())) == 3


def test_the_first_windows_of_a_run_are_small_so_that_it_begins_soon() -> None:
    order = WindowShuffle([10] * 64, [100] * 64, 1600, 0)  # a sixteenth is one extent
    rows = order.slice(0, 0, 640) // 10
    found = [
        len(set(rows[10 * start : 10 * stop].tolist())) for start, stop in ((0, 1), (1, 3), (3, 7), (7, 15))
    ]
    assert found == [1, 2, 4, 8]


def test_workers_of_a_window_read_extents_of_their_own_in_proportion_to_their_shares() -> None:
    order = WindowShuffle([64] * 64, [2**20] * 64, 32 * 2**20, 0)
    sampler, state = GlobalSampler(order, 256), SamplerState(1, 0)
    read: list[set[int]] = [set(), set()]
    while state.epoch == 1:
        rows, state = sampler.batch(state)
        for rank in range(2):
            read[rank] |= set((own_part(rows, [3, 1], rank) // 64).tolist())
    assert len(read[0] & read[1]) <= 0.25 * 64  # those at the border of each window
    assert 2.0 < len(read[0]) / len(read[1]) < 4.0


def test_a_larger_window_mixes_better_and_a_full_shuffle_best() -> None:
    targets = np.repeat(np.arange(10), 100)  # rows lie by class
    extents = ([20] * 50, [20] * 50)
    small, large = (shuffle_quality(WindowShuffle(*extents, size, 0), 50, targets) for size in (40, 400))
    full = shuffle_quality(FullShuffle(1000, 0), 50, targets)
    assert small.class_imbalance and large.class_imbalance and full.class_imbalance
    assert small.class_imbalance > 2 * large.class_imbalance > full.class_imbalance
    assert full.class_imbalance == pytest.approx(1, abs=0.2) and full.neighbours == pytest.approx(1, abs=0.4)
    assert small.neighbours > 5 and abs(full.rank_correlation) < 0.1
    ordered = shuffle_quality(WindowShuffle([1000], [1000], 1, 0), 50, targets)  # one extent: drawn in full
    assert ordered.class_imbalance == pytest.approx(1, abs=0.2)


# --- reading ---------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 499), min_size=1, max_size=80),
    st.integers(2, 9),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_any_rows_in_any_order_with_any_buffer_and_any_forecast(
    numbered: tuple[Path, ShardIndex], rows: list[int], slots: int, ahead: list[int]
) -> None:
    folder, index = numbered
    largest = -(-int(index.extent_bytes.max()) // 64) * 64
    with ExtentReader(folder, index, buffer_bytes=slots * largest) as reader:
        reader.ahead(extent % len(index.extents) for extent in ahead)
        values, is_good = reader.take(np.array(rows), ("input", "target"))
    assert is_good is None and np.asarray(values["target"]).tolist() == rows
    assert np.asarray(values["input"])[:, 5].tolist() == [row % 251 for row in rows]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ShardIndex]:
    folder = tmp_path_factory.mktemp("numbered")
    return folder, _write(folder, 500)


def test_what_is_read_ahead_is_there_and_read_once(numbered: tuple[Path, ShardIndex]) -> None:
    folder, index = numbered
    with ExtentReader(folder, index, buffer_bytes=2**20) as reader:
        reader.ahead(range(10))
        _until(lambda: reader.counts.requests == 10)
        rows = np.arange(int(index.extent_starts[10]))
        for start in range(0, len(rows), 16):
            reader.take(rows[start : start + 16], ("target",))
        assert (reader.counts.requests, reader.counts.late, reader.counts.repeats) == (10, 0, 0)
        assert reader.counts.bytes_read == int(index.extent_bytes[:10].sum())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    stat = path.stat()
    path.write_bytes(bytes(data))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _damaged(folder: Path, how: str) -> ShardIndex:
    index = _write(folder, 500)
    path = folder / index.shards[1].file
    if how == "flipped":
        _flip(path, index.shards[1].extents[2].offset + 300)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "missing":
        path.unlink()
    return index


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", r"shard train-000001.arrow must have \d+ bytes, got \d+: it was cut or changed"),
        ("missing", "shard train-000001.arrow must be in .*No such file"),
    ],
)
def test_a_shard_that_is_not_whole_is_found_out_before_anything_starts(
    tmp_path: Path, how: str, message: str
) -> None:
    _damaged(tmp_path, how)
    with pytest.raises(ShardError, match=message):
        read_index(tmp_path)


def test_a_flipped_byte_is_named_with_its_rows_and_never_used(tmp_path: Path) -> None:
    index = _damaged(tmp_path, "flipped")
    first = index.shards[0].rows + sum(extent.rows for extent in index.shards[1].extents[:2])
    rows = index.shards[1].extents[2].rows
    named = f"shard train-000001.arrow, rows {first} to {first + rows - 1}, must have the checksum"
    with ExtentReader(tmp_path, index, buffer_bytes=2**20) as reader:
        reader.take(np.arange(first), ("target",))
        with pytest.raises(ShardError, match=named):
            reader.take(np.array([3, first + 1]), ("target",))
    with ExtentReader(tmp_path, index, buffer_bytes=2**20, is_bad_skipped=True) as reader:
        values, is_good = reader.take(np.array([3, first + 1, 4]), ("input", "target"))
        assert np.asarray(values["target"]).tolist() == [3, 4]
        assert is_good is not None and is_good.tolist() == [True, False, True]
        assert reader.counts.bad_rows == 1
    faults = {shard.file: fault for shard, fault in check_shards(tmp_path, index) if fault}
    assert faults == {"train-000001.arrow": f"rows {first} to {first + rows - 1} have another checksum"}


@pytest.mark.parametrize("how", ["cut", "written", "missing"])
def test_a_shard_that_changes_while_it_is_read_is_named(tmp_path: Path, how: str) -> None:
    index = _write(tmp_path, 500)
    with ExtentReader(tmp_path, index, buffer_bytes=2**20) as reader:
        reader.take(np.array([0]), ("target",))
        path = tmp_path / index.shards[0].file
        if how == "cut":
            os.truncate(path, 1500)
        elif how == "written":
            _flip(path, 900)
            os.utime(path)
        else:
            path.unlink()
        with pytest.raises(ShardError, match=r"shard train-000000.arrow, rows \d+ to \d+, must"):
            reader.take(np.array([index.shards[0].rows - 1]), ("target",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"version": 99}, "must be of version 1 of 'labkit shards', got version 99"),
        (lambda c: c | {"format": "mds"}, "got version 1 of 'mds'"),
        (lambda c: {"shards": []}, "must be the index of shards, got something else"),
        (lambda c: c | {"shards": [{"file": "x"}]}, "must be a whole index of shards"),
        (lambda c: c | {"shards": []}, "shards must hold at least one row, got none"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    _write(tmp_path, 10)
    path = tmp_path / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match=message):
        read_index(tmp_path)


def test_empty_extents_and_shards_are_passed_over(tmp_path: Path) -> None:
    index = _write(tmp_path, 100)
    schema = index.schema
    with pa.OSFile(str(tmp_path / "empty.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as sink:
        sink.write_batch(pa.record_batch([pa.array([], field.type) for field in schema], schema=schema))
    content = json.loads((tmp_path / "index.json").read_text())
    size = (tmp_path / "empty.arrow").stat().st_size
    empty = {"file": "empty.arrow", "size_bytes": size, "extents": [[232, 8, 0, 0]], "class_counts": {}}
    content["shards"] = [empty, {**empty, "extents": []}, *content["shards"]]
    (tmp_path / "index.json").write_text(json.dumps(content))
    assert _read_all(tmp_path) == list(range(100))


def test_nothing_is_left_after_a_break_or_an_error(numbered: tuple[Path, ShardIndex]) -> None:
    folder, index = numbered
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for error in (None, ValueError("mine")):
        try:
            with ExtentReader(folder, index, buffer_bytes=2**20) as reader:
                reader.ahead(range(len(index.extents)))
                reader.take(np.array([1]), ("target",))
                if error:
                    raise error
        except ValueError:
            pass
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux counts it")
def test_data_ten_times_as_large_as_a_memory_limit_is_read_within_it(tmp_path: Path) -> None:
    count, width, limit = 8192, 16 * KIB, 12 * 2**20  # 128 MiB of data
    options = WriteOptions(16 * 2**20, 2**18, 0.0, None, 2)
    write_shards(MapSource("wide", Numbered(count, width)), tmp_path / "shards", options)
    script = (
        "import sys, resource, numpy as np\n"
        "from pathlib import Path\n"
        "from labkit.data.shards import ExtentReader, read_index, WindowShuffle\n"
        "folder = Path(sys.argv[1]); index = read_index(folder)\n"
        "order = WindowShuffle([e.rows for _, e in index.extents], index.extent_bytes.tolist(), 2**21, 0)\n"
        "def status(name):\n"
        "    return int(next(l for l in open('/proc/self/status') if l.startswith(name)).split()[1]) * 1024\n"
        "with ExtentReader(folder, index, buffer_bytes=6 * 2**20) as reader:\n"
        "    reader.take(np.arange(2), ('input', 'target'))\n"
        "    resident = status('VmRSS')\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (status('VmData') + int(sys.argv[2]),) * 2)\n"
        "    for start in range(0, index.num_rows, 32):\n"
        "        rows = order.slice(1, start, start + 32)\n"
        "        values, _ = reader.take(rows, ('input', 'target'))\n"
        "        assert (values['input'][:, 9] == rows % 251).all()\n"
        "    print(status('VmHWM') - resident)\n"
        "try:\n"
        "    np.ones(16 * 2**20, np.uint8)\n"
        "except MemoryError:\n"
        "    sys.exit(0)\n"
        "sys.exit('the limit did not hold')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "shards"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < limit


def test_more_readers_than_rows_and_a_window_larger_than_the_data(tmp_path: Path) -> None:
    _write(tmp_path / "train", 3)
    _write(tmp_path / "val", 2)
    config = _config(tmp_path, num_readers=64, window="1GiB")
    data = load_data(config)
    order = data.train.order(0)  # type: ignore[attr-defined]
    assert sorted(order.slice(0, 0, 3).tolist()) == [0, 1, 2]
    assert sorted(data.train.batch([2, 0, 1])[1].tolist()) == [0, 1, 2]
    data.close()


@pytest.mark.parametrize("how", ["break", "damage", "transform"])
def test_a_feed_that_ends_early_leaves_nothing(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "train"
    _damaged(folder, "flipped" if how == "damage" else "")
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    samples = ShardSamples(folder, _config(tmp_path, window=8 * KIB), 0, is_training=True)
    if how == "transform":
        samples._transform = lambda value, target, generator: 1 / 0  # type: ignore[assignment]
    rows = [samples.order(0).slice(0, start, start + 50) for start in range(0, 500, 50)]
    feed = Feed(samples, ((0, part) for part in rows), torch.device("cpu"), torch.float32)
    try:
        for part in rows[:2] if how == "break" else rows:
            taken = feed.take(part)
            assert taken is not None and taken[0][1].tolist() == part.tolist()
        assert how == "break"
    except LabkitError as error:
        assert ("checksum" if how == "damage" else "data.transform failed") in str(error)
    feed.close()
    samples.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_no_rows_are_an_empty_batch_of_the_right_form(tmp_path: Path) -> None:
    _write(tmp_path / "train", 20)
    samples = ShardSamples(tmp_path / "train", _config(tmp_path), 0, is_training=True)
    inputs, targets = samples.batch([])
    assert inputs.shape == (0, 64) and targets.shape == (0,) and inputs.dtype == torch.uint8
    samples.close()


def test_one_large_row_does_not_cost_the_buffer_its_length(tmp_path: Path) -> None:
    rows = [(bytes(100), 0)] * 400 + [(bytes(100_000), 1)]
    write_shards(MapSource("m", rows), tmp_path, WriteOptions(200 * KIB, KIB, 0.0, None, 1))
    index = read_index(tmp_path)
    with ExtentReader(tmp_path, index, buffer_bytes=256 * KIB) as reader:
        assert reader.num_slots == len(index.extents)


def test_images_that_can_not_be_decoded_are_named_or_left_out(tmp_path: Path) -> None:
    rows = [(b"no image" if row in (0, 5) else _png(4, 4), row) for row in range(12)]
    write_shards(MapSource("m", rows), tmp_path / "train", WriteOptions(4 * KIB, KIB, 0.0, None, 1))
    failing = ShardSamples(tmp_path / "train", _config(tmp_path, image_size=(4, 4)), 0, is_training=True)
    with pytest.raises(ConfigError, match="row 5: image must be one that Pillow reads"):
        failing.batch([4, 5])
    failing.close()
    config = _config(tmp_path, image_size=(4, 4), on_bad="skip")
    skipping = ShardSamples(tmp_path / "train", config, 0, is_training=True)
    with pytest.raises(ConfigError, match="rows that can be read"):  # the first of its extent is looked at
        skipping.info()
    assert skipping.batch([4, 5, 6])[1].tolist() == [4, 6]
    assert skipping.counts.bad_rows == 1
    skipping.close()


def test_a_buffer_that_is_too_small_is_said_by_the_feed(tmp_path: Path) -> None:
    _write(tmp_path / "train", 100)
    config = _config(tmp_path, window=512, buffer=600)
    samples = ShardSamples(tmp_path / "train", config, 0, is_training=True)
    rows = samples.order(0).slice(0, 0, 10)
    feed = Feed(samples, iter([(0, rows)]), torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="data.buffer must hold two extents"):
        feed.take(rows)
    feed.close()


def test_two_threads_that_open_at_once_get_one_reader(tmp_path: Path) -> None:
    _write(tmp_path / "train", 100)
    before = threading.active_count()
    for _ in range(20):
        samples = ShardSamples(tmp_path / "train", _config(tmp_path), 0, is_training=True)
        threads = [threading.Thread(target=samples._open) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        samples.close()
    assert threading.active_count() == before


def test_a_feed_looks_ahead_no_further_than_it_must(tmp_path: Path) -> None:
    _write(tmp_path / "train", 40)
    samples = ShardSamples(tmp_path / "train", _config(tmp_path), 0, is_training=True)
    drawn = [0]

    def pieces() -> Iterator[tuple[int, Any]]:
        while True:
            drawn[0] += 1
            yield 0, np.array([drawn[0] % 40])

    feed = Feed(samples, pieces(), torch.device("cpu"), torch.float32)
    for number in range(1, 30):
        assert feed.take(np.array([number % 40])) is not None
    feed.close()
    samples.close()
    assert drawn[0] < 2000


# --- decoding --------------------------------------------------------------------------------------------


def _png(height: int, width: int, colour: tuple[int, int, int] = (10, 20, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def test_an_image_is_brought_to_its_size() -> None:
    assert decode_image(_png(7, 5), None).shape == (3, 7, 5)
    found = decode_image(_png(70, 50), (20, 30))
    assert found.shape == (3, 20, 30) and found[:, 3, 4].tolist() == [10, 20, 30]
    with pytest.raises(ConfigError, match="image must be one that Pillow reads"):
        decode_image(b"no image", None)


def jitter(value: Any, target: Any, generator: np.random.Generator | None) -> tuple[Any, Any]:
    """A transform as a user writes one."""
    return value + (generator.integers(1000) if generator is not None else 0), target


@pytest.mark.parametrize(("count", "kind"), [(0, "threads"), (3, "threads"), (2, "processes")])
def test_what_is_random_depends_on_the_row_and_the_epoch_not_on_who_decodes_it(count: int, kind: Any) -> None:
    decoders = Decoders(5, is_image=False, transform=jitter, count=count, kind=kind)
    try:
        rows, zeros = [4, 9, 2, 7], np.zeros(4)
        first, _ = decoders(1, rows, zeros, zeros)
        again, _ = decoders(1, rows[::-1], zeros, zeros)
        assert first.tolist() == again.tolist()[::-1] and len(set(first.tolist())) == 4
        assert decoders(2, rows, zeros, zeros)[0].tolist() != first.tolist()
        assert decoders(None, rows, zeros, zeros)[0].tolist() == [0] * 4
        alone = Decoders(5, is_image=False, transform=jitter)
        assert alone(1, rows, zeros, zeros)[0].tolist() == first.tolist()
    finally:
        decoders.close()


def test_a_transform_that_fails_names_the_row() -> None:
    def fail(value: Any, target: Any, generator: object) -> Any:
        raise ValueError("too dark")

    with pytest.raises(LabkitError, match="data.transform failed at row 9: ValueError: too dark"):
        Decoders(0, is_image=False, transform=fail)(0, [9], np.zeros(1), np.zeros(1))


def test_images_of_several_sizes_without_one_are_refused() -> None:
    decoders = Decoders(0, is_image=True)
    with pytest.raises(ConfigError, match="inputs of a batch must have one shape"):
        decoders(0, [0, 1], [_png(4, 4), _png(5, 4)], np.zeros(2))


# --- as the data of an experiment --------------------------------------------------------------------------


def _config(folder: Path, **settings: Any) -> ShardsConfig:
    return ShardsConfig(path=str(folder), **settings)


def test_the_data_of_an_experiment(tmp_path: Path) -> None:
    source = MapSource("numbered", Numbered(100))
    write_shards(source, tmp_path, WriteOptions(4 * KIB, KIB))
    data = load_data(_config(tmp_path))
    assert (len(data.train), len(data.val)) == (90, 10)
    assert data.info.input_shape == (64,) and data.info.num_classes == 100
    inputs, targets = data.train.batch([3, 1])
    assert inputs[:, 0].tolist() == targets.tolist()
    for samples in (data.train, data.val):
        assert isinstance(samples, ShardSamples)
        samples.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: load_data(_config(p)), "folder must hold shards and their index.json, got"),
        (lambda p: (_write(p, 10), load_data(_config(p))), "data.val_path must be given where data.path has no train"),
        (lambda p: (_write(p / "train", 10), read_index(p)), "It has train inside: name one of them"),
        (lambda p: _config(p, window=100, buffer=99), r"data.buffer must hold data.window \(100 bytes\), got 99"),
        (lambda p: _config(p, window="lots"), "size must be a number of bytes or one such as 64 MiB"),
    ],
)  # fmt: skip
def test_data_that_is_not_there_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64 MiB", 64 * 2**20),
        ("20 GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        ("1.5k", 1500),
        (7, 7),
        ("12", 12),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["lots", "20 XB", "-3", ""])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size must be a number of bytes"):
        parse_bytes(text)
