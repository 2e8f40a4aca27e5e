"""A run's state is true whatever dies, the root cause comes first, nothing is left behind, and resume works."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import need, until, until_step

import labkit
from labkit.errors import ConfigError
from labkit.launch import Run
from labkit.runfolder import RunFolder, RunState

FAST = ["name=t", "model=mlp", "launch.is_tracked=false", "cluster=2x2"]
LONG = ["engine.num_epochs=50", "engine.step_padding_s=0.01", "engine.checkpoint_every_steps=5"]
WAIT_S = 60.0


def _start(*overrides: str, **how: bool) -> Run:
    return labkit.start(labkit.from_overrides([*FAST, *overrides]), **how)


def _long_run(*overrides: str) -> Run:
    run = _start(*LONG, *overrides)
    until_step(run, 7)
    return run


def _pids(run: Run) -> list[int]:
    return [worker.pid for worker in run.status().workers if worker.pid]


def _assert_gone(pids: list[int]) -> None:
    until(lambda: not any(_is_running(pid) for pid in pids), "end of the workers", 10)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _resume_to(run: Run, step: int) -> None:
    """The run goes on from its checkpoint to an end: every step once, in order."""
    again = labkit.resume(run.folder, [f"engine.max_steps={step}"])
    status = again.wait(WAIT_S)
    assert status.state is RunState.FINISHED, status.error
    assert status.attempt == 2
    assert [event["step"] for event in again.folder.history()] == list(range(1, step + 1))
    starts = again.folder.history(0, ("start",))
    assert starts[-1]["start_step"] >= 5


# --- the contract of every launcher --------------------------------------------------------------------

LAUNCHERS = ["local", pytest.param("elastic", marks=pytest.mark.slow)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_finishes_with_its_figures(runs: Path, launcher: str) -> None:
    run = _start("engine.max_steps=30", f"launch.launcher={launcher}")
    status = run.wait(WAIT_S)
    assert status.state is RunState.FINISHED, status.error
    result = json.loads(run.folder.result_file.read_text())
    assert result["step"] == 30
    assert result["final"]["val/accuracy"] > 0.5
    assert set(result["worker_means_ms"]) == {"rank00", "rank01", "rank02", "rank03"}
    assert run.folder.path == runs / "t" / run.key
    _assert_gone(_pids(run))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_worker_is_named_and_the_run_resumes(runs: Path, launcher: str) -> None:
    run = _long_run(f"launch.launcher={launcher}")
    pids = _pids(run)
    os.kill(pids[2], signal.SIGKILL)
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED
    assert status.error is not None and status.error.rank == 2
    assert status.error.message.startswith("worker 2 on node1 was killed by SIGKILL")
    _assert_gone(pids)
    _resume_to(run, 25)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_stop_saves_and_ends_every_worker(runs: Path, launcher: str) -> None:
    run = _long_run(f"launch.launcher={launcher}", "engine.checkpoint_every_steps=1000")
    pids = _pids(run)
    status = run.stop()
    assert status.state is RunState.KILLED
    assert run.stop().state is RunState.KILLED  # twice is as good as once
    _assert_gone(pids)
    saved = [int(file.stem.removeprefix("step")) for file in run.folder.checkpoints_dir.iterdir()]
    assert saved and max(saved) == run.folder.history()[-1]["step"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_worker_that_raises_comes_first_with_its_traceback(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    _write_model(
        tmp_path,
        monkeypatch,
        "if os.getenv('RANKED') or rank() == 1 and self.calls > 2: raise ValueError('boom')",
    )
    status = _start("model={name: 'mymodel:build'}", f"launch.launcher={launcher}").wait(WAIT_S)
    assert status.state is RunState.FAILED
    assert status.error is not None
    assert status.error.message == "worker 1 on node0 failed: ValueError: boom"
    assert "mymodel.py" in status.error.traceback and "boom" in status.error.traceback


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_restart_goes_on_from_the_checkpoint_to_the_same_weights(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    flag = tmp_path / "died"
    body = f"if rank() == 1 and self.calls == 9 and not os.path.exists({str(flag)!r}): " + (
        f"open({str(flag)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    )
    _write_model(tmp_path, monkeypatch, body)
    settings = ["model={name: 'mymodel:build'}", "engine.max_steps=15", "engine.checkpoint_every_steps=4"]
    settings += [f"launch.launcher={launcher}", "launch.max_restarts=1"]
    run = _start(*settings)
    status = run.wait(120)
    assert status.state is RunState.FINISHED, status.error
    assert flag.exists()
    undisturbed = _start(*settings, is_repeat=True)
    assert undisturbed.wait(WAIT_S).state is RunState.FINISHED
    curves = [[e["values"]["train/loss"] for e in r.folder.history()] for r in (run, undisturbed)]
    assert len(curves[0]) == 15
    assert curves[0] == curves[1]


def _write_model(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A model of the user's own beside the working directory, with a line that runs in every forward pass."""
    (folder / "mymodel.py").write_text(
        textwrap.dedent(
            f"""
            import os
            import torch

            def rank():
                return torch.distributed.get_rank()

            class Model(torch.nn.Module):
                def __init__(self, info):
                    super().__init__()
                    self.layer = torch.nn.Linear(64, info.num_classes)
                    self.calls = 0

                def forward(self, x):
                    self.calls += 1
                    {body}
                    return self.layer(x.flatten(1))

            def build(info):
                return Model(info)
            """
        )
    )
    monkeypatch.chdir(folder)


# --- every process, every signal -----------------------------------------------------------------------


def test_a_worker_ended_by_sigterm_is_named(runs: Path) -> None:
    run = _long_run()
    os.kill(_pids(run)[1], signal.SIGTERM)
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED
    assert status.error is not None
    assert status.error.message == "worker 1 on node0 was ended by SIGTERM"
    _resume_to(run, 20)


def test_a_stopped_worker_is_noticed_in_time_and_named(runs: Path) -> None:
    run = _long_run("launch.worker_timeout_s=2")
    pids = _pids(run)
    os.kill(pids[3], signal.SIGSTOP)
    began_at = time.monotonic()
    status = run.wait(WAIT_S)
    assert time.monotonic() - began_at < 6
    assert status.state is RunState.FAILED
    assert status.error is not None and status.error.rank == 3
    assert "worker 3 on node1 showed no life" in status.error.message
    assert "its process is stopped" in status.error.message
    _assert_gone(pids)
    _resume_to(run, 20)


def test_a_killed_supervisor_leaves_a_lost_run_and_no_worker(runs: Path) -> None:
    run = _long_run()
    pids, owner = _pids(run), run.status().owner
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    _assert_gone([*pids, owner.pid])
    status = run.status()
    assert status.state is RunState.LOST
    assert status.ended_at is not None
    assert json.loads(run.folder.status_file.read_text())["state"] == "lost"
    _resume_to(run, 20)


def test_a_supervisor_ended_by_sigterm_leaves_a_killed_run(runs: Path) -> None:
    run = _long_run()
    pids, owner = _pids(run), run.status().owner
    assert owner is not None
    os.kill(owner.pid, signal.SIGTERM)
    status = run.wait(WAIT_S)
    assert status.state is RunState.KILLED
    _assert_gone(pids)
    _resume_to(run, 20)


@pytest.mark.slow
def test_a_stopped_supervisor_is_ended_by_who_waits_for_it(runs: Path) -> None:
    run = _long_run("launch.worker_timeout_s=3")
    pids, owner = _pids(run), run.status().owner
    assert owner is not None
    os.kill(owner.pid, signal.SIGSTOP)
    assert run.wait(40).state is RunState.LOST
    _assert_gone([*pids, owner.pid])


# Without `if __name__ == "__main__"`: a script is not imported again by the processes that it starts.
_LAUNCHING_SCRIPT = """
import labkit, sys, time
run = labkit.start(labkit.from_overrides(sys.argv[2:]), is_detached=sys.argv[1] == "detached")
print(run.folder.path, flush=True)
time.sleep(600)
"""


def _launched_elsewhere(tmp_path: Path, how: str) -> tuple["subprocess.Popen[str]", Run]:
    script = tmp_path / "launch.py"
    script.write_text(_LAUNCHING_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), how, *FAST, *LONG], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    run = labkit.attach(RunFolder(process.stdout.readline().strip()))
    until_step(run, 7)
    return process, run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_ends_with_the_process_that_started_it(runs: Path, tmp_path: Path, number: int) -> None:
    process, run = _launched_elsewhere(tmp_path, "attached")
    pids = _pids(run)
    with process:
        process.send_signal(number)
        process.wait()
        status = run.wait(WAIT_S)
    assert status.state is RunState.KILLED
    assert status.error is not None and "the process that started it died" in status.error.message
    _assert_gone(pids)


def test_ctrl_c_while_torch_is_imported_says_nothing_of_it() -> None:
    code = """if True:
        import labkit, os, signal, time
        labkit.warm_up()
        time.sleep(0.5)
        os.killpg(0, signal.SIGINT)
        time.sleep(5)
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60)
    assert done.stderr.count("KeyboardInterrupt") == 1  # its own
    assert "forkserver" not in done.stderr


def test_a_detached_run_goes_on_without_it(runs: Path, tmp_path: Path) -> None:
    process, run = _launched_elsewhere(tmp_path, "detached")
    with process:
        process.kill()
        process.wait()
    until_step(run, run.folder.history()[-1]["step"] + 20)
    assert run.stop().state is RunState.KILLED
    _assert_gone(_pids(run))


def test_a_stopped_launcher_does_not_disturb_the_run(runs: Path, tmp_path: Path) -> None:
    process, run = _launched_elsewhere(tmp_path, "attached")
    with process:
        process.send_signal(signal.SIGSTOP)
        until_step(run, run.folder.history()[-1]["step"] + 20)
        process.kill()
        process.wait()
    assert run.wait(WAIT_S).state is RunState.KILLED


def test_a_run_that_takes_too_long_times_out(runs: Path) -> None:
    run = _start(*LONG, "launch.timeout_s=2")
    status = run.wait(WAIT_S)
    assert status.state is RunState.TIMEOUT
    assert status.state.exit_code == 124
    assert "launch.timeout_s=2" in (status.error.message if status.error else "")


# --- the same run again ---------------------------------------------------------------------------------


def test_an_equal_run_that_has_finished_is_not_run_again(runs: Path) -> None:
    first = _start("engine.max_steps=3")
    first.wait(WAIT_S)
    second = _start("engine.max_steps=3")
    assert second.is_reused and second.folder.path == first.folder.path
    assert not _start("engine.max_steps=4").is_reused
    third = _start("engine.max_steps=3", is_repeat=True)
    assert third.key == f"{first.key}-r2"
    for run in (third, Run(runs_folder(runs, "engine.max_steps=4"))):
        run.wait(WAIT_S)


def runs_folder(runs: Path, *overrides: str) -> RunFolder:
    """Where the run of a configuration lies."""
    config = labkit.from_overrides([*FAST, *overrides])
    (found,) = [run for run in labkit.all_runs(runs) if run.read_config() == config]
    return found


def test_an_interrupted_run_goes_on_when_started_again(runs: Path) -> None:
    run = _long_run()
    run.stop()
    again = labkit.start(labkit.from_overrides([*FAST, *LONG]))
    assert again.folder.path == run.folder.path and not again.is_reused
    until(lambda: len(again.folder.history(0, ("start",))) == 2, "second start")
    again.stop()
    assert again.folder.history(0, ("start",))[-1]["start_step"] > 5


def test_a_second_start_of_a_running_run_is_refused(runs: Path) -> None:
    run = _long_run()
    with pytest.raises(ConfigError, match=f"run must not be running, got {run.key}.*labkit stop {run.key}"):
        _start(*LONG)
    with pytest.raises(ConfigError, match="run must not be running"):
        labkit.resume(run.folder)
    assert run.stop().state is RunState.KILLED


def test_launch_settings_do_not_make_another_run(runs: Path) -> None:
    first = _start("engine.max_steps=2", "launch.stop_grace_s=5")
    first.wait(WAIT_S)
    assert _start("engine.max_steps=2", "launch.stop_grace_s=6").is_reused


def test_a_finished_run_goes_further_only_when_given_more(runs: Path) -> None:
    run = _start("engine.max_steps=6", "engine.checkpoint_every_steps=3")
    run.wait(WAIT_S)
    with pytest.raises(ConfigError, match="has finished. Give more"):
        labkit.resume(run.folder)
    with pytest.raises(
        ConfigError, match="override must not change what the checkpoint was trained with, got 'seed=1'"
    ):
        labkit.resume(run.folder, ["seed=1"])
    _resume_to(run, 9)


# --- bad input: one line, nothing started ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model={name: 'no_such_module:build'}", "there is no module 'no_such_module' here"),
        ("model={name: 'no.such.module:build'}", "there is no module"),
        ("model={name: 'json:no_such_function'}", "must name a function of json, got 'no_such_function'"),
        ("model={name: '__main__:build'}", "%%labfile"),
        ("data={name: 'no_such_module:load'}", "data.name must be an importable module:function"),
    ],
)
def test_a_missing_function_is_refused_before_anything_starts(
    runs: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _start(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(runs.iterdir()) == []


def test_a_runs_folder_that_can_not_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError, match="run folder must be writable, got .*file/runs/t: Not a directory"):
        _start()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size and puts the runs folder on it."""
    need(os.geteuid() == 0 and sys.platform == "linux", "a small file system needs root on Linux")
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False)
        need(done.returncode == 0, "mounting a tmpfs must be allowed")
        monkeypatch.setenv("LABKIT_RUNS", str(disk / "runs"))
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_fails_the_run_with_its_reason(small_disk: Callable[[str], Path]) -> None:
    small_disk("600k")
    run = _start(*LONG, "engine.keep_checkpoints=100", "engine.step_padding_s=0.0")
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED
    assert "No space left on device" in (status.error.message if status.error else "")


def test_a_full_disk_is_refused_before_anything_starts(small_disk: Callable[[str], Path]) -> None:
    (small_disk("16k") / "filler").write_bytes(b"x" * 12288)
    with pytest.raises(ConfigError, match="run folder must be writable, got .*No space left on device"):
        _start()


def test_a_read_only_folder_is_refused_before_anything_starts(small_disk: Callable[[str], Path]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk("1m"))], check=True)
    with pytest.raises(ConfigError, match="run folder must be writable, got .*Read-only file system"):
        _start()
