"""How workers find each other: a store that lives in the supervisor, never in a worker.

A store in worker 0 dies with worker 0, and then nobody can say why (torch's default). Ours outlives
them all, and each generation of workers uses keys of its own, so that a restart never reads the
addresses of the dead (the cause of failing restarts in torch 2.13 with gloo).
"""

import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from labkit.comm.communicator import Communicator, GroupCommunicator, PeerError, SoloCommunicator
from labkit.errors import ConfigError


@dataclass(frozen=True)
class Rendezvous:
    """Where workers meet.

    Attributes:
        host: Address of the store.
        port: Its port.
        generation: Prefix of this generation's keys; another one after every restart.
    """

    host: str
    port: int
    generation: str


class _Texts:
    """Short texts in the store, by which the supervisors of several machines talk."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None

    def put(self, key: str, text: str) -> None:
        """Set a text.

        Raises:
            PeerError: the store is gone.
        """
        try:
            self._open_store().set(f"labkit/{key}", text)
        except RuntimeError as error:
            raise PeerError(f"the store at the first node is gone: {error}".splitlines()[0]) from error

    def get(self, key: str) -> str | None:
        """Read a text; None while it is not set.

        Raises:
            PeerError: the store is gone.
        """
        try:
            store = self._open_store()
            if not store.check([f"labkit/{key}"]):
                return None
            return str(store.get(f"labkit/{key}").decode())
        except RuntimeError as error:
            raise PeerError(f"the store at the first node is gone: {error}".splitlines()[0]) from error

    def _open_store(self) -> dist.TCPStore:
        if self._store is None:
            raise PeerError("the store is not open")
        return self._store


class StoreServer(_Texts):
    """The store, served by this process on one address only."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__()
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"rendezvous must be a free address of this machine, got {host}:{port}: "
                f"{error.strerror or error}. Choose another port, or stop what listens there."
            ) from None
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._fd = self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """It answers."""
        return self._store is not None

    def fileno(self) -> int:
        """The listening socket, which forked workers must close."""
        return self._fd

    def open(self) -> None:
        """Begin to answer. Workers forked before this may connect already; they wait."""
        # torch binds to every interface when it makes the socket itself; ours listens on `host` alone.
        self._store = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
            use_libuv=True,
        )

    def close(self) -> None:
        """Stop answering."""
        self._store = None
        self._socket.close()


class StoreClient(_Texts):
    """The store of another machine."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Connect; wait for the server to come.

        Raises:
            PeerError: it did not come in time.
        """
        super().__init__()
        self.host, self.port = host, port
        try:
            self._store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise PeerError(
                f"the first node must answer at {host}:{port} within {timeout_s:g} s, got: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error


def interface_towards(host: str) -> str:
    """The network interface by which this machine reaches `host`.

    gloo otherwise takes the address of the host name, which many machines map to loopback.
    """
    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return name
    raise ConfigError(
        f"rendezvous must be reachable by an interface of this machine, got {host}. Check the route."
    )


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def join(
    rendezvous: Rendezvous,
    *,
    rank: int,
    world_size: int,
    device_type: str,
    start_timeout_s: float,
    comm_timeout_s: float,
) -> Communicator:
    """Meet the other workers and return the communicator; alone there is nothing to meet.

    Args:
        rendezvous: The supervisor's store.
        rank: This worker's rank.
        world_size: Number of workers.
        device_type: cpu (gloo) or cuda (NCCL for device tensors, gloo for the rest).
        start_timeout_s: Longest wait for the others to come.
        comm_timeout_s: Longest wait in a collective afterwards.

    Raises:
        PeerError: the others did not come in time.
    """
    if world_size == 1:
        return SoloCommunicator()
    try:
        store = dist.TCPStore(
            rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=start_timeout_s)
        )
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=dist.PrefixStore(rendezvous.generation, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=comm_timeout_s),
        )
    except RuntimeError as error:
        raise PeerError(
            f"workers must meet at {rendezvous.host}:{rendezvous.port} within {start_timeout_s:g} s, "
            f"got: {str(error).strip().splitlines()[0]}"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    communicator = GroupCommunicator(group, is_owner=True)
    communicator.all_reduce_(torch.zeros(1)).wait()  # connects every pair now, not in step 1
    return communicator
