"""What really went over an emulated wire, and how fast it is: nothing is believed unmeasured."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from labkit.errors import ConfigError
from labkit.launch.emulation import kernel
from labkit.launch.emulation.control import link_state
from labkit.launch.emulation.emulation import INTERFACE, Emulation
from labkit.launch.emulation.links import PAYLOAD_SHARE, burst_bytes

_TRANSFER_BYTES = 25_000_000
_LONGEST_S = 4.0
_PATIENCE_S = 60.0
_BLOCK = bytes(2**18)


class LinkBytes(NamedTuple):
    """Bytes counted in a node since it was made.

    They are payload and a thousandth more: headers count once for the up to 64 KiB that TCP hands down at
    a time, not for every frame.

    Attributes:
        sent: Over its link.
        received: Over its link.
        loopback: Inside the node.
    """

    sent: int
    received: int
    loopback: int

    def since(self, earlier: "LinkBytes") -> "LinkBytes":
        """What was counted after an earlier look."""
        return LinkBytes(*(now - before for now, before in zip(self, earlier, strict=True)))


def own_bytes() -> LinkBytes:
    """The counters of the node that this process is on."""
    counted = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        counted[name.strip()] = (int(fields[8]), int(fields[0]))
    sent, received = counted.get(INTERFACE, (0, 0))
    return LinkBytes(sent, received, counted.get("lo", (0, 0))[0])


def link_bytes(emulation: Emulation, node: str) -> LinkBytes:
    """The counters of a node, read inside it.

    Raises:
        ConfigError: there is no such node.
    """
    return emulation.call(node, own_bytes)


@dataclass(frozen=True)
class Calibration:
    """How fast one transfer was.

    Attributes:
        sender: Node.
        receiver: Node.
        mbit: Payload rate that was reached, Mbit/s.
        limit_mbit: The most that the slower of the two link ends lets through as payload; None: unshaped.
    """

    sender: str
    receiver: str
    mbit: float
    limit_mbit: float | None

    @property
    def ratio(self) -> float:
        """Reached over possible; 1 for an unshaped link."""
        return 1.0 if self.limit_mbit is None else self.mbit / self.limit_mbit


def calibrate(emulation: Emulation, sender: str | None = None, receiver: str | None = None) -> Calibration:
    """Send about 25 MB between two nodes over one plain socket, after the links' burst credit is spent.

    Args:
        emulation: At least two nodes.
        sender: Node; default: the first.
        receiver: Node; default: the second.

    Raises:
        ConfigError: there is no such node, or only one.
    """
    source, target = (link_state(emulation, name) for name in _ends(emulation, sender, receiver))
    rates = [rate for rate in (source.up_mbit, target.down_mbit) if rate is not None]
    rate = min(rates, default=None)
    size = _TRANSFER_BYTES if rate is None else min(_TRANSFER_BYTES, round(rate * 1e6 / 8 * _LONGEST_S))
    on_the_way = 0.0 if rate is None else rate * 1e6 / 8 * (emulation.rtt_ms or 0.0) / 1e3
    # TCP needs some round trips until it fills the link.
    credit = 0 if rate is None else 4 * burst_bytes(rate) + round(4 * on_the_way)
    source_network = emulation.nodes[source.node].network
    seconds = emulation.call(target.node, lambda: _transfer(source_network, target.address, size, credit))
    return Calibration(
        source.node, target.node, size * 8e-6 / seconds, None if rate is None else rate * PAYLOAD_SHARE
    )


def _ends(emulation: Emulation, sender: str | None, receiver: str | None) -> tuple[str, str]:
    if len(emulation.links) < 2:
        raise ConfigError("cluster must have at least two nodes to be calibrated, got one. Add a node.")
    return sender or emulation.links[0].node, receiver or emulation.links[1].node


def _transfer(source_network: int, address: str, size: int, credit: int) -> float:
    """Receive here what a child on the other node sends; seconds after the first `credit` bytes."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(_PATIENCE_S)
        where = server.getsockname()
        child = os.fork()
        if child == 0:
            try:
                kernel.enter([source_network])
                _send(where, size + credit)
            finally:
                os._exit(0)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(_PATIENCE_S)
            _receive(connection, credit)
            began_at = time.perf_counter()
            _receive(connection, size)
            seconds = time.perf_counter() - began_at
    os.waitpid(child, 0)
    return seconds


def _send(where: tuple[str, int], size: int) -> None:
    with socket.create_connection(where, timeout=_PATIENCE_S) as connection:
        while size > 0:
            size -= connection.send(_BLOCK[:size])


def _receive(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(len(_BLOCK)))
    while size > 0:
        count = connection.recv_into(buffer[: min(size, len(buffer))])
        if count == 0:
            raise ConnectionError("the sender of a calibration went away")
        size -= count
