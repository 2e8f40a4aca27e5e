"""Links into the MLflow UI.

MLflow 3 opens an experiment on a page for language-model agents; a parameter of the URL, which no
documentation names, opens the one for training. It is written here and nowhere else.
"""

import json
import os
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from labkit.runfolder import ProcessId, RunFolder, runs_root, write_atomically

DEFAULT_BASE = "http://127.0.0.1:5000"
_TRAINING = "workflowType=machine_learning"


class _Served(BaseModel):
    url: str
    owner: ProcessId


def base_url() -> str:
    """Address of the UI: the user's MLflow server, else where `labkit ui` serves it, or would."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return _without_user(uri) if uri.startswith("http") else served_url() or DEFAULT_BASE


def served_url() -> str | None:
    """Where `labkit lab` or `labkit ui` serves the runs at this moment; none when neither does."""
    try:
        served = _Served.model_validate_json(_served_file().read_bytes())
    except (OSError, ValueError):
        return None
    return served.url if served.owner.is_alive() else None


def is_served() -> bool:
    """Links lead somewhere at this moment: to the user's own server, or to a UI that runs."""
    return os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http") or served_url() is not None


@contextmanager
def served_at(url: str) -> Iterator[None]:
    """While this is active, links lead to `url`."""
    mine = _Served(url=url, owner=ProcessId.current())
    with suppress(OSError):
        write_atomically(_served_file(), mine.model_dump_json())
    try:
        yield
    finally:
        if served_url() == url:
            with suppress(OSError):
                _served_file().unlink()


def _served_file() -> Path:
    return runs_root() / "ui.json"


def home_url(base: str | None = None) -> str:
    """The list of experiments."""
    return f"{_trimmed(base)}/#/experiments?{_TRAINING}"


def experiment_url(folder: RunFolder, base: str | None = None) -> str | None:
    """All runs of this run's experiment as charts; none while MLflow does not know the run."""
    ids = _ids(folder)
    if ids is None:
        return None
    return f"{_trimmed(base)}/#/experiments/{ids[0]}/runs?compareRunsMode=CHART&{_TRAINING}"


def run_url(folder: RunFolder, base: str | None = None) -> str | None:
    """The run's curves; none while MLflow does not know the run."""
    ids = _ids(folder)
    if ids is None:
        return None
    return f"{_trimmed(base)}/#/experiments/{ids[0]}/runs/{ids[1]}/model-metrics?{_TRAINING}"


def compare_url(folders: Sequence[RunFolder], base: str | None = None) -> str | None:
    """Several runs side by side; none if MLflow knows fewer than one of them."""
    known = [ids for ids in map(_ids, folders) if ids is not None]
    if not known:
        return None
    experiments = list(dict.fromkeys(experiment for experiment, _ in known))
    query = f"runs={_json_parameter([run for _, run in known])}&experiments={_json_parameter(experiments)}"
    return f"{_trimmed(base)}/#/compare-runs?{query}&{_TRAINING}"


def _ids(folder: RunFolder) -> tuple[str, str] | None:
    tracking = folder.read_json(folder.tracking_file)
    experiment, run = tracking.get("experiment_id"), tracking.get("run_id")
    return (experiment, run) if experiment and run else None


def _json_parameter(value: Any) -> str:
    return urllib.parse.quote(json.dumps(value, separators=(",", ":")), safe="")


def _trimmed(base: str | None) -> str:
    return (base or base_url()).rstrip("/")


def _without_user(uri: str) -> str:
    parts = urllib.parse.urlsplit(uri)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
