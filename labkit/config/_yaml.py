"""YAML as people write it today: the scalars of YAML 1.2's core schema on top of PyYAML.

PyYAML reads YAML 1.1, where `1e-4` is text, `no` is false, `010` is eight and `1:30` is ninety.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from labkit.errors import ConfigError


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 core scalars; a repeated key is an error, not the last one wins."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping",
                    node.start_mark,
                    f"the key {key!r} stands twice; keep one",
                    key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_INTEGER = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper whose scalars both kinds of reader take for what they are.

    Text that either would take for a number, a truth or nothing is quoted, as `08` and `1e5`, which are
    text to YAML 1.1; a float such as 1e-05 is written 1.0e-05, which is a number to it too.
    """


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", _INTEGER, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+.0123456789"),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<"),
):
    for _class in (_CoreLoader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list(_first))


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _represent_float)


def _construct_int(loader: _CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if text.startswith("0o"):
        return int(text, 8)
    return int(text, 16) if text.startswith("0x") else int(text, 10)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str, source: str = "YAML") -> Any:
    """Read one YAML document with YAML 1.2 core scalars.

    Args:
        text: The document.
        source: What to call it in an error, usually the file's name.

    Raises:
        ConfigError: the text is not YAML; the message gives line and column.
    """
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{source} must be YAML, got a fault{place}: {error.problem}. Correct that line."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} must be YAML, got a fault: {error}. Correct it.") from None


def print_yaml(content: Mapping[str, Any]) -> str:
    """Print what `parse_yaml`, and a reader of YAML 1.1, read back equal; keys keep their order."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
