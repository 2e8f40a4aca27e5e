"""How verbs print: tables and colour on a terminal, plain text elsewhere, JSON where it is asked for."""

import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import click

from labkit.config import parse_bytes
from labkit.errors import ConfigError

json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON instead of text.")


def is_terminal(stream: IO[str]) -> bool:
    """A person looks at it: bars and colour are welcome."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def read_size(name: str, text: str) -> int:
    """Bytes of an option such as `64MiB`.

    Raises:
        ConfigError: it is none; the message names the option.
    """
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def print_json(value: Any) -> None:
    """Print a value as JSON on one line; a number that is not finite becomes null."""
    click.echo(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    """A table that rich can draw."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return drawn


_STYLES = {
    "finished": "green",
    "running": "cyan",
    "failed": "bold red",
    "lost": "bold red",
    "timeout": "bold red",
    "unresponsive": "bold yellow",
    "killed": "yellow",
    "ok": "green",
    "warn": "bold yellow",
    "fail": "bold red",
}


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as aligned text, one row a line."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in the way that suits where it goes."""
    if not is_terminal(sys.stdout):
        click.echo(plain_table(columns, rows))
        return
    from rich.console import Console

    Console().print(table(columns, rows))


@contextmanager
def starting() -> Iterator[None]:
    """Around the start of a run: say on stderr what takes so long, if it does."""
    text = "Starting: importing torch takes some seconds."
    timer = threading.Timer(1.0, click.echo, [text], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
