"""The network that workers of a run are put on: an emulated one, or this machine's loopback."""

import os
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Network(Protocol):
    """Where workers meet. `Emulation` is the other one beside `Loopback`."""

    store_host: str

    def join(self) -> None:
        """Move this process to where it may enter nodes. Call it before it has threads."""
        ...

    def enter(self, node: str) -> None:
        """Make this process, which has no threads yet, one of a node."""
        ...

    def at_switch(self, function: Callable[[], T]) -> T:
        """Run a function where it may listen at `store_host`."""
        ...

    def cut_nodes(self) -> list[str]:
        """Nodes whose links are cut now."""
        ...

    def quota(self, rank: int) -> str:
        """Control group of a worker; "" when no quota is set."""
        ...

    def remark(self) -> str:
        """What whoever reads the run's figures must know of the network; "" for nothing."""
        ...

    def close(self) -> None:
        """Let go of it, after all workers have ended."""
        ...


class Loopback:
    """All nodes share this machine's loopback interface, which nothing shapes."""

    store_host = "127.0.0.1"

    def __init__(self, *, is_shape_wanted: bool = False) -> None:
        """Loopback.

        Args:
            is_shape_wanted: The cluster file gives rates, which loopback can't keep.
        """
        self._is_shape_wanted = is_shape_wanted

    def join(self) -> None:
        return None

    def enter(self, node: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"

    def at_switch(self, function: Callable[[], T]) -> T:
        return function()

    def cut_nodes(self) -> list[str]:
        return []

    def quota(self, rank: int) -> str:
        return ""

    def close(self) -> None:
        return None

    def remark(self) -> str:
        if not self._is_shape_wanted:
            return ""
        return "links are not shaped: all nodes share loopback. --emulate gives them the cluster file's rates"
