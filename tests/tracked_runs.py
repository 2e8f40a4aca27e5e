"""Runs written by hand and their real tracker processes, for tests against a real MLflow."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from labkit.config import ExperimentConfig, from_overrides
from labkit.engine.events import EventLog
from labkit.lab.tracking import read_state
from labkit.runfolder import ProcessId, RunError, RunFolder, RunState, RunStatus

TRACKER_TIMEOUT_S = 90


class TrackedRun:
    """A run whose supervisor is this test, and which a real tracker may follow."""

    def __init__(self, runs: Path, key: str = "0123456789", config: ExperimentConfig | None = None) -> None:
        self.config = config or from_overrides(["name=experiment", "cluster=1x2"])
        self.runs = runs
        self.folder = RunFolder(runs / self.config.name / key)
        self.folder.create(self.config)
        self._logs: dict[int, EventLog] = {}
        self.begin()

    def begin(self, attempt: int = 1, owner: ProcessId | None = None) -> None:
        """A new attempt is running."""
        self.close()
        now = time.time()
        ranks = range(self.config.cluster.num_workers)
        self._logs = {rank: EventLog(self.folder.events_file(rank), attempt) for rank in ranks}
        self.status = RunStatus(
            state=RunState.RUNNING,
            attempt=attempt,
            owner=owner or ProcessId.current(),
            heartbeat_at=now,
            created_at=now,
            started_at=now,
        )
        self.folder.write_status(self.status)

    def steps(self, first: int, last: int, pause_s: float = 0.0, **values: float) -> "TrackedRun":
        """Steps first to last of every worker, with the metrics of rank 0. The loss is 1/step."""
        for step in range(first, last + 1):
            for log in self._logs.values():
                log.write("step", step=step, samples=8, step_s=0.01, compute_s=0.005)
            measured = {"train/loss": 1 / step, "train/accuracy": 1 - 1 / step, **values}
            self._logs[0].write("metrics", step=step, epoch=0, samples=16 * step, values=measured)
            time.sleep(pause_s)
        return self

    def end(self, state: RunState = RunState.FINISHED, error: RunError | None = None) -> "TrackedRun":
        """The supervisor writes the final state."""
        changes = {"state": state, "error": error, "ended_at": time.time()}
        self.status = self.status.model_copy(update=changes)
        self.folder.write_status(self.status)
        return self

    def close(self) -> None:
        """Close the workers' files."""
        for log in self._logs.values():
            log.close()
        self._logs = {}

    def track(
        self, cwd: Path | None = None, env: dict[str, str] | None = None, end_timeout_s: float = 30
    ) -> "subprocess.Popen[bytes]":
        """Start its tracker as a supervisor does: a pipe on stdin, the log on stdout and stderr."""
        with open(self.folder.tracker_log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "labkit.lab.tracking", str(self.folder.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env={**os.environ, "LABKIT_TRACKER_END_TIMEOUT_S": str(end_timeout_s), **(env or {})},
            )

    def tracker_log(self) -> str:
        """What the tracker has said."""
        return self.folder.tracker_log.read_text()

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return read_state(self.folder).run_id


def finish(*trackers: "subprocess.Popen[bytes]") -> list[int]:
    """Close the pipes, as a supervisor does when it ends, and wait for the trackers' exit codes."""
    for tracker in trackers:
        assert tracker.stdin is not None
        tracker.stdin.close()
    try:
        return [tracker.wait(TRACKER_TIMEOUT_S) for tracker in trackers]
    finally:
        for tracker in trackers:
            tracker.kill()
            tracker.wait()


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


class Store:
    """A look into MLflow's SQLite file, without MLflow."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / "mlflow.db"

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            return connection.execute(query, arguments).fetchall()
        finally:
            connection.close()

    def status(self, run_id: str) -> str:
        """MLflow's status of a run."""
        return str(self.rows("select status from runs where run_uuid = ?", run_id)[0][0])

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """Step and value of every point of a metric, oldest step first, then oldest time."""
        query = "select step, value from metrics where run_uuid = ? and key = ? order by step, timestamp"
        return self.rows(query, run_id, key)

    def tags(self, run_id: str) -> dict[str, str]:
        """Tags of a run."""
        return dict(self.rows("select key, value from tags where run_uuid = ?", run_id))

    def params(self, run_id: str) -> dict[str, str]:
        """Parameters of a run."""
        return dict(self.rows("select key, value from params where run_uuid = ?", run_id))


def artifacts(runs: Path, run: TrackedRun) -> Path:
    """Where a run's artifacts must lie."""
    return runs / "artifacts" / run.config.name / run.run_id / "artifacts"


def copy_store(template: Path, runs: Path) -> None:
    """Give a runs folder a complete, empty store: making one takes seconds."""
    shutil.copy(template / "mlflow.db", runs / "mlflow.db")
