"""MLflow as a view of the run folders: its store, the tracker of each run, its server.

Nothing here imports MLflow into the caller's process; see `_process`.
"""

import time

from filelock import FileLock, Timeout

from labkit.errors import LabkitError
from labkit.lab.tracking._process import run_helper
from labkit.lab.tracking._server import ui_command, ui_environment
from labkit.lab.tracking._state import TrackingState, read_state
from labkit.lab.tracking._store import ensure_store
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, RunState

__all__ = [
    "TrackingState",
    "close_lost",
    "ensure_store",
    "is_tracked",
    "log_notebook",
    "read_state",
    "sync",
    "ui_command",
    "ui_environment",
    "wait_until_complete",
]


def sync(folder: RunFolder, timeout_s: float = 300.0) -> bool:
    """Send to MLflow what it has not got of a run; each point arrives exactly once.

    Returns:
        Something was to be sent.

    Raises:
        LabkitError: MLflow does not answer, or the run's own tracker is at work.
    """
    if folder.read_status().state is RunState.PLANNED or read_state(folder).is_complete(folder):
        return False
    run_helper(["--sync", str(folder.path)], timeout_s)
    return True


def close_lost(folder: RunFolder, timeout_s: float = 30.0) -> bool:
    """Tell MLflow the end of a run whose supervisor and tracker are both dead.

    Cheap where there is nothing to do, so that a list of runs can call it for each.

    Returns:
        False if MLflow does not know the end of a lost run, and can't be told now.
    """
    status = reap(folder)
    is_known = status.state is not RunState.LOST or read_state(folder).ended_attempt == status.attempt
    if is_known or is_tracked(folder):
        return True
    try:
        sync(folder, timeout_s)
    except LabkitError:
        return False
    return True


def log_notebook(folder: RunFolder, timeout_s: float = 60.0) -> bool:
    """Log the executed notebook of a run that has ended.

    Returns:
        MLflow has it. If not (MLflow is away, there is no notebook), `sync` logs it with the rest.
    """
    if not folder.notebook_file.is_file():
        return False
    try:
        run_helper(["--notebook", str(folder.path)], timeout_s)
    except LabkitError:
        return False
    return bool(read_state(folder).run_id)


def is_tracked(folder: RunFolder) -> bool:
    """A tracker is at work on this run."""
    lock = FileLock(folder.tracking_lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # a read-only folder
        return False
    lock.release()
    return False


def wait_until_complete(folder: RunFolder, timeout_s: float = 10.0) -> bool:
    """Wait until MLflow has all of a run that has ended, or its tracker has given up."""
    deadline = time.monotonic() + timeout_s
    while not read_state(folder).is_complete(folder):
        if time.monotonic() > deadline or not is_tracked(folder):
            return read_state(folder).is_complete(folder)
        time.sleep(0.1)
    return True
