"""The typed parameter layer in front of papermill.

A notebook declares its parameters in the one code cell tagged `parameters`: literals, one assignment
a line, `lr: float = 1e-3  # learning rate`. Values from the command line, files and Python are coerced
to the declared types and injected as Python source, so that the notebook sees equal values of the same
type. papermill's own translation is not used: it turns tuples into text, writes NaN into the JSON,
reads `1e-4` in YAML as text, and runs on with the defaults after a typing error in a name.
"""

import ast
import copy
import io
import json
import keyword
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from labkit.config import parse_yaml
from labkit.errors import ConfigError, did_you_mean
from labkit.lab._annotation import is_text, type_of_annotation, type_of_value
from labkit.lab._values import as_python, json_safe, literal

_DECLARED, _INJECTED = "parameters", "injected-parameters"
_RESERVED = {
    "In",
    "Out",
    "get_ipython",
    "exit",
    "quit",
    "int",
    "float",
    "str",
    "bool",
    "list",
    "dict",
    "tuple",
}
_NOT_FINITE = {"nan", "inf", "-inf", "+inf", "infinity", "-infinity"}


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a notebook.

    Attributes:
        name: Its name.
        default: The literal it is set to in the parameters cell.
        annotation: The annotation's source, "" without one.
        type: What the annotation, or the default, stands for; fit for `pydantic.TypeAdapter`.
        help: The comment behind the assignment.
    """

    name: str
    default: Any
    annotation: str
    type: Any
    help: str

    @property
    def kind(self) -> str:
        """The declared type in words for a person."""
        return self.annotation or type(self.default).__name__


def read_schema(notebook: NotebookNode, source: str = "notebook") -> dict[str, Parameter]:
    """Read the declared parameters of a notebook, by name in their order.

    Args:
        notebook: The notebook.
        source: What to call it in an error.

    Raises:
        ConfigError: there is not exactly one code cell tagged `parameters`, or it holds something
            other than assignments of literals to plain names.
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
    return {parameter.name: parameter for parameter in _parse(cells[0].source, source)}


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
        values: Python values by name.
        texts: `name=value` as typed on a command line. The value is YAML 1.2, or a Python literal where
            YAML's reading does not fit; a parameter declared str keeps its text.
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
            given[name] = _coerce(_declared(schema, name), value, verbatim.get(name))
    for name, value in (values or {}).items():
        given[name] = _coerce(_declared(schema, name), value)
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"parameter must be name=value, got {text!r}. For example -p seed=1.")
        given[name] = coerce_text(_declared(schema, name), value)
    return given


def coerce_text(parameter: Parameter, text: str) -> Any:
    """Read a value typed on a command line as the parameter's type.

    Raises:
        ConfigError: it does not fit.
    """
    if is_text(parameter.type):
        return text
    if text == "None" and _fits(parameter, None):
        return None
    try:
        value, verbatim = parse_yaml(text), yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - texts only
    except (ConfigError, yaml.YAMLError):
        value = verbatim = text
    try:
        return _fit(parameter, value, verbatim)
    except ValidationError as error:
        for read in _python_literal(text):
            if _fits(parameter, read):
                return _fit(parameter, read)
        if _fits(parameter, text):
            return text
        raise _complaint(parameter, value, error) from None


def already_injected(notebook: NotebookNode, schema: Mapping[str, Parameter]) -> dict[str, Any]:
    """Values an executed notebook was given, so that running it again means the same run.

    Raises:
        ConfigError: its injected cell is not literals, or does not fit the parameters cell.
    """
    found: dict[str, Any] = {}
    for cell in _tagged(notebook, _INJECTED):
        for parameter in _parse(cell.source, "injected cell"):
            found[parameter.name] = _coerce(_declared(schema, parameter.name), parameter.default)
    return found


def inject(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """Copy a notebook and put the given values behind its parameters cell.

    The cell is tagged `injected-parameters` and holds Python literals equal to the values; an older one
    is replaced. `metadata.papermill.parameters` gets a rendition in strict JSON.

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
        place = next(i for i, c in enumerate(copied.cells) if c is _tagged(copied, _DECLARED)[0])
        copied.cells.insert(place + 1, cell)
    papermill = copied.metadata.setdefault("papermill", NotebookNode())
    papermill["parameters"] = json_safe(values)
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


def _parse(source: str, where: str) -> list[Parameter]:
    """The assignments of a parameters cell."""
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise _syntax_complaint(source, where, error) from None
    comments = _comments(source)
    found: dict[str, Parameter] = {}
    for statement in statements:
        if _is_harmless(statement):
            continue
        parameter = _parameter(statement, where, comments)
        if parameter.name in found:
            raise ConfigError(
                f"parameter {parameter.name} must be set once, got it twice in {where}. Keep one."
            )
        found[parameter.name] = parameter
    return list(found.values())


def _is_harmless(statement: ast.stmt) -> bool:
    """A docstring, `pass`, or an import that an annotation needs."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module in ("typing", "__future__")
    if isinstance(statement, ast.Import):
        return all(alias.name == "typing" and alias.asname is None for alias in statement.names)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return isinstance(statement, ast.Pass)


def _parameter(statement: ast.stmt, where: str, comments: Mapping[int, str]) -> Parameter:
    """One assignment `name = literal` or `name: annotation = literal`."""
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [statement.target]
        if isinstance(statement, ast.AnnAssign) and statement.value
        else []
    )
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        raise ConfigError(
            f"parameters cell of {where} must hold only lines like `lr: float = 1e-3`, got "
            f"`{_one_line(statement)}` in line {statement.lineno}. Move it to the next cell."
        )
    assert isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
    name = targets[0].id
    if name in _RESERVED or name.startswith("_"):
        raise ConfigError(
            f"parameter {name} must have another name: Jupyter, Python or labkit give it a meaning. Rename it."
        )
    default = _literal_value(statement.value, name)
    annotated = statement.annotation if isinstance(statement, ast.AnnAssign) else None
    parameter = Parameter(
        name=name,
        default=default,
        annotation=_annotation_text(annotated),
        type=type_of_annotation(annotated, name) if annotated else type_of_value(default),
        help=comments.get(statement.end_lineno or 0) or comments.get(statement.lineno, ""),
    )
    _coerce(parameter, default)
    return parameter


def _annotation_text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node) if node else ""


def _literal_value(node: ast.expr, name: str) -> Any:
    """The value of a literal; also of `float("nan")`, which has no literal."""
    text = ast.unparse(node)
    called = re.fullmatch(r"-?float\(['\"]([+-]?\w+)['\"]\)", text)
    try:
        value = float(called[1]) if called else ast.literal_eval(node)
        if called and text.startswith("-"):
            value = -value
        return as_python(value, name)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise ConfigError(
            f"parameter {name} must be set to a literal, got `{_one_line(node)}`. Compute it in the next cell: "
            "a derived value here keeps the defaults when other parameters are given."
        ) from None


def _one_line(node: ast.AST) -> str:
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= 60 else text[:57] + "..."


def _comments(source: str) -> dict[int, str]:
    """Comment texts by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT}


def _syntax_complaint(source: str, where: str, error: SyntaxError) -> ConfigError:
    lines = source.splitlines()
    line = lines[error.lineno - 1].strip() if error.lineno and error.lineno <= len(lines) else ""
    word = re.match(r"([^\W\d][\w-]*)\s*[:=]", line)
    if word and (keyword.iskeyword(word[1]) or "-" in word[1]):
        remedy = f"{word[1]!r} can't be a name in Python; rename it to {word[1].replace('-', '_').rstrip('_') + '_' * keyword.iskeyword(word[1])!r}."
    else:
        remedy = f"Correct it ({error.msg})."
    return ConfigError(
        f"parameters cell of {where} must be Python, got `{line}` in line {error.lineno}. {remedy}"
    )


def _read_file(path: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A file's values, and beside them the texts they were written as (nothing for JSON)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"parameter file must be readable text, got {path}: {reason}. Check the path."
        ) from None
    if path.suffix == ".json":
        try:
            read, verbatim = json.loads(text), None
        except ValueError as error:
            raise ConfigError(f"{path} must be JSON, got a fault: {error}. Correct it.") from None
    else:
        read = parse_yaml(text, str(path))
        verbatim = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - texts only
    if not isinstance(read, dict) and read is not None:
        raise ConfigError(
            f"{path} must hold a mapping of parameter names to values, got {type(read).__name__}. "
            "Write lines like `lr: 0.1`."
        )
    return read or {}, verbatim if isinstance(verbatim, dict) else {}


def _coerce(parameter: Parameter, value: Any, verbatim: Any = None) -> Any:
    """The value as the declared type.

    Args:
        parameter: What is declared.
        value: A value of any library.
        verbatim: The same with every scalar as the text it was written as, where it came from a file:
            `run: 007` for a str is "007".
    """
    plain = as_python(value, parameter.name)
    try:
        return _fit(parameter, plain, verbatim)
    except ValidationError as error:
        raise _complaint(parameter, plain, error) from None


def _fits(parameter: Parameter, value: Any) -> bool:
    try:
        _fit(parameter, value)
    except ValidationError:
        return False
    return True


def _fit(parameter: Parameter, value: Any, verbatim: Any = None) -> Any:
    """Validate; scalars that must be text are taken as they were written.

    Raises:
        ValidationError: the value does not fit.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(parameter.type)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        paths = [_path(value, item) for item in error.errors() if item["type"] == "string_type"]
        mended = copy.deepcopy(value)
        for path in paths:
            mended = _replaced(mended, path, _at(verbatim, path))
        return adapter.validate_python(mended)


def _path(value: Any, error: ErrorDetails) -> list[Any]:
    """Where in the value the error is; pydantic's path also names members of unions."""
    path: list[Any] = []
    for step in error["loc"]:
        try:
            value = value[step]
        except (TypeError, KeyError, IndexError):
            continue
        path.append(step)
    return path


def _at(verbatim: Any, path: Iterable[Any]) -> str | None:
    for step in path:
        try:
            verbatim = verbatim[step if isinstance(verbatim, list) else str(step)]
        except (TypeError, KeyError, IndexError):
            return None
    return verbatim if isinstance(verbatim, str) else None


def _replaced(value: Any, path: list[Any], text: str | None) -> Any:
    """Put the text in the place of the scalar at `path`."""
    if text is None:
        return value
    if not path:
        return value if isinstance(value, (list, dict)) else text
    value[path[0]] = _replaced(value[path[0]], path[1:], text)
    return value


def _python_literal(text: str) -> list[Any]:
    """The text read as a Python literal (`(2, 1)`, `1_000`) or a number that is not finite; or nothing."""
    if text.strip().lower() in _NOT_FINITE:
        return [float(text)]
    try:
        return [as_python(ast.literal_eval(text), "value")]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, ConfigError):
        return []


def _complaint(parameter: Parameter, value: Any, error: ValidationError) -> ConfigError:
    path = _path(value, error.errors()[0])
    place = f", see {''.join(f'[{step!r}]' for step in path)}" if path else ""
    remedy = (
        "Correct the value."
        if parameter.annotation
        else (
            f"It has no annotation, so its default {literal(parameter.default)} says the type; annotate it to widen that."
        )
    )
    return ConfigError(f"parameter {parameter.name} must be {parameter.kind}, got {value!r}{place}. {remedy}")
