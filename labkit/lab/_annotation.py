"""The annotations a parameters cell may use, read without running code, as types pydantic can check."""

import ast
import typing
from typing import Annotated, Any

from pydantic import BeforeValidator, Strict

from labkit.errors import ConfigError


def _whole(value: Any) -> Any:
    """`1e3` is written as a float and means a whole number."""
    return int(value) if type(value) is float and value.is_integer() else value


_INT = Annotated[int, BeforeValidator(_whole), Strict()]
_FLOAT = Annotated[float, Strict()]
_STR = Annotated[str, Strict()]
_BOOL = Annotated[bool, Strict()]
_NAMES: dict[str, Any] = {
    "int": _INT,
    "float": _FLOAT,
    "str": _STR,
    "bool": _BOOL,
    "None": None,
    "Any": Any,
    "list": list,
    "List": list,
    "dict": dict,
    "Dict": dict,
    "tuple": tuple,
    "Tuple": tuple,
}


class _Unknown(Exception):
    """The annotation is outside the grammar."""


def type_of_annotation(node: ast.expr, name: str) -> Any:
    """The type that an annotation of the parameters cell stands for.

    Args:
        node: int, float, str, bool, None, Any, list, dict, tuple, Literal, Optional, Union, `|`, and
            these nested; or the same as text.
        name: The parameter, for the error.

    Raises:
        ConfigError: any other annotation.
    """
    try:
        return _type(node)
    except (_Unknown, SyntaxError, ValueError):
        raise ConfigError(
            f"parameter {name} must be annotated with int, float, str, bool, list, dict, tuple, Literal, "
            f"None or a union of these, got `{ast.unparse(node)}`. Convert to it in the next cell."
        ) from None


def type_of_value(value: Any) -> Any:
    """The type that an unannotated default stands for; anything when it is None."""
    if value is None:
        return Any
    return _NAMES[type(value).__name__]


def is_text(kind: Any) -> bool:
    """The type is `str` alone."""
    return kind is _STR


def _type(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        if node.value is None:
            return None
        if isinstance(node.value, str):
            return _type(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(node.left, node.right)
    if isinstance(node, ast.Subscript):
        return _subscripted(_name(node.value), node.slice)
    name = _name(node)
    if name not in _NAMES:
        raise _Unknown
    return _NAMES[name]


def _name(node: ast.expr) -> str:
    """`Literal` of `Literal` and `typing.Literal`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "typing":
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    raise _Unknown


def _subscripted(name: str, inside: ast.expr) -> Any:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal":
        return typing.Literal[tuple(ast.literal_eval(part) for part in parts)]
    if name == "Optional" and len(parts) == 1:
        return _union(parts[0], ast.Constant(None))
    if name == "Union":
        return _union(*parts)
    if name in ("list", "List") and len(parts) == 1:
        return list[_type(parts[0])]  # type: ignore[misc]
    if name in ("dict", "Dict") and len(parts) == 2:
        return dict[_type(parts[0]), _type(parts[1])]  # type: ignore[misc]
    if name in ("tuple", "Tuple"):
        return tuple[tuple(_item(part) for part in parts)]  # type: ignore[misc]
    raise _Unknown


def _union(*parts: ast.expr) -> Any:
    return typing.Union[tuple(_type(part) for part in parts)]  # noqa: UP007 - its members are known only now


def _item(node: ast.expr) -> Any:
    return ... if isinstance(node, ast.Constant) and node.value is ... else _type(node)
