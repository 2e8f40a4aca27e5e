"""labkit: an experiment lab for distributed training on machines, devices and links that are not alike.

Importing it imports neither torch nor MLflow; each name below loads its part when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.cluster.plan import make_plan
    from labkit.config import ExperimentConfig, from_mapping, from_overrides, from_parameters, load
    from labkit.errors import ConfigError, LabkitError, RunFailed
    from labkit.lab import activations, figures, heterogeneity, input, large_batch, scaling, tables
    from labkit.lab.command import as_command
    from labkit.lab.failure import raise_if_failed
    from labkit.lab.interactive import is_interactive
    from labkit.lab.next_steps import next_steps
    from labkit.lab.progress import wait_with_lines
    from labkit.lab.report import record_verdict, write_report
    from labkit.lab.series import read_series
    from labkit.lab.show import show
    from labkit.lab.stretches import time_shares
    from labkit.lab.timeline import timeline, timeline_table
    from labkit.lab.trace import write_trace
    from labkit.lab.widgets.dashboard import Dashboard
    from labkit.lab.widgets.form import Form
    from labkit.lab.widgets.plan_explorer import PlanExplorer
    from labkit.launch import Run, attach, resume, start, warm_up
    from labkit.runfolder import RunFolder, RunState, RunStatus, all_runs, find_run
    from labkit.tasks.shard_sources import write_shards

_HOME = {
    "labkit.cluster.plan": ("make_plan",),
    "labkit.config": ("ExperimentConfig", "from_mapping", "from_overrides", "from_parameters", "load"),
    "labkit.errors": ("ConfigError", "LabkitError", "RunFailed"),
    "labkit.lab.command": ("as_command",),
    "labkit.lab.failure": ("raise_if_failed",),
    "labkit.lab.interactive": ("is_interactive",),
    "labkit.lab.next_steps": ("next_steps",),
    "labkit.lab.progress": ("wait_with_lines",),
    "labkit.lab.report": ("record_verdict", "write_report"),
    "labkit.lab.series": ("read_series",),
    "labkit.lab.show": ("show",),
    "labkit.lab.stretches": ("time_shares",),
    "labkit.lab.timeline": ("timeline", "timeline_table"),
    "labkit.lab.trace": ("write_trace",),
    "labkit.lab.widgets.dashboard": ("Dashboard",),
    "labkit.lab.widgets.form": ("Form",),
    "labkit.lab.widgets.plan_explorer": ("PlanExplorer",),
    "labkit.launch": ("Run", "attach", "resume", "start", "warm_up"),
    "labkit.runfolder": ("RunFolder", "RunState", "RunStatus", "all_runs", "find_run"),
    "labkit.tasks.shard_sources": ("write_shards",),
}
_MODULES = {
    "activations": "labkit.lab.activations",
    "figures": "labkit.lab.figures",
    "heterogeneity": "labkit.lab.heterogeneity",
    "input": "labkit.lab.input",
    "large_batch": "labkit.lab.large_batch",
    "scaling": "labkit.lab.scaling",
    "tables": "labkit.lab.tables",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [*_WHERE, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _WHERE:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext labkit` brings the `%%labfile` cell magic."""
    importlib.import_module("labkit.lab.magic").load_ipython_extension(ipython)
