"""Servers and groups of workers on this machine: a lost group is started again while the others go on."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess

from labkit.cluster.placement import Placement, placements
from labkit.cluster.plan import make_plan
from labkit.comm import Rendezvous, Secret
from labkit.config import AsyncConfig, ExperimentConfig
from labkit.engine.hybrid import GroupPlace
from labkit.engine.server import ServerTask, run_server
from labkit.engine.worker import WorkerTask, die_with_parent, keep_alive, redirect_output
from labkit.launch.emulation import Network
from labkit.launch.launcher import Exit
from labkit.launch.local import LocalLauncher
from labkit.launch.verdict import signal_text
from labkit.runfolder import RunFolder

_FORK = multiprocessing.get_context("fork")
_BAD_INPUT = 2


@dataclass
class _Group:
    place: GroupPlace
    launcher: LocalLauncher
    num_starts: int = 1
    is_lost: bool = False
    last_exits: list[Exit] = field(default_factory=list)


class GroupLauncher:
    """One server on every node, and the workers in their groups.

    What ends a run is a server that ends before its time, bad input, or the loss of the last group.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        tasks: Sequence[WorkerTask],
        network: Network,
        close_in_worker: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            config: The experiment; its strategy is an asynchronous one.
            tasks: One for each worker, by rank.
            network: Where the nodes are.
            close_in_worker: File descriptors of the supervisor that others must not hold open.
            say: Takes a line for each group that is lost.
        """
        assert isinstance(config.sync, AsyncConfig)
        self._sync, self._tasks, self._network, self._say = config.sync, list(tasks), network, say
        self._close = list(close_in_worker)
        self._places: list[Placement] = placements(config.cluster)
        self._secret = Secret.new().to_text()
        self._nodes = [node.name for node in config.cluster.nodes]
        self._servers: list[BaseProcess] = []
        self._groups = [
            self._make_group(index, ranks) for index, ranks in enumerate(make_plan(config).groups)
        ]
        self._is_stopping = False

    def _make_group(self, index: int, ranks: Sequence[int]) -> _Group:
        servers = self._tasks[0].rendezvous
        place = GroupPlace(index, tuple(ranks), servers, len(self._nodes), self._secret)
        return _Group(place, self._launcher_of(place, 1))

    def _launcher_of(self, place: GroupPlace, start: int) -> LocalLauncher:
        where = place.servers
        own = Rendezvous(where.host, where.port, f"{where.generation}/group{place.group}/{start}")
        tasks = [replace(self._tasks[rank], rendezvous=own, group=place) for rank in place.ranks]
        return LocalLauncher(
            tasks, [self._places[rank].node for rank in place.ranks], self._network, self._close
        )

    # --- the contract of a launcher ----------------------------------------------------------------------

    def start(self) -> None:
        first = self._tasks[0]
        for index, node in enumerate(self._nodes):
            task = ServerTask(
                first.folder,
                index,
                len(self._nodes),
                first.rendezvous,
                self._secret,
                first.attempt,
                first.import_paths,
            )
            rank = self.server_rank(index)
            process = _FORK.Process(
                target=_server_main, args=(task, rank, node, self._network, os.getpid(), self._close)
            )
            process.start()
            self._servers.append(process)
        for group in self._groups:
            group.launcher.start()

    def server_rank(self, index: int) -> int:
        """A number for a server beside those of the workers, for its log and its sign of life."""
        return len(self._places) + index

    def name_of(self, rank: int) -> tuple[str, str]:
        """What to call a process, and its node."""
        if rank < len(self._places):
            return f"worker {rank}", self._places[rank].node
        index = rank - len(self._places)
        return f"server {index}", self._nodes[index]

    def sentinels(self) -> list[int]:
        live = [process.sentinel for process in self._servers if process.exitcode is None]
        return live + [sentinel for group in self._groups for sentinel in group.launcher.sentinels()]

    def exits(self) -> list[Exit]:
        found = [
            Exit(None, process.exitcode, " on ".join(self.name_of(self.server_rank(index))))
            for index, process in enumerate(self._servers)
            if process.exitcode
        ]
        fatal = [group for group in self._groups if self._has_bad_input(group)]
        if all(group.is_lost for group in self._groups):
            fatal = self._groups
        return found + [end for group in fatal for end in group.last_exits or group.launcher.exits()]

    def is_over(self) -> bool:
        return all(process.exitcode is not None for process in self._servers) and all(
            group.is_lost or group.launcher.is_over() for group in self._groups
        )

    def pids(self) -> dict[int, int]:
        found = {
            self.server_rank(index): process.pid
            for index, process in enumerate(self._servers)
            if process.pid is not None and process.exitcode is None
        }
        for group in self._groups:
            if not group.is_lost:
                found |= group.launcher.pids()
        return found

    def terminate(self) -> None:
        self._is_stopping = True
        for process in self._servers:
            if process.exitcode is None:
                process.terminate()
        for group in self._groups:
            group.launcher.terminate()

    def kill(self) -> None:
        self._is_stopping = True
        for group in self._groups:
            group.launcher.kill()
        for process in self._servers:
            if process.exitcode is None:
                process.kill()
        for process in self._servers:
            process.join()

    # --- what only this one can -------------------------------------------------------------------------

    def tend(self) -> None:
        """Start again, or do without, groups that have lost a worker."""
        for group in self._groups:
            ended = [end for end in group.launcher.exits() if end.code]
            if ended and not (group.is_lost or self._is_stopping or self._has_bad_input(group)):
                self._lose(group, ended)

    def lose(self, rank: int) -> bool:
        """Treat a process that shows no life as lost; whether the run can go on without it."""
        for group in self._groups:
            if rank in group.place.ranks and not group.is_lost:
                self._lose(group, [Exit(rank, -signal.SIGKILL)])
                return not all(other.is_lost for other in self._groups)
        return False

    def _why(self, end: Exit) -> str:
        """What a worker was lost to, as far as is known."""
        if end.code < 0:
            return f"worker {end.rank} {signal_text(-end.code)}"
        folder = RunFolder(self._tasks[0].folder)
        told = folder.read_json(folder.error_file(end.rank or 0)).get("message")
        return f"worker {end.rank}: {told or f'exit code {end.code}'}"

    @staticmethod
    def _has_bad_input(group: _Group) -> bool:
        return any(end.code == _BAD_INPUT for end in group.launcher.exits())

    def _lose(self, group: _Group, ended: list[Exit]) -> None:
        """Do without a group, or start it again."""
        group.launcher.kill()
        who = "; ".join(self._why(end) for end in ended)
        if group.num_starts > self._sync.max_group_restarts:
            group.is_lost, group.last_exits = True, ended
            self._say(f"group {group.place.group} is given up: {who}")
            return
        group.num_starts += 1
        self._say(f"group {group.place.group} starts again: {who}")
        group.launcher = self._launcher_of(group.place, group.num_starts)
        group.launcher.start()


def _server_main(
    task: ServerTask, rank: int, node: str, network: Network, parent_pid: int, close_fds: Sequence[int]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    network.enter(node)
    die_with_parent(parent_pid)
    for fd in close_fds:
        os.close(fd)
    folder = RunFolder(task.folder)
    redirect_output(folder, rank)
    keep_alive(folder.alive_file(rank))
    threading.current_thread().name = f"server {task.index}"
    run_server(task)
    sys.exit(0)
