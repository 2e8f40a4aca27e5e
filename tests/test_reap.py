"""Laws of the state of a run whose supervisor died."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from labkit.config import from_overrides
from labkit.launch.reap import is_unresponsive, reap
from labkit.runfolder import ProcessId, RunFolder, RunState, RunStatus, WorkerRecord

_SLEEP = (
    "import sys, time; kept = [open(name) for name in sys.argv[1:]]; print('up', flush=True); time.sleep(60)"
)


def _start(*open_files: Path) -> "subprocess.Popen[bytes]":
    """A process that holds some files open and sleeps."""
    command = [sys.executable, "-c", _SLEEP, *map(str, open_files)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _identity(process: "subprocess.Popen[bytes]") -> ProcessId:
    host = ProcessId.current().host
    return ProcessId(pid=process.pid, host=host, started_at=psutil.Process(process.pid).create_time())


@pytest.fixture
def supervisor() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that stands for the supervisor."""
    process = _start()
    yield process
    _end(process)


@pytest.fixture
def folder(runs: Path, supervisor: "subprocess.Popen[bytes]") -> RunFolder:
    """A run that this supervisor is running."""
    folder = RunFolder(runs / "experiment" / "abc")
    folder.create(from_overrides([]))
    now = time.time()
    folder.write_status(
        RunStatus(
            state=RunState.RUNNING,
            owner=_identity(supervisor),
            heartbeat_at=now,
            created_at=now - 10,
            started_at=now - 9,
        )
    )
    return folder


def test_a_run_whose_supervisor_lives_stays_running(folder: RunFolder) -> None:
    assert reap(folder).state is RunState.RUNNING


def test_a_run_whose_supervisor_was_killed_is_lost(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    _end(supervisor)
    status = reap(folder)
    assert status.state is RunState.LOST
    assert status == folder.read_status()
    assert status.error is not None
    assert "supervisor died" in status.error.message
    assert str(supervisor.pid) in status.error.message
    assert status.ended_at == pytest.approx(status.heartbeat_at)  # not the moment somebody looked


def test_a_supervisor_that_nobody_has_waited_for_is_dead(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    supervisor.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while reap(folder).state is not RunState.LOST and time.monotonic() < deadline:
        time.sleep(0.01)
    assert folder.read_status().state is RunState.LOST  # though it is still there, as a zombie


def test_reaping_again_changes_nothing(folder: RunFolder, supervisor: "subprocess.Popen[bytes]") -> None:
    _end(supervisor)
    first = reap(folder)
    written = folder.status_file.stat().st_mtime_ns
    assert reap(folder) == first
    assert folder.status_file.stat().st_mtime_ns == written


def test_eight_reapers_at_once_agree(folder: RunFolder, supervisor: "subprocess.Popen[bytes]") -> None:
    _end(supervisor)
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: reap(RunFolder(folder.path)), range(8)))
    assert statuses == [folder.read_status()] * 8


def test_a_final_state_stays_when_the_supervisor_is_gone(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    folder.write_status(folder.read_status().model_copy(update={"state": RunState.FINISHED}))
    _end(supervisor)
    assert reap(folder).state is RunState.FINISHED


def test_a_planned_run_without_owner_is_not_lost(runs: Path) -> None:
    folder = RunFolder(runs / "experiment" / "abc")
    folder.create(from_overrides([]))
    assert reap(folder).state is RunState.PLANNED


def test_a_supervisor_on_another_machine_cannot_be_judged_from_here(folder: RunFolder) -> None:
    owner = ProcessId(pid=1, host="elsewhere", started_at=0.0)
    folder.write_status(folder.read_status().model_copy(update={"owner": owner}))
    assert reap(folder).state is RunState.RUNNING


def test_a_stopped_supervisor_is_unresponsive_but_not_lost(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    supervisor.send_signal(signal.SIGSTOP)
    status = folder.read_status()
    assert not is_unresponsive(status, timeout_s=15)
    assert is_unresponsive(status.model_copy(update={"heartbeat_at": time.time() - 16}), timeout_s=15)
    assert reap(folder).state is RunState.RUNNING


def test_a_lost_or_ended_run_is_not_unresponsive(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    old = folder.read_status().model_copy(update={"heartbeat_at": 0.0})
    assert not is_unresponsive(old.model_copy(update={"state": RunState.FINISHED}))
    assert not is_unresponsive(old.model_copy(update={"state": RunState.PLANNED}))
    _end(supervisor)
    assert not is_unresponsive(old)


def test_leftover_workers_are_killed_and_strangers_spared(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    folder.events_file(0).touch()
    worker, stranger = _start(folder.events_file(0)), _start()
    try:
        records = tuple(
            WorkerRecord(rank=rank, node="node0", local_rank=rank, pid=process.pid)
            for rank, process in enumerate((worker, stranger))
        )
        folder.write_status(folder.read_status().model_copy(update={"workers": records}))
        _end(supervisor)
        reap(folder)
        assert worker.wait(5) == -signal.SIGKILL
        assert stranger.poll() is None  # another process that was given the number of a dead worker
    finally:
        _end(worker)
        _end(stranger)


def test_where_status_cannot_be_written_the_answer_is_true_all_the_same(
    folder: RunFolder, supervisor: "subprocess.Popen[bytes]"
) -> None:
    _end(supervisor)
    folder.status_lock_file.mkdir()  # stands for any failure to lock or write, also for root
    assert reap(folder).state is RunState.LOST
    assert folder.read_status().state is RunState.RUNNING
