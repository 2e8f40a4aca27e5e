"""From events to MLflow's points: pure, and the same again for the same bytes.

Whatever is read twice (the tracker died between a batch and the note of it) gives points equal in
key, step, time and value, which MLflow stores once.

After a resume some steps are done again, and MLflow can't delete a point. A repeated step whose
value is the same - the loss, since a resume is exact - is not sent twice. Another value (a timing, a
changed learning rate) is sent too: it has the later time, so MLflow's latest value and a reader
that lets the last attempt win see the new one. The run folder has the last word.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.lab.tracking._state import Window

MAX_NAME_LENGTH = 250
WINDOW_S = 1.0
"""Step times of one worker are averaged over at least this long (seconds)."""

_READ_BYTES = 256 * 1024
_STEP_PARTS = ("step_s", "compute_s")
_STEP = re.compile(rb'"step":\s*(\d+)')
_ATTEMPT = re.compile(rb'"attempt":\s*(\d+)')


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric.

    Attributes:
        key: Name that MLflow accepts.
        value: Finite.
        timestamp_ms: Time of the event, milliseconds since 1970.
        step: Optimizer step, counted from 1.
    """

    key: str
    value: float
    timestamp_ms: int
    step: int


def plain_name(name: str) -> str:
    """The nearest name of a metric or parameter that MLflow accepts; it refuses a batch for a bad one.

    Letters, digits and `_ - . : /` and spaces stay, others become `_`; no empty, `.` or `..` part
    between slashes; at most 250 characters.
    """
    clean = re.sub(r"[^\w\-.: /]", "_", name)
    parts = [part for part in clean.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME_LENGTH].rstrip("/") or "_"


def read_lines(
    path: Path, offset: int, limit_bytes: int = _READ_BYTES
) -> tuple[list[tuple[dict[str, Any], int]], int]:
    """Read whole event lines from a byte offset on, a bounded piece at a time.

    Returns:
        Each event with the offset behind its line, and the offset behind all lines read. Both are as
        `offset` when no whole line is there. A broken line is passed over.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(limit_bytes)
            while b"\n" not in data and (more := file.read(limit_bytes)):
                data += more
    except FileNotFoundError:
        return [], offset
    events = []
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(line)
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append((event, offset))
    return events, offset


def metric_points(event: Mapping[str, Any]) -> list[Point]:
    """Points of a `metrics` or `eval` event: its finite values."""
    time_ms, step = _time_ms(event["t"]), int(event["step"])
    return [
        Point(plain_name(name), float(value), time_ms, step)
        for name, value in event.get("values", {}).items()
        if value is not None and math.isfinite(value)
    ]


def nonfinite_point(event: Mapping[str, Any], count: int) -> Point:
    """How many values were not finite up to and with this event. The values themselves are never sent:
    MLflow makes 1.8e308 of an infinity.
    """
    return Point("health/nonfinite", float(count), _time_ms(event["t"]), int(event["step"]))


def add_to_window(window: Window | None, event: Mapping[str, Any]) -> tuple[Window, Window | None]:
    """Take a `step` event into the worker's window.

    Returns:
        The open window, and the full one before it if this event closed one.
    """
    at, attempt = float(event["t"]), int(event.get("attempt", 1))
    full = None
    if window is None or window.attempt != attempt:
        full, window = window, Window(attempt=attempt, opened_at=at, closed_at=at, step=0)
    elif at - window.opened_at >= WINDOW_S:
        full, window = window, Window(attempt=attempt, opened_at=at, closed_at=at, step=0)
    sums = {part: window.sums_ms.get(part, 0.0) + 1e3 * float(event.get(part, 0.0)) for part in _STEP_PARTS}
    update = {"closed_at": at, "step": int(event["step"]), "num_steps": window.num_steps + 1, "sums_ms": sums}
    return window.model_copy(update=update), full


def window_points(rank: int, window: Window) -> list[Point]:
    """The mean step time of one worker, and of its computing part, in milliseconds."""
    return [
        Point(
            f"rank{rank:02d}/{part.removesuffix('_s')}_ms",
            total / window.num_steps,
            _time_ms(window.closed_at),
            window.step,
        )
        for part, total in window.sums_ms.items()
    ]


def earlier_values(path: Path, attempt: int) -> dict[tuple[str, int], float]:
    """Values of steps that an attempt does again, as the attempts before it left them.

    Two passes over rank 0's file, so that memory is bounded by the repeated steps.

    Returns:
        The last value by (key, step), for steps from the attempt's first one on.
    """
    if attempt <= 1:
        return {}
    own = _events(path, lambda line: _number(_ATTEMPT, line) == attempt)
    first = next((int(event["step"]) for event in own if "values" in event), None)
    if first is None:
        return {}
    values: dict[tuple[str, int], float] = {}
    for event in _events(path, lambda line: _number(_STEP, line) >= first):
        if int(event.get("attempt", 1)) >= attempt:
            break
        if "values" in event:
            values.update({(p.key, p.step): p.value for p in metric_points(event)})
    return values


def _number(pattern: re.Pattern[bytes], line: bytes) -> int:
    """A number read without parsing the line, -1 where there is none."""
    found = pattern.search(line)
    return int(found[1]) if found else -1


def _events(path: Path, is_wanted: Callable[[bytes], bool]) -> Iterator[dict[str, Any]]:
    """Events of the lines that are wanted; a broken line is passed over."""
    with open(path, "rb") as file:
        for line in file:
            if is_wanted(line):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def _time_ms(seconds: float) -> int:
    return round(seconds * 1000)
