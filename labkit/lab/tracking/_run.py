"""One run in MLflow: opened once for its folder, fed with points, ended with the truth."""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from labkit.config import ExperimentConfig
from labkit.errors import LabkitError
from labkit.lab.tracking._describe import (
    describe,
    end_tags,
    final_values,
    flat_params,
    mlflow_status,
    run_name,
)
from labkit.lab.tracking._points import MAX_NAME_LENGTH, Point, plain_name
from labkit.lab.tracking._state import TrackingState, read_state, write_state
from labkit.lab.tracking._store import ensure_experiment, ensure_store, sqlite_uri, without_password
from labkit.runfolder import RunFolder, RunStatus

if TYPE_CHECKING:
    from mlflow.entities import Run

_Item = TypeVar("_Item")

_MAX_METRICS = 1000
_MAX_TAGS = 100
_MAX_LOG_BYTES = 20_000_000
_TOKEN = "labkit.token"
_END_TAGS = ("labkit.error", "labkit.failed_rank")


class MlflowRun:
    """The MLflow run of a run folder. Every method may raise; after that make a new one and go on.

    Args:
        folder: A run; the caller holds its tracking lock.

    Attributes:
        uri: Tracking URI.
        state: The content of `tracking.json`.
    """

    def __init__(self, folder: RunFolder) -> None:
        from mlflow import MlflowClient

        self.folder = folder
        self._root = folder.path.parent.parent
        state = read_state(folder)
        self.uri = _uri_of(state, self._root)
        self._client = MlflowClient(self.uri)
        self.state = self._state_for_store(state)

    def _state_for_store(self, state: TrackingState) -> TrackingState:
        """The state as it is, or a new one if it speaks of another store."""
        is_embedded = self.uri == sqlite_uri(self._root / "mlflow.db")
        store = "" if is_embedded else without_password(self.uri)
        return state if state.store == store else TrackingState(store=store)

    def open(self, status: RunStatus) -> None:
        """Find or create the MLflow run; tell it of a new attempt."""
        config = self.folder.read_config()
        experiment_id = ensure_experiment(self._client, config.name, self.uri, self._root)
        run = self._find(experiment_id) or self._create(experiment_id, config, status)
        if run.info.lifecycle_stage == "deleted":
            self._client.restore_run(run.info.run_id)
        if self.state.attempt != status.attempt or not status.state.is_final:
            self._begin_attempt(run, config, status)
        self._save(attempt=status.attempt, run_id=run.info.run_id, experiment_id=run.info.experiment_id)

    def _find(self, experiment_id: str) -> "Run | None":
        from mlflow.exceptions import MlflowException

        if not self.state.run_id:
            return self._find_by_token(experiment_id)
        try:
            return self._client.get_run(self.state.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self.state = TrackingState(store=self.state.store)  # somebody removed it for good
            return None

    def _find_by_token(self, experiment_id: str) -> "Run | None":
        """A run that MLflow created just before we died, or whose answer never came."""
        if not self.state.token:
            return None
        found = self._client.search_runs([experiment_id], f"tags.`{_TOKEN}` = '{self.state.token}'")
        return found[0] if found else None

    def _create(self, experiment_id: str, config: ExperimentConfig, status: RunStatus) -> "Run":
        if not self.state.token:
            self._save(token=uuid.uuid4().hex)
        started_at = status.started_at or status.created_at or time.time()
        return self._client.create_run(
            experiment_id,
            start_time=round(started_at * 1000),
            tags={_TOKEN: self.state.token},
            run_name=run_name(config, self.folder.key),
        )

    def _begin_attempt(self, run: "Run", config: ExperimentConfig, status: RunStatus) -> None:
        run_id = run.info.run_id
        if not status.state.is_final and run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        changed = self._log_params(run, flat_params(config))
        tags = {
            f"labkit.attempt.{status.attempt}.{key}"[:MAX_NAME_LENGTH]: value
            for key, value in changed.items()
        }
        self._set_tags(run_id, {**describe(self.folder, config, status), **tags})
        for key in _END_TAGS:
            if key in run.data.tags:
                self._client.delete_tag(run_id, key)
        try:
            self._client.log_artifact(run_id, str(self.folder.config_file))
        except Exception as fault:  # metrics don't wait for a file; all files are logged at the end
            print(f"config.json is not in MLflow yet: {first_line(fault)}", flush=True)

    def _log_params(self, run: "Run", params: Mapping[str, str]) -> dict[str, str]:
        """Log new parameters. MLflow refuses to change one: those that differ are returned."""
        from mlflow.entities import Param

        known = run.data.params
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for part in _parts(new, _MAX_TAGS):
            self._client.log_batch(run.info.run_id, params=part)
        return {key: value for key, value in params.items() if known.get(key, value) != value}

    def send(self, points: Sequence[Point], after: TrackingState) -> None:
        """Send points and note in `tracking.json` that MLflow has them.

        Args:
            points: Sent in batches; MLflow drops those it has already.
            after: The state once they are sent.
        """
        from mlflow.entities import Metric, RunTag

        tags = []
        if after.diverged_at != self.state.diverged_at:
            tags = [RunTag("labkit.diverged_at", str(after.diverged_at))]
        metrics = [Metric(point.key, point.value, point.timestamp_ms, point.step) for point in points]
        for part in _parts(metrics, _MAX_METRICS):
            self._client.log_batch(self.state.run_id, metrics=part, tags=tags)
        self.state = after
        if points:
            write_state(self.folder, after)

    def end(self, status: RunStatus) -> None:
        """Summary, files, tags, and MLflow's own status, as the run's final state says."""
        from mlflow.entities import Metric

        run_id = self.state.run_id
        ended_at_ms = round((status.ended_at or time.time()) * 1000)
        # One step for all attempts: MLflow's latest value is the one of the highest step, then time.
        summary = [
            Metric(plain_name(key), value, ended_at_ms, 0)
            for key, value in final_values(self.folder, status, self.state.latest).items()
        ]
        for part in _parts(summary, _MAX_METRICS):
            self._client.log_batch(run_id, metrics=part)
        fault = self._log_files_catching()
        self._set_tags(run_id, end_tags(status, self.state.diverged_at))
        self._client.set_terminated(run_id, mlflow_status(status.state), ended_at_ms)
        if fault is not None:
            raise fault  # the status is true by now; the files are tried again
        self._save(ended_attempt=status.attempt)

    def _log_files_catching(self) -> Exception | None:
        try:
            self.log_files()
        except Exception as fault:
            return fault
        return None

    def log_files(self) -> None:
        """Configuration, environment, result, logs and executed notebook, as far as they are there."""
        folder = self.folder
        for path in (folder.config_file, folder.env_file, folder.result_file):
            self._log_file(path)
        for path in sorted(folder.logs_dir.glob("*")):
            self._log_file(path, "logs")
        self.log_notebook()

    def log_notebook(self) -> None:
        """The executed notebook, if there is one."""
        self._log_file(self.folder.notebook_file, "notebook")

    def _log_file(self, path: Path, into: str | None = None) -> None:
        if not path.is_file() or path.stat().st_size == 0:
            return
        if path.stat().st_size > _MAX_LOG_BYTES:
            print(f"{path.name} is larger than {_MAX_LOG_BYTES} bytes: in the run folder only", flush=True)
            return
        self._client.log_artifact(self.state.run_id, str(path), into)

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for part in _parts([RunTag(key, value) for key, value in tags.items()], _MAX_TAGS):
            self._client.log_batch(run_id, tags=part)

    def _save(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update=changes)
        write_state(self.folder, self.state)


def _uri_of(state: TrackingState, root: Path) -> str:
    """The store that has the run already, unless the user names one."""
    if os.environ.get("MLFLOW_TRACKING_URI") or not (state.run_id and state.store):
        return ensure_store(root)
    if "***" in state.store:
        raise LabkitError(
            f"MLFLOW_TRACKING_URI must name the server that has this run ({state.store}), got nothing. "
            "Set it; its password is not kept in the run folder."
        )
    return state.store


def first_line(fault: BaseException) -> str:
    """An exception in one line."""
    lines = str(fault).strip().splitlines() or [""]
    return f"{type(fault).__name__}: {lines[0][:300]}"


def _parts(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
