"""`labkit shards`, reading speed, the study of input and its notebook, and a benchmark in small."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_notebooks import MAX_KB, _outputs, _papermill

from labkit.bench import input as bench_input
from labkit.cli import main
from labkit.config import ShardsConfig
from labkit.data.shards import WriteOptions, read_index
from labkit.errors import ConfigError
from labkit.lab import input as lab_input
from labkit.lab.input import Result, Setting, Study, Trained
from labkit.lab.input._study import Measured, verdict
from labkit.lab.show import PLOTLY_MIME
from labkit.tasks.read_speed import measure
from labkit.tasks.shard_sources import write_shards

KIB = 1024
PICTURES = "labkit.tasks.pictures:build"
SMALL: dict[str, Any] = {
    "source": PICTURES,
    "source_options": {"num_rows": 600, "shape": [3, 8, 8]},
    "shards": ["64KiB"],
    "extents": ["8KiB", "4KiB"],
    "windows": ["64KiB", "16KiB"],
    "readers": [2],
    "model": "mlp",
    "cluster": "1x2",
    "global_batch_size": 64,
    "max_steps": 6,
    "overrides": {"engine.num_threads": 1, "launch.is_tracked": False},
}


def _run(*words: str) -> int:
    return main(list(words))


def _write(folder: Path, *words: str) -> None:
    options = [
        "--option=num_rows=200",
        "--option=shape=[3, 8, 8]",
        "--extent-size=4KiB",
        "--shard-size=16KiB",
    ]
    assert _run("shards", "write", PICTURES, str(folder), *options, *words) == 0


def test_write_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "s")
    said = capsys.readouterr()
    assert "train: 180 rows in" in said.out and "val: 20 rows" in said.out and "of 200 rows" in said.err
    assert f"labkit run data.format=shards data.path={tmp_path / 's'}" in said.out
    assert _run("shards", "show", str(tmp_path / "s"), "--window", "8KiB", "--batch", "16") == 0
    shown = capsys.readouterr().out
    assert "train: 180 rows" in shown and "input   tensor  uint8  3x8x8" in shown and "classes: 10" in shown
    assert "class imbalance" in shown and "neighbours" in shown
    assert _run("shards", "show", str(tmp_path / "s" / "val"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["val"]["rows"] == 20
    assert _run("shards", "check", str(tmp_path / "s")) == 0
    assert "all good" in capsys.readouterr().out


def test_check_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path)
    index = read_index(tmp_path / "train")
    shard = tmp_path / "train" / index.shards[1].file
    data = bytearray(shard.read_bytes())
    data[index.shards[1].extents[0].offset + 200] ^= 1
    shard.write_bytes(data)
    (tmp_path / "val" / read_index(tmp_path / "val").shards[0].file).unlink()
    assert _run("shards", "check", str(tmp_path), "--json") == 1
    lines = capsys.readouterr().out.strip().splitlines()
    faults = json.loads(lines[-1])["faults"]
    assert [Path(fault["folder"]).name for fault in faults] == ["train", "val"]
    assert "have another checksum" in faults[0]["fault"] and "must be in" in faults[1]["fault"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["write", "nothing_there", "out"], "source must be a folder of images by class"),
        (["write", PICTURES, "out", "--shard-size", "lots"], "--shard-size: size must be a number of bytes"),
        (["write", PICTURES, "out", "--option", "num_rows"], "--option must be KEY=VALUE, got 'num_rows'"),
        (["write", "no_module:build", "out"], "source must be an importable module:function"),
        (
            ["write", "digits", "out", "--val-share", "0.5"],
            "val share must be left out where the data set says",
        ),
        (["show", "."], "folder must hold shards and their index.json"),
        (["check", "."], "folder must hold shards and their index.json"),
    ],
)
def test_bad_input_ends_with_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run("shards", *words) == 2
    assert message in capsys.readouterr().err


def test_the_function_writes_what_a_data_set_says_itself(tmp_path: Path) -> None:
    found = write_shards("digits", tmp_path, WriteOptions(2**16, 2**13, num_processes=1))
    assert {name: index.num_rows for name, index in found.items()} == {"train": 1500, "val": 297}
    stream = ((x, x % 3) for x in range(40))
    found = write_shards(list(stream), tmp_path / "own", WriteOptions(2**16, 2**13, num_processes=1))
    assert found["train"].num_rows == 36 and found["train"].class_counts.keys() == {0, 1, 2}
    with pytest.raises(ConfigError, match="source must be a map-style or iterable data set"):
        write_shards(7, tmp_path / "other")


def test_a_source_that_can_be_read_once_only_is_refused_and_a_stream_is_no_map(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source must be iterable more than once, got generator"):
        write_shards(((x, 0) for x in range(5)), tmp_path)

    class Stream(torch.utils.data.IterableDataset[tuple[int, int]]):
        def __len__(self) -> int:
            return 40

        def __iter__(self) -> Iterator[tuple[int, int]]:
            return ((x, x % 2) for x in range(40))

    assert write_shards(Stream(), tmp_path / "s")["train"].num_rows == 36


def test_a_data_set_with_its_own_parts_goes_on_with_the_part_that_is_missing(tmp_path: Path) -> None:
    options = WriteOptions(2**16, 2**13, num_processes=1)
    write_shards("digits", tmp_path, options)
    shutil.rmtree(tmp_path / "val")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "train").iterdir()}
    assert write_shards("digits", tmp_path, options)["val"].num_rows == 297
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "train").iterdir()} == before


def test_how_fast_shards_are_read(tmp_path: Path) -> None:
    _write(tmp_path)
    found = measure(ShardsConfig(path=str(tmp_path), window=8 * KIB), 16, limit_s=0.3)
    assert min(found.disk, found.cold, found.warm, found.decode) > 0
    assert found.decode > found.cold  # reading is part of that, and not of this


# --- the study -------------------------------------------------------------------------------------------


def test_a_study_changes_one_thing_at_a_time() -> None:
    study = Study.from_parameters({"name": "input", **SMALL})
    own = Setting(64 * KIB, 8 * KIB, 64 * KIB, 2)
    others = (Setting(64 * KIB, 4 * KIB, 64 * KIB, 2), Setting(64 * KIB, 8 * KIB, 16 * KIB, 2))
    assert study.settings == (own, *others)
    data = study.config(own).data
    assert isinstance(data, ShardsConfig) and data.window == 64 * KIB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": []}, "windows must have at least one entry"),
        ({"extents": ["big"]}, "extents: size must be a number of bytes"),
        ({"modell": "mlp"}, "modell"),
        ({"shards": ["4KiB"]}, "shards must be at least as large as extents"),
    ],
)
def test_a_study_refuses_what_makes_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Study.from_parameters({"name": "input", **SMALL, **change})


def _result(disk: float, decode: float, model: float, wait: float) -> Result:
    found = Measured(disk, disk, disk, decode, 1.0, 1.0)
    own = Setting(1, 1, 1, 1)
    return Result({own: found}, {own: Trained(model, wait, 0.5, {0: wait}, "key")})


@pytest.mark.parametrize(
    ("result", "is_met", "words"),
    [
        (_result(100, 1000, 5000, 0.4), False, "The slowest side is the disk.*faster disk"),
        (_result(1000, 100, 5000, 0.4), False, "The slowest side is the decode.*num_decoders"),
        (_result(5000, 9000, 100, 0.01), True, "1.0% of its time.*The slowest side is the model"),
    ],
)
def test_the_verdict_names_the_slowest_side_and_what_to_change(
    result: Result, is_met: bool, words: str
) -> None:
    import re

    found = verdict(result)
    assert found.is_met == is_met and re.search(words, found.text)


def test_the_notebook_runs_small_and_records_its_verdict(runs: Path, tmp_path: Path) -> None:
    code, said, executed = _papermill("06_input.ipynb", runs, tmp_path, yaml=json.dumps(SMALL))
    assert code == 0, said
    assert len(_outputs(executed, PLOTLY_MIME)) == 4
    assert (tmp_path / "out.ipynb").stat().st_size < MAX_KB * 1000
    record = json.loads((runs / "input" / "input.json").read_text())
    assert len(record["trained"]) == 3 and all(0 <= each["wait_share"] < 1 for each in record["trained"])
    assert len(record["measured"]) == 3 and "Training waits for data" in record["verdict"]["text"]
    assert lab_input.__all__


# --- the benchmark ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_input_reads_the_same_rows_on_every_side(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_input, "_NUM_ROWS", 4096)
    monkeypatch.setattr(bench_input, "_SHARD_BYTES", 2**20)
    monkeypatch.setattr(bench_input, "_REPEATS", 1)
    monkeypatch.setattr(bench_input, "_NUM_RANDOM", 512)
    report = bench_input.measure(lambda text: None)
    assert {
        "over_sequential_cold",
        "vs_random_cold",
        "over_memory_warm",
        "wait_share",
    } <= report.figures.keys()
    assert any("disk was" in note for note in report.notes)
    assert not [path for path in runs.iterdir() if path.name.startswith(".input-")]
