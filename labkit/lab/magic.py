"""`%%labfile my_model.py`: a notebook cell that is also a module, so that workers can import it.

%load_ext labkit.lab.magic

%%labfile my_model.py
import torch

def build(width=64): ...

config = labkit.from_overrides({"model.name": "my_model:build"})
"""

import hashlib
import importlib
import importlib.util
import keyword
import linecache
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from labkit.errors import ConfigError
from labkit.runfolder import runs_root, write_atomically

_FILE_NAME = re.compile(r"([^\W\d]\w*)\.py")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the cell magic; `%load_ext labkit.lab.magic` calls this."""

    def labfile(line: str, cell: str) -> None:
        """Write the cell to a module that workers can import, and run it here: %%labfile my_model.py"""
        try:
            run_as_module(shell, line.strip(), cell)
        except ConfigError as error:
            raise UsageError(str(error)) from None  # shown as one line, not as a traceback

    shell.register_magic_function(labfile, "cell", "labfile")  # type: ignore[arg-type] # a decorator hides its signature


def run_as_module(shell: InteractiveShell, file_name: str, cell: str) -> Path:
    """Write a cell to a module of this notebook, import it afresh and take its names over.

    The cell runs as the module, not as a part of the notebook: it sees what it imports itself, in the
    kernel as in the workers, and its classes have the module's name, so that they can be pickled. Names
    that an earlier version had put into the notebook and this one lacks are taken back.

    Args:
        shell: The notebook's shell.
        file_name: A plain module name and `.py`.
        cell: Its source.

    Returns:
        The module's file. It lies under `runs/modules/`, on the kernel's path.

    Raises:
        ConfigError: the name is none, or belongs to another module.
        SyntaxError: the cell is not Python; the file is left as it was.
    """
    name = _module_name(file_name)
    folder = modules_dir(shell)
    file = folder / file_name
    _refuse_if_taken(name, file)
    compile(cell, str(file), "exec")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, cell)
    except OSError as error:
        raise ConfigError(
            f"module's folder must be writable, got {folder}: {error.strerror}. Set LABKIT_RUNS to another."
        ) from None
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    old = _public_names(sys.modules.get(name))
    new = _public_names(_import_afresh(name, file))
    namespace = shell.user_ns
    for gone in old.keys() - new.keys():
        if namespace.get(gone) is old[gone]:
            del namespace[gone]
    namespace.update(new)
    return file


def modules_dir(shell: InteractiveShell) -> Path:
    """The folder of this notebook's modules: of its own execution in a batch, of its path otherwise."""
    identity = (
        os.environ.get("LABKIT_NOTEBOOK_DIR")
        or shell.user_ns.get("__vsc_ipynb_file__")
        or os.environ.get("JPY_SESSION_NAME")
        or _connection_file(shell)
    )
    return runs_root() / "modules" / hashlib.sha256(str(identity).encode()).hexdigest()[:8]


def _connection_file(shell: InteractiveShell) -> str:
    """Names this kernel alone; the process does outside a kernel."""
    parent = getattr(getattr(shell, "kernel", None), "parent", None)
    return str(getattr(parent, "connection_file", "") or f"process {os.getpid()}")


def _module_name(file_name: str) -> str:
    match = _FILE_NAME.fullmatch(file_name)
    if match is None or keyword.iskeyword(match[1]):
        raise ConfigError(
            f"%%labfile must be followed by a module's file name, got {file_name!r}. "
            "For example %%labfile my_model.py"
        )
    return match[1]


def _refuse_if_taken(name: str, file: Path) -> None:
    """A module of that name from anywhere else would win, or lose, by the order of the path."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if name not in sys.modules and spec is None:
        return
    origin = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec else None)
    if origin is None or Path(origin).resolve() != file.resolve():
        raise ConfigError(
            f"%%labfile must name a new module, got {name!r}, which is {origin or 'part of Python'}. "
            f"Choose another name, for example my_{name}.py"
        )


def _import_afresh(name: str, file: Path) -> ModuleType:
    """Import or reload, never from a cache: bytecode is told from newer source only by size and second."""
    importlib.invalidate_caches()
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    linecache.cache.pop(str(file), None)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        module = sys.modules.get(name)
        if module is None:
            return importlib.import_module(name)
        for old in _public_names(module):
            delattr(module, old)
        return importlib.reload(module)
    finally:
        sys.dont_write_bytecode = before


def _public_names(module: ModuleType | None) -> dict[str, Any]:
    names = vars(module) if module is not None else {}
    return {name: value for name, value in names.items() if not name.startswith("__")}
