"""Small notebooks for tests, and a strict reader of what came out of them."""

import json
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook


def make_notebook(
    path: Path, *cells: str, parameters: str | None = "x: int = 1", kernel: str = "python3"
) -> Path:
    """Write a notebook of code cells, the first tagged `parameters` unless that is None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook_of(*cells, parameters=parameters, kernel=kernel), path)
    return path


def notebook_of(*cells: str, parameters: str | None = "x: int = 1", kernel: str = "python3") -> NotebookNode:
    """The same in memory."""
    first = [] if parameters is None else [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
    return new_notebook(cells=[*first, *map(new_code_cell, cells)], metadata={"kernelspec": kernelspec})


def read_strictly(path: Path) -> NotebookNode:
    """Read an executed notebook as JupyterLab does: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{path} holds {constant}, which is not JSON")

    return nbformat.from_dict(json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse))


def printed(notebook: NotebookNode) -> str:
    """Everything the cells printed to stdout."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join("".join(o.text) for o in outputs if o.output_type == "stream" and o.name == "stdout")
