"""Turn values from notebooks and libraries into plain ones that every file format keeps."""

import datetime
import math
import os
from collections.abc import Mapping
from typing import Any

from labkit.errors import ConfigError


def plain(value: Any, name: str = "value") -> Any:
    """Turn a value into None, bool, int, float, str, list or dict with text keys, losing nothing.

    numpy scalars and one-element arrays become numbers, arrays and tuples lists, paths and dates text.

    Args:
        value: What a notebook cell, a YAML file or a caller gave.
        name: What to call it in an error.

    Raises:
        ConfigError: the value has no plain form: a key that is not text, a number that is not
            finite, or an object of another type.
    """
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number, got {value}. Use None for 'not set'.")
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (datetime.date, datetime.datetime)):
        return value.isoformat()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(
                    f"{name} must have text keys, got the key {key!r}. Write it as {str(key)!r}."
                )
        return {key: plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(items)]
    raise ConfigError(
        f"{name} must be a number, text, true or false, None, a list or a mapping, got "
        f"{type(value).__name__} {value!r}. Convert it first."
    )
