"""Activations in device and host memory: record, plan, move beside the computing."""

from labkit.memory.hybrid import HybridMemory, Report
from labkit.memory.planner import Infeasible, Plan, make_plan
from labkit.memory.profile import Block, Decision, Link, Profile
from labkit.memory.search import find_max_batch, fits_in_memory, is_out_of_memory
from labkit.memory.simulate import Outcome, simulate

__all__ = [
    "Block",
    "Decision",
    "HybridMemory",
    "Infeasible",
    "Link",
    "Outcome",
    "Plan",
    "Profile",
    "Report",
    "find_max_batch",
    "fits_in_memory",
    "is_out_of_memory",
    "make_plan",
    "simulate",
]
