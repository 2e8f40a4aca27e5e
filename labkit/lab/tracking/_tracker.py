"""The tracker: a process beside each run that tells MLflow of it, and sees when its supervisor dies.

Training writes files and never waits for MLflow. The tracker reads these files and sends them on;
while MLflow is away, slow or locked it tries again, for as long as the run lives and a bounded time
after that. What is left then, `sync` sends later. Whenever the tracker dies, nothing is lost and
nothing is there twice: `tracking.json` moves on after each batch, and a repeated batch is made of the
same points.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from filelock import FileLock, Timeout

from labkit.errors import LabkitError
from labkit.lab.tracking._collect import BATCH_POINTS, Collector
from labkit.lab.tracking._run import MlflowRun, first_line
from labkit.lab.tracking._store import ensure_store
from labkit.lab.tracking._system import SystemMetrics
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, RunStatus

NICENESS = 10
END_TIMEOUT_S = float(os.environ.get("LABKIT_TRACKER_END_TIMEOUT_S", "30"))
"""How long the tracker goes on trying after the run has ended (seconds)."""

_INTERVAL_S = 2.0
_LOOK_S = 0.25
_MAX_BACKOFF_S = 30.0
_MAX_END_BACKOFF_S = 4.0
_TERM_GRACE_S = 15.0
_HANG_MARGIN_S = 10.0
_MISSING_S = 3.0
_LAST_TRACKER_S = END_TIMEOUT_S + _HANG_MARGIN_S + 5.0


def say(text: str) -> None:
    """One line into logs/tracker.log."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def tracking_lock(folder: RunFolder) -> FileLock:
    """Held by the one process that sends this run to MLflow. The kernel frees it when that dies."""
    return FileLock(folder.tracking_lock_file)


class Watch:
    """Sees the run's end, also when its supervisor is killed and MLflow hangs: a thread of its own."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._deadline: float | None = None
        self._is_told = False
        self._seen_at = time.monotonic()
        self._is_supervisor_gone = False

    def start(self) -> None:
        """Watch until the process ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; its end is for us
        signal.signal(signal.SIGTERM, self._end_soon)
        threading.Thread(target=self._watch, name="labkit-watch", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past the run's end."""
        self._is_over.wait(seconds)

    def is_too_late(self) -> bool:
        """The time to try is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def give_time(self) -> None:
        """MLflow takes what it is sent: the time to try begins again, unless we were told to end."""
        if self._is_over.is_set() and not self._is_told:
            self._deadline = time.monotonic() + END_TIMEOUT_S

    def is_over(self) -> bool:
        """The run has reached a final state."""
        return self._is_over.is_set()

    def _end_soon(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        self._limit(_TERM_GRACE_S)

    def _limit(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._deadline = at if self._deadline is None else min(self._deadline, at)

    def _watch(self) -> None:
        while True:
            self._look_at_stdin()
            self._look_at_status()
            if self._deadline is not None and time.monotonic() > self._deadline + _HANG_MARGIN_S:
                say("MLflow does not answer; `labkit sync` sends the rest later")
                os._exit(1)

    def _look_at_status(self) -> None:
        try:
            status = reap(self._folder)
        except Exception as fault:  # the watch must go on
            say(f"status.json: {first_line(fault)}")
            return
        self._look_for_folder(status)
        if status.state.is_final and not self._is_over.is_set():
            self._limit(END_TIMEOUT_S)
            self._is_over.set()

    def _look_for_folder(self, status: RunStatus) -> None:
        """End the process if the run folder was deleted, or its supervisor died before it took the run."""
        is_nobodys = self._is_supervisor_gone and status.owner is None
        if self._folder.exists() and not is_nobodys:
            self._seen_at = time.monotonic()
        elif time.monotonic() - self._seen_at > _MISSING_S:
            say("there is no run here any more")
            os._exit(1)

    def _look_at_stdin(self) -> None:
        """Wait a moment; an end of file means that the supervisor has gone."""
        if self._is_supervisor_gone:
            time.sleep(_LOOK_S)
            return
        try:
            is_readable = bool(select.select([0], [], [], _LOOK_S)[0])
            self._is_supervisor_gone = is_readable and not os.read(0, 4096)
        except (OSError, ValueError):  # started without a standard input
            self._is_supervisor_gone = True


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
    if not watch.is_over():
        watch.wait(min(2.0**num_faults, _MAX_BACKOFF_S) if num_faults else _INTERVAL_S)
    elif num_faults:
        time.sleep(min(0.5 * 2.0**num_faults, _MAX_END_BACKOFF_S))


class Sender:
    """Sends whatever is new. After an exception it starts over from `tracking.json`.

    Args:
        folder: A run; the caller holds its tracking lock.
        has_system_metrics: Measure this machine as well, as long as the run goes on.
        on_progress: Called after each batch that MLflow has taken.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        has_system_metrics: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._collector = Collector(folder)
        self._on_progress = on_progress
        self._run: MlflowRun | None = None
        self._system = SystemMetrics() if has_system_metrics else None

    def send(self, status: RunStatus) -> bool:
        """Send all that is there; if the run has ended, its end too, and return true."""
        run = self._opened(status)
        if self._system is not None and not status.state.is_final:
            self._system.keep_running(run.uri, run.state.run_id, is_resumed=status.attempt > 1)
        self._send_points(run, is_final=status.state.is_final)
        if not status.state.is_final:
            return False
        self._stop_system_metrics()
        run.end(status)
        return True

    def _opened(self, status: RunStatus) -> MlflowRun:
        """The MLflow run; a supervisor that restarts its workers begins another attempt of it."""
        if self._run is None or self._run.state.attempt != status.attempt:
            run = self._run or MlflowRun(self._folder)
            run.open(status)
            self._run = run
        return self._run

    def _send_points(self, run: MlflowRun, *, is_final: bool) -> None:
        while True:
            points, after = self._collector.next_batch(run.state, is_final=is_final)
            run.send(points, after)
            if points:
                self._on_progress()
            if len(points) < BATCH_POINTS:  # all files were read to their ends
                return

    def close(self) -> None:
        """Forget the MLflow run; the next `send` looks for it again."""
        self._run = None

    def _stop_system_metrics(self) -> None:
        if self._system is not None:
            self._system.stop()
            self._system = None


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
