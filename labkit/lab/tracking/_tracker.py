"""The tracker: a process beside each run that tells MLflow of it, and sees when its supervisor dies.

Training writes files and never waits for MLflow. The tracker reads these files and sends them on;
while MLflow is away, slow or locked it tries again, for as long as the run lives and a bounded time
after that. What is left then, `sync` sends later. Whenever the tracker dies, nothing is lost and
nothing is there twice: `tracking.json` moves on after each batch, and a repeated batch is made of the
same points.
"""

import contextlib
import os
import time

from filelock import FileLock, Timeout

from labkit.errors import LabkitError
from labkit.lab.tracking._run import MlflowRun, first_line
from labkit.lab.tracking._sender import Sender
from labkit.lab.tracking._store import ensure_store
from labkit.lab.tracking._watch import END_TIMEOUT_S, HANG_MARGIN_S, Watch, say
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder

NICENESS = 10

_INTERVAL_S = 2.0
_MAX_BACKOFF_S = 30.0
_MAX_END_BACKOFF_S = 4.0
_LAST_TRACKER_S = END_TIMEOUT_S + HANG_MARGIN_S + 5.0


def tracking_lock(folder: RunFolder) -> FileLock:
    """Held by the one process that sends this run to MLflow. The kernel frees it when that dies."""
    return FileLock(folder.tracking_lock_file)


def track(folder: RunFolder) -> bool:
    """Send a run to MLflow while it goes on.

    Returns:
        MLflow has all of it, its end included.
    """
    watch = Watch(folder)
    watch.start()
    try:
        with tracking_lock(folder).acquire(timeout=_LAST_TRACKER_S):  # the one before may be at its end
            _make_room(folder)
            return _send_until_over(folder, watch)
    except Timeout:
        say("another tracker has this run")
        return False


def _make_room(folder: RunFolder) -> None:
    """Make the store if there is none, then step behind the workers: their processors come first."""
    with contextlib.suppress(Exception):  # it is tried again, and told, with everything else
        ensure_store(folder.path.parent.parent)
    os.nice(NICENESS)


def _send_until_over(folder: RunFolder, watch: Watch) -> bool:
    sender = Sender(folder, on_progress=watch.give_time)
    num_faults = 0
    while True:
        try:
            was_over = watch.is_over()
            status = reap(folder)
            if was_over and not status.state.is_final:
                say("the run was resumed; its new tracker goes on")
                return False
            if sender.send(status):
                return True
            num_faults = 0
        except Exception as fault:
            num_faults += 1
            sender.close()
            say(f"try {num_faults}: {first_line(fault)}")
        if watch.is_too_late():
            sender.close()
            say("not all is in MLflow; `labkit sync` sends the rest later")
            return False
        _pause(watch, num_faults)


def _pause(watch: Watch, num_faults: int) -> None:
    backoff_s = 2.0 ** min(num_faults, 10)
    if not watch.is_over():
        watch.wait(min(backoff_s, _MAX_BACKOFF_S) if num_faults else _INTERVAL_S)
    elif num_faults:
        time.sleep(min(backoff_s / 2, _MAX_END_BACKOFF_S))


def sync_now(folder: RunFolder) -> None:
    """Send what MLflow has not got yet, in this process.

    Raises:
        LabkitError: the run's own tracker is at it.
    """
    try:
        with tracking_lock(folder).acquire(timeout=1.0):
            Sender(folder, has_system_metrics=False).send(reap(folder))
    except Timeout:
        raise LabkitError(
            f"run {folder.key} must have no tracker of its own at work to be sent from here. Wait for it."
        ) from None


def log_notebook_now(folder: RunFolder) -> None:
    """Log the executed notebook, once the run's tracker is done with it; in this process.

    Raises:
        LabkitError: the tracker did not end.
    """
    try:
        with tracking_lock(folder).acquire(timeout=_LAST_TRACKER_S):
            run = MlflowRun(folder)
            if run.state.run_id:
                run.log_notebook()
    except Timeout:
        raise LabkitError(
            f"the tracker of run {folder.key} must end before its notebook is logged. Try again later."
        ) from None
