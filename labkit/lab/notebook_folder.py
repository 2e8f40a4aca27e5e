"""The folder of one execution of a notebook, beside the folders of the runs that it starts.

runs/notebooks/<notebook's name>/<key>/
  status.json      state machine, owner, error         written by the notebook runner alone
  parameters.json  given and effective parameters      written by the notebook runner
  notebook.ipynb   the executed copy, kept up to date   written by the notebook runner
  kernel.log       what the kernel process itself printed
  runs.jsonl       {"run": "/path"} a line, appended by the notebook's kernel when it starts a run
  STOP             asks the notebook runner to stop
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from nbformat import NotebookNode

from labkit.errors import ConfigError
from labkit.lab._values import json_safe, literal
from labkit.launch.code import labkit_digest
from labkit.launch.reap import is_lost
from labkit.runfolder import (
    ProcessId,
    RunError,
    RunFolder,
    RunState,
    RunStatus,
    canonical_json,
    runs_root,
    write_atomically,
)


class NotebookFolder:
    """One execution of a notebook on disk. States and `status.json` are those of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._record = RunFolder(self.path)
        self.status_file = self._record.status_file
        self.stop_file = self._record.stop_file
        self.notebook_file = self._record.notebook_file
        self.parameters_file = self.path / "parameters.json"
        self.kernel_log = self.path / "kernel.log"
        self.runs_file = self.path / "runs.jsonl"

    def __repr__(self) -> str:
        return f"NotebookFolder({str(self.path)!r})"

    @property
    def key(self) -> str:
        """Its key, unique within its notebook's name."""
        return self.path.name

    def status(self) -> RunStatus:
        """The true status: `lost` is written down when the runner died before the end."""
        status = self._record.read_status()
        if not is_lost(status):
            return status
        with FileLock(self._record.status_lock_file, timeout=10):
            status = self._record.read_status()
            if is_lost(status):
                status = _as_lost(status)
                self.write_status(status)
        return status

    def write_status(self, status: RunStatus) -> None:
        """Replace `status.json`. Only the runner that owns it calls this."""
        self._record.write_status(status)

    def claim(self) -> RunStatus | None:
        """Make this process the owner of a new attempt.

        Returns:
            The status it now has, or None when the notebook has already finished here.

        Raises:
            ConfigError: another process executes it, or the folder can't be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            status = self.status()
            with FileLock(self._record.status_lock_file, timeout=10):
                status = self._record.read_status()
                if status.state is RunState.FINISHED and self.notebook_file.is_file():
                    return None
                self._refuse_if_busy(status)
                return self._take_over(status)
        except (OSError, Timeout) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"notebook's folder must be writable, got {self.path}: {reason}. "
                "Free space or rights there, or set LABKIT_RUNS to another folder."
            ) from None

    def _refuse_if_busy(self, status: RunStatus) -> None:
        owner = status.owner
        if status.state.is_final or owner is None or not owner.is_alive():
            return
        raise ConfigError(
            f"notebook must not be running with these parameters already, got {self.path}, which process "
            f"{owner.pid} on {owner.host} owns. Wait for it, stop it by `touch {self.stop_file}`, or give "
            "--force."
        )

    def _take_over(self, before: RunStatus) -> RunStatus:
        for leftover in (self.stop_file, self.runs_file, self.notebook_file):
            leftover.unlink(missing_ok=True)
        now = time.time()
        status = RunStatus(
            state=RunState.RUNNING,
            attempt=before.attempt + before.state.is_final,
            owner=ProcessId.current(),
            heartbeat_at=now,
            created_at=before.created_at or now,
            started_at=now,
        )
        self.write_status(status)
        return status

    def write_parameters(self, given: Mapping[str, Any], effective: Mapping[str, Any]) -> None:
        """Write `parameters.json`: all values as JSON, and the given ones as lossless Python source."""
        content = {
            "parameters": json_safe(effective),
            "given": {name: literal(value) for name, value in given.items()},
        }
        write_atomically(self.parameters_file, json.dumps(content, indent=1, allow_nan=False))

    def started_runs(self) -> list[RunFolder]:
        """The runs that the notebook started, in order."""
        try:
            lines = self.runs_file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        paths = []
        for line in lines:
            try:
                paths.append(str(json.loads(line)["run"]))
            except (ValueError, KeyError, TypeError):  # a line that a killed kernel left half
                continue
        return [RunFolder(path) for path in dict.fromkeys(paths) if Path(path).is_dir()]


def folder_for(stem: str, key: str, *, is_repeat: bool = False) -> NotebookFolder:
    """The folder of a notebook's execution; with `is_repeat` a new one beside it: `<key>-r2`, ..."""
    parent = runs_root() / "notebooks" / stem
    folder = NotebookFolder(parent / key)
    if not is_repeat or not folder.status_file.exists():
        return folder
    number = 2
    while (parent / f"{key}-r{number}").exists():
        number += 1
    return NotebookFolder(parent / f"{key}-r{number}")


def notebook_key(notebook: NotebookNode, effective: Mapping[str, Any]) -> str:
    """The name of an execution by its content: 10 hex digits over what can change its result.

    Code cells, the effective parameters and labkit's own code count; prose, outputs and the time do not.
    """
    identity = {
        "cells": [cell.source for cell in notebook.cells if cell.cell_type == "code"],
        "parameters": {name: literal(value) for name, value in effective.items()},
        "labkit": labkit_digest(),
    }
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:10]


def all_notebooks(root: Path | None = None) -> list[NotebookFolder]:
    """Every execution of a notebook under the runs folder, oldest first."""
    found = [NotebookFolder(p.parent) for p in ((root or runs_root()) / "notebooks").glob("*/*/status.json")]
    return sorted(found, key=lambda folder: folder.status().created_at)


def _as_lost(status: RunStatus) -> RunStatus:
    assert status.owner is not None
    error = RunError(
        message=f"notebook runner died (process {status.owner.pid} on {status.owner.host}) before the end. "
        "Run the notebook again."
    )
    ended_at = max(status.heartbeat_at, status.started_at or 0.0)
    return status.model_copy(update={"state": RunState.LOST, "error": error, "ended_at": ended_at})
