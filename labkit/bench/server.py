"""The transport of the asynchronous parameter server between two emulated nodes: push and pull of 40 MB."""

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.emulated import ForeignLoad, check_links, measured, run_emulated
from labkit.bench.harness import Report, interleave, ratios
from labkit.cluster.cost import PAYLOAD_SHARE
from labkit.cluster.placement import Placement
from labkit.comm import Communicator, MessageClient, MessageServer, Secret
from labkit.config import from_overrides
from labkit.launch.emulation import build

_MBIT = 1000.0
_NUM_FLOATS = 10_000_000
_SIZE_BYTES = 4 * _NUM_FLOATS
_WARMUP, _REPEATS, _PINGS = 2, 7, 50
_TIMEOUT_S = 60.0
_TRANSPORTS = ("ours", "zmq", "gloo", "tcp")


def measure(say: Callable[[str], None]) -> Report:
    """Measure all figures; about two minutes on two cores.

    Raises:
        ConfigError: nodes can't be emulated here.
        LabkitError: a link is not what it is said to be.
    """
    report = Report("server")
    found: dict[str, dict[str, Any]] = {}
    load = ForeignLoad()
    for name, mbit in (("wire", _MBIT), ("unshaped", None)):
        config = from_overrides({"cluster": "2x1", "cluster.link_mbit": mbit})
        with build(config.cluster) as network:
            if mbit is not None:
                check_links(network, say)
            say(f"push and pull of 40 MB, {'unshaped' if mbit is None else f'{mbit:g} Mbit/s'}")
            hosts = [link.address for link in network.links]
            sides = run_emulated(
                _exchange, config.cluster, hosts, os.getpid(), emulation=network, timeout_s=600
            )
        found[name] = sides[0]
        for transport in _TRANSPORTS:
            found[name][transport]["cpu_s"] += sides[1][transport]["cpu_s"]
            found[name][transport]["doubts"] += sides[1][transport]["doubts"]
    _add_wire(report, found["wire"])
    _add_unshaped(report, found["unshaped"])
    _add_notes(report, found, load.cores())
    return report


def _add_wire(report: Report, found: dict[str, Any]) -> None:
    wire_s = 8 * _SIZE_BYTES / (PAYLOAD_SHARE * _MBIT * 1e6)
    for transport in _TRANSPORTS:
        times = found[transport]["times"]
        suffix, is_ours = ("", True) if transport == "ours" else (f"_{transport}", False)
        sequential = [seconds / (2 * wire_s) for seconds in times["sequential"]]
        report.add(f"over_wire{suffix}", sequential, "<= 1.05" if is_ours else "")
        report.add(
            f"over_wire_duplex{suffix}", [s / wire_s for s in times["duplex"]], "<= 1.1" if is_ours else ""
        )
    for transport in _TRANSPORTS[1:]:
        theirs, ours = (found[name]["times"]["sequential"] for name in (transport, "ours"))
        report.add(f"vs_{transport}", ratios(theirs, ours), ">= 0.95")
    for transport in _TRANSPORTS:
        report.add(f"ping_us_{transport}", [1e6 * seconds for seconds in found[transport]["times"]["ping"]])


def _add_unshaped(report: Report, found: dict[str, Any]) -> None:
    for transport in _TRANSPORTS:
        times = found[transport]["times"]
        rates = [2e-6 * _SIZE_BYTES / seconds for seconds in times["sequential"]]
        report.add(f"unshaped_mb_per_s_{transport}", rates)
        rates = [2e-6 * _SIZE_BYTES / seconds for seconds in times["duplex"]]
        report.add(f"unshaped_duplex_mb_per_s_{transport}", rates)
    for transport in _TRANSPORTS:
        gigabytes = 2e-9 * _SIZE_BYTES * _REPEATS
        report.add(f"cpu_s_per_gb_{transport}", [found[transport]["cpu_s"] / gigabytes])


def _add_notes(report: Report, found: dict[str, dict[str, Any]], foreign_cores: float) -> None:
    report.notes.append(
        "wire: 40 MB each way over 0.956 of 1 Gbit/s, one after the other or (duplex) at once; ours is "
        "encrypted and authenticated (CURVE), zmq is the same code without that, gloo and tcp are neither; "
        "cpu_s_per_gb: processor seconds of both ends together, all threads, unshaped"
    )
    ours, plain = (report.figures[f"unshaped_mb_per_s_{name}"] for name in ("ours", "zmq"))
    report.notes.append(
        f"encryption on the processor is what bounds an unshaped link: {ours:.0f} MB/s "
        f"({8e-3 * ours:.1f} Gbit/s) with it, {plain:.0f} MB/s without; on slower links it hides behind "
        "the wire"
    )
    for name, sides in found.items():
        for transport in _TRANSPORTS:
            doubts = sorted(set(sides[transport]["doubts"]))
            report.notes.extend(f"doubts: {name}, {transport}: {doubt}" for doubt in doubts)
    if foreign_cores > 0.1:
        report.notes.append(f"disturbed: other processes used {foreign_cores:.2f} cores")


# --- one worker of the two -----------------------------------------------------------------


class _Transport(Protocol):
    """One end: rank 0 serves, rank 1 pushes and pulls; both call the same methods in the same order."""

    def push(self, tensor: Tensor) -> None: ...

    def pull(self, tensor: Tensor) -> None: ...

    def duplex(self, pushed: Tensor, pulled: Tensor) -> None: ...

    def close(self) -> None: ...


def _exchange(
    comm: Communicator, placement: Placement, hosts: list[str], benchmark_pid: int
) -> dict[str, dict[str, Any]]:
    """Seconds of each transport in turn, and what its bytes and its processor time were."""
    secret = Secret.from_text(_share(comm, Secret.new().to_text()))
    transports: dict[str, _Transport] = {
        "ours": _Messages(comm, hosts[0], secret, MessageServer, MessageClient),
        "zmq": _Messages(comm, hosts[0], secret, _PlainServer, _PlainClient),
        "gloo": _Gloo(comm),
        "tcp": _Tcp(comm, hosts[0]),
    }
    pushed, pulled, small = torch.ones(_NUM_FLOATS), torch.ones(_NUM_FLOATS), torch.ones(1)

    def sequential(transport: _Transport) -> None:
        transport.push(pushed)
        transport.pull(pulled)

    def ping(transport: _Transport) -> None:
        for _ in range(_PINGS):
            transport.push(small)
            transport.pull(small)

    found: dict[str, dict[str, Any]] = {name: {"times": {}} for name in transports}
    for mode, work, count in (
        ("sequential", sequential, 1),
        ("duplex", lambda transport: transport.duplex(pushed, pulled), 1),
        ("ping", ping, 2 * _PINGS),
    ):
        sides = {name: _timed(comm, partial(work, t), count) for name, t in transports.items()}
        for name, seconds in interleave(sides, _REPEATS, _WARMUP).items():
            found[name]["times"][mode] = seconds
    for name, transport in transports.items():
        cpu_s = time.process_time()
        with measured(comm, benchmark_pid) as seen:
            for _ in range(_REPEATS):
                sequential(transport)
        # Each node sends one tensor each time; the tolerance is for the headers of packets.
        found[name]["doubts"] = seen.doubts(_REPEATS * _SIZE_BYTES)
        found[name]["cpu_s"] = time.process_time() - cpu_s
    comm.barrier()
    for transport in transports.values():
        transport.close()
    return found


def _timed(comm: Communicator, work: Callable[[], object], count: int) -> Callable[[], float]:
    """Seconds of one call from barrier to barrier, over `count`."""

    def once() -> float:
        comm.barrier()
        began_at = time.perf_counter()
        work()
        comm.barrier()
        return (time.perf_counter() - began_at) / count

    return once


def _share(comm: Communicator, text: str) -> str:
    """Rank 0's text, of the same length on both."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    comm.broadcast_(content)
    return bytes(content.tolist()).decode()


# --- the transports -----------------------------------------------------------------


class _PlainServer(MessageServer):
    def _protect(self, socket: Any) -> None:
        return None


class _PlainClient(MessageClient):
    def _protect(self, socket: Any) -> None:
        return None


class _Messages:
    def __init__(
        self,
        comm: Communicator,
        host: str,
        secret: Secret,
        server_type: type[MessageServer],
        client_type: type[MessageClient],
    ) -> None:
        self._server: MessageServer | None = None
        if comm.rank == 0:
            self._server = server_type(host, secret, max_bytes=2 * _SIZE_BYTES)
        port = self._server.address.rpartition(":")[2] if self._server else ""
        address = f"tcp://{host}:{int(_share(comm, port.rjust(5)))}"
        if comm.rank == 1:
            self._client = client_type(address, secret, timeout_s=_TIMEOUT_S, max_bytes=2 * _SIZE_BYTES)

    def push(self, tensor: Tensor) -> None:
        if self._server is None:
            self._client.request("push", tensors=[tensor])
        else:
            self._serve(1, tensor)

    def pull(self, tensor: Tensor) -> None:
        if self._server is None:
            self._client.request("pull")
        else:
            self._serve(1, tensor)

    def duplex(self, pushed: Tensor, pulled: Tensor) -> None:
        if self._server is None:
            pull = self._client.send("pull")
            push = self._client.send("push", tensors=[pushed])
            self._client.receive(push)
            self._client.receive(pull)
        else:
            self._serve(2, pulled)

    def _serve(self, num_requests: int, tensor: Tensor) -> None:
        assert self._server is not None
        while num_requests > 0:
            for message in self._server.poll(_TIMEOUT_S):
                self._server.reply(message, tensors=[tensor] if message.kind == "pull" else [])
                num_requests -= 1

    def close(self) -> None:
        if self._server is None:
            self._client.close()
        else:
            self._server.close()


class _Gloo:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def push(self, tensor: Tensor) -> None:
        if self._comm.rank == 1:
            self._comm.send(tensor, 0)
        else:
            self._comm.receive_(tensor, 1)

    def pull(self, tensor: Tensor) -> None:
        if self._comm.rank == 1:
            self._comm.receive_(tensor, 0)
        else:
            self._comm.send(tensor, 1)

    def duplex(self, pushed: Tensor, pulled: Tensor) -> None:
        other = 1 - self._comm.rank
        outgoing, incoming = (pushed, pulled) if self._comm.rank == 1 else (pulled, pushed)
        under_way = [dist.isend(outgoing, other), dist.irecv(incoming, other)]
        for work in under_way:
            assert work is not None
            work.wait()

    def close(self) -> None:
        return None


class _Tcp:
    def __init__(self, comm: Communicator, host: str) -> None:
        listening = socket.create_server((host, 0)) if comm.rank == 0 else None
        port = int(_share(comm, str(listening.getsockname()[1] if listening else 0).rjust(5)))
        if listening:
            self._socket, _ = listening.accept()
            listening.close()
        else:
            self._socket = socket.create_connection((host, port), timeout=_TIMEOUT_S)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_client = comm.rank == 1

    def push(self, tensor: Tensor) -> None:
        self._move(tensor, is_out=self._is_client)

    def pull(self, tensor: Tensor) -> None:
        self._move(tensor, is_out=not self._is_client)

    def duplex(self, pushed: Tensor, pulled: Tensor) -> None:
        outgoing, incoming = (pushed, pulled) if self._is_client else (pulled, pushed)
        sender = threading.Thread(target=self._move, args=(outgoing,), kwargs={"is_out": True})
        sender.start()
        self._move(incoming, is_out=False)
        sender.join()

    def _move(self, tensor: Tensor, *, is_out: bool) -> None:
        content: memoryview = tensor.numpy().data.cast("B")
        if is_out:
            self._socket.sendall(content)
            return
        while content:
            count = self._socket.recv_into(content)
            if count == 0:
                raise ConnectionError("the other end of a benchmark went away")
            content = content[count:]

    def close(self) -> None:
        self._socket.close()
