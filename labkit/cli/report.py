"""What is said when a run has ended: the root cause first where it failed, then figures and where to look."""

from collections.abc import Mapping
from typing import Any

import click

from labkit.cli.glance import glance, messages
from labkit.cli.output import print_json
from labkit.lab import links
from labkit.lab.failure import failure_text
from labkit.lab.progress import clock_text
from labkit.runfolder import RunFolder, RunState, RunStatus


def report(
    folder: RunFolder, status: RunStatus, *, is_json: bool, extra: Mapping[str, Any] | None = None
) -> None:
    """Print the end of a run.

    Args:
        folder: The run.
        status: Its final status.
        is_json: Print one JSON object instead.
        extra: More keys of that object.
    """
    if is_json:
        print_json({**summary_of(folder, status), **(extra or {})})
        return
    if status.error is not None:
        click.echo(_cause(folder, status))
    for text in messages(folder, status.attempt):
        _line("note", text)
    click.echo(_headline(folder, status))
    _line("run", str(folder.path))
    _line("mlflow", _link_text(folder))
    if status.state.is_final and status.state is not RunState.FINISHED:
        _line("logs", f"labkit logs {folder.key}")
        _line("resume", f"labkit resume {folder.key}")


def _cause(folder: RunFolder, status: RunStatus) -> str:
    """Message and traceback; for a worker that left none, the last lines of its log."""
    error = status.error
    if error is None or not error.traceback:
        return failure_text(folder, status)
    return f"{error.message}\n{error.traceback}".rstrip()


def _line(name: str, value: str | None) -> None:
    if value:
        click.echo(f"  {name:<8}{value}")


def summary_of(folder: RunFolder, status: RunStatus) -> dict[str, Any]:
    """A run as JSON values: what `status` shows, its final figures and its MLflow link."""
    return {
        **glance(folder, status).as_dict(),
        "messages": messages(folder, status.attempt),
        "exit_code": status.state.exit_code,
        "final": final_figures(folder),
        "mlflow": links.run_url(folder),
    }


def final_figures(folder: RunFolder) -> dict[str, float | None]:
    """The final figures of a run by name, {} before its end."""
    figures = folder.read_json(folder.result_file).get("final")
    return dict(figures) if isinstance(figures, dict) else {}


def _link_text(folder: RunFolder) -> str | None:
    """The run's page in MLflow; how to get there when nobody serves it at this moment."""
    url = links.run_url(folder)
    return url if url is None or links.is_served() else f"{url}  (after: labkit ui)"


def _headline(folder: RunFolder, status: RunStatus) -> str:
    took_s = (status.ended_at or 0.0) - (status.started_at or status.created_at)
    after = f" after {clock_text(took_s)}" if status.ended_at else ""
    line = glance(folder, status)
    figures = [f"step {line.step}" + (f"/{line.total_steps}" if line.total_steps else "")]
    if line.train_loss is not None:
        figures.append(f"loss {line.train_loss:.4g}")
    if line.val_accuracy is not None:
        figures.append(f"val accuracy {line.val_accuracy:.4f}")
    return f"{status.state}{after}: {', '.join(figures)}"
