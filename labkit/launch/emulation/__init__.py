"""Emulated clusters: nodes as network namespaces of this machine, joined by links of given rates."""

from labkit.launch.emulation.builder import build, check
from labkit.launch.emulation.control import (
    LinkState,
    cut_link,
    heal_link,
    link_state,
    link_states,
    set_link,
)
from labkit.launch.emulation.emulation import Emulation
from labkit.launch.emulation.network import Loopback, Network
from labkit.launch.emulation.record import open_record
from labkit.launch.emulation.run import network_of, open_run
from labkit.launch.emulation.traffic import Calibration, LinkBytes, calibrate, link_bytes, own_bytes

__all__ = [
    "Calibration",
    "Emulation",
    "LinkBytes",
    "LinkState",
    "Loopback",
    "Network",
    "build",
    "calibrate",
    "check",
    "cut_link",
    "heal_link",
    "link_bytes",
    "link_state",
    "link_states",
    "network_of",
    "open_record",
    "open_run",
    "own_bytes",
    "set_link",
]
