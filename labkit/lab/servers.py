"""JupyterLab and the MLflow UI: child processes on loopback, started together and stopped together."""

import ctypes
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from labkit.errors import ConfigError, LabkitError
from labkit.lab import links, tracking
from labkit.runfolder import project_root, runs_root

LOOPBACK = "127.0.0.1"
JUPYTER_PORT = 8888
MLFLOW_PORT = 5000

_START_TIMEOUT_S = 120.0
_STOP_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1
_FIRST_NOTEBOOK = Path("notebooks") / "00_quickstart.ipynb"


# --- ports ---------------------------------------------------------------------------------------


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Nothing listens on the port.

    Raises:
        ConfigError: the host is no address of this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise ConfigError(f"port must be 1024 or more, got {port}. Choose another.") from None
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host must be an address of this machine, got {host!r}.") from None
            return False
    return True


def choose_port(
    asked: int | None,
    preferred: int,
    *,
    host: str = LOOPBACK,
    option: str = "--port",
    taken: Collection[int] = (),
) -> int:
    """The port that was asked for, else the first free one from `preferred` on.

    Args:
        asked: What the user wants; none: any.
        preferred: Where to begin to look.
        host: Address to listen on.
        option: What the user calls it.
        taken: Ports that will be in use soon.

    Raises:
        ConfigError: the port that was asked for is in use.
    """
    if asked is not None:
        if asked in taken or not is_free(asked, host):
            raise ConfigError(
                f"{option} must be a free port, got {asked}, which is in use. "
                f"Choose another, or leave {option} out."
            )
        return asked
    for port in range(preferred, preferred + 20):
        if port not in taken and is_free(port, host):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as any_port:
        any_port.bind((host, 0))
        return int(any_port.getsockname()[1])


# --- what is started -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerPlan:
    """One server that is to be started.

    Attributes:
        name: What a person calls it.
        command: Program and arguments.
        environment: Its whole environment.
        folder: Its working directory.
        health_url: Answers 200 once the server is up.
        link: What a person opens.
        closed_url: Must refuse a request without the token; none where there is no token.
        mlflow_base: Where links into MLflow lead while it runs; none for another server.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    health_url: str
    link: str
    closed_url: str | None = None
    mlflow_base: str | None = None


def jupyterlab(port: int) -> ServerPlan:
    """JupyterLab on loopback, in the checkout, with a fresh token. Its kernels can import labkit."""
    token = secrets.token_hex(24)
    root = project_root() or Path.cwd()
    base = f"http://{LOOPBACK}:{port}"
    page = f"/lab/tree/{_FIRST_NOTEBOOK.as_posix()}" if (root / _FIRST_NOTEBOOK).is_file() else "/lab"
    options = [
        "--no-browser",
        f"--ServerApp.ip={LOOPBACK}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={root}",
    ]
    return ServerPlan(
        name="JupyterLab",
        command=[sys.executable, "-m", "jupyterlab", *options, *(["--allow-root"] if _is_root() else [])],
        # The token goes by the environment: a command line is there for every user of the machine to read.
        environment={**os.environ, **kernel_environment(), **_jupyter_settings(), "JUPYTER_TOKEN": token},
        folder=root,
        health_url=f"{base}/api",
        link=f"{base}{page}?token={token}",
        closed_url=f"{base}/api/contents",
    )


def mlflow_ui(port: int, host: str = LOOPBACK) -> ServerPlan:
    """The MLflow UI over the runs, on loopback unless `host` says otherwise.

    Raises:
        ConfigError: the runs are tracked by a server of the user's own.
    """
    base = f"http://{LOOPBACK if host == '0.0.0.0' else host}:{port}"
    return ServerPlan(
        name="MLflow UI",
        command=tracking.ui_command(host, port),
        environment=tracking.ui_environment(),
        folder=runs_root(),
        health_url=f"{base}/health",
        link=links.home_url(base),
        mlflow_base=base,
    )


def kernel_environment() -> dict[str, str]:
    """What a kernel needs to import labkit and to find the runs, wherever it is started."""
    environment = {"LABKIT_RUNS": str(runs_root())}
    root = project_root()
    if root is not None:
        environment["PYTHONPATH"] = _before(root, "PYTHONPATH")
    return environment


def _jupyter_settings() -> dict[str, str]:
    """Defaults of JupyterLab that we change: it does not ask about news and looks for no updates.

    What the user has chosen in JupyterLab's own settings comes before them.
    """
    folder = Path(__file__).parent / "jupyter"
    return {"JUPYTER_CONFIG_PATH": _before(folder, "JUPYTER_CONFIG_PATH")}


def _before(folder: Path, variable: str) -> str:
    """A search path with one more folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


# --- starting, watching, stopping --------------------------------------------------------------------


@dataclass
class Server:
    """A server that runs."""

    plan: ServerPlan
    process: "subprocess.Popen[bytes]"
    log: IO[bytes] = field(repr=False)

    def is_alive(self) -> bool:
        """Its process has not ended."""
        return self.process.poll() is None

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines it printed."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and all that it started in its group."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return


@contextmanager
def started(plan: ServerPlan) -> Iterator[Server]:
    """Start a server in a session of its own; at the end stop it and everything in its group."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                plan.command,
                cwd=plan.folder,
                env=dict(plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:
            raise LabkitError(f"{plan.name} could not be started: {error}. Run `labkit doctor`.") from None
        server = Server(plan, process, log)
        try:
            yield server
        finally:
            _stop(server)


def _end_with_parent() -> Callable[[], None] | None:
    """Let the kernel send SIGTERM to the child when we are killed without a chance to stop it."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _stop(server: Server) -> None:
    """Ask, wait, then kill what is left. JupyterLab ends its kernels when it is asked."""
    server.signal(signal.SIGTERM)
    try:
        server.process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        server.signal(signal.SIGKILL)
        server.process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _wait_until_up(servers: Sequence[Server], stop: threading.Event) -> None:
    """Wait until all answer.

    Raises:
        LabkitError: one ended or did not answer in time, or JupyterLab is open without its token.
    """
    waiting = list(servers)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while waiting and not stop.wait(0.1):
        for server in list(waiting):
            _check_alive(server)
            if _answers(server.plan.health_url):
                _check_closed(server)
                waiting.remove(server)
        if waiting and time.monotonic() > deadline:
            raise LabkitError(
                f"{waiting[0].plan.name} must answer within {_START_TIMEOUT_S:.0f} s, got nothing. "
                f"Its last lines:\n{waiting[0].log_tail()}"
            )


def _check_alive(server: Server) -> None:
    if not server.is_alive():
        raise LabkitError(
            f"{server.plan.name} ended with exit code {server.process.returncode}. "
            f"Its last lines:\n{server.log_tail()}"
        )


def _check_closed(server: Server) -> None:
    if server.plan.closed_url and _answers(server.plan.closed_url):
        raise LabkitError(
            f"{server.plan.name} must ask for a token, got an open server. A Jupyter configuration of "
            "yours switches it off: `jupyter --paths` shows where."
        )


@contextmanager
def _stop_signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal set `stop` while this is active."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(plans: Sequence[ServerPlan], announce: Callable[[], None]) -> None:
    """Start servers, call `announce` once all answer, and wait for Ctrl-C or the end of one of them.

    Whatever happens, no server is left behind.

    Raises:
        LabkitError: a server did not come up, or ended by itself.
    """
    stop = threading.Event()
    with _stop_signals(stop), ExitStack() as running:
        servers = [running.enter_context(started(plan)) for plan in plans]
        _wait_until_up(servers, stop)
        for base in filter(None, [plan.mlflow_base for plan in plans]):
            running.enter_context(links.served_at(base))
        if not stop.is_set():
            announce()
        while not stop.wait(0.3):
            for server in servers:
                _check_alive(server)
