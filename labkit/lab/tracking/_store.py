"""Where MLflow keeps its runs: the user's server, or one SQLite file beside the run folders.

MLflow's own first use of a SQLite file is not safe: of three processes that start at once on a fresh
file, all fail, and the file stays broken. So the file is made once, under a lock, with another name,
and appears complete.
"""

import os
import re
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from labkit.errors import ConfigError
from labkit.lab.tracking._process import run_helper
from labkit.runfolder import runs_root

if TYPE_CHECKING:
    from mlflow import MlflowClient

_CREATE_TIMEOUT_S = 180.0
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # training, not language-model agents


def ensure_store(root: Path | None = None) -> str:
    """Make sure that there is a place for MLflow runs.

    Args:
        root: Folder of all runs; none: the configured one.

    Returns:
        `$MLFLOW_TRACKING_URI` if set, else `sqlite:////.../runs/mlflow.db`. A SQLite file is there
        and complete afterwards, however many processes ask at once. A file that is there already
        costs one look.

    Raises:
        ConfigError: the folder can't be written.
    """
    root = (root or runs_root()).absolute()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(root / "mlflow.db")
    path = sqlite_file(uri)
    if path is not None and not _is_there(path):
        _create(path, root)
    return uri


def sqlite_uri(path: Path) -> str:
    """The URI of a SQLite file. SQLAlchemy decodes `%xx` in it, and takes `?` and `#` as separators."""
    text = str(path.absolute())
    for char in "%?#":
        text = text.replace(char, urllib.parse.quote(char))
    return f"sqlite:///{text}"


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI; none for any other URI and for a database in memory."""
    if not uri.startswith("sqlite:///"):
        return None
    name = urllib.parse.unquote(uri.removeprefix("sqlite:///").partition("?")[0])
    return None if name in ("", ":memory:") else Path(name).absolute()


def without_password(uri: str) -> str:
    """The URI as it may be written into files and logs."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", uri)


def _is_there(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _create(path: Path, root: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock"), timeout=_CREATE_TIMEOUT_S):
            if not _is_there(path):
                _build(path, root)
    except OSError as error:
        raise ConfigError(
            f"the folder of MLflow's database must be writable, got {path.parent}: "
            f"{error.strerror or error}. Free space or rights there, or set LABKIT_RUNS."
        ) from None


def _build(path: Path, root: Path) -> None:
    unfinished = path.with_name(f".{path.name}.new")
    _remove(unfinished)
    try:
        run_helper(["--create-store", str(unfinished), str(artifacts_of(root))], timeout_s=_CREATE_TIMEOUT_S)
        os.replace(unfinished, path)
    finally:
        _remove(unfinished)


def _remove(database: Path) -> None:
    """Remove a database and its journals: SQLite would play an old journal back into a new file."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def create_store(path: Path, artifacts: Path) -> None:
    """Make a complete SQLite file. Imports MLflow; nobody else may know the file yet."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(sqlite_uri(path), artifacts.absolute().as_uri())
    store.engine.dispose()


def artifacts_of(root: Path) -> Path:
    """The folder of all artifacts. Without it MLflow puts them under the working directory."""
    return root.absolute() / "artifacts"


def ensure_experiment(client: "MlflowClient", name: str, uri: str, root: Path) -> str:
    """Find or make an experiment; bring a deleted one back.

    Its artifacts lie under `runs/artifacts/` whatever the working directory; a server (http)
    decides itself where they lie.

    Returns:
        MLflow's number of the experiment.
    """
    found = client.get_experiment_by_name(name) or _create_experiment(client, name, uri, root)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    for key, value in _KIND.items():
        if found.tags.get(key) != value:
            client.set_experiment_tag(found.experiment_id, key, value)
    return str(found.experiment_id)


def _create_experiment(client: "MlflowClient", name: str, uri: str, root: Path) -> Any:
    from mlflow.exceptions import MlflowException

    location = None if uri.startswith("http") else (artifacts_of(root) / name).as_uri()
    try:
        return client.get_experiment(client.create_experiment(name, location, tags=_KIND))
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another process was faster
        if found is None:
            raise
        return found
