"""Servers and groups of workers: a lost group is started again while the others go on.

On several machines each has a launcher for its own server and its own workers. A group that has workers on
more than one of them is lost and started again as a whole: whoever sees it lost says so in the store.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess

from labkit.cluster.placement import Placement, placements, process_name, server_ranks
from labkit.cluster.plan import make_plan
from labkit.comm import PeerError, Rendezvous, Secret, StoreClient, StoreServer
from labkit.config import AsyncConfig, ExperimentConfig
from labkit.engine.hybrid import GroupPlace
from labkit.engine.server import ServerTask, given_up_key, run_server
from labkit.engine.worker import WorkerTask, keep_alive, redirect_output
from labkit.launch.emulation import Network
from labkit.launch.launcher import Exit, Launcher
from labkit.launch.local import LocalLauncher
from labkit.launch.verdict import root_cause
from labkit.processes import die_with_parent
from labkit.runfolder import RunFolder

_FORK = multiprocessing.get_context("fork")
_BAD_INPUT = 2
_GOODBYE_S = 3.0  # of the groups, after the servers have ended the run


@dataclass
class _Group:
    place: GroupPlace
    launcher: LocalLauncher
    num_starts: int = 1
    is_lost: bool = False
    last_exits: list[Exit] = field(default_factory=list)


class GroupLauncher(Launcher):
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
        store: StoreServer | StoreClient,
        secret: Secret,
    ) -> None:
        """Prepare.

        Args:
            config: The experiment; its strategy is an asynchronous one.
            tasks: One for each worker that runs here.
            network: Where the nodes are.
            close_in_worker: File descriptors of the supervisor that others must not hold open.
            say: Takes a line for each group that is lost.
            store: Where the servers' addresses stand, and which groups are lost.
            secret: The run's.
        """
        assert isinstance(config.sync, AsyncConfig)
        self._sync, self._network, self._say, self._store = config.sync, network, say, store
        self._tasks = {task.rank: task for task in tasks}
        self._where, self._attempt = tasks[0].rendezvous, tasks[0].attempt
        self._import_paths = tasks[0].import_paths
        self._folder = RunFolder(tasks[0].folder)
        self._close = list(close_in_worker)
        self._places: list[Placement] = placements(config.cluster)
        self._secret = secret.to_text()
        self._cluster = config.cluster
        here = {self._places[rank].node_index for rank in self._tasks}
        ranks = server_ranks(config.cluster)
        self._server_ranks = {index: ranks[index] for index in sorted(here)}  # of those that run here
        self._is_alone = len(here) == len(config.cluster.nodes)
        self._servers: dict[int, BaseProcess] = {}  # by the rank of each
        self._groups = [
            self._make_group(index, ranks) for index, ranks in enumerate(make_plan(config).groups)
        ]
        self._is_stopping = False
        self._silent_servers: set[int] = set()
        self._served_at: float | None = None  # when the last server ended the run as it should

    def _make_group(self, index: int, ranks: Sequence[int]) -> _Group:
        place = GroupPlace(index, tuple(ranks), self._where, len(self._cluster.nodes), self._secret)
        return _Group(place, self._launcher_of(place, 1))

    def _launcher_of(self, place: GroupPlace, start: int) -> LocalLauncher:
        where = place.servers
        own = Rendezvous(where.host, where.port, f"{where.generation}/group{place.group}/{start}")
        here = [rank for rank in place.ranks if rank in self._tasks]
        tasks = [replace(self._tasks[rank], rendezvous=own, group=place) for rank in here]
        return LocalLauncher(tasks, [self._places[rank].node for rank in here], self._network, self._close)

    # --- the contract of a launcher ----------------------------------------------------------------------

    def start(self) -> None:
        for index, rank in self._server_ranks.items():
            task = ServerTask(
                str(self._folder.path),
                index,
                len(self._cluster.nodes),
                self._where,
                self._secret,
                self._attempt,
                self._import_paths,
            )
            node = self._cluster.nodes[index].name
            process = _FORK.Process(
                target=_server_main, args=(task, rank, node, self._network, os.getpid(), self._close)
            )
            process.start()
            self._servers[rank] = process
        for group in self._groups:
            group.launcher.start()

    def sentinels(self) -> list[int]:
        live = [process.sentinel for process in self._servers.values() if process.exitcode is None]
        return live + [sentinel for group in self._groups for sentinel in group.launcher.sentinels()]

    def exits(self) -> list[Exit]:
        found = [
            Exit(None, process.exitcode, " on ".join(process_name(self._cluster, rank)))
            for rank, process in self._servers.items()
            if process.exitcode
        ]
        fatal = [group for group in self._groups if self._has_bad_input(group)]
        if all(group.is_lost for group in self._groups):
            fatal = self._groups
        return found + [end for group in fatal for end in group.last_exits or group.launcher.exits()]

    @property
    def is_server_lost(self) -> bool:
        """A server has ended before its time, or shows no life."""
        return bool(self._silent_servers) or any(p.exitcode for p in self._servers.values())

    def is_over(self) -> bool:
        return all(process.exitcode is not None for process in self._servers.values()) and all(
            group.is_lost or group.launcher.is_over() for group in self._groups
        )

    def pids(self) -> dict[int, int]:
        found = {
            rank: process.pid
            for rank, process in self._servers.items()
            if process.pid is not None and process.exitcode is None
        }
        for group in self._groups:
            ended = {end.rank for end in group.launcher.exits()}
            found |= {rank: pid for rank, pid in group.launcher.pids().items() if rank not in ended}
        return found

    def terminate(self) -> None:
        self._is_stopping = True
        for process in self._servers.values():
            if process.exitcode is None:
                process.terminate()
        for group in self._groups:
            group.launcher.terminate()

    def kill(self) -> None:
        self._is_stopping = True
        for group in self._groups:
            group.launcher.kill()
        for process in self._servers.values():
            if process.exitcode is None:
                process.kill()
        for process in self._servers.values():
            process.join()

    # --- what only this one can -------------------------------------------------------------------------

    def tend(self) -> None:
        """Start again, or do without, groups that have lost a worker."""
        if self._is_stopping or self.is_server_lost:
            return
        if any(process.exitcode == 0 for process in self._servers.values()):
            self._see_off()
            return
        for group in self._groups:
            ended = [end for end in group.launcher.exits() if end.code]
            if group.is_lost or self._has_bad_input(group):
                continue
            why = self._lost_elsewhere(group)
            if ended or why:
                self._lose(group, ended, why or self._why(ended))

    def _see_off(self) -> None:
        """The servers have ended the run: whoever comes back now finds nobody, and is not waited for."""
        self._served_at = self._served_at or time.monotonic()
        is_late = time.monotonic() - self._served_at > _GOODBYE_S
        for group in self._groups:
            if is_late or any(end.code for end in group.launcher.exits()):
                group.launcher.kill()

    def lose(self, rank: int) -> bool:
        """Treat a process that shows no life as lost; whether the run can go on without it."""
        if rank in self._server_ranks.values():
            self._silent_servers.add(rank)
            return False
        for group in self._groups:
            if rank in group.place.ranks and not group.is_lost:
                self._lose(group, [Exit(rank, -signal.SIGKILL)], f"worker {rank} showed no life")
                break
        return not all(group.is_lost for group in self._groups)

    def _why(self, ends: Sequence[Exit]) -> str:
        """What a group was lost to, as far as is known."""
        ranks = [end.rank for end in ends if end.rank is not None]
        told = {rank: self._folder.read_json(self._folder.error_file(rank)) for rank in ranks}
        return root_cause(ends, {rank: text for rank, text in told.items() if text}, self._places).message

    @staticmethod
    def _has_bad_input(group: _Group) -> bool:
        return any(end.code == _BAD_INPUT for end in group.launcher.exits())

    def _lost_key(self, group: _Group) -> str:
        return f"{self._where.generation}/lost{group.place.group}/{group.num_starts}"

    def _lost_elsewhere(self, group: _Group) -> str:
        """What another machine has lost the group to; "" as long as it has not."""
        if self._is_alone:
            return ""
        with contextlib.suppress(PeerError):  # the supervisor sees by itself that the first node is gone
            return self._store.get(self._lost_key(group)) or ""
        return ""

    def _put(self, key: str, text: str) -> None:
        with contextlib.suppress(PeerError):
            self._store.put(key, text)

    def _lose(self, group: _Group, ended: list[Exit], why: str) -> None:
        """Do without a group, or start it again, here and on the other machines that have a part in it."""
        group.launcher.kill()
        index = group.place.group
        if not (self._is_alone or self._lost_elsewhere(group)):
            self._put(self._lost_key(group), why)
        if group.num_starts > self._sync.max_group_restarts:
            group.is_lost, group.last_exits = True, ended
            self._put(given_up_key(group.place.servers, index), why)
            self._say(f"group {index} is given up: {why}")
            return
        group.num_starts += 1
        self._say(f"group {index} starts again: {why}")
        for rank in self._tasks.keys() & set(group.place.ranks):
            # The age of its last sign of life is not the new one's.
            self._folder.alive_file(rank).unlink(missing_ok=True)
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
    sys.exit(run_server(task))
