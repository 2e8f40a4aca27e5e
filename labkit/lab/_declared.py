"""Read the declarations of a parameters cell with `ast`; no code of the notebook runs."""

import ast
import copy
import io
import keyword
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import ConfigError
from labkit.lab._annotation import type_of_annotation, type_of_value
from labkit.lab._values import as_python

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
_NOT_FINITE = ("nan", "inf", "-inf")


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


def parse_cell(source: str, where: str) -> list[Parameter]:
    """The assignments of a parameters cell, in their order.

    Args:
        source: The cell: lines `name: annotation = literal  # help`, or `name = literal`. A docstring
            and imports from `typing`, which annotations need, may stand beside them.
        where: The notebook, for errors.

    Raises:
        ConfigError: anything else stands there, a name comes twice, or a name is taken.
    """
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
    target, annotation, value = _parts(statement)
    if not isinstance(target, ast.Name) or value is None:
        raise ConfigError(
            f"parameters cell of {where} must hold only lines like `lr: float = 1e-3`, got "
            f"`{_one_line(statement)}` in line {statement.lineno}. Move it to the next cell."
        )
    name = target.id
    if name in _RESERVED or name.startswith("_"):
        raise ConfigError(
            f"parameter {name} must have another name; this one has a meaning in Jupyter, Python or labkit."
        )
    default = _literal_value(value, name)
    return Parameter(
        name=name,
        default=default,
        annotation=_annotation_text(annotation),
        type=type_of_annotation(annotation, name) if annotation else type_of_value(default),
        help=comments.get(statement.end_lineno or 0) or comments.get(statement.lineno, ""),
    )


def _parts(statement: ast.stmt) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None]:
    """Target, annotation and value of an assignment to one target."""
    if isinstance(statement, ast.AnnAssign):
        return statement.target, statement.annotation, statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], None, statement.value
    return None, None, None


def _annotation_text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node) if node else ""


def _literal_value(node: ast.expr, name: str) -> Any:
    try:
        return as_python(ast.literal_eval(_NotFinite().visit(copy.deepcopy(node))), name)
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"parameter {name} must be set to a literal, got `{_one_line(node)}`. Compute it in the next "
            "cell; here it would keep its default when other parameters are given."
        ) from None


class _NotFinite(ast.NodeTransformer):
    """Takes `float("nan")` and `float("inf")` for literals: Python has no others for these."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        argument = node.args[0] if len(node.args) == 1 and not node.keywords else None
        is_float = isinstance(node.func, ast.Name) and node.func.id == "float"
        if is_float and isinstance(argument, ast.Constant) and argument.value in _NOT_FINITE:
            return ast.copy_location(ast.Constant(float(argument.value)), node)
        return node


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
    remedy = f"Correct it ({error.msg})."
    if word and keyword.iskeyword(word[1]):
        remedy = f"{word[1]!r} is a reserved word; rename it to {word[1] + '_'!r}."
    elif word and "-" in word[1]:
        remedy = f"A name has no hyphen; rename it to {word[1].replace('-', '_')!r}."
    return ConfigError(
        f"parameters cell of {where} must be Python, got `{line}` in line {error.lineno}. {remedy}"
    )
