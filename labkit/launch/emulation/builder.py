"""Build an emulated network: a switch and nodes as namespaces, joined by veth pairs, shaped by tc.

Both ends of a link are shaped by a token bucket: what a node sends at its own end, what it receives at the
switch's. Rates are exact to a few per cent up to what the machine's cores can push through. The switch is
a bridge; with latency it is a process (`delay`), with a bridge that joins it to each port.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from labkit.config import ClusterConfig
from labkit.errors import ConfigError
from labkit.launch.emulation import kernel
from labkit.launch.emulation.delay import start_switch
from labkit.launch.emulation.emulation import INTERFACE, Delay, Emulation, Spaces
from labkit.launch.emulation.links import (
    PREFIX_BITS,
    SWITCH_ADDRESS,
    Link,
    links_of,
    port_of,
    shape_command,
    tap_of,
)
from labkit.launch.emulation.tools import OR_LOOPBACK, batch, find_program

_CONGESTION = "reno"  # in every kernel, settable in every namespace, and with the least spread
_WIDEST_WINDOW = 2**26
_SWITCH_NAME = "labkit-switch"
_SWITCH_TAP = "switch"  # joins the switch's own address with the process that delays frames


def build(cluster: ClusterConfig) -> Emulation:
    """Build the network of a cluster; a tenth of a second for four nodes.

    Raises:
        ConfigError: a rate, a round trip or a name can't be emulated, a program is missing, or it is not
            allowed.
    """
    links = links_of(cluster)
    check_system()
    emulation = _make_namespaces(links)
    try:
        if cluster.rtt_ms is not None:
            _start_delay(emulation, cluster.rtt_ms)
        _wire(emulation)
    except BaseException:
        emulation.close()
        raise
    return emulation


def check(cluster: ClusterConfig) -> None:
    """Find out whether a cluster can be emulated here, by building one of its nodes and dropping it.

    Raises:
        ConfigError: it can't.
    """
    links = links_of(cluster)
    index = next((i for i, link in enumerate(links) if link.up_mbit or link.down_mbit), 0)
    build(cluster.model_copy(update={"nodes": (cluster.nodes[index],)})).close()


def check_system() -> None:
    """Refuse a system without namespaces or without iproute2.

    Raises:
        ConfigError: naming what is missing.
    """
    if not kernel.is_linux():
        raise ConfigError(f"launch.is_emulated must be false except on Linux. Use Linux, {OR_LOOPBACK}.")
    for program in ("ip", "tc"):
        find_program(program)


def _make_namespaces(links: Sequence[Link]) -> Emulation:
    hosts = _hosts_text(links)
    user, switch, congestion = _make_switch(hosts)
    emulation = Emulation(links, user, switch, {}, congestion)
    try:
        for link in links:
            emulation.nodes[link.node], _ = _make_host(user, link.node, hosts)
    except ConfigError:
        emulation.close()
        raise
    return emulation


def _make_switch(hosts: str) -> tuple[int | None, Spaces, str]:
    """The first host shows by which right the others can be made: as root, or in a user namespace."""
    try:
        return None, *_make_host(None, _SWITCH_NAME, hosts)
    except _NotAllowed:
        user = _make_user_namespace()
    try:
        return user, *_make_host(user, _SWITCH_NAME, hosts)
    except ConfigError:
        os.close(user)
        raise


def _make_user_namespace() -> int:
    try:
        return kernel.new_user_namespace()
    except OSError as error:
        raise _refused(error) from None


def _make_host(user: int | None, name: str, hosts: str) -> tuple[Spaces, str]:
    """A node or the switch, without cables. Returns its TCP congestion control too."""
    kinds = [kernel.NEW_NETWORK, kernel.NEW_MOUNTS, kernel.NEW_HOST_NAME]
    try:
        fds, congestion = kernel.new_namespaces(user, kinds, lambda: _furnish(name, hosts))
    except OSError as error:
        raise _refused(error) from None
    return Spaces(*fds), congestion


class _NotAllowed(ConfigError):
    """The right to make namespaces is missing."""


def _refused(error: OSError) -> ConfigError:
    if error.errno == errno.EMFILE:
        return ConfigError(
            f"cluster.nodes must need fewer open files than allowed, got {error.strerror}. Raise `ulimit -n`."
        )
    kind = _NotAllowed if error.errno == errno.EPERM else ConfigError
    return kind(
        f"launch.is_emulated must be allowed to make network namespaces, got: {error.strerror or error}. Run "
        "as root, allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        f"kernel.apparmor_restrict_unprivileged_userns; a container needs --privileged), {OR_LOOPBACK}."
    )


def _tune_tcp() -> str:
    """Pin what decides how TCP fills a link. Called inside a new network namespace.

    Returns:
        The congestion control now in force.
    """
    network = Path("/proc/sys/net")
    control = network / "ipv4" / "tcp_congestion_control"
    for file, value in ((control, _CONGESTION), (network / "ipv6/conf/default/disable_ipv6", "1")):
        try:
            file.write_text(value)
        except OSError:
            pass  # a container may forbid it, a kernel may lack it; what is in force is printed
    return control.read_text().strip()


def _widen_tcp() -> None:
    """Let one connection have as much on the way as a long and fast link holds. Called inside a node."""
    for name in ("tcp_rmem", "tcp_wmem"):
        file = Path("/proc/sys/net/ipv4") / name
        with contextlib.suppress(OSError):  # then a connection fills the link only up to the kernel's window
            least, usual, _ = file.read_text().split()
            file.write_text(f"{least} {usual} {_WIDEST_WINDOW}")


def _furnish(name: str, hosts: str) -> str:
    """Called inside a host's new namespaces: its name, its hosts file, and a /dev/shm of its own.

    Returns:
        Its TCP congestion control.
    """
    socket.sethostname(name)
    kernel.keep_mounts_to_ourselves()
    kernel.mount_memory("/dev/shm")  # as on machines of their own: nothing is shared between nodes
    file = Path("/dev/shm/hosts")
    file.write_text(hosts)
    kernel.bind_file(str(file), "/etc/hosts")
    file.unlink()
    return _tune_tcp()


def _hosts_text(links: Sequence[Link]) -> str:
    hosts = [(SWITCH_ADDRESS, _SWITCH_NAME), *((link.address, link.node) for link in links)]
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in hosts)]
    # torch looks an address up as the IPv6 one that stands for it, and warns each time it finds no name.
    return "\n".join([*lines, *(f"::ffff:{address} {name}.ipv4" for address, name in hosts)]) + "\n"


def _start_delay(emulation: Emulation, rtt_ms: float) -> None:
    taps = [tap_of(port_of(emulation.links, link.node)) for link in emulation.links]
    pid, lifeline = start_switch([*taps, _SWITCH_TAP], rtt_ms, emulation.way_to(None))
    emulation.delay = Delay(rtt_ms, lifeline, pid)


def _wire(emulation: Emulation) -> None:
    """Cables, addresses and rates."""
    sockets = [node.network for node in emulation.nodes.values()]
    is_delayed = emulation.delay is not None
    emulation.call(None, lambda: _wire_switch(emulation.links, sockets, is_delayed=is_delayed))
    for link in emulation.links:
        commands = [
            "link set lo up",
            f"addr add {link.address}/{PREFIX_BITS} dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ]
        shape = [] if link.up_mbit is None else [shape_command(INTERFACE, link.up_mbit)]

        def wire_node(ip: list[str] = commands, tc: list[str] = shape) -> None:
            batch("ip", ip)
            batch("tc", tc)
            if is_delayed:
                _widen_tcp()

        emulation.call(link.node, wire_node)


def _wire_switch(links: Sequence[Link], node_networks: Sequence[int], *, is_delayed: bool) -> None:
    commands = [
        "link set lo up",
        *_bridge("br0"),
        f"addr add {SWITCH_ADDRESS}/{PREFIX_BITS} dev br0",
        *([f"link set {_SWITCH_TAP} master br0 up"] if is_delayed else []),
    ]
    for index, fd in enumerate(node_networks):
        # The other end lands in the node's namespace, which `ip` knows by a descriptor that it inherits.
        commands.append(f"link add p{index} type veth peer name {INTERFACE} netns /proc/self/fd/{fd}")
        if is_delayed:
            # It must not answer for the switch's address in the place of br0, past the delay: no ARP.
            commands += [
                *_bridge(f"b{index}"),
                f"link set b{index} arp off",
                f"link set d{index} master b{index} up",
            ]
        commands.append(f"link set p{index} master {f'b{index}' if is_delayed else 'br0'} up")
    batch("ip", commands, pass_fds=node_networks)
    shaped = [(index, link.down_mbit) for index, link in enumerate(links) if link.down_mbit is not None]
    batch("tc", [shape_command(f"p{index}", rate) for index, rate in shaped])


def _bridge(name: str) -> list[str]:
    return [
        f"link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"link set {name} up",
    ]
