"""What a run ran on, for whoever wants to repeat it."""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "numpy", "mlflow", "papermill", "pydantic", "jupyterlab", "ipywidgets", "plotly")


def describe_environment(command: str, code: dict[str, str], import_paths: list[str]) -> dict[str, Any]:
    """Versions, machine, git commit and command, as JSON values."""
    return {
        "command": command,
        "cwd": str(Path.cwd()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": _git_state(),
        "code": code,
        "import_paths": import_paths,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any]:
    """Commit of the working directory and whether it has changes; {} outside a repository."""
    git = shutil.which("git")
    if git is None:
        return {}
    try:
        sha = subprocess.run(
            [git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        changes = subprocess.run(
            [git, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return {}
    return {"sha": sha, "is_dirty": bool(changes)}
