"""Clusters that stand by themselves: a small process holds the namespaces until it is told to let go.

A run whose `cluster` is the same as a standing one's is put on it, and so is another one at the same time:
they share its links, and what was done to them. Taking a cluster down while a run is on it does not hurt
the run: the kernel keeps the namespaces as long as the run's supervisor holds them too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.config import ClusterConfig
from labkit.errors import ConfigError, LabkitError, did_you_mean
from labkit.launch.emulation.builder import check_system
from labkit.launch.emulation.control import with_rates_of_now
from labkit.launch.emulation.emulation import Emulation
from labkit.launch.emulation.links import links_of
from labkit.launch.emulation.record import EmulationRecord, open_record
from labkit.runfolder import runs_root

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_PATIENCE_S = 10.0


class StandingRecord(BaseModel):
    """The content of a standing cluster's file.

    Attributes:
        name: Its name.
        cluster: What it was built from.
        emulation: Where its namespaces are.
        started_at: Seconds since 1970.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    cluster: ClusterConfig
    emulation: EmulationRecord
    started_at: float


def state_file(name: str) -> Path:
    """The file of a standing cluster."""
    return runs_root() / "clusters" / f"{name}.json"


def up(name: str, cluster: ClusterConfig) -> StandingRecord:
    """Build a cluster's network and leave it standing.

    Args:
        name: To call it by.
        cluster: Nodes and link rates; its workers do not matter.

    Raises:
        ConfigError: the name is taken or no name, or the cluster can't be emulated here.
    """
    if not _NAME.match(name):
        raise ConfigError(f"name of a cluster must be letters, digits, '.', '_' and '-', got {name!r}.")
    links_of(cluster)
    check_system()
    file = state_file(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.parent / ".lock", timeout=_PATIENCE_S)
        lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"{file.parent} must be writable, got: {error.strerror or error}. Set LABKIT_RUNS elsewhere."
        ) from None
    with lock:
        if any(record.name == name for record in all_standing()):
            raise ConfigError(
                f"name of a cluster must be free, got {name!r}, which stands already. Take it down first: "
                f"labkit cluster down {name}"
            )
        _start_holder(name, cluster)
        return find(name)


def _start_holder(name: str, cluster: ClusterConfig) -> None:
    # A session of its own: Ctrl-C in the terminal that started it is not meant for it.
    with subprocess.Popen(
        [sys.executable, "-m", "labkit.launch.emulation.holder", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        answer, faults = process.communicate(cluster.model_dump_json())
    error = json.loads(answer)["error"] if answer else faults.strip() or "it died"
    if error:
        raise ConfigError(error) if answer else LabkitError(f"holder of cluster {name} failed: {error}")


def all_standing() -> list[StandingRecord]:
    """Every standing cluster, by name; files of dead ones are removed."""
    found = []
    for file in sorted((runs_root() / "clusters").glob("*.json")):
        record = _read(file)
        if record is not None and record.emulation.holder.is_alive():
            found.append(record)
        elif record is not None:
            file.unlink(missing_ok=True)
    return found


def _read(file: Path) -> StandingRecord | None:
    try:
        return StandingRecord.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def find(name: str) -> StandingRecord:
    """A standing cluster by its name.

    Raises:
        ConfigError: none of that name stands.
    """
    standing = all_standing()
    for record in standing:
        if record.name == name:
            return record
    hint = did_you_mean(name, [record.name for record in standing])
    raise ConfigError(
        f"cluster must be one that stands, got {name!r}. {hint} Start one: labkit cluster up PRESET|FILE"
    )


def open_standing(name: str) -> Emulation:
    """Take hold of a standing cluster.

    Raises:
        ConfigError: none of that name stands, or it is somebody else's.
    """
    return open_record(find(name).emulation)


def open_equal(cluster: ClusterConfig) -> Emulation | None:
    """Take hold of a standing cluster of the same description; None without one."""
    for record in all_standing():
        if record.cluster == cluster and record.emulation.holder.is_here():
            return with_rates_of_now(open_record(record.emulation))
    return None


def down(name: str) -> None:
    """Let a standing cluster go.

    Raises:
        ConfigError: none of that name stands, or it is somebody else's.
    """
    holder = find(name).emulation.holder
    try:
        os.kill(holder.pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_S
        while holder.is_alive():
            if time.monotonic() > deadline:
                os.kill(holder.pid, signal.SIGKILL)
            time.sleep(0.01)
    except ProcessLookupError:
        pass  # it ended by itself
    except PermissionError:
        raise ConfigError(
            f"cluster must belong to you, got {name!r} of process {holder.pid}. Ask who started it."
        ) from None
    state_file(name).unlink(missing_ok=True)
