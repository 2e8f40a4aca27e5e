"""The tracker's second thread: it sees the run's end, also when its supervisor is killed and MLflow hangs."""

import os
import select
import signal
import threading
import time
from types import FrameType

from labkit.lab.tracking._run import first_line
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, RunStatus

END_TIMEOUT_S = float(os.environ.get("LABKIT_TRACKER_END_TIMEOUT_S", "30"))
"""How long the tracker goes on trying after the run has ended (seconds)."""
HANG_MARGIN_S = 10.0
"""How much longer an answer of MLflow's is waited for."""

_LOOK_S = 0.25
_TERM_GRACE_S = 15.0
_MISSING_S = 3.0


def say(text: str) -> None:
    """One line into logs/tracker.log."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


class Watch:
    """Knows whether the run is over, and how long the tracker may still try."""

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
            if self._deadline is not None and time.monotonic() > self._deadline + HANG_MARGIN_S:
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
