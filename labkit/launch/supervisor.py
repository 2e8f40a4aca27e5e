"""The supervisor: one per run. It alone owns the run's state, its store and its MLflow tracker."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from labkit.cluster.placement import Placement, placements, process_name, server_ranks
from labkit.comm import Rendezvous, Secret, StoreClient, StoreServer
from labkit.config import AsyncConfig, ExperimentConfig
from labkit.engine.events import EventLog
from labkit.engine.worker import WorkerTask
from labkit.errors import LabkitError
from labkit.launch.elastic import ElasticLauncher, ElasticTask
from labkit.launch.emulation import Network, network_of
from labkit.launch.groups import GroupLauncher
from labkit.launch.launcher import Launcher, SeveralLaunchers
from labkit.launch.local import LocalLauncher
from labkit.launch.machines import Machine
from labkit.launch.peers import End, FirstNode, NoPeers, OtherNode, Peers
from labkit.launch.result import summarise
from labkit.launch.verdict import is_for_peers_sake, root_cause
from labkit.runfolder import (
    ProcessId,
    RunError,
    RunFolder,
    RunState,
    RunStatus,
    WorkerRecord,
    write_atomically,
)

_SETTLE_S = 1.0
_PEER_SETTLE_S = 5.0
_LEAST_SILENCE_S = 2.0  # processes show life once a second
_TRACKER_GRACE_S = 60.0


@dataclass(frozen=True)
class SupervisorTask:
    """What a supervisor is asked to do.

    Attributes:
        folder: The run folder, made and filled by the launcher.
        key: The run's identity: configuration and code.
        launcher: Who asked; the run is stopped when that process dies. None: the run is detached.
        import_paths: Folders of the user's modules.
        rendezvous: Address at which nodes on several machines meet, HOST:PORT; none: all are here.
        node: Name of this machine's node; none: all are here.
        secret: Of the parameter servers, the same on all machines; "" where there are none or all are here.
    """

    folder: RunFolder
    key: str
    launcher: ProcessId | None
    import_paths: tuple[str, ...]
    rendezvous: tuple[str, int] | None = None
    node: str | None = None
    secret: str = field(default="", repr=False)


def known_by(secret: str) -> str:
    """By what others may know that they have the same secret: its public key."""
    return Secret.derived(secret).server_public.decode() if secret else ""


def supervise(reply: Callable[[str], None], task: SupervisorTask) -> None:
    """Run one experiment to its end. Called in a process of its own.

    Args:
        reply: Called once with the run folder when the run is taken over.
        task: What to do.

    Raises:
        ConfigError: the rendezvous address can't be served, or the cluster can't be emulated; nothing has
            started.
    """
    folder = task.folder
    config = folder.read_config()
    redirect_to(folder.supervisor_log)
    places = placements(config.cluster)
    network = Machine(task.rendezvous[0]) if task.rendezvous else network_of(config, folder)
    with contextlib.ExitStack() as stack:
        stack.callback(network.close)
        where = task.rendezvous or (network.store_host, 0)
        store = network.at_switch(lambda: StoreServer(*where))
        stack.callback(store.close)
        peers: Peers = NoPeers()
        if task.rendezvous:
            others = [node.name for node in config.cluster.nodes if node.name != task.node]
            launch = config.launch
            peers = FirstNode(store, others, launch.start_timeout_s, launch.worker_timeout_s)
            places = [place for place in places if place.node == task.node]
        supervisor = Supervisor(task, config, places, store, peers, network)
        supervisor.take_over()
        reply(str(folder.path))
        supervisor.run()


def redirect_to(log: Path) -> None:
    """Send what this process prints to a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


class Supervisor:
    """Starts the workers, watches them, and writes how it ended."""

    def __init__(
        self,
        task: SupervisorTask,
        config: ExperimentConfig,
        places: list[Placement],
        store: StoreServer | StoreClient,
        peers: Peers,
        network: Network,
    ) -> None:
        """Prepare.

        Args:
            task: What to do.
            config: The experiment.
            places: The workers that run here.
            store: Served by this process, or by the first node's.
            peers: The other nodes.
            network: Where the workers that run here are put.
        """
        self._folder = task.folder
        self._task = task
        self._config = config
        self._places = places
        self._store = store
        self._peers = peers
        self._network = network
        self._status: RunStatus = self._folder.read_status()
        self._tracker: subprocess.Popen[bytes] | None = None
        self._is_stop_asked = False
        self._last_beat = 0.0
        self._num_trackers = 0
        self._is_server_lost = False  # what ended the last attempt

    def take_over(self) -> None:
        """From here on this process owns the run's state."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_stop)
        now = time.time()
        self._update(
            state=RunState.RUNNING,
            owner=ProcessId.current(),
            started_at=now,
            heartbeat_at=now,
            ended_at=None,
            error=None,
        )

    def run(self) -> None:
        """Everything from the first worker to the final state."""
        if self._network.remark():
            self._say(self._network.remark())
        try:
            while True:
                end = self._run_once()
                is_worth_a_restart = (
                    end.state is RunState.FAILED
                    and self._config.launch.launcher == "local"  # the elastic agent restarts by itself
                    and self._task.rendezvous is None  # on several machines the same command resumes
                    and self._status.num_restarts < self._max_restarts()
                )
                if not is_worth_a_restart:
                    break
                self._note(f"restart after: {end.error.message if end.error else end.state}")
                self._update(attempt=self._status.attempt + 1, num_restarts=self._status.num_restarts + 1)
        except BaseException as error:
            self._finish(End(state=RunState.FAILED, error=RunError(message=f"supervisor failed: {error!r}")))
            raise
        self._finish(end)

    def _max_restarts(self) -> int:
        sync = self._config.sync
        own = sync.max_server_restarts if isinstance(sync, AsyncConfig) and self._is_server_lost else 0
        return max(own, self._config.launch.max_restarts)

    def _ask_stop(self, *_: object) -> None:
        self._is_stop_asked = True

    def _run_once(self) -> End:
        for rank in (*(place.rank for place in self._places), *server_ranks(self._config.cluster)):
            # The age of a sign of life in the attempt before is not that of this one.
            self._folder.alive_file(rank).unlink(missing_ok=True)
        launcher = self._make_launcher()
        launcher.start()
        try:
            if isinstance(self._store, StoreServer):
                self._open(self._store)
            self._record_workers(launcher.pids())
            self._ensure_tracker()
            end = self._watch(launcher)
            self._is_server_lost = launcher.is_server_lost
            return end
        finally:
            launcher.kill()

    def _open(self, store: StoreServer) -> None:
        """Serve the store, after the first fork: until then this process has no threads."""
        if not store.is_open:
            self._network.at_switch(store.open)
            offer = {"key": self._task.key, "folder": self._folder.key, "attempt": self._status.attempt}
            store.put("run", json.dumps({**offer, "secret": known_by(self._task.secret)}))

    def _make_launcher(self) -> Launcher:
        mine = [self._store.fileno()] if isinstance(self._store, StoreServer) else []
        if self._tracker is not None and self._tracker.stdin is not None:
            mine.append(self._tracker.stdin.fileno())
        store = self._store
        attempt, paths = self._status.attempt, self._task.import_paths
        if self._config.launch.launcher == "elastic":
            nodes = self._config.cluster.nodes
            groups = [[p for p in self._places if p.node == node.name] for node in nodes]
            tasks = [
                ElasticTask(
                    self._folder,
                    g,
                    len(nodes),
                    store.host,
                    store.port,
                    attempt,
                    paths,
                    self._network,
                    len(self._places),
                )
                for g in groups
                if g
            ]
            return SeveralLaunchers([ElasticLauncher(self._config, task, mine) for task in tasks])
        where = Rendezvous(store.host, store.port, f"attempt{attempt}")
        folder, remark = str(self._folder.path), self._network.remark()
        num_here = len(self._places)
        workers = [
            WorkerTask(folder, p.rank, where, attempt, paths, remark, num_here, self._network.quota(p.rank))
            for p in self._places
        ]
        if isinstance(self._config.sync, AsyncConfig) and self._config.launch.purpose == "train":
            secret = Secret.derived(self._task.secret) if self._task.secret else Secret.new()
            return GroupLauncher(self._config, workers, self._network, mine, self._note, store, secret)
        return LocalLauncher(workers, [place.node for place in self._places], self._network, mine)

    def _record_workers(self, pids: Mapping[int, int]) -> None:
        workers = tuple(
            WorkerRecord(rank=p.rank, node=p.node, local_rank=p.local_rank, pid=pids.get(p.rank))
            for p in self._places
        )
        if workers != self._status.workers:
            self._update(workers=workers)

    # --- watching ----------------------------------------------------------------------------------

    def _watch(self, launcher: Launcher) -> End:
        """Until the run is over, for whatever reason."""
        while True:
            wait(launcher.sentinels(), timeout=0.2)
            self._beat(launcher)
            launcher.tend()
            if any(end.code for end in launcher.exits()):
                return self._failed(launcher)
            if launcher.is_over():
                return End(state=RunState.FINISHED)
            asked = self._asked_to_end()
            if asked is not None:
                self._stop_gently(launcher)
                return asked
            end = self._silent_worker(launcher) or self._peers.news()
            if end is not None:
                return end

    def _asked_to_end(self) -> End | None:
        launcher, limit_s = self._task.launcher, self._config.launch.timeout_s
        if self._is_stop_asked or self._folder.stop_file.exists():
            state, text = RunState.KILLED, "stopped on request"
        elif launcher is not None and not launcher.is_alive():
            state, text = RunState.KILLED, "stopped because the process that started it died"
        elif limit_s is not None and time.time() - (self._status.started_at or 0.0) > limit_s:
            state, text = RunState.TIMEOUT, f"ran longer than launch.timeout_s={limit_s:g}"
        else:
            return None
        return End(state=state, error=RunError(message=text, node=self._task.node))

    def _stop_gently(self, launcher: Launcher) -> None:
        launcher.terminate()
        self._settle(launcher, self._config.launch.stop_grace_s)

    def _settle(self, launcher: Launcher, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not launcher.is_over() and time.monotonic() < deadline:
            wait(launcher.sentinels(), timeout=0.1)
            self._beat(launcher)

    def _failed(self, launcher: Launcher) -> End:
        """A worker failed: wait a moment for what its peers say, then name the root cause."""
        self._settle(launcher, _SETTLE_S)
        exits = [end for end in launcher.exits() if end.code]
        errors = self._read_errors()
        if is_for_peers_sake(exits, errors):
            deadline = time.monotonic() + (0.0 if isinstance(self._peers, NoPeers) else _PEER_SETTLE_S)
            while time.monotonic() < deadline:
                end = self._peers.news()
                if end is not None:
                    return end
                time.sleep(0.1)
        error = root_cause(exits, errors, placements(self._config.cluster))
        cut: list[str] = []
        if is_for_peers_sake(exits, errors):
            with contextlib.suppress(LabkitError, OSError):  # why it failed is known well enough without
                cut = self._network.cut_nodes()
        if cut:
            text = f"link of {', '.join(cut)} is cut: {error.message}"
            error = error.model_copy(update={"message": text, "node": cut[0]})
        return End(state=RunState.FAILED, error=error)

    def _read_errors(self) -> dict[int, dict[str, Any]]:
        found = {}
        for place in self._places:
            content = self._folder.read_json(self._folder.error_file(place.rank))
            if content.get("attempt", 0) >= self._status.attempt:
                found[place.rank] = content
        return found

    def _silent_worker(self, launcher: Launcher) -> End | None:
        """The worker that has shown no life for too long: a stopped process, a dead machine."""
        limit_s, sync = self._config.launch.worker_timeout_s, self._config.sync
        if isinstance(sync, AsyncConfig):
            limit_s = min(limit_s, max(_LEAST_SILENCE_S, sync.heartbeat_timeout_s))
        pids = launcher.pids()
        oldest: tuple[float, int] | None = None
        for rank in pids:
            with contextlib.suppress(OSError):
                age_s = time.time() - self._folder.alive_file(rank).stat().st_mtime
                if age_s > limit_s and (oldest is None or age_s > oldest[0]):
                    oldest = (age_s, rank)
        if oldest is None:
            return None
        age_s, rank = oldest
        why = _why_silent(pids[rank])
        if launcher.lose(rank):
            return None
        name, node = process_name(self._config.cluster, rank)
        text = f"{name} on {node} showed no life for {age_s:.0f} s{why}"
        known = rank if rank < self._config.cluster.num_workers else None
        return End(state=RunState.FAILED, error=RunError(message=text, rank=known, node=node))

    # --- state ---------------------------------------------------------------------------------------

    def _update(self, *, is_durable: bool = True, **changes: Any) -> None:
        self._status = self._status.model_copy(update=changes)
        self._folder.write_status(self._status, is_durable=is_durable)

    def _beat(self, launcher: Launcher) -> None:
        now = time.time()
        if now - self._last_beat < 1.0:
            return
        self._last_beat = now
        self._peers.beat()
        self._record_workers(launcher.pids())
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._update(heartbeat_at=now, is_durable=False)
        if self._tracker is not None and self._tracker.poll() is not None and self._num_trackers < 4:
            self._say(f"tracker ended with {self._tracker.returncode}; starting it again")
            self._ensure_tracker()

    def _ensure_tracker(self) -> None:
        """Start the MLflow tracker. It sees the end of this process as the end of its standard input."""
        is_elsewhere = isinstance(self._peers, OtherNode)
        is_running = self._tracker is not None and self._tracker.poll() is None
        if is_elsewhere or is_running or not self._config.launch.is_tracked:
            return
        self._num_trackers += 1
        with open(self._folder.tracker_log, "ab") as log:
            self._tracker = subprocess.Popen(
                [sys.executable, "-m", "labkit.lab.tracking", str(self._folder.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def _finish(self, end: End) -> None:
        self._peers.tell(end)
        now = time.time()
        self._say(f"{end.state}{': ' + end.error.message if end.error else ''}")
        diverged_at = None
        if not isinstance(self._peers, OtherNode):
            result = summarise(self._folder, self._config, end.state, self._status, now)
            diverged_at = result.diverged_at
            with contextlib.suppress(OSError):
                write_atomically(self._folder.result_file, result.to_json())
        self._folder.stop_file.unlink(missing_ok=True)
        self._update(
            state=end.state, error=end.error, ended_at=now, heartbeat_at=now, diverged_at=diverged_at
        )
        if self._tracker is not None:
            try:
                self._tracker.wait(_TRACKER_GRACE_S)
            except subprocess.TimeoutExpired:
                self._tracker.kill()
                self._tracker.wait()

    def _note(self, text: str) -> None:
        """Say it in the log, and to whoever reads the run's events."""
        self._say(text)
        with contextlib.suppress(OSError):
            log = EventLog(self._folder.events_file(self._places[0].rank), self._status.attempt)
            log.write("message", text=text)
            log.close()

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _why_silent(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""
    return " (its process is stopped)" if state == psutil.STATUS_STOPPED else f" (its process is {state})"
