"""Whole runs as measurements: watched for what other processes do meanwhile, and repeated if in doubt."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from labkit.bench.emulated import MAX_FOREIGN_CORES, ForeignLoad
from labkit.config import ExperimentConfig
from labkit.lab.scaling import Point, run_point
from labkit.runfolder import RunState, RunStatus

_MOST_TRIES = 2
_PATIENCE_S = 60.0  # a run that took longer is not run again


def measured_point(config: ExperimentConfig, say: Callable[[str], None]) -> Point:
    """Train a configuration anew; once more when something cast doubt on its times.

    Args:
        config: The experiment.
        say: Takes a line when a run is thrown away.

    Raises:
        RunFailed: it did not finish.
    """
    began_at = time.monotonic()
    for attempt in range(1, _MOST_TRIES + 1):
        watch = _Watch()
        point = run_point(config, is_repeat=True, on_poll=watch)
        if watch.foreign_cores > MAX_FOREIGN_CORES:
            doubt = f"other processes used {watch.foreign_cores:.2f} cores"
            point = replace(point, doubts=(*point.doubts, doubt))
        is_last = attempt == _MOST_TRIES or time.monotonic() - began_at > _PATIENCE_S
        if not point.doubts or is_last:
            return point
        say(f"thrown away: {'; '.join(point.doubts)}")
    raise AssertionError("not reached")


class _Watch:
    """Looks once a second, while a run goes on, how many cores others than its supervisor and workers use."""

    def __init__(self) -> None:
        self.foreign_cores = 0.0
        self._load: ForeignLoad | None = None
        self._looked_at = 0.0

    def __call__(self, status: RunStatus) -> None:
        now = time.monotonic()
        if status.state is not RunState.RUNNING or status.owner is None or now - self._looked_at < 1.0:
            return
        self._looked_at = now
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if self._load is None:
                self._load = ForeignLoad(status.owner.pid)
            else:
                self.foreign_cores = self._load.cores()
