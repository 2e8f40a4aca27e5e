"""Notebook files: read and checked before anything runs, written as strict JSON."""

import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labkit.errors import ConfigError
from labkit.lab._outcome import first_line
from labkit.lab._values import json_safe

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def read_notebook(path: str | Path) -> NotebookNode:
    """Read a notebook.

    Raises:
        ConfigError: there is no such file, it is not a notebook, or not one in Python.
    """
    path = Path(path)
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        cells = notebook.cells
    except FileNotFoundError:
        raise ConfigError(f"notebook must be an existing file, got {path}. Check the path.") from None
    except OSError as error:
        raise ConfigError(f"notebook must be readable, got {path}: {error.strerror}. Check it.") from None
    except Exception as error:  # nbformat raises whatever it stumbles on
        raise ConfigError(
            f"notebook must be a Jupyter notebook, got {path}: {first_line(error)}. "
            "Open and save it in JupyterLab."
        ) from None
    language = notebook.metadata.get("kernelspec", {}).get("language") or "python"
    if language != "python" or not cells:
        what = f"a notebook in {language}" if cells else "one without cells"
        raise ConfigError(f"notebook must be in Python and have cells, got {what}: {path}.")
    return notebook


def as_text(notebook: NotebookNode) -> str:
    """A notebook as strict JSON (no bare NaN, which JupyterLab refuses to open), without widget state."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if len(output.get("data", ())) > 1:  # its view needs the state; the text beside it does not
                output["data"].pop(_WIDGET_VIEW, None)
    try:
        return str(nbformat.writes(notebook, allow_nan=False))
    except ValueError:
        return str(nbformat.writes(nbformat.from_dict(json_safe(notebook)), allow_nan=False))


def use_python3(notebook: NotebookNode, echo: Callable[[str], None]) -> None:
    """A kernel's name means something on the machine it was saved on; here there is one kernel."""
    saved = notebook.metadata.get("kernelspec", {}).get("name", "python3")
    if saved != "python3":
        echo(f"notebook was saved with the kernel {saved!r}; it runs with python3 of {sys.prefix}")
    notebook.metadata["kernelspec"] = NotebookNode(name="python3", display_name="Python 3", language="python")


def checked_output(path: Path, output: str | Path | None) -> Path | None:
    """Make the folder that one more copy goes to, before anything runs.

    Raises:
        ConfigError: the copy would replace the notebook or a folder, or its folder can't be made.
    """
    if output is None:
        return None
    output = Path(output).absolute()
    if output.is_dir() or output.resolve() == path.resolve():
        what = "a folder" if output.is_dir() else "the notebook itself"
        raise ConfigError(f"output must be the path of a new notebook, got {what}: {output}. Name another.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output's folder must be writable, got {output.parent}: {error.strerror}. Name another."
        ) from None
    return output
