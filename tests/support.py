"""What several test files share."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from labkit.launch.emulation import Emulation


def need(condition: bool, reason: str) -> None:
    """Skip a test whose surroundings lack something; in CI that is a failure, not a skip."""
    if condition:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"in CI this must run: {reason}")
    pytest.skip(reason)


def namespaces_of(emulation: "Emulation") -> set[str]:
    """As the kernel names them: net:[4026532323]."""
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in emulation.fds()}


def holders_of(namespaces: set[str]) -> set[int]:
    """Processes that are in one of them or hold it open. Without any, the kernel has freed them."""
    found = set()
    for process in psutil.process_iter():
        for path in (*Path(f"/proc/{process.pid}/ns").glob("*"), *Path(f"/proc/{process.pid}/fd").glob("*")):
            with contextlib.suppress(OSError):
                if os.readlink(path) in namespaces:
                    found.add(process.pid)
    return found
