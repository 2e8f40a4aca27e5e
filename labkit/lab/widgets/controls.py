"""Input controls made from the configuration's own schema: kind, choices and explanation of each setting."""

from typing import Any

import ipywidgets

from labkit.config import ExperimentConfig, json_schema

_LAYOUT = {"width": "auto"}
_STYLE = {"description_width": "9.5em"}


def schemas_of(key: str) -> list[dict[str, Any]]:
    """JSON schemas of a dotted key: one, or one for each member of a family that has it."""
    schema = json_schema()
    section, _, leaf = key.partition(".")
    top = schema["properties"][section]
    if not leaf:
        return [top]
    references = [member["$ref"] for member in top.get("oneOf", [top])]
    members = [schema["$defs"][reference.rsplit("/", 1)[1]]["properties"] for reference in references]
    return [member[leaf] for member in members if leaf in member]


def choices_of(key: str) -> list[str]:
    """The values a setting may have, [] when there is no list of them."""
    found: list[str] = []
    for schema in schemas_of(key):
        found += schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found


def value_of(config: ExperimentConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def make_control(key: str, label: str, value: Any) -> Any:
    """The control of a setting, with its label as accessible name and its description as tooltip."""
    schema = schemas_of(key)[0]
    tooltip = schema.get("description", label)
    common = {"description": label, "tooltip": tooltip, "layout": _LAYOUT, "style": _STYLE}
    choices = choices_of(key)
    if choices:
        options = choices if value in choices else [*choices, value]
        return ipywidgets.Dropdown(options=options, value=value, **common)
    if schema.get("type") == "integer":
        return ipywidgets.IntText(value=value, continuous_update=True, **common)
    if schema.get("type") == "number":
        return ipywidgets.FloatText(value=value, step=None, continuous_update=True, **common)
    return ipywidgets.Text(value=value, continuous_update=True, **common)
