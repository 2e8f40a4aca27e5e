"""What an emulated network looks like: one link per node, its address and its rates. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.config import ClusterConfig
from labkit.errors import ConfigError

SWITCH_ADDRESS = "10.77.0.254"
PREFIX_BITS = 24
MAX_NODES = 253
MIN_MBIT, MAX_MBIT = 0.01, 100_000.0  # what tc's token bucket shapes; outside it refuses, or shapes wrongly
_MAX_NAME = 64  # of a host name
PAYLOAD_SHARE = 1448 / 1514  # of a full frame; what is left over is headers
_LATENCY_MS = 50

# Rate in Mbit/s and token bucket in KiB that it needs; measured. A small bucket halves the throughput of a
# fast link; a large one gives small messages more than the link's rate. None may be smaller than what TCP
# hands down at once, 64 KiB and its headers: when a link under traffic is slowed down, such a piece may be
# waiting already, and if it does not fit the new bucket it blocks the link for ever.
_BURSTS_KIB = ((100.0, 80.0), (1000.0, 256.0), (2000.0, 512.0))


@dataclass(frozen=True)
class Link:
    """One node's way to the others.

    Attributes:
        node: Its name.
        address: Its address.
        up_mbit: Rate towards the others, Mbit/s on the wire; None: as fast as it goes.
        down_mbit: Rate from the others.
    """

    node: str
    address: str
    up_mbit: float | None
    down_mbit: float | None


def links_of(cluster: ClusterConfig) -> tuple[Link, ...]:
    """The links of a cluster, in the order of its nodes.

    Raises:
        ConfigError: it has more nodes than addresses, a rate that can't be shaped, or a name that no
            host can have.
    """
    if len(cluster.nodes) > MAX_NODES:
        raise ConfigError(
            f"cluster.nodes must be at most {MAX_NODES} to be emulated, one address each, got "
            f"{len(cluster.nodes)}. Use fewer nodes with more workers."
        )
    found = []
    for index, node in enumerate(cluster.nodes):
        if len(node.name) > _MAX_NAME:
            raise ConfigError(
                f"name of an emulated node must have at most {_MAX_NAME} characters, as a host name, got "
                f"{node.name!r}. Shorten it."
            )
        up = cluster.link_mbit if node.up_mbit is None else node.up_mbit
        down = cluster.link_mbit if node.down_mbit is None else node.down_mbit
        for direction, rate in (("up_mbit", up), ("down_mbit", down)):
            check_rate(f"{direction} of node {node.name}", rate)
        found.append(Link(node.name, f"10.77.0.{index + 1}", up, down))
    return tuple(found)


def check_rate(name: str, rate_mbit: float | None) -> None:
    """Refuse a rate that tc can't shape.

    Raises:
        ConfigError: it is out of range.
    """
    if rate_mbit is not None and not MIN_MBIT <= rate_mbit <= MAX_MBIT:
        raise ConfigError(
            f"{name} must be {MIN_MBIT:g} to {MAX_MBIT:g} Mbit/s, which tc can shape, got {rate_mbit:g}. "
            "Correct it, or leave it out for a link as fast as it goes."
        )


def burst_bytes(rate_mbit: float) -> int:
    """Token bucket for a rate: interpolated between measured ones, in proportion above them.

    Args:
        rate_mbit: Rate, Mbit/s.
    """
    (low_rate, low), *rest = _BURSTS_KIB
    if rate_mbit <= low_rate:
        return round(1024 * low)
    for high_rate, high in rest:
        if rate_mbit <= high_rate:
            share = (rate_mbit - low_rate) / (high_rate - low_rate)
            return round(1024 * (low + share * (high - low)))
        low_rate, low = high_rate, high
    return round(1024 * low * rate_mbit / low_rate)


def shape_command(device: str, rate_mbit: float) -> str:
    """The line for `tc -batch` that gives what a device sends a rate."""
    return (
        f"qdisc replace dev {device} root tbf rate {math.ceil(rate_mbit * 1e6)}bit "
        f"burst {burst_bytes(rate_mbit)} latency {_LATENCY_MS}ms"
    )


def port_of(links: Sequence[Link], node: str) -> str:
    """The switch's port of a node.

    Raises:
        ConfigError: there is no such node.
    """
    return f"p{[link.node for link in links].index(link_of(links, node).node)}"


def tap_of(port: str) -> str:
    """The device that joins a port with the process that delays frames."""
    return f"d{port.removeprefix('p')}"


def link_of(links: Sequence[Link], node: str) -> Link:
    """A node's link.

    Raises:
        ConfigError: there is no such node.
    """
    for link in links:
        if link.node == node:
            return link
    raise ConfigError(
        f"node must be one of {', '.join(link.node for link in links)}, got {node!r}. Correct it."
    )


def describe(links: Sequence[Link]) -> str:
    """The links in one line: all at once where they are alike."""
    rates = {(link.up_mbit, link.down_mbit) for link in links}
    if len(rates) == 1:
        first, last = links[0].address, links[-1].address.rpartition(".")[2]
        return f"{first}-{last}, every link {_rates_text(*rates.pop())}"
    return ", ".join(
        f"{link.node} {link.address} {_rates_text(link.up_mbit, link.down_mbit)}" for link in links
    )


def _rates_text(up_mbit: float | None, down_mbit: float | None) -> str:
    if up_mbit == down_mbit:
        return rate_text(up_mbit)
    return f"up {rate_text(up_mbit)}, down {rate_text(down_mbit)}"


def rtt_text(rtt_ms: float | None) -> str:
    """A round trip as one reads it."""
    return "not delayed" if rtt_ms is None else f"{rtt_ms:g} ms"


def rate_text(rate_mbit: float | None) -> str:
    """A rate as one reads it."""
    return "unshaped" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"
