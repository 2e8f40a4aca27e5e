"""Values of notebook parameters: from any library to plain Python, to source text, to JSON."""

import datetime
import math
import os
from collections.abc import Mapping
from typing import Any

from labkit.errors import ConfigError

_SCALARS = (bool, int, float, str)


def as_python(value: Any, name: str) -> Any:
    """Turn a value into None, bool, int, float, str, list, tuple or dict, losing nothing.

    numpy scalars become numbers and arrays lists; paths and dates become text; a tuple stays a tuple,
    NaN stays NaN, a key that is not text stays so. A float32 becomes the shortest number that names it.

    Args:
        value: What a caller, a YAML file or a notebook gave.
        name: What to call it in an error.

    Raises:
        ConfigError: the value is of another type.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _from_array(value, name)
    for kind in _SCALARS:
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        items = [as_python(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {_key(key, name): as_python(item, f"{name}[{key!r}]") for key, item in value.items()}
    raise ConfigError(
        f"parameter {name} must be a number, text, True, False, None, a list, tuple or dict, got "
        f"{type(value).__name__} {value!r}. Convert it first."
    )


def _key(key: Any, name: str) -> Any:
    plain = as_python(key, f"{name} key")
    if isinstance(plain, (list, dict)):
        raise ConfigError(f"parameter {name} must have plain keys, got {key!r}. Use text or a number.")
    return plain


def _from_array(value: Any, name: str) -> Any:
    """A numpy scalar or array, or another library's that looks like one."""
    if getattr(value, "ndim", 0):
        return [as_python(item, f"{name}[{index}]") for index, item in enumerate(value)]
    kind = getattr(value.dtype, "kind", "")
    if kind == "M":
        return str(value)
    if kind == "f" and value.dtype.itemsize != 8:
        return float(str(value))
    return as_python(value.tolist(), name)


def literal(value: Any) -> str:
    """Python source that evaluates to an equal value of the same type; NaN to NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def json_safe(value: Any) -> Any:
    """The nearest value that strict JSON can hold: null for NaN and infinities, text for keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    return value
