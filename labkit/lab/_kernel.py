"""A Python kernel of this very interpreter, and the thread that ends it when its time is up."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop

from labkit.runfolder import RunState

_POLL_S = 0.2
_GRACE_S = 5.0  # from the interrupt, which lets the notebook's own clean-up run, to the kill
_HEARTBEAT_S = 5.0
_LONGEST_SOCKET_PATH = 90  # the system's limit is 104 to 108 characters; zmq appends a number


@dataclass(frozen=True)
class Limits:
    """How long things may take.

    Attributes:
        timeout_s: The notebook as a whole; None: for ever.
        start_timeout_s: From starting the kernel's process to its first answer; whole seconds.
        exit_timeout_s: From the end of the last cell to the end of the kernel.
        stopped_timeout_s: How long the kernel's process may be stopped (SIGSTOP).
    """

    timeout_s: float | None = None
    start_timeout_s: int = 60
    exit_timeout_s: float = 20.0  # with polling and clean-up: 30 s at most
    stopped_timeout_s: float = 60.0


class LocalKernel(AsyncKernelManager):
    """Starts `sys.executable -m ipykernel_launcher`, whatever kernels are installed under which names.

    It talks over sockets in the file system: nobody else can take its ports, since there are none.
    """

    def prepare(self, folder: Path, environment: dict[str, str], log: Path) -> None:
        """Say where its connection file goes, what it sees, and where its own messages go."""
        self._environment, self._log = environment, log
        self.connection_file = str(folder / "kernel.json")
        if len(self.connection_file) < _LONGEST_SOCKET_PATH:
            self.transport = "ipc"

    @property
    def kernel_spec(self) -> KernelSpec:
        """This interpreter's kernel."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, name="python3", display_name="Python 3", language="python")

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        # The process leads its own session, so a Ctrl-C in our terminal does not reach it by itself.
        options["env"] = {**self._environment, "JPY_PARENT_PID": str(os.getpid())}
        with open(self._log, "a", encoding="utf-8") as log:
            await super()._async_launch_kernel(kernel_cmd, **options, stdout=log, stderr=log)

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """The kernel's process, also after its end."""
        found = getattr(self.provisioner, "process", None)
        if found is not None:
            self._process = found
        return getattr(self, "_process", None)


@contextlib.contextmanager
def connection_folder() -> Iterator[Path]:
    """A short-named private folder for a kernel's sockets, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="labkit-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def closed_event_loop() -> Iterator[None]:
    """Close the event loop that nbclient makes and leaves open, with the tasks of a kernel that died."""
    try:
        yield
    finally:
        try:
            asyncio.get_running_loop()  # inside Jupyter: the loop is not ours
        except RuntimeError:
            loop = ensure_event_loop()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=5) if tasks else asyncio.sleep(0))
            loop.close()
            asyncio.set_event_loop(None)


class Watchdog(threading.Thread):
    """Ends a kernel whose time is up, that hangs at its end, or that somebody asked to stop.

    An interrupt comes first, so that the cell's own clean-up runs and its traceback is kept; a kill
    follows. The first reason given is the verdict.
    """

    def __init__(self, limits: Limits, stop_file: Path, heartbeat: Callable[[], None]) -> None:
        super().__init__(name="labkit-notebook-watchdog", daemon=True)
        self.verdict: tuple[RunState, str] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._limits, self._stop_file, self._heartbeat = limits, stop_file, heartbeat
        self._started_at = time.monotonic()
        self._cells_done_at: float | None = None
        self._verdict_at = 0.0
        self._stopped_since: float | None = None
        self._is_interrupted = False
        self._finished = threading.Event()

    def stop(self, state: RunState, reason: str) -> None:
        """Stop the notebook; a second call kills the kernel at once. Safe in a signal handler."""
        if self.verdict is None:
            self._verdict_at = time.monotonic()
            self.verdict = (state, reason)
        else:
            self._verdict_at = 0.0

    def cells_done(self) -> None:
        """The last cell has ended; the kernel's shutdown is now on the clock."""
        self._cells_done_at = time.monotonic()

    def close(self) -> None:
        """End the thread."""
        self._finished.set()
        self.join()

    def run(self) -> None:
        beaten_at = 0.0
        while not self._finished.wait(_POLL_S):
            now = time.monotonic()
            self._look(now)
            self._act(now)
            if now - beaten_at > _HEARTBEAT_S:
                beaten_at = now
                with contextlib.suppress(OSError):  # a full disk must not end the watch
                    self._heartbeat()

    def _look(self, now: float) -> None:
        if self.verdict is not None:
            return
        limit = self._limits.timeout_s
        if limit is not None and now - self._started_at > limit:
            self.stop(RunState.TIMEOUT, f"notebook ran past its time-out of {limit:g} s")
        elif self._stop_file.exists():
            self.stop(RunState.KILLED, f"asked to stop by {self._stop_file.name}")
        elif self._is_stopped_too_long(now):
            limit = self._limits.stopped_timeout_s
            self.stop(RunState.FAILED, f"kernel was stopped (SIGSTOP) for more than {limit:g} s")
            self._verdict_at = 0.0

    def _is_stopped_too_long(self, now: float) -> bool:
        if self.process is None:
            return False
        try:
            is_stopped = psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        return self._stopped_since is not None and now - self._stopped_since > self._limits.stopped_timeout_s

    def _act(self, now: float) -> None:
        """Interrupt, then kill."""
        is_hanging = (
            self._cells_done_at is not None and now - self._cells_done_at > self._limits.exit_timeout_s
        )
        if is_hanging or (self.verdict is not None and now - self._verdict_at > _GRACE_S):
            self.signal_kernel(signal.SIGKILL)
        elif self.verdict is not None and not self._is_interrupted:
            self._is_interrupted = self.signal_kernel(signal.SIGINT)

    def signal_kernel(self, number: int) -> bool:
        """Signal the kernel and the processes of its session's group; whether there was one."""
        process = self.process
        if process is None or process.poll() is not None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        return True

    def end_leftovers(self) -> None:
        """Kill what a dead kernel left in its group: commands that its cells had started."""
        if self.process is not None and self.process.poll() is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
