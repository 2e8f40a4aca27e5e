"""Sends what is new in a run folder to its MLflow run, and the run's end when it has ended."""

from collections.abc import Callable

from labkit.lab.tracking._collect import BATCH_POINTS, Collector
from labkit.lab.tracking._run import MlflowRun
from labkit.lab.tracking._system import SystemMetrics
from labkit.runfolder import RunFolder, RunStatus


class Sender:
    """Sends whatever is new. After an exception it starts over from `tracking.json`.

    Args:
        folder: A run; the caller holds its tracking lock.
        has_system_metrics: Measure this machine as well, as long as the run goes on.
        on_progress: Called after each batch that MLflow has taken.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        has_system_metrics: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._collector = Collector(folder)
        self._on_progress = on_progress
        self._run: MlflowRun | None = None
        self._system = SystemMetrics() if has_system_metrics else None

    def send(self, status: RunStatus) -> bool:
        """Send all that is there; if the run has ended, its end too, and return true."""
        run = self._opened(status)
        if self._system is not None and not status.state.is_final:
            self._system.keep_running(run.uri, run.state.run_id, is_resumed=status.attempt > 1)
        self._send_points(run, is_final=status.state.is_final)
        if not status.state.is_final:
            return False
        self._stop_system_metrics()
        run.end(status)
        return True

    def _opened(self, status: RunStatus) -> MlflowRun:
        """The MLflow run; a supervisor that restarts its workers begins another attempt of it."""
        if self._run is None or self._run.state.attempt != status.attempt:
            run = self._run or MlflowRun(self._folder)
            run.open(status)
            self._run = run
        return self._run

    def _send_points(self, run: MlflowRun, *, is_final: bool) -> None:
        while True:
            points, after = self._collector.next_batch(run.state, is_final=is_final)
            run.send(points, after)
            if points:
                self._on_progress()
            if len(points) < BATCH_POINTS:  # all files were read to their ends
                return

    def close(self) -> None:
        """Forget the MLflow run; the next `send` looks for it again."""
        self._run = None

    def _stop_system_metrics(self) -> None:
        if self._system is not None:
            self._system.stop()
            self._system = None
