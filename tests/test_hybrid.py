"""The asynchronous strategies on real processes: what they compute, and what is left of it when some die."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import newest_checkpoint, until, until_step
from torch import Tensor

import labkit
from labkit.cluster.plan import make_plan
from labkit.errors import ConfigError
from labkit.lab.series import read_series
from labkit.launch import Run
from labkit.runfolder import RunFolder, RunState, RunStatus

FAST = ["name=t", "model=mlp", "launch.is_tracked=false", "cluster=2x2", "launch.comm_timeout_s=30"]
EXACT = ["engine.dtype=float64", "engine.max_steps=26"]  # step 24 is the partial batch of the first epoch
# Long enough to be disturbed: about 2 s undisturbed.
LONG = ["engine.num_epochs=3", "engine.step_padding_s=0.02", "engine.checkpoint_every_steps=10"]
NUM_SAMPLES = 1500
WAIT_S = 90.0


def _start(*overrides: str) -> Run:
    return labkit.start(labkit.from_overrides([*FAST, *overrides]))


def _finish(*overrides: str) -> Run:
    run = _start(*overrides)
    _assert_finished(run.wait(WAIT_S))
    return run


def _assert_finished(status: RunStatus) -> None:
    assert status.state is RunState.FINISHED, (status.state, status.error)


def _weights(run: Run) -> dict[str, Tensor]:
    found: dict[str, Tensor] = newest_checkpoint(run)["model"]
    return found


def _events(run: Run, rank: int, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.folder.read_events(rank)[0] if event["kind"] == kind]


def _notes(run: Run) -> list[str]:
    return [event["text"] for event in _events(run, 0, "message")]


def _pid(run: Run, rank: int) -> int:
    """Of a worker, or a server, whose numbers follow those of the workers."""
    return int(run.folder.alive_file(rank).read_text())


def _assert_nothing_left(run: Run) -> None:
    inside = str(run.folder.path.resolve()) + os.sep

    def users() -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and any(
                    f.path.startswith(inside) for f in process.open_files()
                ):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    until(lambda: not users(), "end of the run's processes", 10)


def _assert_whole(run: Run, num_epochs: int = 3) -> None:
    """The run got to its end, and every sample was applied once in every epoch."""
    last = run.folder.history()[-1]
    assert last["samples"] == num_epochs * NUM_SAMPLES
    state = newest_checkpoint(run)["ledger"]
    assert state["applied_samples"] == num_epochs * NUM_SAMPLES and state["returned"] == []
    samples = [event["samples"] for event in run.folder.history()]
    assert samples == sorted(samples)


def _bound_holds(run: Run, bound: int) -> bool:
    counts = _events(run, 0, "staleness")[-1]["counts"]
    return all(int(staleness) <= bound for staleness in counts)


# --- what is computed ----------------------------------------------------------------------------------


UNEQUAL = (
    "cluster={nodes: [{name: a, workers: [{local_batch_size: 40}, {local_batch_size: 0}]}, "
    "{name: b, workers: [{local_batch_size: 24}]}]}"
)
LARS = ["optimizer.name=lars", "optimizer.learning_rate=2", "schedule.name=cosine"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("groups", "is_shared"), [("[[0,1],[2,3]]", True), ("[[0,2],[1,3]]", False)])
def test_workers_of_a_group_on_one_node_read_what_is_pulled_from_shared_memory(
    runs: Path, groups: str, is_shared: bool
) -> None:
    run = _start(*LONG, "sync=hybrid", f"sync.groups={groups}")
    until_step(run, 3)
    maps = [Path(f"/proc/{_pid(run, rank)}/maps").read_text() for rank in range(4)]
    assert ["memfd:labkit" in text for text in maps] == [is_shared] * 4
    run.stop()
    run.wait(WAIT_S)


@pytest.mark.parametrize(
    ("sync", "extra"),
    [
        (["sync=hybrid", "sync.groups=[[0,1,2,3]]"], []),
        (["sync=hybrid"], []),
        (["sync=ssp"], LARS),
        (["sync=hybrid", "sync.groups=[[2],[0,1]]"], [UNEQUAL, "optimizer.weight_decay=0.01"]),
    ],
    ids=["one group", "group per node", "group per worker, LARS", "unequal groups"],
)
def test_with_bound_0_it_is_the_algorithm_of_allreduce(runs: Path, sync: list[str], extra: list[str]) -> None:
    same = _finish(*EXACT, *extra, "sync=allreduce")
    run = _finish(*EXACT, *extra, *sync, "sync.staleness_bound=0")
    for name, value in _weights(same).items():
        torch.testing.assert_close(_weights(run)[name], value, rtol=1e-11, atol=1e-13, msg=name)
    curves = [
        [(e["step"], e["samples"], e["values"]["train/loss"], e["values"]["optim/learning_rate"]) for e in each.folder.history()]
        for each in (same, run)
    ]  # fmt: skip
    assert len(curves[0]) == 26
    for (*place, loss, rate), (*other_place, other_loss, other_rate) in zip(*curves, strict=True):
        assert place == other_place
        assert other_loss == pytest.approx(loss, rel=1e-9) and other_rate == rate
    assert _events(run, 0, "staleness")[-1]["counts"] == {
        "0": 26 * len(make_plan(run.folder.read_config()).groups)
    }


@pytest.mark.parametrize(
    ("sync", "bound"),
    [
        (["sync=hybrid"], 8),
        (["sync=ssp", "sync.staleness_bound=1", "optimizer.learning_rate=0.03"], 1),
        (["sync=async_parameter_server", "optimizer.learning_rate=0.03"], 10**6),
    ],
    ids=["hybrid", "ssp", "async"],
)
def test_asynchronous_training_learns_and_counts_every_sample_once(
    runs: Path, sync: list[str], bound: int
) -> None:
    run = _finish(*sync, "engine.num_epochs=4")
    _assert_whole(run, 4)
    assert json.loads(run.folder.result_file.read_text())["best_val_accuracy"]["value"] > 0.85
    assert _bound_holds(run, bound)
    computed = [event["samples"] for rank in range(4) for event in _events(run, rank, "step")]
    assert sum(computed) == 4 * NUM_SAMPLES
    pushed = _events(run, 0, "staleness")[-1]
    assert sum(pushed["counts"].values()) == len(computed) // len(_groups(run)[0])
    assert pushed["repeated"] == pushed["dropped"] == 0
    steps = [event["step"] for event in run.folder.history(0, ("metrics",))]
    assert steps == sorted(set(steps)) and steps[-1] == 4 * 24
    evaluated = [event["step"] for event in run.folder.history(0, ("eval",))]
    assert evaluated[-1] == 4 * 24 and len(evaluated) >= 4


def test_a_worker_says_how_it_spends_its_time_and_at_which_step(runs: Path) -> None:
    run = _finish("sync=hybrid", "engine.max_steps=20", "engine.step_padding_s=0.01")
    for rank in range(4):
        for event in _events(run, rank, "step"):
            parts = sum(event[f"{part}_s"] for part in ("data", "compute", "node", "communicate", "wait"))
            assert parts == pytest.approx(event["step_s"], abs=2e-3)
            assert 1 <= event["step"] <= 20
        steps = [event["step"] for event in _events(run, rank, "step")]
        assert steps == sorted(steps)


def test_a_worker_that_is_held_up_says_that_it_waits(runs: Path) -> None:
    slow = "cluster={nodes: [{name: a, workers: [{}]}, {name: b, workers: [{speed: 0.25}]}]}"
    run = _finish(
        slow, "sync=ssp", "sync.staleness_bound=1", "engine.max_steps=16", "engine.step_padding_s=0.02",
        "shares.name=even",
    )  # fmt: skip
    spent = {
        part: [sum(event[f"{part}_s"] for event in _events(run, rank, "step")) for rank in range(2)]
        for part in ("compute", "communicate", "wait")
    }
    assert spent["wait"][0] > spent["compute"][0]  # four times as fast, and may be one version ahead
    assert spent["wait"][1] < 0.3 * spent["compute"][1]
    assert spent["communicate"][0] < spent["wait"][0]


# --- lost groups ---------------------------------------------------------------------------------------


def _groups(run: Run) -> tuple[tuple[int, ...], ...]:
    return make_plan(run.folder.read_config()).groups


def _slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGKILL, 3),
        (signal.SIGTERM, 2),
        (signal.SIGSTOP, 3),
        _slow(signal.SIGKILL, 2),
        _slow(signal.SIGTERM, 3),
        _slow(signal.SIGSTOP, 2),
    ],
)
def test_a_lost_group_comes_back_and_no_sample_is_lost(runs: Path, number: signal.Signals, rank: int) -> None:
    run = _start(*LONG, "sync=hybrid", "sync.heartbeat_timeout_s=2")
    until_step(run, 12)
    os.kill(_pid(run, rank), number)
    began_at = time.monotonic()
    until(lambda: any("group 1 starts again" in note for note in _notes(run)), "restart", 5)
    assert number is signal.SIGSTOP or time.monotonic() - began_at < 2.5
    _assert_finished(run.wait(WAIT_S))
    _assert_whole(run)
    assert _bound_holds(run, 8)
    (why,) = [note for note in _notes(run) if "starts again" in note]
    words = {
        signal.SIGKILL: "killed by SIGKILL",
        signal.SIGTERM: "ended by SIGTERM",
        signal.SIGSTOP: "showed no life",
    }
    assert why.startswith(f"group 1 starts again: worker {rank}") and words[number] in why
    assert why in run.folder.supervisor_log.read_text()
    assert any("group 1 joined again" in note for note in _notes(run))
    _assert_nothing_left(run)


def test_the_others_go_on_while_a_group_hangs(runs: Path) -> None:
    run = _start(
        *LONG, "sync=async_parameter_server", "optimizer.learning_rate=0.03", "sync.heartbeat_timeout_s=3"
    )
    until_step(run, 12)
    os.kill(_pid(run, 3), signal.SIGSTOP)
    step = run.folder.history()[-1]["step"]
    until_step(run, step + 10)
    assert not any("starts again" in note for note in _notes(run))
    _assert_finished(run.wait(WAIT_S))
    _assert_whole(run)


@pytest.mark.parametrize("sync", ["sync=hybrid", _slow("sync=ssp")])
def test_a_group_that_may_not_come_back_is_done_without(runs: Path, sync: str) -> None:
    run = _start(
        *LONG,
        sync,
        "optimizer.learning_rate=0.03",
        "sync.max_group_restarts=0",
        "engine.num_epochs=2",
        "sync.heartbeat_timeout_s=2",
    )
    until_step(run, 12)
    os.kill(_pid(run, 3), signal.SIGKILL)
    _assert_finished(run.wait(WAIT_S))
    _assert_whole(run, 2)
    assert any("is given up: worker 3 on node1 was killed by SIGKILL" in note for note in _notes(run))


def test_a_group_that_is_given_up_before_it_came_is_not_waited_for(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymodel.py").write_text(
        "import os, torch\n"
        "def build(info):\n"
        "    if 'rank0003' in os.readlink('/proc/self/fd/1'): raise ValueError('boom')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, info.num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    run = _start(
        "model={name: 'mymodel:build'}", "sync=ssp", "sync.max_group_restarts=0", "engine.num_epochs=3"
    )
    began_at = time.monotonic()
    _assert_finished(run.wait(WAIT_S))
    assert time.monotonic() - began_at < 20
    _assert_whole(run)
    assert "group 3 is given up: worker 3 on node1 failed: ValueError: boom" in _notes(run)


def test_when_all_groups_are_lost_the_run_fails_with_the_root_cause(runs: Path) -> None:
    run = _start(*LONG, "sync=hybrid", "sync.max_group_restarts=0")
    until_step(run, 12)
    os.kill(_pid(run, 3), signal.SIGKILL)
    until(lambda: any("group 1 is given up" in note for note in _notes(run)), "group given up")
    os.kill(_pid(run, 0), signal.SIGKILL)
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED and status.error is not None
    assert (
        status.error.message == "worker 0 on node0 was killed by SIGKILL (out of memory, or killed by hand)"
    )
    assert status.num_restarts == 0  # that is for servers
    _assert_nothing_left(run)


def test_a_fault_of_the_users_model_is_named_and_not_repeated_for_ever(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymodel.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Sequential):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls > 3: raise ValueError('boom')\n"
        "        return super().forward(x)\n"
        "def build(info):\n"
        "    return Model(torch.nn.Flatten(), torch.nn.Linear(64, info.num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    status = _start("model={name: 'mymodel:build'}", "sync=hybrid").wait(WAIT_S)
    assert status.state is RunState.FAILED and status.error is not None
    assert status.error.message.endswith("failed: ValueError: boom")
    assert "mymodel.py" in status.error.traceback
    assert status.num_restarts == 0


# --- lost servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "number"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGKILL),
        _slow(0, signal.SIGTERM),
        _slow(0, signal.SIGSTOP),
        _slow(1, signal.SIGSTOP),
    ],
)
def test_after_a_lost_server_all_go_back_to_the_last_checkpoint(
    runs: Path, index: int, number: signal.Signals
) -> None:
    run = _start(*LONG, "sync=hybrid", "sync.heartbeat_timeout_s=2")
    until_step(run, 15)
    os.kill(_pid(run, 4 + index), number)
    status = run.wait(WAIT_S)
    _assert_finished(status)
    assert status.num_restarts == 1
    _assert_whole(run)
    assert any(note.startswith(f"restart after: server {index} on node{index}") for note in _notes(run))
    _assert_nothing_left(run)


@pytest.mark.parametrize("index", [1, _slow(0)])
def test_a_lost_server_that_may_not_come_back_ends_the_run_and_is_named(runs: Path, index: int) -> None:
    run = _start(*LONG, "sync=hybrid", "sync.max_server_restarts=0")
    until_step(run, 12)
    os.kill(_pid(run, 4 + index), signal.SIGKILL)
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED and status.error is not None
    assert status.error.message.startswith(f"server {index} on node{index} was killed by SIGKILL")
    _assert_nothing_left(run)


# --- what is refused before anything starts ------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["sync.groups=[[0,1],[2]]"], "sync.groups must have each of the 4 workers once, got [0, 1, 2]"),
        (["sync.groups=[[0,1],[1,2,3]]"], "sync.groups must have each worker once, got worker 1 twice"),
        (["sync.groups=[[0,1,2,3],[]]"], "sync.groups must have at least one worker each, got an empty one"),
        (["sync.staleness_bound=-1"], "sync.staleness_bound must be at least 0, got -1"),
        (["launch.launcher=elastic"], "launch.launcher must be 'local' with sync.name 'hybrid'"),
        ([UNEQUAL, "sync.groups=[[0,2],[1]]"], "every group must get at least one sample, got none for [1]"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(runs: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _start("sync=hybrid", *overrides)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(runs.iterdir()) == []


# --- stop and resume -----------------------------------------------------------------------------------


def _stopped(*overrides: str) -> Run:
    run = _start(*LONG, *overrides)
    until_step(run, 15)
    began_at = time.monotonic()
    assert run.stop().state is RunState.KILLED
    assert time.monotonic() - began_at < 6
    _assert_nothing_left(run)
    assert (
        newest_checkpoint(run)["step"] == run.folder.history()[-1]["step"]
    )  # nothing that was applied is lost
    return run


def test_a_stopped_run_goes_on_and_applies_every_sample_once(runs: Path) -> None:
    run = _stopped("sync=ssp", "optimizer.learning_rate=0.03")
    again = labkit.resume(run.folder, ["engine.step_padding_s=0"])
    _assert_finished(again.wait(WAIT_S))
    _assert_whole(again)
    steps = [event["step"] for event in again.folder.history()]
    assert steps == sorted(set(steps)) and steps[-1] == 72
    assert read_series(again).line("train/loss").steps == steps
    assert (
        sum(read_series(again).staleness.values()) >= newest_checkpoint(again)["ledger"]["version"]
    )  # several make one


@pytest.mark.parametrize(("first", "then"), [("hybrid", "allreduce"), ("allreduce", "hybrid")])
def test_a_run_goes_on_under_another_strategy_as_if_nothing_had_been(
    runs: Path, first: str, then: str
) -> None:
    exact = ["engine.dtype=float64", "engine.max_steps=26"]
    bound = {"hybrid": ["sync.staleness_bound=0"], "allreduce": []}
    straight = _finish(*exact, f"sync={first}", *bound[first])
    broken = _finish("engine.dtype=float64", "engine.max_steps=11", f"sync={first}", *bound[first])
    again = labkit.resume(broken.folder, ["engine.max_steps=26", f"sync={then}", *bound[then]])
    _assert_finished(again.wait(WAIT_S))
    for name, value in _weights(straight).items():
        torch.testing.assert_close(_weights(again)[name], value, rtol=1e-11, atol=1e-13, msg=name)


# --- nothing is left -----------------------------------------------------------------------------------


def test_a_killed_supervisor_takes_workers_and_servers_with_it(runs: Path) -> None:
    run = _start(*LONG, "sync=hybrid")
    until_step(run, 12)
    owner = run.status().owner
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    _assert_nothing_left(run)
    assert run.status().state is RunState.LOST
    again = labkit.resume(run.folder, ["engine.step_padding_s=0"])
    _assert_finished(again.wait(WAIT_S))
    _assert_whole(again)


def test_ctrl_c_saves_and_leaves_nothing(runs: Path) -> None:
    command = [sys.executable, "-m", "labkit", "run", *FAST, *LONG, "sync=ssp"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: list(runs.glob("t/*/config.json")), "run")
        run = labkit.attach(RunFolder(next(runs.glob("t/*/config.json")).parent))
        until_step(run, 5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in said
    assert run.status().state is RunState.KILLED
    assert newest_checkpoint(run)["step"] == run.folder.history()[-1]["step"]
    _assert_nothing_left(run)


# --- chance --------------------------------------------------------------------------------------------


def _disturb(run: Run, chance: random.Random, num_processes: int) -> None:
    """Kill workers and servers at random moments, until the run has ended."""
    while True:
        deadline = time.monotonic() + chance.uniform(0.2, 1.5)
        while time.monotonic() < deadline:
            if run.status().state.is_final:
                return
            time.sleep(0.02)
        try:
            os.kill(_pid(run, chance.randrange(num_processes)), chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]))  # fmt: skip
        except (OSError, ValueError):
            continue  # it is not there at the moment


SEEDS = [0, *(_slow(seed) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_dies_whenever_the_run_ends_with_the_truth_and_leaves_nothing(runs: Path, seed: int) -> None:
    chance = random.Random(seed)
    sync = ["sync=hybrid", "sync=ssp", "sync=hybrid", "sync=async_parameter_server"][seed % 4]
    bound = chance.choice([0, 1, 4])
    run = _start(
        *LONG, sync, f"sync.staleness_bound={bound}", "optimizer.learning_rate=0.03",
        "sync.heartbeat_timeout_s=2", "sync.max_group_restarts=4", "sync.max_server_restarts=3",
    )  # fmt: skip
    if run.wait(0.1).state.is_final:
        pytest.fail("it ended at once")
    _disturb(run, chance, 6)
    status = run.wait(WAIT_S)
    if status.state is RunState.FINISHED:
        _assert_whole(run)
        assert _bound_holds(run, bound)
    else:
        assert status.state is RunState.FAILED and status.error is not None
        assert status.error.message.startswith(("server ", "worker ")), status.error.message
    _assert_nothing_left(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_group_that_is_lost_in_the_last_moments_is_not_waited_for(runs: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = _start(
        "engine.num_epochs=1", "engine.step_padding_s=0.01", ["sync=hybrid", "sync=ssp"][seed % 2],
        f"sync.staleness_bound={chance.choice([0, 1, 4])}", "sync.heartbeat_timeout_s=2",
    )  # fmt: skip
    last = chance.choice([20, 22, 23, 24])
    until(lambda: run.status().state.is_final or any(e["step"] >= last for e in run.folder.history()), "end")
    time.sleep(chance.uniform(0, 0.08))
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(
            _pid(run, chance.randrange(4)), chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
        )
    began_at = time.monotonic()
    _assert_finished(run.wait(WAIT_S))
    assert time.monotonic() - began_at < 10
    _assert_whole(run, 1)
    _assert_nothing_left(run)


def test_a_run_that_diverges_ends_and_says_where(runs: Path) -> None:
    run = _start("model=mlp", "cluster=2x2", "sync=hybrid", "optimizer.learning_rate=1e30")
    status = run.wait(WAIT_S)
    assert status.state is RunState.FINISHED, status.error
    assert status.diverged_at is not None
    last = run.folder.history(0, ("metrics",))[-1]
    assert last["values"]["train/loss"] is None and "train/loss" in last["nonfinite"]
