"""Runs whose activations move: the same weights under every strategy, and budgets that cannot be met."""

from pathlib import Path

import pytest
import torch
from support import newest_checkpoint

import labkit
from labkit.errors import ConfigError
from labkit.launch import Run
from labkit.runfolder import RunState

FAST = [
    "name=t",
    "model=convnet",
    "launch.is_tracked=false",
    "engine.max_steps=6",
    "cluster=2x2",
    "engine.global_batch_size=512",
]
MOVED = ["memory.policy=offload", "memory.host_budget=64MiB", "memory.window=64KiB"]
WAIT_S = 60.0


def _finish(*overrides: str) -> Run:
    run = labkit.start(labkit.from_overrides([*FAST, *overrides]))
    status = run.wait(WAIT_S)
    assert status.state is RunState.FINISHED, status.error
    return run


@pytest.mark.parametrize(
    "sync",
    [
        ["sync=allreduce"],
        ["sync=hierarchical", "engine.micro_batch_size=64"],
        pytest.param(["sync=parameter_server"], marks=pytest.mark.slow),
        pytest.param(["sync=local_sgd"], marks=pytest.mark.slow),
        pytest.param(
            ["sync=hybrid", "sync.groups=[[0,1,2,3]]", "sync.staleness_bound=0"], marks=pytest.mark.slow
        ),
    ],
    ids=lambda sync: sync[0],
)
def test_every_strategy_comes_to_the_same_bits(runs: Path, sync: list[str]) -> None:
    plain, moved = _finish(*sync), _finish(*sync, *MOVED)
    for name, value in newest_checkpoint(plain)["model"].items():
        assert torch.equal(value, newest_checkpoint(moved)["model"][name]), name
    (report,) = moved.folder.history(0, ("memory",))
    assert report["moved_bytes"] > 0 and report["num_replans"] == 0


@pytest.mark.parametrize("sync", ["allreduce", pytest.param("hierarchical", marks=pytest.mark.slow)])
def test_blocks_that_are_computed_again_come_to_the_same_bits(runs: Path, sync: str) -> None:
    small = ["model=gpt", "data=text", "data.max_bytes=200000", "engine.global_batch_size=16", f"sync={sync}"]
    plain, again = _finish(*small), _finish(*small, "memory.policy=recompute")
    for name, value in newest_checkpoint(plain)["model"].items():
        assert torch.equal(value, newest_checkpoint(again)["model"][name]), name
    (report,) = again.folder.history(0, ("memory",))
    assert report["num_recomputed"] > 0 and report["moved_bytes"] == 0


def test_a_tier_on_disk_and_a_budget(runs: Path, tmp_path: Path) -> None:
    run = _finish("cluster=1x1", "memory.device_budget=6MB", f"memory.tier=mmap:{tmp_path}")
    (report,) = run.folder.history(0, ("memory",))
    assert report["moved_bytes"] > 0 and list(tmp_path.glob("labkit-*")) == []
    assert report["values"]["memory/moved_mib"] > 0 and report["values"]["memory/peak_mib"] > 0
    assert report["measured_peak_bytes"] == pytest.approx(report["predicted_peak_bytes"], rel=0.15)
    notes = " ".join(event["text"] for event in run.folder.history(0, ("message",)))
    assert "memory of worker 0 on node0" in notes and "a step saves" in notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["memory.device_budget=1000"], r"memory.device_budget must be above the \d+ bytes of parameters"),
        (["memory.device_budget=2MB", "memory.host_budget=4KiB"], "memory.device_budget must be at least"),
        (["memory.device_budget=9MB", "memory.tier=mmap:/nowhere"], "memory.tier must be a folder"),
        (["memory.policy=offload"], "memory.host_budget must be given with policy 'offload'"),
        (["memory.device_budget=lots"], "size must be a number of bytes"),
        (["memory.tier=floppy"], "memory.tier must match the pattern"),
    ],
)
def test_what_can_not_be_is_said(runs: Path, changes: list[str], message: str) -> None:
    import re

    try:
        status = labkit.start(labkit.from_overrides([*FAST, "cluster=1x1", *changes])).wait(WAIT_S)
    except ConfigError as error:
        assert re.search(message, str(error))
    else:
        assert status.state is RunState.FAILED and status.error is not None
        assert re.search(message, status.error.message)
