"""The command of the MLflow server and UI over the embedded store."""

import socket
import sys
from pathlib import Path

import psutil

from labkit.errors import ConfigError
from labkit.lab.tracking._process import environment
from labkit.lab.tracking._store import artifacts_of, ensure_store, without_password
from labkit.runfolder import runs_root

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")
_WILDCARDS = ("0.0.0.0", "::")


def ui_command(host: str = LOOPBACK, port: int = 5000, root: Path | None = None) -> list[str]:
    """The command that serves the UI and the API; run it in `ui_environment()`.

    Args:
        host: Address to listen on. Anything but loopback is open to the network, without a password.
        port: Port to listen on.
        root: Folder of all runs; none: the configured one.

    Raises:
        ConfigError: `MLFLOW_TRACKING_URI` names a server: there is nothing to serve here.
    """
    root = (root or runs_root()).absolute()
    uri = ensure_store(root)
    if uri.startswith("http"):
        raise ConfigError(
            f"MLFLOW_TRACKING_URI must be unset, or name a database, to start a server, got "
            f"{without_password(uri)}. Open that in a browser instead."
        )
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--artifacts-destination", artifacts_of(root).as_uri()]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    return command if host in _LOOPBACK_NAMES else command + _open_to(host, port)


def ui_environment() -> dict[str, str]:
    """The server's whole environment: no telemetry, and no job runner (235 MB for nothing here)."""
    result = {**environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    result.pop("MLFLOW_TRACKING_URI", None)  # the server's store is named on its command line
    return result


def names_of(host: str) -> list[str]:
    """Every name by which a browser may call a server that listens on `host`."""
    own = [socket.gethostname(), socket.getfqdn()]
    if host in _WILDCARDS:
        own += [
            a.address
            for addresses in psutil.net_if_addrs().values()
            for a in addresses
            if a.family == socket.AF_INET
        ]
    else:
        own.append(host)
    return sorted({*own, "localhost", LOOPBACK})


def _open_to(host: str, port: int) -> list[str]:
    """Flags for a server that others reach: by default MLflow answers 403 to any name but localhost."""
    names = names_of(host)
    hosts = [pattern for name in names for pattern in (name, f"{name}:*")]
    origins = [f"http://{name}:{port}" for name in names]
    return ["--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", ",".join(origins)]
