"""Run functions on workers of an emulated cluster, and throw away figures that the surroundings spoilt."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from labkit.cluster.placement import Placement, placements
from labkit.comm import Communicator
from labkit.config import ClusterConfig
from labkit.errors import LabkitError
from labkit.launch.emulation import Calibration, Emulation, build, calibrate, own_bytes
from labkit.launch.emulation.kernel import in_child
from labkit.launch.forked import run_on
from labkit.processes import die_with_parent

LINK_TOLERANCE = 0.05
BYTES_TOLERANCE = 0.05
MAX_FOREIGN_CORES = 0.1
MAX_OVERRUN_SHARE = 0.05

T = TypeVar("T")


def run_emulated(
    function: Callable[..., T],
    cluster: ClusterConfig,
    *arguments: Any,
    timeout_s: float = 60.0,
    emulation: Emulation | None = None,
) -> list[T]:
    """Run `function(comm, placement, *arguments)` on every worker of an emulated cluster.

    Each worker is forked from this process, which has imported torch, and lives in its node's namespaces:
    the address, the host name and the link are the node's.

    Args:
        function: What every worker does; its result must be picklable.
        cluster: Nodes, workers and link rates.
        arguments: Passed on.
        timeout_s: Longest time for all.
        emulation: A network of these nodes from `build`, to be used again and again; default: one is
            built and dropped, which takes a tenth of a second.

    Returns:
        What each worker gave, by rank.

    Raises:
        ConfigError: the cluster can't be emulated here.
        WorkerFailed: a worker raised or died.
    """
    if emulation is None:
        with build(cluster) as built:
            return run_emulated(function, cluster, *arguments, timeout_s=timeout_s, emulation=built)
    # The process in between may join a user namespace, from which this one could never come back.
    return in_child(
        partial(_run_joined, os.getpid(), emulation, function, placements(cluster), arguments, timeout_s)
    )


def _run_joined(
    parent_pid: int,
    emulation: Emulation,
    function: Callable[..., T],
    places: list[Placement],
    arguments: tuple[Any, ...],
    timeout_s: float,
) -> list[T]:
    emulation.join()
    die_with_parent(parent_pid)
    nodes = [place.node for place in places]
    call = partial(_call_placed, function, places)
    return run_on(emulation, nodes, call, *arguments, timeout_s=timeout_s, comm_timeout_s=timeout_s)


def _call_placed(
    function: Callable[..., T], places: list[Placement], comm: Communicator, *arguments: Any
) -> T:
    return function(comm, places[comm.rank], *arguments)


# --- what a measurement was made under --------------------------------------------------------------------


@dataclass
class Measured:
    """What one worker saw while something was measured.

    Attributes:
        seconds: How long it took.
        sent_bytes: By this worker's node over its link.
        loopback_bytes: Inside the node.
        foreign_cores: Cores that processes outside the benchmark kept busy.
    """

    seconds: float = 0.0
    sent_bytes: int = 0
    loopback_bytes: int = 0
    foreign_cores: float = 0.0

    def doubts(self, expected_bytes: float | None = None) -> list[str]:
        """Why this figure must not be believed; [] when it may.

        Args:
            expected_bytes: What the formula says the node sends.
        """
        found = []
        if self.foreign_cores > MAX_FOREIGN_CORES:
            found.append(f"other processes used {self.foreign_cores:.2f} cores")
        if expected_bytes is not None and abs(self.sent_bytes / expected_bytes - 1) > BYTES_TOLERANCE:
            found.append(f"{self.sent_bytes:,} bytes were sent where {expected_bytes:,.0f} were expected")
        return found


@contextmanager
def measured(comm: Communicator, benchmark_pid: int) -> Iterator[Measured]:
    """Measure a block that all workers run together, from barrier to barrier.

    Args:
        comm: All workers.
        benchmark_pid: The benchmark's own process; what it and its children use is not foreign.
    """
    seen = Measured()
    comm.barrier()  # what came before is over on every worker
    load, before = ForeignLoad(benchmark_pid), own_bytes()
    comm.barrier()  # all have looked at their counters; costs some hundred bytes
    began_at = time.perf_counter()
    yield seen
    comm.barrier()
    seen.seconds = time.perf_counter() - began_at
    counted = own_bytes().since(before)
    seen.sent_bytes, seen.loopback_bytes = counted.sent, counted.loopback
    seen.foreign_cores = load.cores()


class ForeignLoad:
    """Cores kept busy by others than one process and its children, since this was made."""

    def __init__(self, root_pid: int | None = None) -> None:
        """Begin to count.

        Args:
            root_pid: The process that is not foreign; default: this one.
        """
        self._root_pid = root_pid or os.getpid()
        self._began_at = time.perf_counter()
        self._busy_s = self._foreign_s()

    def cores(self) -> float:
        """Mean since the start. Clock ticks are 10 ms: below a second or so it says little."""
        seconds = max(time.perf_counter() - self._began_at, 1e-9)
        return max(0.0, (self._foreign_s() - self._busy_s) / seconds)

    def _foreign_s(self) -> float:
        # Interrupts count for nobody: they are mostly our own packets. Time that a hypervisor gave away does.
        user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK") - _tree_s(self._root_pid)


def _tree_s(root_pid: int) -> float:
    """Processor seconds of a process and all below it, those included that have ended and been reaped."""
    total_s = 0.0
    root = psutil.Process(root_pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it ended just now; its parent counts it
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


# --- refusing what can't be trusted -----------------------------------------------------------------------


def check_links(emulation: Emulation, say: Callable[[str], None] = lambda _: None) -> list[Calibration]:
    """Send from each node to the next one and refuse links that are not what they are said to be.

    Args:
        emulation: At least two nodes.
        say: Called with a line of progress.

    Raises:
        LabkitError: a link was off by more than 5 % three times in a row.
    """
    names = [link.node for link in emulation.links]
    return [_checked(emulation, a, b, say) for a, b in zip(names, names[1:] + names[:1], strict=True)]


def _checked(emulation: Emulation, sender: str, receiver: str, say: Callable[[str], None]) -> Calibration:
    for _ in range(3):
        found = calibrate(emulation, sender, receiver)
        say(f"link {sender} -> {receiver}: {found.mbit:.1f} Mbit/s, {found.ratio:.3f} of its limit")
        if abs(found.ratio - 1) <= LINK_TOLERANCE:
            return found
    raise LabkitError(
        f"link {sender} -> {receiver} must carry {found.limit_mbit:.1f} Mbit/s of payload within "
        f"{LINK_TOLERANCE:.0%}, got {found.mbit:.1f}. End other work on this machine and try again."
    )


def trusted(
    once: Callable[[], tuple[T, list[str]]],
    repeats: int,
    say: Callable[[str], None],
    *,
    most: int | None = None,
) -> list[T]:
    """Repeat a measurement until enough of its results can be believed.

    Args:
        once: Measures once; returns the result, and why it must not be believed (`Measured.doubts`).
        repeats: Results wanted.
        say: Called with each reason.
        most: Tries in all; default: four per result.

    Raises:
        LabkitError: too few results could be believed.
    """
    kept: list[T] = []
    tries = most or 4 * repeats
    for _ in range(tries):
        result, doubts = once()
        if doubts:
            say(f"thrown away: {'; '.join(doubts)}")
            continue
        kept.append(result)
        if len(kept) == repeats:
            return kept
    raise LabkitError(
        f"measurement must be undisturbed {repeats} times, got {len(kept)} in {tries} tries. End other work "
        "on this machine and try again."
    )
