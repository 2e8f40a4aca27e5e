"""Activations in device and host memory: record, plan, move beside the computing.

What plans and simulates needs no torch; the rest is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from labkit.memory.planner import Infeasible, Plan, make_plan
from labkit.memory.profile import Block, Decision, Link, Profile
from labkit.memory.simulate import Limits, Outcome, Transfer, simulate, simulate_shared
from labkit.memory.uplink import Uplink

if TYPE_CHECKING:
    from labkit.memory.hybrid import HybridMemory, Report
    from labkit.memory.search import find_max_batch, fits_in_memory, is_out_of_memory

_WITH_TORCH = {
    "HybridMemory": "hybrid",
    "Report": "hybrid",
    "find_max_batch": "search",
    "fits_in_memory": "search",
    "is_out_of_memory": "search",
}

__all__ = [
    "Block",
    "Decision",
    "HybridMemory",
    "Infeasible",
    "Limits",
    "Link",
    "Outcome",
    "Plan",
    "Profile",
    "Report",
    "Transfer",
    "Uplink",
    "find_max_batch",
    "fits_in_memory",
    "is_out_of_memory",
    "make_plan",
    "simulate",
    "simulate_shared",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'labkit.memory' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.memory.{_WITH_TORCH[name]}"), name)
