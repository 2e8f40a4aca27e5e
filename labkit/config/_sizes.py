"""Sizes in bytes as people write them."""

import re
from typing import Any

_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(value: Any) -> Any:
    """Read `64 MiB` (1024 each), `20 GB` (1000 each) or a number of bytes.

    Raises:
        ValueError: a text that is none of these.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value.strip())
    if match is None:
        raise ValueError(f"size must be a number of bytes or one such as 64 MiB or 20 GB, got {value!r}.")
    number, letter, is_binary = match.groups()
    return round(float(number) * (1024 if is_binary else 1000) ** _POWERS[letter.lower()])


def format_bytes(size_bytes: float) -> str:
    """As `64.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError
