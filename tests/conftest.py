"""Fixtures and leak guards of the whole suite."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs folder of the test's own."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setenv("LABKIT_RUNS", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


# Of the standard library and the plugins that the whole session shares; they end with it.
_SHARED_COMMANDS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "playwright")
_SHARED_THREADS = ("MainThread", "pydevd", "asyncio_", "ThreadPoolExecutor")
_SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR")


def _is_shared(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() == psutil.STATUS_ZOMBIE or any(part in command for part in _SHARED_COMMANDS)
    except psutil.Error:
        return True


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if not _is_shared(p)}


def _users_of(folder: Path) -> set[int]:
    """Processes, of whatever parent, that have a file under a folder open."""
    found = set()
    inside = str(folder.resolve()) + os.sep
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(f.path.startswith(inside) for f in process.open_files()):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if not t.name.startswith(_SHARED_THREADS)}


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _environment() -> set[str]:
    return {f"{k}={v}" for k, v in os.environ.items() if k not in _SET_BY_OTHERS}


def _listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def _signals() -> set[str]:
    return {f"{number.name} is {signal.getsignal(number)}" for number in (signal.SIGINT, signal.SIGTERM)}


def _groups() -> set[str]:
    import sys

    distributed = sys.modules.get("torch.distributed")
    return {"process group"} if distributed is not None and distributed.is_initialized() else set()


def _describe(pids: set[int]) -> str:
    lines = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            lines.append(f"{pid} ({process.status()}): {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return "; ".join(lines)


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves no process, thread, process group, variable, shared-memory file or port behind."""
    folder: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    guards: dict[str, Callable[[], set[object]]] = {
        "processes": _children,  # type: ignore[dict-item]
        "threads": _threads,  # type: ignore[dict-item]
        "process groups": _groups,  # type: ignore[dict-item]
        "environment variables": _environment,  # type: ignore[dict-item]
        "files in /dev/shm": _shared_memory,  # type: ignore[dict-item]
        "listening ports": _listening,  # type: ignore[dict-item]
        "signal handlers": _signals,  # type: ignore[dict-item]
    }
    before = {name: look() for name, look in guards.items()}
    yield
    deadline = time.monotonic() + 10.0
    while True:
        left = {name: look() - before[name] for name, look in guards.items()}
        if folder is not None:
            left["processes"] |= _users_of(folder)  # type: ignore[arg-type]
        left = {name: found for name, found in left.items() if found}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for pid in left.get("processes", set()):
        left[f"process {pid}"] = {_describe({pid})}  # type: ignore[arg-type]
    assert not left, f"the test left behind: {left}"


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would all that the tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` needs CUDA; elsewhere, CI included, there is nothing to install for it."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU and a torch build with CUDA")
