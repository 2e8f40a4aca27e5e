"""labkit: an experiment lab for distributed training on machines, devices and links that are not alike.

Importing it imports neither torch nor MLflow; each name below loads its part when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.config import ExperimentConfig, from_mapping, from_overrides, from_parameters, load
    from labkit.errors import ConfigError, LabkitError, RunFailed
    from labkit.launch import Run, attach, resume, start, warm_up
    from labkit.runfolder import RunFolder, RunState, RunStatus, all_runs, find_run

_HOME = {
    "labkit.config": ("ExperimentConfig", "from_mapping", "from_overrides", "from_parameters", "load"),
    "labkit.errors": ("ConfigError", "LabkitError", "RunFailed"),
    "labkit.launch": ("Run", "attach", "resume", "start", "warm_up"),
    "labkit.runfolder": ("RunFolder", "RunState", "RunStatus", "all_runs", "find_run"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
