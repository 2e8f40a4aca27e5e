"""Emulated clusters: nodes as network namespaces of this machine, joined by links of given rates."""

from labkit.launch.emulation.build import build, check
from labkit.launch.emulation.emulation import Emulation

__all__ = ["Emulation", "build", "check"]
