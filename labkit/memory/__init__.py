"""Activations in device and host memory: record, plan, move beside the computing."""

from labkit.memory.hybrid import HybridMemory, Report
from labkit.memory.planner import Infeasible, Plan, make_plan
from labkit.memory.profile import Block, Decision, Link, Profile
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
    "make_plan",
    "simulate",
]
