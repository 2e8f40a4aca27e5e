"""The typed parameter layer in front of papermill.

A notebook declares its parameters in the one code cell tagged `parameters`: literals, one assignment
a line, `lr: float = 1e-3  # learning rate`. Values from the command line, files and Python are coerced
to the declared types and injected as Python source, so that the notebook sees equal values of the same
type. papermill's own translation is not used: it turns tuples into text, writes NaN into the JSON,
reads `1e-4` in YAML as text, and runs on with the defaults after a typing error in a name.
"""

import copy
import json
import keyword
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from labkit.config import parse_yaml
from labkit.errors import ConfigError, did_you_mean
from labkit.lab._coercion import coerce, coerce_text, texts_of_yaml
from labkit.lab._declared import Parameter, parse_cell
from labkit.lab._values import json_safe, literal

__all__ = ["Parameter", "already_injected", "collect", "inject", "json_safe", "literal", "read_schema"]

_DECLARED, _INJECTED = "parameters", "injected-parameters"


def read_schema(notebook: NotebookNode, source: str = "notebook") -> dict[str, Parameter]:
    """Read the declared parameters of a notebook, by name in their order.

    Args:
        notebook: The notebook.
        source: What to call it in an error.

    Raises:
        ConfigError: there is not exactly one code cell tagged `parameters`, it holds something other
            than assignments of literals to plain names, or a default does not fit its annotation.
    """
    cells = _tagged(notebook, _DECLARED)
    if not cells:
        raise ConfigError(
            f"{source} must have a parameters cell, got no code cell tagged `parameters`. "
            "Tag the cell that sets the defaults (JupyterLab: gear icon, Cell Tags)."
        )
    if len(cells) > 1:
        raise ConfigError(
            f"{source} must have one parameters cell, got {len(cells)} code cells tagged `parameters`. "
            "Put all parameters into one of them."
        )
    parameters = parse_cell(cells[0].source, source)
    for parameter in parameters:
        coerce(parameter, parameter.default)
    return {parameter.name: parameter for parameter in parameters}


def collect(
    schema: Mapping[str, Parameter],
    values: Mapping[str, Any] | None = None,
    *,
    texts: Sequence[str] = (),
    files: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Coerce given values to the declared types. Texts win over values, values over files.

    Args:
        schema: From `read_schema`.
        values: Python values by name; numpy, tuples, NaN and nested ones too.
        texts: `name=value` as typed on a command line.
        files: YAML or JSON files that hold a mapping of names to values.

    Returns:
        The values that were given, each of its declared type; parameters not given are left out.

    Raises:
        ConfigError: an unknown name, a value that does not fit its type, or a file that can't be read.
    """
    given: dict[str, Any] = {}
    for file in files:
        read, verbatim = _read_file(Path(file))
        for name, value in read.items():
            given[name] = coerce(_declared(schema, name), value, verbatim.get(name))
    for name, value in (values or {}).items():
        given[name] = coerce(_declared(schema, name), value)
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"parameter must be name=value, got {text!r}. For example -p seed=1.")
        given[name] = coerce_text(_declared(schema, name), value)
    return given


def already_injected(notebook: NotebookNode, schema: Mapping[str, Parameter]) -> dict[str, Any]:
    """Values that an executed notebook was given: running its copy again means the same run.

    Raises:
        ConfigError: its injected cell is not literals, or does not fit the parameters cell.
    """
    found: dict[str, Any] = {}
    for cell in _tagged(notebook, _INJECTED):
        for parameter in parse_cell(cell.source, "the injected cell"):
            found[parameter.name] = coerce(_declared(schema, parameter.name), parameter.default)
    return found


def inject(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """Copy a notebook and put the given values behind its parameters cell.

    The new cell is tagged `injected-parameters` and holds Python literals equal to the values; it
    replaces an older one. `metadata.papermill.parameters` gets a rendition in strict JSON.

    Args:
        notebook: A notebook that `read_schema` accepts. It is not changed.
        values: From `collect`.
    """
    copied = copy.deepcopy(notebook)
    old = {id(cell) for cell in _tagged(copied, _INJECTED)}
    copied.cells = [cell for cell in copied.cells if id(cell) not in old]
    if values:
        lines = [f"{name} = {literal(value)}" for name, value in values.items()]
        cell = new_code_cell("\n".join(["# Parameters", *lines]), metadata={"tags": [_INJECTED]})
        declared = id(_tagged(copied, _DECLARED)[0])
        place = [id(other) for other in copied.cells].index(declared)
        copied.cells.insert(place + 1, cell)
    copied.metadata.setdefault("papermill", NotebookNode())["parameters"] = json_safe(values)
    return copied


def _tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    return [c for c in notebook.cells if c.cell_type == "code" and tag in c.metadata.get("tags", [])]


def _declared(schema: Mapping[str, Parameter], name: Any) -> Parameter:
    if name in schema:
        return schema[name]
    reserved = " (a reserved word of Python)" if isinstance(name, str) and keyword.iskeyword(name) else ""
    raise ConfigError(
        f"parameter {name!r}{reserved} must be one that the notebook declares. "
        f"{did_you_mean(str(name).replace('-', '_'), schema)}"
    )


def _read_file(path: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A file's values, and beside them the texts they were written as (none for JSON)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"parameter file must be readable text, got {path}: {reason}. Check the path."
        ) from None
    if path.suffix == ".json":
        read, verbatim = _parse_json(text, path), None
    else:
        read, verbatim = parse_yaml(text, str(path)), texts_of_yaml(text)
    if not isinstance(read, dict) and read is not None:
        raise ConfigError(
            f"{path} must hold a mapping of parameter names to values, got {type(read).__name__}. "
            "Write lines like `lr: 0.1`."
        )
    return read or {}, verbatim if isinstance(verbatim, dict) else {}


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON, got a fault: {error}. Correct it.") from None
