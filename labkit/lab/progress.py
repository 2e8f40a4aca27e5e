"""How far a run has come: one record, one plain line, and waiting with such lines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from labkit.lab.failure import failure_text
from labkit.lab.series import Series, SeriesReader
from labkit.launch import Run
from labkit.runfolder import RunStatus


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
    run: Run, *, interval_s: float = 5.0, write: Callable[[str], object] = print
) -> RunStatus:
    """Wait until a run is over; meanwhile write one plain line every few seconds.

    Works on the caller's thread, so the lines land under the notebook cell that waits. Interrupting
    it ends the waiting only: the run goes on.

    Args:
        run: The run.
        interval_s: Seconds between lines.
        write: Takes each line.

    Returns:
        The final status.
    """
    reader = SeriesReader(run.folder)
    lines = _Lines(reader, interval_s, write)
    status = run.wait(on_poll=lines.tick)
    reader.update()
    end = replace(progress_of(reader.series), eta_s=None)
    write(f"{status.state} at {progress_line(end)}")
    if status.error is not None:
        write(failure_text(run.folder, status))
    return status


class _Lines:
    """Writes a line when the last one is old enough."""

    def __init__(self, reader: SeriesReader, interval_s: float, write: Callable[[str], object]) -> None:
        self._reader, self._interval_s, self._write = reader, interval_s, write
        self._written_at = time.monotonic()

    def tick(self, status: RunStatus) -> None:
        """Look at the clock; called often."""
        if status.state.is_final or time.monotonic() - self._written_at < self._interval_s:
            return
        self._written_at = time.monotonic()
        self._reader.update()
        is_begun = self._reader.series.step > 0
        self._write(progress_line(progress_of(self._reader.series)) if is_begun else "starting workers")
