"""Verbs on a run that exists: `logs`, `stop`, `attach`, `resume`, `sync`."""

import time
from pathlib import Path
from typing import Any

import click

from labkit.cli.follow import follow
from labkit.cli.output import json_option, print_json, starting
from labkit.cli.report import report
from labkit.cli.run import see_through
from labkit.errors import ConfigError
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, find_run

_POLL_S = 0.3


@click.command()
@click.argument("run")
@click.option("--rank", type=int, metavar="R", help="Only this worker.")
@click.option("-n", "--lines", "num_lines", default=30, show_default=True, help="Last lines of each file.")
@click.option("--follow", "is_following", is_flag=True, help="Go on with new lines until the run has ended.")
def logs(run: str, rank: int | None, num_lines: int, is_following: bool) -> None:
    """Show what a run's workers printed, the root cause first.

    \b
    Examples:
      labkit logs latest
      labkit logs 3f9a --rank 2 --follow
    """
    folder = find_run(run)
    status = reap(folder)
    files = _log_files(folder, rank, first=status.error.rank if status.error else None)
    if status.error is not None and rank in (None, status.error.rank):
        click.echo(f"{status.error.message}\n{status.error.traceback}".rstrip())
    offsets = {file: _print_tail(file, num_lines) for file in files}
    if is_following:
        _follow(folder, rank, offsets)


def _log_files(folder: RunFolder, rank: int | None, first: int | None = None) -> list[Path]:
    """Log files that are there: the supervisor's, then by rank, the root cause's before the others'.

    Raises:
        ConfigError: no worker of this rank has a log.
    """
    ranks = sorted({int(path.stem.removeprefix("rank")) for path in folder.logs_dir.glob("rank*.*")})
    if rank is not None and rank not in ranks:
        known = ", ".join(map(str, ranks)) or "none yet"
        raise ConfigError(f"--rank must be a worker of the run, got {rank}. Known: {known}.")
    wanted = sorted(ranks, key=lambda each: (each != first, each)) if rank is None else [rank]
    files = [folder.supervisor_log] if rank is None else []
    files += [file for each in wanted for file in folder.log_files(each)]
    return [file for file in files if file.is_file()]


def _print_tail(file: Path, num_lines: int) -> int:
    """Print the last lines of a file under its name; nothing for an empty one.

    Returns:
        The offset behind them.
    """
    data = file.read_bytes()
    lines = data.decode(errors="replace").splitlines()[-num_lines:] if num_lines > 0 else []
    if lines:
        click.echo(f"--- {file.name}")
        click.echo("\n".join(lines))
    return len(data)


def _follow(folder: RunFolder, rank: int | None, offsets: dict[Path, int]) -> None:
    while True:
        is_over = reap(folder).state.is_final
        for file in _log_files(folder, rank):
            offsets[file] = _print_new(file, offsets.get(file, 0))
        if is_over:
            return
        time.sleep(_POLL_S)


def _print_new(file: Path, offset: int) -> int:
    """Print whole lines from an offset on, each behind its file's name; return where to go on."""
    with open(file, "rb") as log:
        log.seek(offset)
        data = log.read()
    end = data.rfind(b"\n") + 1
    for line in data[:end].decode(errors="replace").splitlines():
        click.echo(f"{file.name}: {line}")
    return offset + end


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@json_option
def stop(runs: tuple[str, ...], is_json: bool) -> None:
    """Stop runs. They save a checkpoint first; `labkit resume` goes on from it.

    \b
    Examples:
      labkit stop latest
    """
    folders = [find_run(text) for text in runs]  # all names are right before the first run is stopped
    ended = [_stop(folder) for folder in folders]
    if is_json:
        print_json(ended)
        return
    for one in ended:
        click.echo(f"{one['key']} {'was already ' if one['was_over'] else ''}{one['state']}")


def _stop(folder: RunFolder) -> dict[str, Any]:
    """Stop one run; say how it ended and whether it had ended before."""
    from labkit import launch

    status = reap(folder)
    was_over = status.state.is_final
    if not was_over:
        status = launch.attach(folder).stop()
    return {"key": folder.key, "state": str(status.state), "was_over": was_over}


@click.command()
@click.argument("run")
@json_option
def attach(run: str, is_json: bool) -> int:
    """Follow a run until it ends. Ctrl-C ends the following; the run goes on.

    \b
    Examples:
      labkit attach latest
    """
    from labkit import launch

    handle = launch.attach(find_run(run))
    status = follow(handle, is_ours=False)
    report(handle.folder, status, is_json=is_json)
    return status.state.exit_code


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--detach", "is_detached", is_flag=True, help="Return at once; the run goes on by itself.")
@json_option
def resume(run: str, overrides: tuple[str, ...], is_detached: bool, is_json: bool) -> int:
    """Go on with a run from its newest good checkpoint.

    Settings given as KEY=VALUE are changed: more epochs, another cluster.

    \b
    Examples:
      labkit resume latest
      labkit resume 3f9a engine.num_epochs=20
    """
    from labkit import launch

    with starting():
        handle = launch.resume(find_run(run), overrides, is_detached=is_detached)
    return see_through(handle, is_detached=is_detached, is_json=is_json)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
def sync(runs: tuple[str, ...]) -> None:
    """Send to MLflow what it has missed.

    For runs that trained while MLflow was away: the run folder has everything.

    \b
    Examples:
      labkit sync latest
    """
    from labkit.lab import tracking

    for folder in [find_run(text) for text in runs]:
        tracking.sync(folder)
        click.echo(f"{folder.key} is in MLflow")
