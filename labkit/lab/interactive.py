"""Tell a notebook that a person sits in front of from one that a program executes."""

import os
import sys
from typing import Any

from labkit.errors import ConfigError

_YES, _NO = ("1", "true", "yes"), ("0", "false", "no", "")


def is_interactive() -> bool:
    """A person sits in front of this notebook: JupyterLab, VS Code.

    False in a script or a terminal's IPython, under `LABKIT_BATCH=1`, and where papermill, nbconvert or
    anything else built on nbclient executes the notebook, however that was started: these tell the
    kernel with every cell that nobody can answer `input()`. `LABKIT_INTERACTIVE=1` or `=0` decides
    against all this.

    Raises:
        ConfigError: LABKIT_INTERACTIVE is neither 0 nor 1.
    """
    forced = _switch("LABKIT_INTERACTIVE")
    if forced is not None:
        return forced
    if _switch("LABKIT_BATCH"):
        return False
    # ipykernel keeps what the newest execute request said, which callbacks of widgets then see too.
    return bool(getattr(_kernel(), "_allow_stdin", False))


def _switch(name: str) -> bool | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if text.lower() not in _YES + _NO:
        raise ConfigError(f"{name} must be 0 or 1, got {text!r}. Correct or unset it.")
    return text.lower() in _YES


def _kernel() -> Any:
    """The kernel this process is, or None. IPython is not imported for it: in a kernel it already is."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)
