"""Import the user's own `module:function`. This is the one place where a configuration runs code."""

import importlib
from collections.abc import Callable
from typing import Any

from labkit.errors import ConfigError


def load_entry_point(name: str, setting: str) -> Callable[..., Any]:
    """Import a function by `module:function`.

    Args:
        name: Such as `my_models:build`.
        setting: The setting that named it, for errors.

    Raises:
        ConfigError: the module or the function is not there.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} must be an importable module:function, got {name!r}: {error}. Put the module "
            "beside the notebook, install it, or write it with %%labfile."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"{setting} must name a function of {module_name}, got {function_name!r}. Correct the name."
        )
    return function  # type: ignore[no-any-return]
