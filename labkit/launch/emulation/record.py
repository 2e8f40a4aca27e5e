"""Tell others where an emulation is: descriptors of the process that holds it, as a small file."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from labkit.errors import ConfigError
from labkit.launch.emulation.emulation import Emulation, NodeSpaces
from labkit.launch.emulation.links import Link
from labkit.runfolder import ProcessId


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeRecord(_Record):
    """One node: its link as it was built, and the holder's descriptors of its namespaces."""

    name: str
    address: str
    up_mbit: float | None
    down_mbit: float | None
    network: int
    host_name: int
    mounts: int


class EmulationRecord(_Record):
    """An emulation that a process holds.

    Attributes:
        holder: Lives as long as the emulation.
        name: Of the standing cluster; None: it belongs to one run.
        congestion: TCP congestion control.
        user: Descriptor of the user namespace; None: root made it.
        switch: Descriptor of the switch's network namespace.
        nodes: In order.
    """

    holder: ProcessId
    name: str | None
    congestion: str
    user: int | None
    switch: int
    nodes: tuple[NodeRecord, ...]


def record_of(emulation: Emulation) -> EmulationRecord:
    """Describe an emulation that this process holds."""
    nodes = []
    for link in emulation.links:
        spaces = emulation.nodes[link.node]
        nodes.append(
            NodeRecord(
                name=link.node,
                address=link.address,
                up_mbit=link.up_mbit,
                down_mbit=link.down_mbit,
                network=spaces.network,
                host_name=spaces.host_name,
                mounts=spaces.mounts,
            )
        )
    return EmulationRecord(
        holder=ProcessId.current(),
        name=emulation.name,
        congestion=emulation.congestion,
        user=emulation.user,
        switch=emulation.switch,
        nodes=tuple(nodes),
    )


def open_record(record: EmulationRecord, *, log: Path | None = None) -> Emulation:
    """Take hold of an emulation that another process holds.

    Args:
        record: From that process.
        log: Where changes of links are written down.

    Raises:
        ConfigError: its holder has ended, or belongs to somebody else.
    """
    if not record.holder.is_here() or not record.holder.is_alive():
        raise ConfigError(
            f"emulation must be held by a process of this machine, got process {record.holder.pid} on "
            f"{record.holder.host}, which has ended or is elsewhere. Start it again."
        )
    opened: list[int] = []

    def take(fd: int) -> int:
        opened.append(os.open(f"/proc/{record.holder.pid}/fd/{fd}", os.O_RDONLY))
        return opened[-1]

    try:
        return _open(record, take, log)
    except OSError as error:
        _close_all(opened)
        raise ConfigError(
            f"emulation must belong to you, got process {record.holder.pid}: {error.strerror}. "
            "Use the account that started it."
        ) from None


def _open(record: EmulationRecord, take: Callable[[int], int], log: Path | None) -> Emulation:
    return Emulation(
        [Link(node.name, node.address, node.up_mbit, node.down_mbit) for node in record.nodes],
        None if record.user is None else take(record.user),
        take(record.switch),
        {
            node.name: NodeSpaces(take(node.network), take(node.host_name), take(node.mounts))
            for node in record.nodes
        },
        record.congestion,
        name=record.name,
        log=log,
    )


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
