"""How far a run has come: one record, one plain line, and waiting with such lines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from labkit.lab.failure import failure_text
from labkit.lab.series import Series, SeriesReader
from labkit.runfolder import RunFolder, RunStatus


class WatchedRun(Protocol):
    """The part of a run's handle that watching it needs."""

    @property
    def folder(self) -> RunFolder:
        """Where the run lives."""
        ...

    def status(self) -> RunStatus:
        """The run's true status."""
        ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands; None where nothing is known (yet)."""

    step: int
    total_steps: int | None
    train_loss: float | None
    val_accuracy: float | None
    samples_per_s: float | None
    eta_s: float | None


_WINDOW_STEPS = 50


def progress_of(series: Series) -> Progress:
    """Where a run stands, its speed taken over the last 50 steps of the newest attempt."""
    speed = _rate(series, series.clock.steps)
    total = series.total_steps
    left = total - series.step if total is not None else None
    return Progress(
        step=series.step,
        total_steps=total,
        train_loss=series.last("train/loss"),
        val_accuracy=series.last("val/accuracy"),
        samples_per_s=_rate(series, series.samples.values),
        eta_s=left / speed if left is not None and speed else None,
    )


def _rate(series: Series, amounts: Sequence[float | None]) -> float | None:
    """Growth of `amounts` per second over the window."""
    times = series.clock.values
    since = series.started_at or 0.0
    recent = range(max(0, len(times) - _WINDOW_STEPS), len(times))
    first = next((i for i in recent if (times[i] or 0.0) >= since), None)
    if first is None or first == len(times) - 1:
        return None
    took_s = (times[-1] or 0.0) - (times[first] or 0.0)
    return ((amounts[-1] or 0.0) - (amounts[first] or 0.0)) / took_s if took_s > 0 else None


def clock_text(seconds: float) -> str:
    """A duration as 0:31 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_line(progress: Progress) -> str:
    """One plain line: `step 40/200 loss 1.83 412 samples/s eta 0:31`."""
    total = f"/{progress.total_steps}" if progress.total_steps is not None else ""
    parts = [f"step {progress.step}{total}"]
    if progress.train_loss is not None:
        parts.append(f"loss {progress.train_loss:.3g}")
    if progress.val_accuracy is not None:
        parts.append(f"val accuracy {progress.val_accuracy:.3f}")
    if progress.samples_per_s is not None:
        parts.append(f"{progress.samples_per_s:.0f} samples/s")
    if progress.eta_s is not None:
        parts.append(f"eta {clock_text(progress.eta_s)}")
    return " ".join(parts)


def wait_with_lines(
    run: WatchedRun,
    *,
    interval_s: float = 5.0,
    write: Callable[[str], object] = print,
    poll_s: float = 0.1,
) -> RunStatus:
    """Wait until a run has ended; meanwhile write one plain line every few seconds.

    Runs on the caller's thread, so the lines land under the notebook cell that waits. Interrupting
    it ends the waiting only.

    Args:
        run: The run.
        interval_s: Seconds between lines; nothing is written when there is nothing new.
        write: Takes each line.
        poll_s: Seconds between looks at the run.

    Returns:
        The final status.
    """
    reader = SeriesReader(run.folder)
    written_at = time.monotonic()
    while not (status := run.status()).state.is_final:
        if time.monotonic() - written_at >= interval_s:
            written_at = time.monotonic()
            reader.update()
            write(progress_line(progress_of(reader.series)) if reader.series.step else "starting workers")
        time.sleep(poll_s)
    reader.update()
    end = replace(progress_of(reader.series), eta_s=None)
    write(f"{status.state} at {progress_line(end)}")
    if status.error is not None:
        write(failure_text(run.folder, status))
    return status
