"""An emulated network as those see it who hold it: its supervisor, its workers, a benchmark."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from labkit.engine.quota import Quotas
from labkit.launch.emulation import kernel
from labkit.launch.emulation.links import SWITCH_ADDRESS, Link, describe, link_of, port_of, rtt_text, tap_of
from labkit.launch.emulation.tools import devices, is_down

T = TypeVar("T")

INTERFACE = "eth0"
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class Delay:
    """Latency between the nodes, and the process that makes it.

    Attributes:
        rtt_ms: Round trip, milliseconds.
        lifeline: Descriptor; the process lives as long as somebody holds it.
        pid: The process where it is a child of this one; None: another process started it.
    """

    rtt_ms: float
    lifeline: int
    pid: int | None = None


@dataclass(frozen=True)
class Spaces:
    """Descriptors of the namespaces of a node or of the switch."""

    network: int
    mounts: int
    host_name: int

    def as_list(self) -> list[int]:
        """All of them."""
        return [self.network, self.mounts, self.host_name]


class Emulation:
    """Nodes as namespaces, joined by a switch. It lasts as long as somebody holds it."""

    store_host = SWITCH_ADDRESS

    def __init__(
        self,
        links: Sequence[Link],
        user: int | None,
        switch: Spaces,
        nodes: Mapping[str, Spaces],
        congestion: str,
        *,
        name: str | None = None,
        log: Path | None = None,
        quotas: Quotas | None = None,
        delay: Delay | None = None,
    ) -> None:
        """Take hold of namespaces that are there; `build` makes them.

        Args:
            links: One per node, in order.
            user: Descriptor of the user namespace that owns all others; None: root made them.
            switch: Descriptors of the switch.
            nodes: Descriptors by node.
            congestion: TCP congestion control of the nodes.
            name: Of the standing cluster that this is.
            log: Where changes of links are written down.
            quotas: Processor shares of the workers of the one run that this is held for.
            delay: Latency; None: none is added.
        """
        self.links = tuple(links)
        self.user = user
        self.switch = switch
        self.nodes = dict(nodes)
        self.congestion = congestion
        self.name = name
        self.log = log
        self.quotas = quotas
        self.delay = delay
        self._is_closed = False

    def __enter__(self) -> "Emulation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go. Safe to call twice."""
        if self.quotas is not None:
            self.quotas.remove()
        for fd in self.fds():
            os.close(fd)
        if not self._is_closed and self.delay is not None and self.delay.pid is not None:
            _reap(self.delay.pid)
        self._is_closed = True

    def fds(self) -> list[int]:
        """Every descriptor held."""
        if self._is_closed:
            return []
        found = [fd for spaces in (self.switch, *self.nodes.values()) for fd in spaces.as_list()]
        found += [self.user] if self.user is not None else []
        return found + ([self.delay.lifeline] if self.delay is not None else [])

    @property
    def rtt_ms(self) -> float | None:
        """Round trip between two nodes, milliseconds; None: not delayed."""
        return None if self.delay is None else self.delay.rtt_ms

    def join(self) -> None:
        """Move this process to where it may enter the nodes. Call it before it has threads.

        Without root that is a user namespace, from which there is no way back; with root nothing happens.
        """
        if self.user is not None:
            kernel.enter([self.user])

    def enter(self, node: str) -> None:
        """Make this process one of a node: its address, host name, hosts file and /dev/shm.

        Raises:
            ConfigError: there is no such node.
        """
        kernel.enter(self.way_to(node))
        # gloo and NCCL would otherwise guess by the host name, or take loopback.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = INTERFACE

    def at_switch(self, function: Callable[[], T]) -> T:
        """Run a function in this process, which has joined, where all nodes can reach it."""
        return kernel.in_thread(function, [self.switch.network, self.switch.mounts])

    def call(self, node: str | None, function: Callable[[], T]) -> T:
        """Run a function in a child process on a node, or at the switch (None).

        Args:
            node: Its name.
            function: Its result must be picklable.

        Raises:
            ConfigError: there is no such node.
        """
        return kernel.in_child(function, self.way_to(node))

    def cut_nodes(self) -> list[str]:
        """Nodes whose links are cut now."""
        found = self.call(None, devices)
        return [link.node for link in self.links if self.is_cut(link.node, found)]

    def is_cut(self, node: str, found: Mapping[str, Mapping[str, Any]]) -> bool:
        """Nothing goes through a node's link: its port is down, or the process that delays frames has ended.

        Args:
            node: Its name.
            found: The switch's devices.

        Raises:
            ConfigError: there is no such node.
        """
        port = port_of(self.links, node)
        return is_down(found[port]) or (self.delay is not None and tap_of(port) not in found)

    def quota(self, rank: int) -> str:
        """Control group of a worker; "" when no quota is set."""
        return "" if self.quotas is None else str(self.quotas.groups[rank])

    def remark(self) -> str:
        """What whoever reads the run's figures must know of the network and of the workers' speeds."""
        return str(self) if self.quotas is None else f"{self}; {self.quotas}"

    def way_to(self, node: str | None) -> list[int]:
        """Namespaces to enter for a node, or the switch (None), in this order.

        Raises:
            ConfigError: there is no such node.
        """
        spaces = self.switch if node is None else self.nodes[link_of(self.links, node).node]
        return [*([self.user] if self.user is not None else []), *spaces.as_list()]

    def __str__(self) -> str:
        right = "as root" if self.user is None else "in a user namespace"
        how = "" if self.rtt_ms is None else f", round trip {rtt_text(self.rtt_ms)}"
        how += f"; TCP {self.congestion}, {right}"
        what = f"standing cluster {self.name}, " if self.name else ""
        return f"{what}{len(self.links)} emulated nodes: {describe(self.links)}{how}"


def _reap(pid: int) -> None:
    """Wait for a child that is about to end; not for long: somebody else may still hold its lifeline."""
    deadline = time.monotonic() + _PATIENCE_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
