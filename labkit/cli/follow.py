"""Follow a run to its end: a bar on a terminal, plain lines elsewhere; Ctrl-C stops it or lets go of it."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import click

from labkit.cli.output import is_terminal
from labkit.errors import LabkitError
from labkit.lab.progress import Progress, progress_line, progress_of
from labkit.lab.series import Series, SeriesReader
from labkit.launch import Run
from labkit.launch.reap import end_leftover_workers
from labkit.runfolder import RunFolder, RunStatus

_LINE_EVERY_S = 5.0


class Detached(LabkitError):
    """Somebody had enough of following a run, which goes on."""

    exit_code = 130


def follow(run: Run, *, is_ours: bool) -> RunStatus:
    """Show a run's progress on stderr until it has ended and MLflow knows it.

    Args:
        run: The run.
        is_ours: The first Ctrl-C asks the run to stop and waits for it, a second one kills its
            workers. Otherwise Ctrl-C ends the following and the run goes on.

    Returns:
        The final status.

    Raises:
        Detached: Ctrl-C on a run that is not ours.
        KeyboardInterrupt: Ctrl-C while MLflow gets the rest of a run that has ended.
    """
    reader = SeriesReader(run.folder)
    with _Interrupts() as interrupts, _display() as display:

        def on_poll(status: RunStatus) -> None:
            if not status.state.is_final:  # the report says how it ended
                reader.update()
                display.show(_progress(reader.series))
            if interrupts.take():
                _interrupt(run.folder, status, display, interrupts.count if is_ours else 0)

        return run.wait(on_poll=on_poll)


def _progress(series: Series) -> Progress:
    """Where a run stands; its figures are on the first node's machine, on the others there are only steps."""
    progress = progress_of(series)
    if progress.step:
        return progress
    steps = [worker.times["step_s"].steps for worker in series.workers.values()]
    return replace(progress, step=max((own[-1] for own in steps if own), default=0))


def _interrupt(folder: RunFolder, status: RunStatus, display: "_Display", count: int) -> None:
    """Act on the `count`th Ctrl-C, 0 for any on a run that is not ours."""
    if status.state.is_final:
        raise KeyboardInterrupt
    if count == 0:
        raise Detached(f"detached, the run goes on. Again: labkit attach {folder.key}")
    if count == 1:
        display.say("Stopping. Ctrl-C again kills the workers.")
        folder.stop_file.touch()
    else:
        display.say("Killing.")
        end_leftover_workers(folder, status)


class _Interrupts:
    """Counts Ctrl-C and SIGTERM, so that they act at the next poll and not in the middle of anything."""

    def __init__(self) -> None:
        self.count = 0
        self._num_taken = 0

    def __enter__(self) -> "_Interrupts":
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.count += 1

    def take(self) -> bool:
        """One has come since the last call."""
        has_come = self.count > self._num_taken
        self._num_taken = self.count
        return has_come


class _Display:
    """What is shown of a run while it goes on."""

    def __init__(self, show: Callable[[Progress], None], say: Callable[[str], None]) -> None:
        self.show = show
        self.say = say


@contextmanager
def _display() -> Iterator[_Display]:
    if not is_terminal(sys.stderr):
        yield _Display(_line_now_and_then(), _say)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    with Bars(BarColumn(), TextColumn("{task.description}", markup=False), console=console) as bars:
        task = bars.add_task("starting workers", total=None)

        def show(progress: Progress) -> None:
            if progress.step:
                total = progress.total_steps
                bars.update(task, description=progress_line(progress), completed=progress.step, total=total)

        yield _Display(show, lambda text: console.print(text, markup=False, highlight=False))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _line_now_and_then() -> Callable[[Progress], None]:
    """Write a plain line every few seconds, when there is something new."""
    shown, shown_at = "", 0.0

    def show(progress: Progress) -> None:
        nonlocal shown, shown_at
        line = progress_line(progress) if progress.step else "starting workers"
        if line != shown and time.monotonic() - shown_at >= _LINE_EVERY_S:
            _say(line)
            shown, shown_at = line, time.monotonic()

    return show
