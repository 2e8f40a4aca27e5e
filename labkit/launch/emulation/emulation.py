"""An emulated network as those see it who hold it: its supervisor, its workers, a benchmark."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from labkit.engine.quota import Quotas
from labkit.launch.emulation import kernel
from labkit.launch.emulation.links import SWITCH_ADDRESS, Link, describe, link_of, port_of
from labkit.launch.emulation.tools import devices, is_down

T = TypeVar("T")

INTERFACE = "eth0"


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
        """
        self.links = tuple(links)
        self.user = user
        self.switch = switch
        self.nodes = dict(nodes)
        self.congestion = congestion
        self.name = name
        self.log = log
        self.quotas = quotas
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
        self._is_closed = True

    def fds(self) -> list[int]:
        """Every descriptor held."""
        if self._is_closed:
            return []
        found = [fd for spaces in (self.switch, *self.nodes.values()) for fd in spaces.as_list()]
        return found + ([self.user] if self.user is not None else [])

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
        kernel.enter(self._way_to(node))
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
        return kernel.in_child(function, self._way_to(node))

    def cut_nodes(self) -> list[str]:
        """Nodes whose links are cut now."""
        ports = self.call(None, devices)
        return [link.node for link in self.links if is_down(ports[port_of(self.links, link.node)])]

    def quota(self, rank: int) -> str:
        """Control group of a worker; "" when no quota is set."""
        return "" if self.quotas is None else str(self.quotas.groups[rank])

    def remark(self) -> str:
        """What whoever reads the run's figures must know of the network and of the workers' speeds."""
        return str(self) if self.quotas is None else f"{self}; {self.quotas}"

    def _way_to(self, node: str | None) -> list[int]:
        spaces = self.switch if node is None else self.nodes[link_of(self.links, node).node]
        return [*([self.user] if self.user is not None else []), *spaces.as_list()]

    def __str__(self) -> str:
        right = "as root" if self.user is None else "in a user namespace"
        what = f"standing cluster {self.name}, " if self.name else ""
        return (
            f"{what}{len(self.links)} emulated nodes: {describe(self.links)}; TCP {self.congestion}, {right}"
        )
