"""Where a run stands, at a glance: cheap however long it has run, so that `status` can show hundreds."""

import json
import mmap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.launch.reap import is_unresponsive
from labkit.runfolder import RunFolder, RunState, RunStatus


@dataclass(frozen=True)
class Glance:
    """One run in one row; None where nothing is known (yet).

    Attributes:
        key: Key of the run.
        experiment: Name of the experiment.
        folder: Where it lies.
        state: State as `status.json` says it.
        is_unresponsive: Its supervisor exists but has shown no life for a while.
        attempt: 1, and one more for each resume.
        step: Steps done.
        total_steps: Steps it will have.
        train_loss: The newest.
        val_accuracy: The newest.
        age_s: Seconds since it was made.
        error: Why it did not finish, one line.
    """

    key: str
    experiment: str
    folder: str
    state: RunState
    is_unresponsive: bool
    attempt: int
    step: int
    total_steps: int | None
    train_loss: float | None
    val_accuracy: float | None
    age_s: float
    error: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def glance(folder: RunFolder, status: RunStatus) -> Glance:
    """Look at a run.

    Args:
        folder: The run.
        status: Its true status (`launch.reap`).
    """
    now = time.time()
    # On a machine other than the first node's there is no worker 0, and there are steps but no figures.
    events = folder.events_file(min(folder.ranks(), default=0))
    start, step, metrics, evaluation = newest(events, ("start", "step", "metrics", "eval"))
    return Glance(
        key=folder.key,
        experiment=folder.path.parent.name,
        folder=str(folder.path),
        state=status.state,
        is_unresponsive=is_unresponsive(status),
        attempt=status.attempt,
        step=int((metrics or step).get("step", start.get("start_step", 0))),
        total_steps=start.get("total_steps"),
        train_loss=metrics.get("values", {}).get("train/loss"),
        val_accuracy=evaluation.get("values", {}).get("val/accuracy"),
        age_s=max(0.0, now - status.created_at),
        error=status.error.message if status.error else None,
    )


def messages(folder: RunFolder, attempt: int) -> list[str]:
    """What an attempt's workers had to say beside their figures: a checkpoint passed over, for example."""
    found = [event for rank in folder.ranks() for event in _all_of(folder.events_file(rank), "message")]
    return [str(event.get("text")) for event in found if event.get("attempt") == attempt]


def _all_of(file: Path, kind: str) -> list[dict[str, Any]]:
    """Every event of a kind, found without reading the others."""
    mark = f'"kind":"{kind}"'.encode()
    with open(file, "rb") as events:
        lines = [line for line in events if mark in line]
    return [event for line in lines if (event := _parse(line)).get("kind") == kind]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def newest(file: Path, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """The newest event of each kind, {} where there is none. Searches from the end, through a memory map."""
    try:
        with open(file, "rb") as events, mmap.mmap(events.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return [_newest_in(data, kind) for kind in kinds]
    except (OSError, ValueError):  # no file yet, or an empty one, which can't be mapped
        return [{} for _ in kinds]


def _newest_in(data: mmap.mmap, kind: str) -> dict[str, Any]:
    at = len(data)
    while (at := data.rfind(f'"kind":"{kind}"'.encode(), 0, at)) >= 0:
        end = data.find(b"\n", at)
        event = _parse(data[data.rfind(b"\n", 0, at) + 1 : end])
        if end >= 0 and event.get("kind") == kind:
            return event
    return {}
