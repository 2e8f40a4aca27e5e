"""The base of every configuration section, and its one grammar of errors."""

import typing
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from labkit.errors import ConfigError, did_you_mean


class Section(BaseModel):
    """A frozen group of settings. Unknown keys and wrong types are errors, never guesses."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_CONDITIONS = {
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "string_type": "be text",
    "bool_type": "be true or false",
    "literal_error": "be one of {expected}",
    "dict_type": "be a mapping of keys to values",
    "model_type": "be a mapping of keys to values",
    "tuple_type": "be a list",
    "list_type": "be a list",
    "too_short": "have at least {min_length} entries",
    "string_too_short": "have at least {min_length} characters",
    "string_pattern_mismatch": "match the pattern {pattern}",
}


def _path(error: ErrorDetails) -> list[str]:
    # The tag of a tagged union (the component's name) is part of pydantic's path, not of ours.
    parts = [str(part) for part in error["loc"]]
    return [part for index, part in enumerate(parts) if not (index and part.startswith("<"))]


def _describe(error: ErrorDetails, root: type[Section], known: dict[str, list[str]]) -> str:
    path = _path(error)
    name = ".".join(path) or root.__name__
    kind = error["type"]
    if kind == "extra_forbidden":
        section = ".".join(path[:-1])
        return f"{name} must be a known key. {did_you_mean(path[-1], known.get(section, []))}"
    if kind == "missing":
        return f"{name} must be given, got nothing. Add it."
    if kind == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    condition = _CONDITIONS.get(kind)
    if condition is None:
        return f"{name} must be valid, got {error['input']!r}: {error['msg']}."
    text = f"{name} must {condition.format(**error.get('ctx', {}))}, got {error['input']!r}."
    return f"{text} {_remedy(path, root)}".rstrip()


def _remedy(path: list[str], root: type[Section]) -> str:
    """What the setting is and its default, from its description."""
    if len(path) == 1:
        field = root.model_fields.get(path[0])
        return _hint(field) if field else ""
    for member in members_of(root.model_fields.get(path[0])):
        field = member.model_fields.get(path[1]) if len(path) == 2 else None
        if field is not None:
            return _hint(field)
    return ""


def _hint(field: FieldInfo) -> str:
    if not field.description:
        return ""
    default = "" if field.is_required() else f" (default {field.get_default(call_default_factory=True)})"
    return f"It is: {field.description}{default}."


def members_of(field: FieldInfo | None) -> list[type[Section]]:
    """The section classes that a field may hold; several for a family such as `model`."""

    def walk(annotation: Any) -> list[type[Section]]:
        if isinstance(annotation, type):
            return [annotation] if issubclass(annotation, Section) else []
        return [found for part in typing.get_args(annotation) for found in walk(part)]

    return walk(field.annotation) if field is not None else []


def raise_config_error(
    error: ValidationError, root: type[Section], known: dict[str, list[str]], source: str
) -> NoReturn:
    """Say the faults of a configuration in labkit's grammar, in one line.

    Args:
        error: What pydantic found.
        root: The class that was to be built.
        known: Known keys of each section by its dotted path, "" for the top.
        source: Where the values came from; put in front of the message, "" for nothing.

    Raises:
        ConfigError: always.
    """
    errors = error.errors()
    # A fault inside a list makes pydantic call the list too short as well; that one misleads.
    causes = [e for e in errors if not any(_is_inside(other, e) for other in errors)]
    lines = list(dict.fromkeys(_describe(item, root, known) for item in causes))
    prefix = f"{source}: " if source else ""
    raise ConfigError(prefix + " ".join(lines)) from None


def _is_inside(inner: ErrorDetails, outer: ErrorDetails) -> bool:
    depth = len(outer["loc"])
    return len(inner["loc"]) > depth and inner["loc"][:depth] == outer["loc"]
