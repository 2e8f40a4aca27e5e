"""Workers of one node under PyTorch's elastic agent, one agent per machine."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as AgentConfig
from torch.distributed.launcher.api import elastic_launch

from labkit.cluster.placement import Placement
from labkit.comm import address_towards, interface_towards
from labkit.config import ExperimentConfig
from labkit.engine.worker import write_error
from labkit.launch.emulation import Network
from labkit.launch.launcher import Exit, Launcher
from labkit.launch.verdict import signal_text
from labkit.processes import die_with_parent
from labkit.runfolder import RunFolder

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class ElasticTask:
    """What an agent must know.

    Attributes:
        folder: The run folder on this machine.
        places: Workers of this node.
        num_nodes: Nodes of the run.
        store_host: Address of the store, which the first node's supervisor serves.
        store_port: Its port.
        attempt: The run's attempt.
        import_paths: Folders of the user's own modules.
        network: Where the nodes are.
        num_here: Workers of the run on this machine, those of other emulated nodes included.
    """

    folder: RunFolder
    places: Sequence[Placement]
    num_nodes: int
    store_host: str
    store_port: int
    attempt: int
    import_paths: tuple[str, ...]
    network: Network
    num_here: int


class ElasticLauncher(Launcher):
    """One node's workers, started and restarted by torch.distributed.run's agent in a child process."""

    def __init__(
        self, config: ExperimentConfig, task: ElasticTask, close_in_agent: Sequence[int] = ()
    ) -> None:
        """Prepare.

        Args:
            config: The experiment.
            task: This node's part.
            close_in_agent: File descriptors of the supervisor that the agent must not hold open.
        """
        self._config = config
        self._task = task
        self._close_in_agent = list(close_in_agent)
        self._agent: BaseProcess | None = None

    def start(self) -> None:
        self._agent = _FORK.Process(
            target=_agent_main, args=(self._config, self._task, os.getpid(), self._close_in_agent)
        )
        self._agent.start()

    def sentinels(self) -> list[int]:
        return [] if self._agent is None or self.is_over() else [self._agent.sentinel]

    def exits(self) -> list[Exit]:
        code = self._agent.exitcode if self._agent else None
        return [] if code is None else [Exit(None, code)]

    def is_over(self) -> bool:
        return self._agent is not None and self._agent.exitcode is not None

    def pids(self) -> dict[int, int]:
        found = {}
        for place in self._task.places:
            try:
                found[place.rank] = int(self._task.folder.alive_file(place.rank).read_text())
            except (OSError, ValueError):
                continue  # not up yet
        return found

    def terminate(self) -> None:
        if self._agent is not None and self._agent.exitcode is None:
            self._agent.terminate()

    def kill(self) -> None:
        if self._agent is not None:
            self._agent.kill()  # its workers die with it
            self._agent.join()


def _agent_main(
    config: ExperimentConfig, task: ElasticTask, parent_pid: int, close_fds: Sequence[int]
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    task.network.enter(task.places[0].node)
    die_with_parent(parent_pid)
    for fd in close_fds:
        os.close(fd)
    os.environ.update(_worker_environment(task))
    launch = config.launch
    agent = AgentConfig(
        min_nodes=task.num_nodes,
        max_nodes=task.num_nodes,
        nproc_per_node=len(task.places),
        run_id=f"{task.folder.key}.{task.attempt}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{task.store_host}:{task.store_port}",
        rdzv_configs={
            "is_host": False,  # the supervisor serves the store, so that it outlives any worker and agent
            "join_timeout": int(launch.start_timeout_s),
            "last_call_timeout": 1,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
            "read_timeout": int(launch.start_timeout_s),
        },
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
        local_addr=address_towards(task.store_host),
        shutdown_timeout=int(launch.stop_grace_s),
        logs_specs=DefaultLogsSpecs(log_dir=str(task.folder.logs_dir / "elastic")),
    )
    try:
        elastic_launch(agent, sys.executable)("-m", "labkit.engine.worker")
    except ChildFailedError as error:
        _record_killed(task, error)
        sys.exit(1)


def _record_killed(task: ElasticTask, error: ChildFailedError) -> None:
    """A worker that raised has left its error file; one that a signal killed could not."""
    for failure in error.failures.values():
        place = next(place for place in task.places if place.local_rank == failure.local_rank)
        if failure.exitcode < 0 and not task.folder.error_file(place.rank).exists():
            text = signal_text(-failure.exitcode)
            write_error(task.folder, place.rank, task.attempt, text, "", is_peer_failure=False)


def _worker_environment(task: ElasticTask) -> dict[str, str]:
    return {
        "LABKIT_RUN": str(task.folder.path),
        "LABKIT_NODE_INDEX": str(task.places[0].node_index),
        "LABKIT_STORE_HOST": task.store_host,
        "LABKIT_STORE_PORT": str(task.store_port),
        "LABKIT_ATTEMPT": str(task.attempt),
        "LABKIT_IMPORT_PATHS": os.pathsep.join(task.import_paths),
        "LABKIT_REMARK": task.network.remark(),
        "LABKIT_NUM_HERE": str(task.num_here),
        "LABKIT_QUOTAS": os.pathsep.join(task.network.quota(place.rank) for place in task.places),
        "GLOO_SOCKET_IFNAME": interface_towards(task.store_host),
        # Otherwise later rounds reuse the first round's store, whose gloo addresses are of dead workers.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
