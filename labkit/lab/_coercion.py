"""Bring a given value to the type that a notebook declares, or say why it does not fit."""

import ast
import copy
from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from labkit.config import parse_yaml
from labkit.errors import ConfigError
from labkit.lab._annotation import is_text
from labkit.lab._declared import Parameter
from labkit.lab._values import as_python, literal

_NOT_FINITE = {"nan", "inf", "-inf", "+inf", "infinity", "-infinity"}


def coerce(parameter: Parameter, value: Any, verbatim: Any = None) -> Any:
    """A Python value, or one read from a file, as the declared type.

    Args:
        parameter: What is declared.
        value: A value of any library.
        verbatim: The same with every scalar as the text it was written as, where it came from a file,
            so that `run: 007` for a str is "007".

    Raises:
        ConfigError: it does not fit.
    """
    plain = as_python(value, parameter.name)
    try:
        return _fit(parameter, plain, verbatim)
    except ValidationError as error:
        raise _complaint(parameter, plain, error) from None


def coerce_text(parameter: Parameter, text: str) -> Any:
    """What was typed on a command line, as the declared type: a str keeps its text, else YAML 1.2, else
    a Python literal.

    Raises:
        ConfigError: it does not fit.
    """
    if is_text(parameter.type):
        return text
    if text == "None" and _fits(parameter, None):
        return None
    try:
        value, verbatim = parse_yaml(text), texts_of_yaml(text)
    except ConfigError:
        value = verbatim = text
    try:
        return _fit(parameter, value, verbatim)
    except ValidationError as error:
        for other in (*_python_literal(text), text):
            if _fits(parameter, other):
                return _fit(parameter, other)
        raise _complaint(parameter, value, error) from None


def texts_of_yaml(text: str) -> Any:
    """A YAML document with every scalar left as the text it was written as.

    Raises:
        ConfigError: the text is not YAML.
    """
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"YAML must be readable, got a fault: {error}. Correct it.") from None


def _fits(parameter: Parameter, value: Any) -> bool:
    try:
        _fit(parameter, value)
    except ValidationError:
        return False
    return True


def _fit(parameter: Parameter, value: Any, verbatim: Any = None) -> Any:
    """Validate; a scalar that must be text is taken as it was written.

    Raises:
        ValidationError: the value does not fit.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(parameter.type)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        mended = copy.deepcopy(value)
        for item in error.errors():
            if item["type"] == "string_type":
                path = _path(value, item)
                mended = _replaced(mended, path, _at(verbatim, path))
        return adapter.validate_python(mended)


def _path(value: Any, error: ErrorDetails) -> list[Any]:
    """Where in the value the error is. pydantic's path also names members of unions: left out."""
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
    if text is None or (not path and isinstance(value, (list, dict))):
        return value
    if not path:
        return text
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
    place = f" (at {''.join(f'[{step!r}]' for step in path)})" if path else ""
    remedy = "Correct the value."
    if not parameter.annotation:
        remedy = f"Its default {literal(parameter.default)} says the type; annotate it to allow another."
    return ConfigError(f"parameter {parameter.name} must be {parameter.kind}, got {value!r}{place}. {remedy}")
