"""Shares of a processor for workers of unlike speed: one control group of the Linux kernel for each.

A group's processes together run for its quota in each period and wait for the rest of it. That slows all
that a worker does on the processor, its communication too, as a slow processor would; `engine.pace` slows
the compute alone and leaves the processor free, as an accelerator would.

The kernel keeps an empty group until somebody removes it. Its name holds its owner's process number and
start, so whoever comes later can tell, and removes, the groups of a process that was killed.
"""

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from labkit.config import EngineConfig, ExperimentConfig
from labkit.errors import ConfigError
from labkit.runfolder import ProcessId

PERIOD_US = 20_000
_MIN_QUOTA_US = 1_000  # the kernel refuses less
_PATIENCE_S = 2.0
_NAME = re.compile(r"^labkit-(\d+)-([\d.]+)-\d+$")
_MOUNTS = Path("/proc/self/mounts")


def num_threads(engine: EngineConfig, num_here: int) -> int:
    """Threads of a worker: what the configuration says, else its part of the cores.

    Args:
        engine: The configuration.
        num_here: Workers of the run on this machine, which share its cores.
    """
    return engine.num_threads or max(1, num_cores() // num_here)


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of(speeds: Sequence[float], threads: int) -> list[float]:
    """The cores of each worker: as many as threads for the fastest, in proportion to speed for the others.

    Args:
        speeds: Of each worker; shape (W,).
        threads: Of each worker.

    Raises:
        ConfigError: a share is smaller than the kernel can give.
    """
    cores = [threads * speed / max(speeds) for speed in speeds]
    least = _MIN_QUOTA_US / PERIOD_US
    for rank, share in enumerate(cores):
        if share < least * (1 - 1e-9):
            raise ConfigError(
                f"speed of worker {rank} must be at least {least / threads:g} of the fastest one's, which is "
                f"the smallest processor quota, got {speeds[rank] / max(speeds):g} of it. Raise it, or set "
                "engine.step_padding_s."
            )
    return cores


@dataclass(frozen=True)
class Controller:
    """Where the kernel's cpu controller is mounted.

    Attributes:
        folder: Its root group.
        is_v2: By the interface of cgroup v2.
    """

    folder: Path
    is_v2: bool

    def make(self, name: str, cores: float) -> Path:
        """Make a group.

        Raises:
            OSError: it is not allowed.
        """
        group = self.folder / name
        if self.is_v2:
            delegated = self.folder / "cgroup.subtree_control"
            if "cpu" not in delegated.read_text().split():
                delegated.write_text("+cpu")  # stays: others may come to need it
        group.mkdir()
        try:
            self._limit(group, max(_MIN_QUOTA_US, round(cores * PERIOD_US)))
        except OSError:
            group.rmdir()
            raise
        return group

    def _limit(self, group: Path, quota_us: int) -> None:
        if self.is_v2:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            return
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def find_controller() -> Controller | None:
    """The cpu controller of this machine; None without one."""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return None  # not Linux
    for _, folder, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Controller(Path(folder), is_v2=False)
        if kind == "cgroup2" and "cpu" in _words(Path(folder) / "cgroup.controllers"):
            return Controller(Path(folder), is_v2=True)
    return None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def enter(group: str | Path) -> None:
    """Move this process, with all of its threads, into a group.

    Raises:
        OSError: it is not allowed.
    """
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


class Quotas:
    """The groups of a run's workers, owned by this process."""

    def __init__(self, cores: Sequence[float]) -> None:
        """Make them.

        Args:
            cores: Of each worker; shape (W,).

        Raises:
            ConfigError: there is no controller, or it may not be used.
        """
        controller = find_controller()
        if controller is None:
            raise _refused("no cpu controller among the mounted cgroup file systems")
        sweep()
        owner = ProcessId.current()
        self.cores = tuple(cores)
        self.groups: list[Path] = []
        try:
            for rank, share in enumerate(cores):
                name = f"labkit-{owner.pid}-{owner.started_at:.2f}-{rank}"
                self.groups.append(controller.make(name, share))
        except OSError as error:
            self.remove()
            raise _refused(f"{error.strerror}: {error.filename or controller.folder}") from None

    def remove(self) -> None:
        """Remove them, once their processes have ended. Safe to call twice."""
        _remove(self.groups)
        self.groups = []

    def __str__(self) -> str:
        text = f"processor quotas of {', '.join(f'{share:.3g}' for share in self.cores)} cores"
        if sum(self.cores) > num_cores() + 1e-9:
            text += f", MORE THAN THE {num_cores()} HERE: speeds come out less unlike"
        return text


def quotas_of(config: ExperimentConfig) -> Quotas | None:
    """Make the quotas that a run on one machine asks for; None if it asks for none.

    Raises:
        ConfigError: they can't be had here.
    """
    if not config.has_quotas:
        return None
    speeds = config.cluster.speeds
    return Quotas(cores_of(speeds, num_threads(config.engine, len(speeds))))


def check(config: ExperimentConfig) -> None:
    """Find out whether a run's quotas can be had here, by making them, going into one and dropping them.

    Raises:
        ConfigError: they can't.
    """
    quotas = quotas_of(config)
    if quotas is None:
        return
    try:
        if (child := os.fork()) == 0:
            _try(quotas.groups[0])
        if os.waitpid(child, 0)[1]:
            raise _refused(f"a process may not be moved to {quotas.groups[0]}")
    finally:
        quotas.remove()


def _try(group: Path) -> NoReturn:
    try:
        enter(group)
    except OSError:
        os._exit(1)
    os._exit(0)


def sweep() -> None:
    """Remove the groups of owners that have died."""
    controller = find_controller()
    if controller is not None:
        _remove([group for group in controller.folder.glob("labkit-*") if _is_ownerless(group)])


def _is_ownerless(group: Path) -> bool:
    found = _NAME.match(group.name)
    if found is None:
        return False  # not one of ours
    owner = ProcessId(pid=int(found[1]), host=socket.gethostname(), started_at=float(found[2]))
    return not owner.is_alive()


def _remove(groups: Sequence[Path]) -> None:
    """A group that still has processes can't be removed: wait a moment for their end, then leave it."""
    deadline = time.monotonic() + _PATIENCE_S
    for group in groups:
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
            break


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        "cluster speeds without engine.step_padding_s must be emulated by processor quotas, for which root "
        f"and the cgroup cpu controller are needed, got: {reason}. Run as root where it is mounted, or set "
        "engine.step_padding_s."
    )
