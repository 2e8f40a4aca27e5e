"""Show figures, tables and runs in a notebook: live for a person, small and still in a batch."""

import json
import re
from typing import Any

import plotly.graph_objects as go
from IPython.display import display

from labkit.lab import figures, tables
from labkit.lab.interactive import is_interactive
from labkit.lab.progress import wait_with_lines
from labkit.lab.series import folder_of, read_series
from labkit.lab.tables import Table
from labkit.launch import Run, attach
from labkit.runfolder import RunFolder

PLOTLY_MIME = "application/vnd.plotly.v1+json"

_TABLE_STYLE = "<style>.labkit-table td, .labkit-table th {text-align: right; padding: 2px 10px}</style>"


def show(thing: Any, table: Table | None = None) -> None:
    """Show a run, a figure, a form or a dashboard under the cell.

    A run is shown by a dashboard that moves while it trains; in a batch by a plain line every few
    seconds until it has ended, and then by its figure. A figure is shown as plotly's JSON alone
    (some kB), never as a widget, which costs 4.8 MB each in the saved notebook.

    Args:
        thing: A run's handle, its folder, its key or `latest`; a plotly figure; a table; or anything that
            knows how to display itself, such as a form.
        table: What the figure shows, in text, to unfold below it.
    """
    if isinstance(thing, go.Figure):
        _show_figure(thing)
    elif isinstance(thing, Table):
        display({"text/html": table_html(thing), "text/plain": str(thing)}, raw=True)  # type: ignore[no-untyped-call]
    elif isinstance(thing, (Run, RunFolder, str)):
        _show_run(thing if isinstance(thing, Run) else attach(folder_of(thing)))
    else:
        display(thing)  # type: ignore[no-untyped-call]
    if table is not None:
        _show_table(table)


def figure_bundle(figure: go.Figure) -> dict[str, Any]:
    """A figure as a notebook output: plotly's JSON, and its title for readers without plotly."""
    content = json.loads(figure.to_json() or "{}")
    content["config"] = {"displaylogo": False, "responsive": True}
    return {PLOTLY_MIME: content, "text/plain": _title_of(content)}


def _title_of(content: dict[str, Any]) -> str:
    layout = content.get("layout", {})
    titled = [layout.get("title", {}), *layout.get("annotations", [])]
    texts = [item.get("text", "").partition("<br>")[0] for item in titled]
    return "[figure] " + "; ".join(re.sub(r"</?b>", "", text) for text in texts if text)


def table_html(table: Table) -> str:
    """A table with room between its columns."""
    return f"{_TABLE_STYLE}<div class='labkit-table'>{table.to_html()}</div>"


def _show_figure(figure: go.Figure) -> None:
    display(figure_bundle(figure), raw=True)  # type: ignore[no-untyped-call]


def _show_table(table: Table) -> None:
    html = (
        f"{_TABLE_STYLE}<details class='labkit-table'><summary>The same as a table</summary>"
        f"{table.to_html()}</details>"
    )
    display({"text/html": html, "text/plain": str(table)}, raw=True)  # type: ignore[no-untyped-call]


def _show_run(run: Run) -> None:
    if is_interactive():
        from labkit.lab.widgets.dashboard import Dashboard

        display(Dashboard(run))  # type: ignore[no-untyped-call]
        return
    status = run.status()
    if not status.state.is_final:
        wait_with_lines(run)
    elif run.is_reused:
        print(f"{run.key} was trained before: its result is shown.")
    series = read_series(run)
    _show_figure(figures.overview(series))
    _show_table(tables.overview(series))
