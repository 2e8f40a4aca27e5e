"""The run folder: the one truth about a run. This module owns every file name in it.

runs/<experiment>/<run key>/
  config.json     what was asked, as the workers read it          written by the launcher
  code/           the user's own modules (notebook cells)         written by the launcher
  env.json        versions, machine, git commit, command          written by the launcher
  status.json     state machine, owner, error                     written by the supervisor alone
  emulation.json  where the namespaces of an emulated cluster are  written by the supervisor
  tracking.json   MLflow run id and how far each file was sent    written by the tracker alone
  events/rankNNNN.jsonl   one JSON object a line                  written by each worker
  alive/rankNNNN          touched once a second                   written by each worker
  links/NODE-N            what workers behind one link know of each other   written by each worker
  errors/rankNNNN.json    exception and traceback                 written by a worker that fails
  logs/rankNNNN.out|err, supervisor.log, tracker.log
  checkpoints/stepNNNNNNNN.pt
  result.json     final figures                                   written by the supervisor
  verdict.json    what the notebook concluded                     written by the notebook
  report.html     figures and tables of the run, self-contained   written by the notebook
  notebook.ipynb  the executed notebook, where one started the run, and notebook.html, the same to read
  STOP            asks the supervisor to stop; works when nothing else answers
  .status.lock    held while status.json passes to a new owner
  .tracking.lock  held by the tracker as long as it lives
"""

import enum
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from labkit.config import ExperimentConfig, from_mapping
from labkit.errors import ConfigError


class RunState(enum.StrEnum):
    """Where a run stands. It only moves from planned to running to one of the others."""

    PLANNED = "planned"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    TIMEOUT = "timeout"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """Nothing of the run is alive any more."""
        return self not in (RunState.PLANNED, RunState.RUNNING)

    @property
    def exit_code(self) -> int:
        """What a command that waited for the run ends with."""
        return {RunState.FINISHED: 0, RunState.TIMEOUT: 124, RunState.KILLED: 130}.get(self, 1)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ProcessId(_Record):
    """A process that can be told from a later one with the same number.

    Attributes:
        pid: Process number on `host`.
        host: Host name.
        started_at: Start of the process, seconds since 1970.
    """

    pid: int
    host: str
    started_at: float

    @classmethod
    def current(cls) -> "ProcessId":
        """This process."""
        process = psutil.Process()
        return cls(pid=process.pid, host=socket.gethostname(), started_at=process.create_time())

    def is_here(self) -> bool:
        """It runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """It still runs. A process on another machine counts as alive: it can't be seen from here."""
        if not self.is_here():
            return True
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class WorkerRecord(_Record):
    """Where one worker runs."""

    rank: int
    node: str
    local_rank: int
    pid: int | None = None


class RunError(_Record):
    """Why a run did not finish: the root cause first.

    Attributes:
        message: One line.
        rank: The worker that failed first; none when no worker did.
        node: Its node.
        traceback: Its traceback, "" when it left none (a killed process).
    """

    message: str
    rank: int | None = None
    node: str | None = None
    traceback: str = ""


class RunStatus(_Record):
    """The content of `status.json`. Times are seconds since 1970."""

    state: RunState = RunState.PLANNED
    attempt: int = 1
    owner: ProcessId | None = None
    heartbeat_at: float = 0.0
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    workers: tuple[WorkerRecord, ...] = ()
    num_restarts: int = 0
    error: RunError | None = None
    diverged_at: int | None = None


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Write a whole file or none of it: a temporary name in the same folder, flushed, then renamed.

    Args:
        path: The file.
        text: All of its content.
        is_durable: Survive a power cut too; a heartbeat that is written every second need not.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def project_root() -> Path | None:
    """The checkout that this package is imported from, or None when it is installed elsewhere."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def runs_root() -> Path:
    """The folder of all runs: `$LABKIT_RUNS`, else `runs/` of the checkout, else `runs/` here."""
    given = os.environ.get("LABKIT_RUNS")
    if given:
        return Path(given).expanduser().absolute()
    return (project_root() or Path.cwd()) / "runs"


class RunFolder:
    """One run on disk. Reading needs no lock: every file is replaced whole or only appended to."""

    def __init__(self, path: str | Path, *, node: str | None = None) -> None:
        """Name a run.

        Args:
            path: Its folder.
            node: Set on a machine that takes part in a run which another machine owns: the state and
                the supervisor's log are then those of this node.
        """
        self.path = Path(path).absolute()
        self.node = node
        self.config_file = self.path / "config.json"
        self.code_dir = self.path / "code"
        self.env_file = self.path / "env.json"
        self.emulation_file = self.path / "emulation.json"
        self.tracking_file = self.path / "tracking.json"
        self.result_file = self.path / "result.json"
        self.verdict_file = self.path / "verdict.json"
        self.report_file = self.path / "report.html"
        self.notebook_file = self.path / "notebook.ipynb"
        self.notebook_html_file = self.path / "notebook.html"
        self.stop_file = self.path / "STOP"
        self.events_dir = self.path / "events"
        self.alive_dir = self.path / "alive"
        self.errors_dir = self.path / "errors"
        self.logs_dir = self.path / "logs"
        self.checkpoints_dir = self.path / "checkpoints"
        self.tracker_log = self.path / "logs" / "tracker.log"
        self.status_lock_file = self.path / ".status.lock"
        self.tracking_lock_file = self.path / ".tracking.lock"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def key(self) -> str:
        """The run's key, unique within its experiment."""
        return self.path.name

    @property
    def status_file(self) -> Path:
        """State of the run, or of one node's part in it."""
        return self.path / "nodes" / f"{self.node}.json" if self.node else self.path / "status.json"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor said."""
        return self.logs_dir / (f"supervisor-{self.node}.log" if self.node else "supervisor.log")

    def events_file(self, rank: int) -> Path:
        """Events of one worker."""
        return self.events_dir / f"rank{rank:04d}.jsonl"

    def alive_file(self, rank: int) -> Path:
        """Holds the worker's process number; touched by it once a second."""
        return self.alive_dir / f"rank{rank:04d}"

    def link_file(self, node: str, index: int) -> Path:
        """What the workers behind one link of a node share."""
        return self.path / "links" / f"{node}-{index}"

    def error_file(self, rank: int) -> Path:
        """Exception of a worker that failed."""
        return self.errors_dir / f"rank{rank:04d}.json"

    def log_files(self, rank: int) -> tuple[Path, Path]:
        """What the worker printed: stdout, stderr."""
        stem = self.logs_dir / f"rank{rank:04d}"
        return stem.with_suffix(".out"), stem.with_suffix(".err")

    def checkpoint_file(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.checkpoints_dir / f"step{step:08d}.pt"

    def exists(self) -> bool:
        """There is a run here."""
        return self.config_file.is_file()

    def create(self, config: ExperimentConfig) -> None:
        """Make the folder and write its configuration.

        Raises:
            ConfigError: the folder can't be written.
        """
        try:
            for folder in (
                self.events_dir,
                self.alive_dir,
                self.errors_dir,
                self.logs_dir,
                self.checkpoints_dir,
                self.status_file.parent,
            ):
                folder.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            self.write_status(RunStatus(created_at=time.time()))
        except OSError as error:
            raise ConfigError(
                f"run folder must be writable, got {self.path}: {error.strerror or error}. "
                "Free space or rights there, or set LABKIT_RUNS to another folder."
            ) from None

    def write_config(self, config: ExperimentConfig) -> None:
        """Write `config.json`."""
        write_atomically(self.config_file, json.dumps(config.model_dump(mode="json"), indent=1))

    def read_config(self) -> ExperimentConfig:
        """Read `config.json`.

        Raises:
            ConfigError: there is no run here, or the file is not an experiment.
        """
        try:
            values = json.loads(self.config_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"run must be a run folder, got {self.path} (no config.json). `labkit status` lists them."
            ) from None
        except ValueError as error:
            raise ConfigError(f"{self.config_file} must be JSON, got a fault: {error}.") from None
        return from_mapping(values, source=str(self.config_file))

    def read_status(self) -> RunStatus:
        """Read `status.json`; a run without one is planned."""
        try:
            return RunStatus.model_validate_json(self.status_file.read_bytes())
        except FileNotFoundError:
            return RunStatus()

    def write_status(self, status: RunStatus, *, is_durable: bool = True) -> None:
        """Replace `status.json`. Only the run's owner calls this."""
        write_atomically(self.status_file, status.model_dump_json(indent=1), is_durable=is_durable)

    def read_json(self, path: Path) -> dict[str, Any]:
        """A JSON object of the folder, {} when it is not there (yet) or broken."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def ranks(self) -> list[int]:
        """Ranks that have written events."""
        return sorted(int(path.stem.removeprefix("rank")) for path in self.events_dir.glob("rank*.jsonl"))

    def read_events(self, rank: int, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Read whole lines of a worker's events from a byte offset on.

        Returns:
            The events, and the offset to go on from. A last line that is still being written is
            left for the next call; a broken line is passed over.
        """
        try:
            with open(self.events_file(rank), "rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return [], offset
        end = data.rfind(b"\n") + 1
        events = []
        for line in data[:end].splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
        return events, offset + end

    def history(self, rank: int = 0, kinds: tuple[str, ...] = ("metrics",)) -> list[dict[str, Any]]:
        """Events of some kinds in order of their steps; after a resume the last attempt wins."""
        events, _ = self.read_events(rank)
        return last_attempt_wins(event for event in events if event.get("kind") in kinds)


def last_attempt_wins(events: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop what a later attempt did again: steps that a resume repeated from its checkpoint.

    Events without a step are kept. Each (kind, step) appears once, from the newest attempt.
    """
    kept: dict[tuple[str, Any, int], dict[str, Any]] = {}
    unnumbered = 0
    newest = 0
    for event in events:
        step = event.get("step")
        attempt = int(event.get("attempt", 1))
        if step is None:
            unnumbered += 1
            kept[str(event.get("kind")), None, unnumbered] = event
            continue
        if attempt > newest:
            newest = attempt
            for key in [k for k in kept if k[1] is not None and k[1] >= step]:
                del kept[key]
        kept[str(event.get("kind")), step, 0] = event
    return list(kept.values())


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def run_key(config: ExperimentConfig, code: Mapping[str, str]) -> str:
    """The name of a run by its content: 10 hex digits over what can change its result.

    Args:
        config: The experiment. Its `launch` section and `name` do not count, but for `purpose` and
            `is_emulated`: on links of given rates a run takes another time.
        code: Digest of each source file that takes part, by a name without machine paths.
    """
    identity = config.model_dump(mode="json", exclude={"launch", "name"})
    if config.launch.is_emulated:
        identity["is_emulated"] = True
    if config.launch.purpose != "train":
        identity["purpose"] = config.launch.purpose
    text = canonical_json({"config": identity, "code": dict(code)})
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def all_runs(root: Path | None = None) -> list[RunFolder]:
    """Every run under the runs folder, oldest first."""
    found = [_seen_from_here(path.parent) for path in (root or runs_root()).glob("*/*/config.json")]
    return sorted(found, key=lambda run: run.read_status().created_at)


def _seen_from_here(path: Path) -> RunFolder:
    """A run as this machine sees it: one node's part, where another machine owns the run."""
    parts = list((path / "nodes").glob("*.json"))
    is_part = len(parts) == 1 and not (path / "status.json").exists()
    return RunFolder(path, node=parts[0].stem if is_part else None)


def find_run(text: str, root: Path | None = None) -> RunFolder:
    """Find a run by its folder, its key, the beginning of its key, or `latest`.

    Raises:
        ConfigError: there is none, or several.
    """
    path = Path(text)
    if (path / "config.json").is_file():
        return _seen_from_here(path)
    runs = all_runs(root)
    if text == "latest" and runs:
        return runs[-1]
    hits = [run for run in runs if run.key == text] or [r for r in runs if r.key.startswith(text)]
    if len(hits) == 1:
        return hits[0]
    if not hits:
        raise ConfigError(
            f"run must be a run folder, a run key or 'latest', got {text!r}: none found under "
            f"{root or runs_root()}. `labkit status` lists them."
        )
    raise ConfigError(
        f"run must name one run, got {text!r}, which fits {', '.join(r.key for r in hits)}. Give more of it."
    )
