"""`labkit status`: the runs and where they stand."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from labkit.cli.glance import Glance, glance
from labkit.cli.output import is_terminal, json_option, print_json, print_table, table
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, RunState, all_runs, find_run, runs_root

_COLUMNS = ("run", "experiment", "state", "step", "loss", "val acc", "age")
_SHOWN = 20
_WATCH_S = 2.0


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "is_all", is_flag=True, help=f"Every run, not only the newest {_SHOWN}.")
@click.option("--watch", "is_watch", is_flag=True, help="Go on until Ctrl-C or the end of every RUN.")
@json_option
def status(runs: tuple[str, ...], is_all: bool, is_watch: bool, is_json: bool) -> None:
    """List runs: state, step, loss, age.

    RUN is a key, the beginning of one, a folder or `latest`.

    \b
    Examples:
      labkit status
      labkit status latest --watch
      labkit status --all --json
    """
    if is_watch:
        _watch(runs, is_all, is_json)
        return
    glances = _look(runs, is_all)
    _print(glances, is_json)
    sys.stdout.flush()
    _close_lost(glances)


def _close_lost(glances: Sequence[Glance]) -> None:
    """Tell MLflow of runs whose supervisor and tracker both died: it would show them running for ever."""
    for item in glances:
        if item.state is RunState.LOST:
            from labkit.lab.tracking import close_lost

            if not close_lost(RunFolder(item.folder)):
                return  # MLflow is away; next time


def _look(runs: Sequence[str], is_all: bool) -> list[Glance]:
    folders = [find_run(text) for text in runs] if runs else _newest_runs(is_all)
    return [glance(folder, reap(folder)) for folder in folders]


def _newest_runs(is_all: bool) -> list[RunFolder]:
    return all_runs() if is_all else all_runs()[-_SHOWN:]


def _print(glances: Sequence[Glance], is_json: bool) -> None:
    if is_json:
        print_json([item.as_dict() for item in glances])
    elif glances:
        print_table(_COLUMNS, [_row(item) for item in glances])
    else:
        click.echo(f"No runs in {runs_root()} yet. Start one: labkit run")


def _row(item: Glance) -> tuple[str, ...]:
    total = f"/{item.total_steps}" if item.total_steps is not None else ""
    return (
        item.key,
        item.experiment,
        "unresponsive" if item.is_unresponsive else str(item.state),
        f"{item.step}{total}",
        "" if item.train_loss is None else f"{item.train_loss:.4g}",
        "" if item.val_accuracy is None else f"{item.val_accuracy:.4f}",
        age_text(item.age_s),
    )


def age_text(seconds: float) -> str:
    """An age in its largest unit: 45 s, 12 min, 3 h, 9 d."""
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_s:
            return f"{int(seconds // size_s)} {unit}"
    return f"{int(seconds)} s"


def _watch(runs: Sequence[str], is_all: bool, is_json: bool) -> None:
    with _screen(is_json) as show:
        while True:
            glances = _look(runs, is_all)
            show(glances)
            if runs and all(item.state.is_final for item in glances):
                return
            time.sleep(_WATCH_S)


@contextmanager
def _screen(is_json: bool) -> Iterator[Callable[[list[Glance]], None]]:
    """A table that is drawn again in its place; elsewhere than on a terminal one whenever it has changed."""
    if is_json or not is_terminal(sys.stdout):
        yield _changes(is_json)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        yield lambda glances: live.update(table(_COLUMNS, list(map(_row, glances))), refresh=True)


def _changes(is_json: bool) -> Callable[[list[Glance]], None]:
    before: list[tuple[str, ...]] | None = None

    def show(glances: list[Glance]) -> None:
        nonlocal before
        rows = [_row(item)[:-1] for item in glances]  # the age always changes
        if rows != before:
            _print(glances, is_json)
            sys.stdout.flush()
        before = rows

    return show
