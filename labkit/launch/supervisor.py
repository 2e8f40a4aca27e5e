"""The supervisor: one per run. It alone owns the run's state, its store and its MLflow tracker."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import psutil

from labkit.cluster.placement import Placement, placements
from labkit.comm import StoreServer
from labkit.config import ExperimentConfig
from labkit.engine.worker import WorkerTask
from labkit.launch.launcher import Launcher
from labkit.launch.local import LocalLauncher
from labkit.launch.result import summarise
from labkit.launch.verdict import root_cause
from labkit.runfolder import (
    ProcessId,
    RunError,
    RunFolder,
    RunState,
    RunStatus,
    WorkerRecord,
    write_atomically,
)

_SETTLE_S = 1.0
_TRACKER_GRACE_S = 60.0


@dataclass(frozen=True)
class SupervisorTask:
    """What a supervisor is asked to do.

    Attributes:
        folder: The run folder, made and filled by the launcher.
        launcher: Who asked; the run is stopped when that process dies. None: the run is detached.
        is_resume: Go on from the newest checkpoint.
        import_paths: Folders of the user's modules.
    """

    folder: str
    launcher: ProcessId | None
    is_resume: bool
    import_paths: tuple[str, ...]


@dataclass(frozen=True)
class _End:
    state: RunState
    error: RunError | None = None


def supervise(task: SupervisorTask) -> None:
    """Run one experiment to its end. Called in a process of its own."""
    folder = RunFolder(task.folder)
    log = os.open(folder.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    Supervisor(folder, task).run()


class Supervisor:
    """Starts the workers, watches them, and writes how it ended."""

    def __init__(self, folder: RunFolder, task: SupervisorTask) -> None:
        self._folder = folder
        self._task = task
        self._config: ExperimentConfig = folder.read_config()
        self._places: list[Placement] = placements(self._config.cluster)
        self._status: RunStatus = folder.read_status()
        self._tracker: subprocess.Popen[bytes] | None = None
        self._is_stop_asked = False
        self._last_beat = 0.0
        self._num_trackers = 0

    def run(self) -> None:
        """Everything, from taking the run over to its final state."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_stop)
        self._update(
            state=RunState.RUNNING,
            owner=ProcessId.current(),
            started_at=time.time(),
            heartbeat_at=time.time(),
            ended_at=None,
            error=None,
        )
        is_resume = self._task.is_resume
        try:
            while True:
                end = self._run_once(is_resume)
                if (
                    end.state is not RunState.FAILED
                    or self._status.num_restarts >= self._config.launch.max_restarts
                ):
                    break
                self._say(f"restart after: {end.error.message if end.error else end.state}")
                self._update(attempt=self._status.attempt + 1, num_restarts=self._status.num_restarts + 1)
                is_resume = True
        except BaseException as error:
            self._finish(_End(RunState.FAILED, RunError(message=f"supervisor failed: {error!r}")))
            raise
        self._finish(end)

    def _ask_stop(self, *_: object) -> None:
        self._is_stop_asked = True

    def _run_once(self, is_resume: bool) -> _End:
        store = StoreServer()
        launcher = self._make_launcher(store, is_resume)
        launcher.start()
        try:
            store.open()
            self._record_workers(launcher.pids())
            self._ensure_tracker()
            return self._watch(launcher)
        finally:
            launcher.kill()
            store.close()

    def _make_launcher(self, store: StoreServer, is_resume: bool) -> Launcher:
        attempt = self._status.attempt
        tasks = [
            WorkerTask(
                folder=str(self._folder.path),
                rank=place.rank,
                rendezvous=store.address(f"attempt{attempt}"),
                attempt=attempt,
                is_resume=is_resume,
                import_paths=self._task.import_paths,
            )
            for place in self._places
        ]
        pipe = self._tracker.stdin if self._tracker else None
        return LocalLauncher(tasks, [store.fileno(), *([pipe.fileno()] if pipe else [])])

    def _record_workers(self, pids: Mapping[int, int]) -> None:
        self._update(
            workers=tuple(
                WorkerRecord(rank=p.rank, node=p.node, local_rank=p.local_rank, pid=pids.get(p.rank))
                for p in self._places
            )
        )

    # --- watching ----------------------------------------------------------------------------------

    def _watch(self, launcher: Launcher) -> _End:
        """Until the run is over, for whatever reason."""
        while True:
            wait(launcher.sentinels(), timeout=0.2)
            self._beat()
            exits = launcher.exits()
            if any(end.code for end in exits):
                return self._failed(launcher)
            if launcher.is_over():
                return _End(RunState.FINISHED)
            asked = self._asked_to_end()
            if asked is not None:
                self._stop_gently(launcher)
                return asked
            silent = self._silent_worker(launcher)
            if silent is not None:
                return _End(RunState.FAILED, silent)

    def _asked_to_end(self) -> _End | None:
        if self._is_stop_asked or self._folder.stop_file.exists():
            return _End(RunState.KILLED, RunError(message="stopped on request"))
        launcher = self._task.launcher
        if launcher is not None and not launcher.is_alive():
            return _End(RunState.KILLED, RunError(message="stopped because the process that started it died"))
        limit_s = self._config.launch.timeout_s
        if limit_s is not None and time.time() - (self._status.started_at or 0.0) > limit_s:
            return _End(RunState.TIMEOUT, RunError(message=f"ran longer than launch.timeout_s={limit_s:g}"))
        return None

    def _stop_gently(self, launcher: Launcher) -> None:
        launcher.terminate()
        deadline = time.monotonic() + self._config.launch.stop_grace_s
        while not launcher.is_over() and time.monotonic() < deadline:
            wait(launcher.sentinels(), timeout=0.1)
            self._beat()

    def _failed(self, launcher: Launcher) -> _End:
        """A worker failed: wait a moment for what its peers say, then name the root cause."""
        deadline = time.monotonic() + _SETTLE_S
        while not launcher.is_over() and time.monotonic() < deadline:
            wait(launcher.sentinels(), timeout=0.1)
            self._beat()
        exits = [end for end in launcher.exits() if end.code]
        return _End(RunState.FAILED, root_cause(exits, self._read_errors(), self._places))

    def _read_errors(self) -> dict[int, dict[str, Any]]:
        found = {}
        for place in self._places:
            content = self._folder.read_json(self._folder.error_file(place.rank))
            if content.get("attempt") == self._status.attempt:
                found[place.rank] = content
        return found

    def _silent_worker(self, launcher: Launcher) -> RunError | None:
        """The worker that has shown no life for too long: a stopped process, a dead machine."""
        limit_s = self._config.launch.worker_timeout_s
        oldest: tuple[float, int] | None = None
        for rank in launcher.pids():
            with contextlib.suppress(OSError):
                age_s = time.time() - self._folder.alive_file(rank).stat().st_mtime
                if age_s > limit_s and (oldest is None or age_s > oldest[0]):
                    oldest = (age_s, rank)
        if oldest is None:
            return None
        age_s, rank = oldest
        node = self._places[rank].node
        return RunError(
            message=f"worker {rank} on {node} showed no life for {age_s:.0f} s{_why_silent(launcher.pids()[rank])}",
            rank=rank,
            node=node,
        )

    # --- state ---------------------------------------------------------------------------------------

    def _update(self, *, is_durable: bool = True, **changes: Any) -> None:
        self._status = self._status.model_copy(update=changes)
        self._folder.write_status(self._status, is_durable=is_durable)

    def _beat(self) -> None:
        now = time.time()
        if now - self._last_beat < 1.0:
            return
        self._last_beat = now
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._update(heartbeat_at=now, is_durable=False)
        if self._tracker is not None and self._tracker.poll() is not None and self._num_trackers < 4:
            self._say(f"tracker ended with {self._tracker.returncode}; starting it again")
            self._ensure_tracker()

    def _ensure_tracker(self) -> None:
        """Start the MLflow tracker. It sees the end of this process as the end of its standard input."""
        if self._tracker is not None and self._tracker.poll() is None:
            return
        self._num_trackers += 1
        with open(self._folder.tracker_log, "ab") as log:
            self._tracker = subprocess.Popen(
                [sys.executable, "-m", "labkit.lab.tracking", str(self._folder.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def _finish(self, end: _End) -> None:
        now = time.time()
        result = summarise(self._folder, self._config, end.state, self._status, now)
        with contextlib.suppress(OSError):
            write_atomically(self._folder.result_file, result.to_json())
        self._say(f"{end.state}{': ' + end.error.message if end.error else ''}")
        self._update(
            state=end.state,
            error=end.error,
            ended_at=now,
            heartbeat_at=now,
            diverged_at=result.diverged_at,
        )
        self._folder.stop_file.unlink(missing_ok=True)
        if self._tracker is not None:
            try:
                self._tracker.wait(_TRACKER_GRACE_S)
            except subprocess.TimeoutExpired:
                self._tracker.kill()
                self._tracker.wait()

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _why_silent(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""
    return " (its process is stopped)" if state == psutil.STATUS_STOPPED else f" (its process is {state})"
