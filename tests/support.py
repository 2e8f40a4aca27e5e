"""What several test files share."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from labkit.launch import Run
    from labkit.launch.emulation import Emulation


def need(condition: bool, reason: str) -> None:
    """Skip a test whose surroundings lack something; in CI that is a failure, not a skip."""
    if condition:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"in CI this must run: {reason}")
    pytest.skip(reason)


def until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {limit_s} s"
        time.sleep(0.02)


def until_step(run: "Run", step: int) -> None:
    """Wait until a run that goes on has done a step."""

    def is_reached() -> bool:
        status = run.status()
        assert not status.state.is_final, (status.state, status.error)
        return any(event["step"] >= step for event in run.folder.history())

    until(is_reached, f"step {step}")


def newest_checkpoint(run: "Run") -> dict[str, Any]:
    """What a run has saved last."""
    from labkit.engine import checkpoint

    newest = max(run.folder.checkpoints_dir.glob("step*.pt"))
    return checkpoint.read_checkpoint(newest.read_bytes(), "it")


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
