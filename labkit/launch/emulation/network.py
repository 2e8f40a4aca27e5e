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


class Loopback:
    """All nodes share this machine's loopback interface, which nothing shapes."""

    store_host = "127.0.0.1"

    def join(self) -> None:
        return None

    def enter(self, node: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"

    def at_switch(self, function: Callable[[], T]) -> T:
        return function()

    def __str__(self) -> str:
        return "loopback"
