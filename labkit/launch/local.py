"""Workers forked from the supervisor, which has torch imported already."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from labkit.engine.worker import WorkerTask, redirect_output, run_worker
from labkit.launch.emulation import Network
from labkit.launch.launcher import Exit, Launcher
from labkit.processes import die_with_parent
from labkit.runfolder import RunFolder

_FORK = multiprocessing.get_context("fork")


class LocalLauncher(Launcher):
    """All workers of a run on this machine, as direct children of the supervisor."""

    def __init__(
        self,
        tasks: Sequence[WorkerTask],
        nodes: Sequence[str],
        network: Network,
        close_in_worker: Sequence[int] = (),
    ) -> None:
        """Prepare.

        Args:
            tasks: One for each worker, by rank.
            nodes: Node of each worker.
            network: Where the nodes are.
            close_in_worker: File descriptors of the supervisor that a worker must not hold open.
        """
        self._tasks = tasks
        self._nodes = nodes
        self._network = network
        self._close_in_worker = list(close_in_worker)
        self._processes: list[BaseProcess] = []

    def start(self) -> None:
        for task, node in zip(self._tasks, self._nodes, strict=True):
            process = _FORK.Process(
                target=_worker_main, args=(task, node, self._network, os.getpid(), self._close_in_worker)
            )
            process.start()
            self._processes.append(process)

    def sentinels(self) -> list[int]:
        return [process.sentinel for process in self._processes if process.exitcode is None]

    def exits(self) -> list[Exit]:
        return [
            Exit(task.rank, process.exitcode)
            for task, process in zip(self._tasks, self._processes, strict=True)
            if process.exitcode is not None
        ]

    def is_over(self) -> bool:
        return all(process.exitcode is not None for process in self._processes)

    def pids(self) -> dict[int, int]:
        pairs = zip(self._tasks, self._processes, strict=False)
        return {task.rank: process.pid for task, process in pairs if process.pid is not None}

    def terminate(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join()


def _worker_main(
    task: WorkerTask, node: str, network: Network, parent_pid: int, close_fds: Sequence[int]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    network.enter(node)
    die_with_parent(parent_pid)
    for fd in close_fds:
        os.close(fd)
    redirect_output(RunFolder(task.folder), task.rank)
    sys.exit(run_worker(task))
