"""Tell others where an emulation is: descriptors of the process that holds it, as a small file."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from labkit.errors import ConfigError
from labkit.launch.emulation.emulation import Delay, Emulation, Spaces
from labkit.launch.emulation.links import Link
from labkit.runfolder import ProcessId


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SpacesRecord(_Record):
    """The holder's descriptors of the namespaces of a node or of the switch."""

    network: int
    mounts: int
    host_name: int


class NodeRecord(_Record):
    """One node: its link as it was built, and its namespaces."""

    name: str
    address: str
    up_mbit: float | None
    down_mbit: float | None
    spaces: SpacesRecord


class DelayRecord(_Record):
    """Latency, and the holder's descriptor of what keeps the process alive that makes it."""

    rtt_ms: float
    lifeline: int


class EmulationRecord(_Record):
    """An emulation that a process holds.

    Attributes:
        holder: Lives as long as the emulation.
        name: Of the standing cluster; None: it belongs to one run.
        congestion: TCP congestion control.
        user: Descriptor of the user namespace; None: root made it.
        switch: Namespaces of the switch.
        nodes: In order.
        delay: Latency; None: none is added.
    """

    holder: ProcessId
    name: str | None
    congestion: str
    user: int | None
    switch: SpacesRecord
    nodes: tuple[NodeRecord, ...]
    delay: DelayRecord | None = None


def record_of(emulation: Emulation) -> EmulationRecord:
    """Describe an emulation that this process holds."""
    return EmulationRecord(
        holder=ProcessId.current(),
        name=emulation.name,
        congestion=emulation.congestion,
        user=emulation.user,
        switch=_spaces_record(emulation.switch),
        nodes=tuple(
            NodeRecord(
                name=link.node,
                address=link.address,
                up_mbit=link.up_mbit,
                down_mbit=link.down_mbit,
                spaces=_spaces_record(emulation.nodes[link.node]),
            )
            for link in emulation.links
        ),
        delay=None
        if emulation.delay is None
        else DelayRecord(rtt_ms=emulation.delay.rtt_ms, lifeline=emulation.delay.lifeline),
    )


def _spaces_record(spaces: Spaces) -> SpacesRecord:
    return SpacesRecord(network=spaces.network, mounts=spaces.mounts, host_name=spaces.host_name)


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
    try:
        return _open(record, opened, log)
    except OSError as error:
        for fd in opened:
            os.close(fd)
        raise ConfigError(
            f"emulation must belong to you, got process {record.holder.pid}: {error.strerror}. "
            "Use the account that started it."
        ) from None


def _open(record: EmulationRecord, opened: list[int], log: Path | None) -> Emulation:
    def take(fd: int, mode: int = os.O_RDONLY) -> int:
        opened.append(os.open(f"/proc/{record.holder.pid}/fd/{fd}", mode))
        return opened[-1]

    def take_all(spaces: SpacesRecord) -> Spaces:
        return Spaces(take(spaces.network), take(spaces.mounts), take(spaces.host_name))

    return Emulation(
        [Link(node.name, node.address, node.up_mbit, node.down_mbit) for node in record.nodes],
        None if record.user is None else take(record.user),
        take_all(record.switch),
        {node.name: take_all(node.spaces) for node in record.nodes},
        record.congestion,
        name=record.name,
        log=log,
        delay=None
        if record.delay is None
        else Delay(record.delay.rtt_ms, take(record.delay.lifeline, os.O_WRONLY)),
    )
