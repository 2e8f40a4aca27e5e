"""A handle on a run: nothing but its folder, so that anybody can hold one at any time."""

import os
import signal
import time
from collections.abc import Callable

from labkit.launch.reap import is_unresponsive, reap
from labkit.runfolder import RunFolder, RunState, RunStatus

_POLL_S = 0.1


class Run:
    """A run that somebody started, here or elsewhere."""

    def __init__(self, folder: RunFolder, *, is_reused: bool = False) -> None:
        """Take hold of a run.

        Args:
            folder: Its folder.
            is_reused: It had finished before and was not started again.
        """
        self.folder = folder
        self.is_reused = is_reused

    def __repr__(self) -> str:
        return f"Run({self.folder.key}, {self.folder.read_status().state})"

    @property
    def key(self) -> str:
        """The run's key."""
        return self.folder.key

    def status(self) -> RunStatus:
        """The true state: a run whose supervisor has died is `lost`, whatever the file says."""
        return reap(self.folder)

    def wait(
        self, timeout_s: float | None = None, *, on_poll: Callable[[RunStatus], None] | None = None
    ) -> RunStatus:
        """Wait until the run is over and MLflow knows it.

        A supervisor that is alive but shows no life for `launch.worker_timeout_s` is killed, which ends
        the run as `lost`.

        Args:
            timeout_s: Wait no longer than this; the run goes on.
            on_poll: Called about ten times a second with the state.

        Returns:
            The state, final unless the time was up.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        limit_s = max(15.0, self.folder.read_config().launch.worker_timeout_s)
        while True:
            status = self.status()
            if on_poll is not None:
                on_poll(status)
            is_settled = status.state.is_final and not self._owner_is_alive(status)
            if is_settled or (deadline is not None and time.monotonic() > deadline):
                return status
            if not status.state.is_final and is_unresponsive(status, timeout_s=limit_s):
                self._kill_owner(status)
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 30.0) -> RunStatus:
        """Ask the run to save and stop, and wait until it has. Safe to call from any thread, and twice."""
        status = self.status()
        if status.state.is_final:
            return status
        self.folder.stop_file.touch()
        deadline = time.monotonic() + timeout_s
        while not (status := self.status()).state.is_final and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return status

    @staticmethod
    def _owner_is_alive(status: RunStatus) -> bool:
        owner = status.owner
        return owner is not None and owner.is_here() and owner.pid != os.getpid() and owner.is_alive()

    @staticmethod
    def _kill_owner(status: RunStatus) -> None:
        owner = status.owner
        if owner is not None and owner.is_here() and status.state is RunState.RUNNING and owner.is_alive():
            os.kill(owner.pid, signal.SIGKILL)


def attach(folder: RunFolder) -> Run:
    """Take hold of a run that was started elsewhere or before.

    Raises:
        ConfigError: there is no run in the folder.
    """
    folder.read_config()
    return Run(folder)
