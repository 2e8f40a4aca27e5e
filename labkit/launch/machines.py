"""This machine among several that train together: where its workers meet those of the others."""

import os

from labkit.comm import interface_towards
from labkit.launch.emulation import Loopback


class Machine(Loopback):
    """Real links: a worker's traffic leaves by the interface on the way to the first node."""

    def __init__(self, store_host: str) -> None:
        """Prepare.

        Args:
            store_host: Address of the first node.
        """
        super().__init__()
        self.store_host = store_host

    def enter(self, node: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(self.store_host)
