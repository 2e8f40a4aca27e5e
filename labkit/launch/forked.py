"""Run a function on real workers, forked processes that meet over gloo, for tests and benchmarks."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from labkit.comm import Rendezvous, StoreServer, join
from labkit.launch.emulation.network import Loopback, Network
from labkit.processes import die_with_parent

# OpenMP's threads do not survive a fork: neither this process nor its workers may have any.
torch.set_num_threads(1)
_CONTEXT = multiprocessing.get_context("fork")


class WorkerFailed(AssertionError):
    """The function raised on a worker; the message names the rank and holds its traceback."""


@dataclass(frozen=True)
class _Place:
    """Where one worker goes: its rank, its node on the network, where it meets the others."""

    rank: int
    world_size: int
    network: Network
    node: str
    rendezvous: Rendezvous
    timeout_s: float


def _child(
    connection: Connection,
    function: Callable[..., Any],
    place: _Place,
    parent_pid: int,
    arguments: tuple[Any, ...],
) -> None:
    try:
        place.network.enter(place.node)
        die_with_parent(parent_pid)
        comm = join(
            place.rendezvous,
            rank=place.rank,
            world_size=place.world_size,
            device_type="cpu",
            start_timeout_s=30,
            comm_timeout_s=place.timeout_s,
        )
        value = function(comm, *arguments)
        comm.barrier()
        # Plain pickle copies tensors; torch's own way would share memory of a process about to end.
        connection.send_bytes(pickle.dumps((True, value)))
        comm.close()
    except BaseException as error:
        fault = ("PeerError" in type(error).__name__, traceback.format_exc())
        connection.send_bytes(pickle.dumps((False, fault)))
    connection.close()
    os._exit(0)


def run_workers(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60
) -> list[Any]:
    """Run `function(comm, *arguments)` on `world_size` workers and return what each gave, by rank.

    Forked from this process, which has imported torch: four workers stand in 0.1-0.2 s.

    Raises:
        WorkerFailed: naming the rank that failed first of its own, not for a peer's sake.
    """
    return run_on(Loopback(), [""] * world_size, function, *arguments, timeout_s=timeout_s, comm_timeout_s=30)


def run_on(
    network: Network,
    nodes: Sequence[str],
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float,
    comm_timeout_s: float,
) -> list[Any]:
    """Run `function(comm, *arguments)` on one worker per entry of `nodes`, each on its node of a network.

    Args:
        network: This process has joined it.
        nodes: Node of each rank; shape (W,).
        function: What every worker does.
        arguments: Passed on.
        timeout_s: Longest time for all.
        comm_timeout_s: Longest wait in a collective.

    Raises:
        WorkerFailed: naming the rank that failed first of its own, not for a peer's sake.
    """
    server = network.at_switch(lambda: StoreServer(network.store_host))
    where = Rendezvous(server.host, server.port, "test")
    pipes, processes = [], []
    for rank, node in enumerate(nodes):
        mine, theirs = _CONTEXT.Pipe()
        place = _Place(rank, len(nodes), network, node, where, comm_timeout_s)
        process = _CONTEXT.Process(
            target=_child, args=(theirs, function, place, os.getpid(), arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    network.at_switch(server.open)
    try:
        return _collect(pipes, processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
        server.close()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: list[Any] = []
    faults: list[tuple[bool, int, str]] = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            faults.append((False, rank, "gave no answer in time"))
            continue
        try:
            is_good, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            processes[rank].join(5)
            faults.append((False, rank, f"died with exit code {processes[rank].exitcode}"))
            continue
        if is_good:
            results.append(value)
        else:
            faults.append((value[0], rank, value[1]))
    if faults:
        _, rank, text = min(faults)
        raise WorkerFailed(f"worker {rank} failed:\n{text}")
    return results
