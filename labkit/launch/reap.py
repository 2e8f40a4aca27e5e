"""Make the state of a run true when its supervisor died without writing the end.

A run whose supervisor is stopped (SIGSTOP) or slow is not lost: its process exists and may go on.
Lost is a run whose supervisor no longer exists. Whoever finds that first - the run's tracker,
`labkit status`, a notebook - writes it down; all others see it done.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import psutil
from filelock import FileLock

from labkit.engine import quota
from labkit.runfolder import RunError, RunFolder, RunState, RunStatus

_LOCK_TIMEOUT_S = 10.0


@contextlib.contextmanager
def status_lock(folder: RunFolder) -> Iterator[None]:
    """Hold this while `status.json` passes to a new owner: to reap a run, or to resume it."""
    with FileLock(folder.status_lock_file, timeout=_LOCK_TIMEOUT_S):
        yield


def is_unresponsive(status: RunStatus, timeout_s: float = 15.0) -> bool:
    """The supervisor of a running run exists but showed no life for `timeout_s`: stopped, or starved."""
    if status.state is not RunState.RUNNING or status.owner is None or not status.owner.is_alive():
        return False
    return time.time() - status.heartbeat_at > timeout_s


def is_lost(status: RunStatus) -> bool:
    """The run has not ended, but its supervisor has. Nobody's run (no owner yet) is not lost."""
    return not status.state.is_final and status.owner is not None and not status.owner.is_alive()


def reap(folder: RunFolder) -> RunStatus:
    """Write `lost` if the run's supervisor is dead, and end the workers it left behind.

    Safe to call at any time, from any number of processes; all but the first find nothing to do.

    Returns:
        The true status, also where it can't be written (a read-only folder).
    """
    status = folder.read_status()
    if not is_lost(status):
        return status
    try:
        with status_lock(folder):
            status = folder.read_status()  # another process may have been faster
            if not is_lost(status):
                return status
            end_leftover_workers(folder, status)
            quota.sweep()
            folder.write_status(as_lost(status))
            return folder.read_status()
    except OSError:
        return as_lost(status)


def as_lost(status: RunStatus) -> RunStatus:
    """The status of a run whose supervisor died. It ended when it last showed life."""
    assert status.owner is not None
    error = RunError(
        message=f"supervisor died (process {status.owner.pid} on {status.owner.host}) before the run ended. "
        "`labkit resume` goes on from the last checkpoint; logs/supervisor.log may say more."
    )
    ended_at = max(status.heartbeat_at, status.started_at or 0.0, status.created_at)
    return status.model_copy(update={"state": RunState.LOST, "error": error, "ended_at": ended_at})


def end_leftover_workers(folder: RunFolder, status: RunStatus) -> list[int]:
    """Kill recorded workers that still run here; usually the kernel has done so with the supervisor.

    Returns:
        The processes killed.
    """
    if status.owner is None or not status.owner.is_here():
        return []
    killed = []
    for worker in status.workers:
        if worker.pid is None or worker.pid == os.getpid():
            continue
        try:
            process = psutil.Process(worker.pid)
            if _is_worker_of(process, folder):
                process.kill()
                killed.append(worker.pid)
        except psutil.Error:  # it ended in the meantime, or is somebody else's
            continue
    return killed


def _is_worker_of(process: psutil.Process, folder: RunFolder) -> bool:
    """The process has a file of the run open: process numbers are used again, open files tell the truth."""
    inside = str(folder.path.resolve()) + os.sep
    return any(file.path.startswith(inside) for file in process.open_files())
