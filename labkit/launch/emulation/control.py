"""Change, cut and heal a node's link while a run goes on, and see how the links stand."""

import contextlib
import time
from dataclasses import dataclass

from labkit.errors import ConfigError
from labkit.launch.emulation.emulation import INTERFACE, Emulation
from labkit.launch.emulation.links import Link, check_rate, link_of, port_of, rate_text, shape_command
from labkit.launch.emulation.tools import batch, devices, rates


@dataclass(frozen=True)
class LinkState:
    """How a link stands now.

    Attributes:
        node: Its node.
        address: The node's address.
        up_mbit: Rate towards the others, Mbit/s; None: unshaped.
        down_mbit: Rate from the others.
        is_cut: Nothing goes through.
        rtt_ms: Round trip to any other node, milliseconds; None: not delayed.
        sent_bytes: By the node since it was made, as the switch counted them.
        received_bytes: The same, the other way.
    """

    node: str
    address: str
    up_mbit: float | None
    down_mbit: float | None
    is_cut: bool
    rtt_ms: float | None
    sent_bytes: int
    received_bytes: int


def set_link(emulation: Emulation, node: str, *, up_mbit: float | None, down_mbit: float | None) -> None:
    """Give a link other rates, at once, also under traffic.

    Args:
        emulation: Where.
        node: Whose link.
        up_mbit: Rate towards the others, Mbit/s; None: as fast as it goes.
        down_mbit: Rate from the others.

    Raises:
        ConfigError: there is no such node, or a rate can't be shaped.
    """
    port = port_of(emulation.links, node)
    for name, rate in (("up_mbit", up_mbit), ("down_mbit", down_mbit)):
        check_rate(f"{name} of node {node}", rate)
    emulation.call(node, lambda: _shape(INTERFACE, up_mbit))
    emulation.call(None, lambda: _shape(port, down_mbit))
    _write_down(emulation, f"link of {node} set to {rate_text(up_mbit)} up, {rate_text(down_mbit)} down")


def _shape(device: str, rate_mbit: float | None) -> None:
    if rate_mbit is not None:
        batch("tc", [shape_command(device, rate_mbit)])
        return
    with contextlib.suppress(ConfigError):  # it is unshaped already
        batch("tc", [f"qdisc del dev {device} root"])


def cut_link(emulation: Emulation, node: str) -> None:
    """Take a node's cable out of the switch.

    Raises:
        ConfigError: there is no such node.
    """
    _switch_port(emulation, node, "down")
    _write_down(emulation, f"link of {node} cut")


def heal_link(emulation: Emulation, node: str) -> None:
    """Put a node's cable back; its rates are as before.

    Raises:
        ConfigError: there is no such node.
    """
    _switch_port(emulation, node, "up")
    _write_down(emulation, f"link of {node} healed")


def _switch_port(emulation: Emulation, node: str, state: str) -> None:
    port = port_of(emulation.links, node)
    emulation.call(None, lambda: batch("ip", [f"link set {port} {state}"]))


def _write_down(emulation: Emulation, text: str) -> None:
    """A run's log says what was done to its links."""
    if emulation.log is not None:
        with contextlib.suppress(OSError), open(emulation.log, "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def link_states(emulation: Emulation) -> list[LinkState]:
    """How every link stands, as the kernel says it."""
    return [link_state(emulation, link.node) for link in emulation.links]


def link_state(emulation: Emulation, node: str) -> LinkState:
    """How one link stands.

    Raises:
        ConfigError: there is no such node.
    """
    link, port = link_of(emulation.links, node), port_of(emulation.links, node)
    found, down = emulation.call(None, lambda: (devices(), rates()))
    counted = found[port]["stats64"]
    return LinkState(
        node=link.node,
        address=link.address,
        up_mbit=emulation.call(link.node, rates).get(INTERFACE),
        down_mbit=down.get(port),
        is_cut=emulation.is_cut(node, found),
        rtt_ms=emulation.rtt_ms,
        sent_bytes=counted["rx"]["bytes"],
        received_bytes=counted["tx"]["bytes"],
    )


def with_rates_of_now(emulation: Emulation) -> Emulation:
    """The same emulation, described by the rates that its links have now, not by those it was built with."""
    states = link_states(emulation)
    emulation.links = tuple(Link(s.node, s.address, s.up_mbit, s.down_mbit) for s in states)
    return emulation
