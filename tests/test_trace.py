"""A trace holds every part of every step of every worker once, at its time."""

import json
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.config import from_overrides
from labkit.engine.events import EventLog
from labkit.lab.trace import write_trace
from labkit.runfolder import RunFolder


def test_each_part_of_each_step_is_one_block_at_its_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(from_overrides(["cluster=2x1"]))
    for rank in range(2):
        log = EventLog(folder.events_file(rank), 1)
        log.write("start", rank=rank, node=f"node{rank}")
        for step in (1, 2):
            parts = {
                "data_s": 0.001,
                "compute_s": 0.004,
                "node_s": 0.0,
                "communicate_s": 0.002,
                "wait_s": 0.003,
            }
            log.write("step", step=step, samples=5, step_s=0.01, **parts)
        log.close()
    content = json.loads(write_trace(folder).read_text())
    blocks = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert len(blocks) == 2 * 2 * 4  # no block for a part that took no time
    first = [block for block in blocks if block["tid"] == 1 and block["args"]["step"] == 1]
    assert [block["name"] for block in first] == ["data", "compute", "wait", "communicate"]
    for before, after in zip(first, first[1:], strict=False):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=0.5)
    ended_us = first[-1]["ts"] + first[-1]["dur"]
    reported = folder.history(1, ("step",))[0]["t"]
    assert ended_us == pytest.approx(1e6 * reported, abs=200)
    names = {event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert names == {"node0", "node1", "worker 0", "worker 1"}


def test_the_verb_writes_it_and_says_where_to_open_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(runs / "traced" / "0123456789")
    folder.create(from_overrides(["cluster=1x1"]))
    log = EventLog(folder.events_file(0), 1)
    log.write("start", rank=0, node="node0")
    log.write("step", step=1, samples=5, step_s=0.01, compute_s=0.01)
    log.close()
    assert main(["trace", "0123"]) == 0
    said = capsys.readouterr().out
    assert str(folder.path / "trace.json") in said and "ui.perfetto.dev" in said
    assert [e["ph"] for e in json.loads((folder.path / "trace.json").read_text())["traceEvents"]].count(
        "X"
    ) == 1
    assert main(["trace", "none"]) == 2
