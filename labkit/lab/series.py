"""Read what a run's workers wrote into series that a figure can draw, also while it goes on."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from labkit.runfolder import RunFolder, find_run

PARTS = ("compute", "node", "communicate", "wait", "data")
"""What a step's time is made of, in the order figures stack it."""

_TIMES = ("step_s", *(f"{part}_s" for part in PARTS))


@dataclass
class Line:
    """One number per step, steps rising.

    Attributes:
        steps: Step of each value; shape (N,).
        values: The numbers; None where one was not finite; shape (N,).
        nonfinite: "nan", "inf" or "-inf" by the step it came at.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    nonfinite: dict[int, str] = field(default_factory=dict)

    def add(self, step: int, value: float | None, nonfinite: str = "") -> None:
        """Append a value; one that is there for this step or a later one is forgotten."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(value)
        if value is None:
            self.nonfinite[step] = nonfinite or "nan"

    def cut(self, step: int) -> None:
        """Forget everything from `step` on."""
        if not self.steps or self.steps[-1] < step:
            return
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]
        self.nonfinite = {s: what for s, what in self.nonfinite.items() if s < step}

    @property
    def last(self) -> float | None:
        """The newest value; None when there is none or it is not finite."""
        return self.values[-1] if self.values else None

    @property
    def has_fallen(self) -> bool:
        """The newest value is finite and lower than the first one."""
        first = self.values[0] if self.values else None
        return self.last is not None and first is not None and self.last < first

    @property
    def first_nonfinite(self) -> int | None:
        """The first step whose value is not finite."""
        return min(self.nonfinite, default=None)


@dataclass
class WorkerSeries:
    """What one worker wrote: who it is, and the times of its steps in seconds by part."""

    rank: int
    node: str = ""
    local_batch_size: int | None = None
    times: dict[str, Line] = field(default_factory=lambda: {name: Line() for name in _TIMES})

    @property
    def label(self) -> str:
        """How figures and tables name it: `2 · node1`."""
        return f"{self.rank} · {self.node}" if self.node else f"{self.rank} ·"


@dataclass
class Series:
    """A run in numbers, as far as it has come.

    Attributes:
        title: Experiment and run key.
        metrics: Lines by the metric's name, e.g. `train/loss`, `val/accuracy`, `perf/step_ms`.
        samples: Samples trained on so far, all workers, at each step.
        clock: Seconds since 1970 at each step.
        workers: By rank.
        total_steps: Steps the run will have; None until a worker has started.
        staleness: Pushes so far by their staleness; {} but under an asynchronous strategy.
        attempt: The newest attempt; a resume is a new one.
        started_at: When the newest attempt started, seconds since 1970.
    """

    title: str = ""
    metrics: dict[str, Line] = field(default_factory=dict)
    samples: Line = field(default_factory=Line)
    clock: Line = field(default_factory=Line)
    workers: dict[int, WorkerSeries] = field(default_factory=dict)
    total_steps: int | None = None
    staleness: dict[int, int] = field(default_factory=dict)
    attempt: int = 0
    started_at: float | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.clock.steps[-1] if self.clock.steps else 0

    def line(self, name: str) -> Line:
        """A metric's line, empty when nothing was written under this name (yet)."""
        return self.metrics.get(name) or Line()

    def change(self, name: str) -> str:
        """How a metric went, in words: `val/loss went from 2.31 to 0.0725`."""
        values = [value for value in self.line(name).values if value is not None]
        return f"{name} went from {values[0]:.3g} to {values[-1]:.3g}" if values else f"{name} has no value"

    @property
    def rebalanced_at(self) -> list[int]:
        """The last step before each change of the workers' shares."""
        return self.line("shares/rank00").steps

    def last(self, name: str) -> float | None:
        """A metric's newest value; None when there is none or it is not finite."""
        return self.line(name).last


class SeriesReader:
    """Follows a run's events by byte offsets: each `update` reads only what is new.

    After a resume the last attempt wins: steps that it repeats replace the old ones, in every line.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.series = Series(title=f"{folder.path.parent.name}/{folder.key}")
        self._offsets: dict[int, int] = {}
        self._attempts: dict[int, int] = {}

    def update(self) -> bool:
        """Read what was written since the last call.

        Returns:
            True when there was something new.
        """
        is_new = False
        for rank in self.folder.ranks():
            events, self._offsets[rank] = self.folder.read_events(rank, self._offsets.get(rank, 0))
            worker = self.series.workers.setdefault(rank, WorkerSeries(rank))
            for event in events:
                self._take(worker, event)
            is_new = is_new or bool(events)
        return is_new

    def _take(self, worker: WorkerSeries, event: dict[str, Any]) -> None:
        self._begin_attempt(worker, event)
        kind = event.get("kind")
        if kind == "start":
            worker.node = str(event.get("node", ""))
            worker.local_batch_size = event.get("local_batch_size")
            self.series.total_steps = event.get("total_steps", self.series.total_steps)
        elif kind == "step":
            for name, line in worker.times.items():
                if event.get(name) is not None:
                    line.add(event["step"], event[name])
        elif kind == "staleness":
            self.series.staleness = {int(value): count for value, count in event["counts"].items()}
        elif kind in ("metrics", "eval", "shares") and worker.rank == 0:
            self._take_values(event, is_step=kind == "metrics")

    def _begin_attempt(self, worker: WorkerSeries, event: dict[str, Any]) -> None:
        attempt = int(event.get("attempt", 1))
        if attempt <= self._attempts.get(worker.rank, 0) or not {"start_step", "step"} & event.keys():
            return  # a message before the start does not say from where the attempt goes on
        self._attempts[worker.rank] = attempt
        first = event["start_step"] + 1 if "start_step" in event else event["step"]
        for line in worker.times.values():
            line.cut(first)
        if worker.rank == 0:
            self.series.attempt, self.series.started_at = attempt, event.get("t")
            for line in (self.series.samples, self.series.clock, *self.series.metrics.values()):
                line.cut(first)

    def _take_values(self, event: dict[str, Any], is_step: bool) -> None:
        step, bad = event["step"], event.get("nonfinite", {})
        if is_step:
            self.series.clock.add(step, event.get("t"))
            self.series.samples.add(step, event.get("samples"))
        for name, value in event.get("values", {}).items():
            self.series.metrics.setdefault(name, Line()).add(step, value, bad.get(name, ""))


def read_series(run: Any) -> Series:
    """Read a run as far as it has come.

    Args:
        run: A run, its folder, its key, the beginning of its key, or `latest`.

    Raises:
        ConfigError: there is no such run.
    """
    reader = SeriesReader(folder_of(run))
    reader.update()
    return reader.series


def folder_of(run: Any) -> RunFolder:
    """The folder of whatever names a run: a run's handle, a folder, a key, `latest`.

    Raises:
        ConfigError: there is no such run.
    """
    if isinstance(run, RunFolder):
        return run
    folder = getattr(run, "folder", None)
    return folder if isinstance(folder, RunFolder) else find_run(str(run))
