"""Read what the workers wrote since the last batch, and cut it into the next batch of points."""

from typing import Any

from labkit.lab.tracking._points import (
    WINDOW_S,
    Point,
    add_to_window,
    earlier_values,
    metric_points,
    nonfinite_point,
    read_lines,
    window_points,
)
from labkit.lab.tracking._state import TrackingState, Window
from labkit.runfolder import RunFolder

BATCH_POINTS = 900
"""A batch is closed once it has this many points; MLflow takes 1000, and an event stays whole."""


class Collector:
    """The reader of one run's events. Its place in them is the `TrackingState` passed to and fro."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._repeated: tuple[int, dict[tuple[str, int], float]] = (1, {})

    def next_batch(self, state: TrackingState, *, is_final: bool) -> tuple[list[Point], TrackingState]:
        """The next points, and the state once MLflow has taken them.

        Args:
            state: How far everything was sent.
            is_final: The run has ended; step times that wait for more are given out too.

        Returns:
            Points, none when all is sent. The state may have moved on without a point.
        """
        batch = _Batch(state)
        for rank in self._folder.ranks():
            if not self._read_worker(rank, batch):
                return batch.points, batch.state()
        if is_final:
            for rank in self._folder.ranks():
                batch.finish(rank, self._folder.events_file(rank).stat().st_size)
        return batch.points, batch.state()

    def _read_worker(self, rank: int, batch: "_Batch") -> bool:
        """Read one worker's file to its end (true), or until the batch is full (false)."""
        path = self._folder.events_file(rank)
        while True:
            events, end = read_lines(path, batch.offsets.get(rank, 0))
            for event, offset in events:
                self._take(rank, event, batch)
                batch.offsets[rank] = offset
                if len(batch.points) >= BATCH_POINTS:
                    return False
            if end == batch.offsets.get(rank, 0) and not events:
                return True
            batch.offsets[rank] = end

    def _take(self, rank: int, event: dict[str, Any], batch: "_Batch") -> None:
        kind = event.get("kind")
        try:
            if kind == "step":
                batch.add_step(rank, event)
            elif kind in ("metrics", "eval", "shares") and rank == 0:
                batch.add_values(event, self._repeated_values(event))
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # a line of another shape is nobody's metric

    def _repeated_values(self, event: dict[str, Any]) -> dict[tuple[str, int], float]:
        attempt = int(event.get("attempt", 1))
        if self._repeated[0] != attempt:
            self._repeated = (attempt, earlier_values(self._folder.events_file(0), attempt))
        return self._repeated[1]


class _Batch:
    """A batch in the making: points, and what the state will be."""

    def __init__(self, state: TrackingState) -> None:
        self._before = state
        self.points: list[Point] = []
        self.offsets = dict(state.offsets)
        self._windows = dict(state.windows)
        self._latest = dict(state.latest)
        self._num_nonfinite = state.num_nonfinite
        self._diverged_at = state.diverged_at
        self._timings_sent_at = state.timings_sent_at

    def add_values(self, event: dict[str, Any], repeated: dict[tuple[str, int], float]) -> None:
        points = metric_points(event)
        self._latest.update({point.key: point.value for point in points})
        points = self._with_timings_now_and_then(event, points)
        self.points += [p for p in points if repeated.get((p.key, p.step)) != p.value]
        if event.get("nonfinite"):
            self._num_nonfinite += len(event["nonfinite"])
            if self._diverged_at is None:
                self._diverged_at = int(event["step"])
            self.points.append(nonfinite_point(event, self._num_nonfinite))

    def _with_timings_now_and_then(self, event: dict[str, Any], points: list[Point]) -> list[Point]:
        """Keep `perf/*` once a second: most values of a step, which would cost MLflow most of its time.

        Losses and rates go out for every step; every step's timings are in the run folder.
        """
        if float(event["t"]) - self._timings_sent_at >= WINDOW_S or event["kind"] != "metrics":
            self._timings_sent_at = float(event["t"])
            return points
        return [point for point in points if not point.key.startswith("perf/")]

    def add_step(self, rank: int, event: dict[str, Any]) -> None:
        self._windows[rank], full = add_to_window(self._windows.get(rank), event)
        self._give_out(rank, full)

    def finish(self, rank: int, size_bytes: int) -> None:
        """Nothing more will come: give out the open window, pass over a line that was never completed."""
        self._give_out(rank, self._windows.pop(rank, None))
        self.offsets[rank] = size_bytes

    def _give_out(self, rank: int, window: Window | None) -> None:
        if window is not None:
            self.points += window_points(rank, window)

    def state(self) -> TrackingState:
        return self._before.model_copy(
            update={
                "offsets": self.offsets,
                "windows": self._windows,
                "latest": self._latest,
                "num_nonfinite": self._num_nonfinite,
                "diverged_at": self._diverged_at,
                "timings_sent_at": self._timings_sent_at,
                "num_sent": self._before.num_sent + len(self.points),
            }
        )
