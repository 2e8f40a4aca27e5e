"""Everything that imports MLflow runs in a process of its own.

So a kernel or a command stays quick and small (MLflow's import takes a second and 1,800 modules),
keeps its environment, and can't be held up: a process that waits for a dead server is ended.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import labkit
from labkit.errors import LabkitError

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the tracker tries again itself, and says so
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


def settings() -> dict[str, str]:
    """Environment of a process that imports MLflow: what the user has set stays as it is."""
    return {name: os.environ.get(name, value) for name, value in _SETTINGS.items()}


def environment() -> dict[str, str]:
    """Environment of a helper process: it finds labkit, wherever it is started."""
    package_parent = str(Path(labkit.__file__).parent.parent)
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **settings(), "PYTHONPATH": os.pathsep.join(paths)}


def run_helper(arguments: Sequence[str], timeout_s: float) -> str:
    """Run `python -m labkit.lab.tracking ARGUMENTS` to its end.

    Returns:
        What it printed.

    Raises:
        LabkitError: it failed, or took longer than `timeout_s`; the message is its last line.
    """
    command = [sys.executable, "-m", "labkit.lab.tracking", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise LabkitError(
            f"MLflow must answer within {timeout_s:.0f} s, got nothing. Is its server up?"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LabkitError(f"MLflow: {lines[-1]}")
    return done.stdout
