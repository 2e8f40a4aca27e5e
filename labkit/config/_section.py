"""The base of every configuration section, and its one grammar of errors."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
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


def _describe(error: ErrorDetails, title: str, known: dict[str, list[str]]) -> str:
    location = [str(part) for part in error["loc"]]
    # The tag of a tagged union (the component's name) is part of pydantic's path, not of ours.
    path: list[str] = []
    for index, part in enumerate(location):
        if not (index and part.startswith("<")):
            path.append(part)
    name = ".".join(path) or title
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
    return f"{name} must {condition.format(**error.get('ctx', {}))}, got {error['input']!r}."


def raise_config_error(error: ValidationError, known: dict[str, list[str]], source: str) -> None:
    """Say the faults of a configuration in labkit's grammar, one a line.

    Args:
        error: What pydantic found.
        known: Known keys of each section by its dotted path, "" for the top.
        source: Where the values came from; put in front of the message, "" for nothing.

    Raises:
        ConfigError: always.
    """
    lines = list(dict.fromkeys(_describe(item, error.title, known) for item in error.errors()))
    prefix = f"{source}: " if source else ""
    raise ConfigError(prefix + " ".join(lines)) from None


def defaults_of(section: type[Section]) -> dict[str, Any]:
    """The default value of every field that has one."""
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in section.model_fields.items()
        if not field.is_required()
    }
