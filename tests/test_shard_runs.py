"""Training on shards: the same on any cluster, also after an interruption, and whose reader is slow is said."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import newest_checkpoint, until, until_step

import labkit
from labkit.config import DigitsConfig
from labkit.data.shards import WriteOptions, read_index, write_shards
from labkit.data.shards.sources import MapSource
from labkit.launch import Run
from labkit.runfolder import RunState
from labkit.tasks import load_data

FAST = ["name=t", "model=mlp", "launch.is_tracked=false", "data.format=shards", "data.window=32KiB"]
EXACT = ["engine.dtype=float64", "engine.num_epochs=2"]
UNEQUAL = "cluster={nodes: [{name: a, workers: [{local_batch_size: 40}, {local_batch_size: 0}]}, {name: b, workers: [{local_batch_size: 24}]}]}"  # fmt: skip
WAIT_S = 60.0


class Digits:
    def __init__(self) -> None:
        self._data = load_data(DigitsConfig())

    def __len__(self) -> int:
        return 1500

    def __getitem__(self, row: int) -> tuple[Any, int]:
        inputs, targets = self._data.train.batch([row])
        return inputs[0].numpy(), int(targets[0])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_shards(MapSource("digits", Digits()), folder, WriteOptions(2**16, 2**12, 0.1, 0, 1))
    return folder


def _start(shards: Path, *overrides: str) -> Run:
    return labkit.start(labkit.from_overrides([*FAST, f"data.path={shards}", *overrides]))


def _finish(shards: Path, *overrides: str) -> Run:
    run = _start(shards, *overrides)
    status = run.wait(WAIT_S)
    assert status.state is RunState.FINISHED, status.error
    return run


def _assert_equal(one: Run, other: Run) -> None:
    for name, value in newest_checkpoint(one)["model"].items():
        torch.testing.assert_close(value, newest_checkpoint(other)["model"][name], rtol=1e-9, atol=1e-12)


def _notes(run: Run) -> str:
    return " ".join(event["text"] for event in run.folder.history(0, ("message",)))


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One worker, undisturbed: what all others must come to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("alone")))
        return _finish(shards, *EXACT, "cluster=1x1")


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster=2x2"],
        [UNEQUAL, "sync=hierarchical"],
        ["cluster=1x3", "engine.micro_batch_size=5"],
        [UNEQUAL, "engine.micro_batch_size=7", "sync.batch_norm=synchronized"],
        ["cluster=1x2", "data.buffer=40KiB", "data.num_readers=1"],
        ["cluster=1x2", "data.num_decoders=2", "data.transform=shard_transforms:same"],
        pytest.param(["cluster=1x7"], marks=pytest.mark.slow),
        pytest.param(
            ["cluster=1x2", "sync=hybrid", "sync.groups=[[0,1]]", "sync.staleness_bound=0"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_cluster_trains_on_the_same_batches(
    shards: Path, runs: Path, alone: Run, transforms: None, changes: list[str]
) -> None:
    _assert_equal(_finish(shards, *EXACT, *changes), alone)


@pytest.fixture
def transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard_transforms.py").write_text(
        "import os, time\n"
        "def same(value, target, generator):\n"
        "    return value, target\n"
        "def slow_on_rank_1(value, target, generator):\n"
        "    if generator is not None and 'rank0001' in os.readlink('/proc/self/fd/1'):\n"
        "        time.sleep(0.002)\n"
        "    return value, target\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("other", ["cluster=1x3", UNEQUAL])
def test_a_killed_run_goes_on_with_other_workers_where_it_was(
    shards: Path, runs: Path, alone: Run, other: str
) -> None:
    run = _start(
        shards, *EXACT, "cluster=1x2", "engine.checkpoint_every_steps=5", "engine.step_padding_s=0.02"
    )
    until_step(run, 13)
    os.kill(int(run.folder.alive_file(1).read_text()), signal.SIGKILL)
    assert run.wait(WAIT_S).state is RunState.FAILED
    resumed = labkit.resume(run.folder, [other, "engine.step_padding_s=0.0"])
    assert resumed.wait(WAIT_S).state is RunState.FINISHED
    assert min(e["step"] for e in run.folder.history() if e["attempt"] == 2) in (11, 16)
    _assert_equal(resumed, alone)


def test_shares_that_change_while_training_do_not_change_the_data(
    shards: Path, runs: Path, alone: Run
) -> None:
    throttled = "cluster={nodes: [{name: a, workers: [{throttle: {factor: 3, from_step: 8}}, {}]}]}"
    run = _finish(shards, *EXACT, throttled, "shares.is_rebalanced=true", "engine.step_padding_s=0.02")
    assert len(run.folder.history(0, ("shares",))) >= 1
    _assert_equal(run, alone)


def test_a_slow_reader_is_named_and_not_taken_for_a_slow_device(
    shards: Path, runs: Path, transforms: None
) -> None:
    run = _finish(
        shards, "cluster=1x2", "engine.num_epochs=1", "shares.is_rebalanced=true", "engine.step_padding_s=0.02",
        "data.transform=shard_transforms:slow_on_rank_1",
    )  # fmt: skip
    assert "worker 1 on node0 waited for data" in _notes(run) and "worker 0 on" not in _notes(run)
    assert run.folder.history(0, ("shares",)) == []
    waits = [sum(e["data_s"] for e in run.folder.history(rank, ("step",))) for rank in (0, 1)]
    assert waits[1] > 0.5 > waits[0]


@pytest.fixture
def damaged(shards: Path, tmp_path: Path) -> tuple[Path, int]:
    """The same shards with a flipped byte, and how many rows cannot be read for it."""
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(shards, folder)
    index = read_index(folder / "train")
    extent = index.shards[2].extents[3]
    path = folder / "train" / index.shards[2].file
    data = bytearray(path.read_bytes())
    data[extent.offset + extent.size_bytes // 2] ^= 4
    path.write_bytes(data)
    return folder, extent.rows


def test_damage_fails_the_run_with_shard_and_rows(damaged: tuple[Path, int], runs: Path) -> None:
    run = _start(damaged[0], "cluster=1x2", "engine.num_epochs=1")
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED and status.error is not None
    assert "shard train-000002.arrow, rows" in status.error.message
    assert "must have the checksum of the index" in status.error.message


def test_damage_can_be_left_out_and_is_counted(damaged: tuple[Path, int], runs: Path) -> None:
    run = _finish(damaged[0], "cluster=1x2", "engine.num_epochs=1", "data.on_bad=skip")
    reads = [run.folder.history(rank, ("reads",))[-1] for rank in (0, 1)]
    assert sum(event["bad_rows"] for event in reads) == damaged[1]
    assert "samples that can't be read" in _notes(run)


def test_every_sample_once_under_the_hybrid_too(shards: Path, runs: Path) -> None:
    run = _finish(shards, "cluster=2x2", "sync=hybrid", "engine.num_epochs=2")
    assert run.folder.history()[-1]["samples"] == 2 * 1350


def test_decoders_end_with_their_worker(shards: Path, runs: Path, transforms: None) -> None:
    run = _start(
        shards, "cluster=1x2", "engine.num_epochs=50", "engine.step_padding_s=0.02", "data.num_decoders=2",
        "data.decoders=processes", "data.transform=shard_transforms:same",
    )  # fmt: skip
    until_step(run, 3)
    worker = psutil.Process(int(run.folder.alive_file(1).read_text()))
    decoders = worker.children()
    assert len(decoders) >= 2
    worker.kill()
    assert run.wait(WAIT_S).state is RunState.FAILED
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in decoders), "end of the decoders")
    time.sleep(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.window=lots", "size must be a number of bytes"),
        ("data.path=/nowhere", "folder must hold shards and their index.json, got /nowhere"),
        ("data.transform=shard_transforms:nothing", "data.transform"),
        ("engine.global_batch_size=2000", "must be at most the number of training samples (1350), got 2000"),
    ],
)
def test_bad_input_is_refused_by_name(
    shards: Path, runs: Path, transforms: None, change: str, message: str
) -> None:
    try:
        status = _start(shards, "cluster=1x2", change, "engine.num_epochs=1").wait(WAIT_S)
    except labkit.ConfigError as error:
        assert message in str(error)
    else:
        assert status.error is not None and message in status.error.message
