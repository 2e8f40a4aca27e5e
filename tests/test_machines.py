"""A run on several machines: each is a process of its own, with a runs folder of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import until_step

import labkit
from labkit.engine import checkpoint
from labkit.errors import ConfigError, LabkitError
from labkit.launch import Run
from labkit.runfolder import RunFolder, RunState

FAST = ["name=t", "model=mlp", "launch.is_tracked=false", "cluster=2x2"]
LONG = ["engine.num_epochs=50", "engine.step_padding_s=0.01", "engine.checkpoint_every_steps=5"]
# About 3 s undisturbed.
GROUPS = [
    "sync=hybrid",
    "engine.num_epochs=3",
    "engine.step_padding_s=0.02",
    "engine.checkpoint_every_steps=5",
]
NUM_SAMPLES = 1500
SECRET = "5ec3e7" * 6
WAIT_S = 60.0


def _start(*overrides: str) -> Run:
    return labkit.start(labkit.from_overrides([*FAST, *overrides]))


_NODE_SCRIPT = """
import labkit, os, sys
if __name__ == "__main__":
    os.environ["LABKIT_RUNS"] = sys.argv[1]
    config = labkit.from_overrides(sys.argv[4:])
    run = labkit.start(config, rendezvous=sys.argv[2], node=sys.argv[3])
    print(run.folder.path, flush=True)
    status = run.wait()
    print(status.model_dump_json(), flush=True)
"""


def _node(tmp_path: Path, port: int, node: str, *overrides: str) -> "subprocess.Popen[str]":
    """One machine: a process with a runs folder of its own, as there is no shared disk."""
    script = tmp_path / "node.py"
    script.write_text(_NODE_SCRIPT)
    arguments = [str(tmp_path / node), f"127.0.0.1:{port}", node, *FAST, *overrides]
    return subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_two_machines_without_a_shared_disk_train_as_one(runs: Path, tmp_path: Path) -> None:
    port = _free_port()
    settings = ["engine.max_steps=12", "engine.dtype=float64"]
    nodes = [_node(tmp_path, port, name, *settings) for name in ("node1", "node0")]
    outputs = [process.communicate(timeout=120) for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], outputs
    states = [json.loads(out.splitlines()[-1])["state"] for out, _ in outputs]
    assert states == ["finished", "finished"]
    folders = {
        name: RunFolder(out.splitlines()[0])
        for name, (out, _) in zip(("node1", "node0"), outputs, strict=True)
    }
    assert folders["node0"].ranks() == [0, 1] and folders["node1"].ranks() == [2, 3]
    alone = _start(*settings, "cluster=1x1")
    alone.wait(WAIT_S)
    curves = [[e["values"]["train/loss"] for e in f.history()] for f in (folders["node0"], alone.folder)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


@pytest.mark.slow
def test_a_worker_that_dies_on_another_machine_is_the_root_cause_on_all(runs: Path, tmp_path: Path) -> None:
    port = _free_port()
    nodes = [_node(tmp_path, port, name, *LONG) for name in ("node0", "node1")]
    folders = []
    for name, process in zip(("node0", "node1"), nodes, strict=True):
        assert process.stdout is not None
        folders.append(RunFolder(process.stdout.readline().strip(), node=None if name == "node0" else name))
    until_step(Run(folders[0]), 7)
    os.kill(int(folders[1].alive_file(3).read_text()), signal.SIGKILL)
    for process, folder in zip(nodes, folders, strict=True):
        process.communicate(timeout=60)
        error = folder.read_status().error
        assert error is not None and error.message.startswith("worker 3 on node1 was killed by SIGKILL")
        assert folder.read_status().state is RunState.FAILED


@pytest.mark.slow
def test_another_experiment_on_the_second_machine_is_refused(runs: Path, tmp_path: Path) -> None:
    port = _free_port()
    first = _node(tmp_path, port, "node0", *LONG)
    second = _node(tmp_path, port, "node1", *LONG, "seed=1")
    _, errors = second.communicate(timeout=60)
    assert "all nodes must run the same experiment and code" in errors
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    run = Run(*[RunFolder(p.parent) for p in (tmp_path / "node0").glob("t/*/config.json")])
    assert run.wait(WAIT_S).state is RunState.KILLED


@pytest.mark.parametrize(
    ("rendezvous", "node", "message"),
    [
        ("nonsense", "node0", "rendezvous must be HOST:PORT, got 'nonsense'"),
        ("127.0.0.1:99999", "node0", "rendezvous must be HOST:PORT"),
        ("127.0.0.1:29400", "nod1", "node must be one of node0, node1, got 'nod1'"),
    ],
)
def test_a_bad_rendezvous_is_refused(runs: Path, rendezvous: str, node: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        labkit.start(labkit.from_overrides(FAST), rendezvous=rendezvous, node=node)
    assert list(runs.iterdir()) == []


def test_a_rendezvous_port_in_use_is_refused(runs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"got 127.0.0.1:{port}: Address already in use"):
            labkit.start(labkit.from_overrides(FAST), rendezvous=f"127.0.0.1:{port}", node="node0")


def test_a_first_node_that_never_comes_is_said(runs: Path) -> None:
    config = labkit.from_overrides([*FAST, "launch.start_timeout_s=1"])
    with pytest.raises(LabkitError, match="the first node must answer at 127.0.0.1"):
        labkit.start(config, rendezvous=f"127.0.0.1:{_free_port()}", node="node1")


# --- groups and servers on several machines -------------------------------------------------------------------


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_SECRET", SECRET)


def _machines(tmp_path: Path, *overrides: str) -> list["subprocess.Popen[str]"]:
    port = _free_port()
    return [_node(tmp_path, port, name, *overrides) for name in ("node0", "node1")]


def _folders(machines: list["subprocess.Popen[str]"]) -> list[RunFolder]:
    """The run folders of both, as soon as both have taken over."""
    found = []
    for process, name in zip(machines, (None, "node1"), strict=True):
        assert process.stdout is not None
        found.append(RunFolder(process.stdout.readline().strip(), node=name))
    return found


def _finish(machines: list["subprocess.Popen[str]"]) -> None:
    outputs = [process.communicate(timeout=WAIT_S) for process in machines]
    assert [process.returncode for process in machines] == [0, 0], outputs


def _assert_whole(folder: RunFolder) -> None:
    """The run got to its end, and every sample was applied once in every epoch."""
    status = folder.read_status()
    assert status.state is RunState.FINISHED, (status.state, status.error)
    newest = max(folder.checkpoints_dir.glob("step*.pt"))
    ledger = checkpoint.read_checkpoint(newest.read_bytes(), "it")["ledger"]
    assert ledger["applied_samples"] == 3 * NUM_SAMPLES and ledger["returned"] == []


@pytest.mark.parametrize("groups", [pytest.param("[[0,1],[2,3]]", marks=pytest.mark.slow), "[[0,2],[1,3]]"])
def test_groups_of_two_machines_lose_a_worker_and_train_to_the_end(
    runs: Path, tmp_path: Path, secret: None, groups: str
) -> None:
    machines = _machines(tmp_path, *GROUPS, f"sync.groups={groups}")
    folders = _folders(machines)
    until_step(Run(folders[0]), 7)
    os.kill(int(folders[1].alive_file(3).read_text()), signal.SIGKILL)
    _finish(machines)
    _assert_whole(folders[0])
    assert folders[1].read_status().state is RunState.FINISHED
    said = "group 1 starts again: worker 3 on node1 was killed by SIGKILL"
    assert all(said in folder.supervisor_log.read_text() for folder in folders)
    notes = [event["text"] for event in folders[0].history(0, ("message",))]
    assert "group 1 joined again" in " ".join(notes)


@pytest.mark.slow
def test_a_server_lost_on_the_other_machine_ends_the_run_and_the_same_commands_go_on(
    runs: Path, tmp_path: Path, secret: None
) -> None:
    machines = _machines(tmp_path, *GROUPS)
    folders = _folders(machines)
    until_step(Run(folders[0]), 12)
    os.kill(int(folders[1].alive_file(5).read_text()), signal.SIGKILL)
    for process, folder in zip(machines, folders, strict=True):
        process.communicate(timeout=WAIT_S)
        error = folder.read_status().error
        assert error is not None and "server 1 on node1 was killed by SIGKILL" in error.message
    again = _machines(tmp_path, *GROUPS)
    assert [process.communicate(timeout=WAIT_S) and process.returncode for process in again] == [0, 0]
    _assert_whole(folders[0])
    assert folders[0].read_status().attempt == 2
    assert min(event["step"] for event in folders[0].history() if event["attempt"] == 2) > 1


@pytest.mark.slow
def test_a_group_that_is_given_up_is_given_up_on_all_machines(
    runs: Path, tmp_path: Path, secret: None
) -> None:
    machines = _machines(tmp_path, *GROUPS, "sync.groups=[[0,2],[1,3]]", "sync.max_group_restarts=0")
    folders = _folders(machines)
    until_step(Run(folders[0]), 7)
    os.kill(int(folders[1].alive_file(3).read_text()), signal.SIGKILL)
    _finish(machines)
    _assert_whole(folders[0])
    assert all("group 1 is given up" in folder.supervisor_log.read_text() for folder in folders)


@pytest.mark.parametrize("text", ["", "short"])
def test_servers_on_several_machines_want_a_secret(
    runs: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LABKIT_SECRET", text)
    with pytest.raises(ConfigError, match=f"LABKIT_SECRET must be at least 32 .*, got {len(text)}"):
        labkit.start(labkit.from_overrides([*FAST, *GROUPS]), rendezvous="127.0.0.1:29400", node="node0")
    assert list(runs.iterdir()) == []


@pytest.mark.slow
def test_another_secret_on_the_second_machine_is_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = _free_port()
    monkeypatch.setenv("LABKIT_SECRET", SECRET)
    first = _node(tmp_path, port, "node0", *GROUPS)
    monkeypatch.setenv("LABKIT_SECRET", SECRET[::-1])
    second = _node(tmp_path, port, "node1", *GROUPS)
    _, errors = second.communicate(timeout=WAIT_S)
    assert "LABKIT_SECRET must be the same on all machines" in errors
    assert SECRET not in errors and SECRET[::-1] not in errors
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=WAIT_S)
    run = Run(*[RunFolder(p.parent) for p in (tmp_path / "node0").glob("t/*/config.json")])
    assert run.wait(WAIT_S).state is RunState.KILLED
    assert not any(
        SECRET.encode() in path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()
    )
