"""What stays of a run for a reader without a kernel: the verdict, and pages that need no network."""

import copy
import html
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go

from labkit.config import to_yaml
from labkit.lab import figures, tables
from labkit.lab.command import as_command
from labkit.lab.failure import failure_text
from labkit.lab.series import folder_of, read_series
from labkit.lab.show import PLOTLY_MIME
from labkit.runfolder import RunFolder, RunState, write_atomically

_STYLE = """
body {font: 15px/1.5 Verdana, "DejaVu Sans", sans-serif; color: #222;
      max-width: 1000px; margin: 2em auto; padding: 0 1em}
table {border-collapse: collapse; margin: 0.5em 0} caption {text-align: left; font-weight: bold}
th, td {text-align: right; padding: 2px 12px; border-bottom: 1px solid #ddd}
pre {background: #f5f5f5; padding: 0.8em; white-space: pre-wrap; overflow-wrap: anywhere}
.verdict {border-left: 5px solid #0072B2; padding: 0.3em 1em; font-size: 17px}
.failed {border-color: #D55E00}
@media print {figure {break-inside: avoid}}
"""


@dataclass(frozen=True)
class Verdict:
    """What an experiment's author concluded from a run.

    Attributes:
        text: One sentence.
        is_met: The answer to the notebook's question is yes.
        recorded_at: Seconds since 1970; None when it was not recorded because the run goes on.
    """

    text: str
    is_met: bool
    recorded_at: float | None

    def __str__(self) -> str:
        if self.recorded_at is None:
            return "No verdict yet: the run goes on. Run this cell again when it has ended."
        return f"Verdict: {'yes' if self.is_met else 'no'}. {self.text}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        kind = "verdict" if self.is_met or self.recorded_at is None else "verdict failed"
        color = "#0072B2" if kind == "verdict" else "#D55E00"
        return (
            f'<p class="{kind}" style="border-left:5px solid {color};padding:4px 12px;font-size:15px">'
            f"{html.escape(str(self))}</p>"
        )


def record_verdict(run: Any, text: str, is_met: bool) -> Verdict:
    """Write what you conclude from a run beside its `result.json`, as `verdict.json`.

    Args:
        run: A run's handle, its folder, its key, the beginning of its key, or `latest`.
        text: One sentence.
        is_met: The answer to the notebook's question is yes.

    Returns:
        The verdict, to show as the cell's value. While the run goes on nothing is recorded.
    """
    folder = folder_of(run)
    if not folder.read_status().state.is_final:
        return Verdict(text, is_met, None)
    verdict = Verdict(text, bool(is_met), time.time())
    write_atomically(folder.verdict_file, json.dumps(asdict(verdict), indent=1))
    return verdict


def read_verdict(run: Any) -> Verdict | None:
    """The recorded verdict, None when there is none."""
    folder = folder_of(run)
    content = folder.read_json(folder.verdict_file)
    return Verdict(**content) if content else None


def write_report(run: Any) -> Path:
    """Write `report.html` into the run folder: one file (about 5 MB), readable without a network.

    It holds state, verdict, why the run failed, all figures with their tables, the configuration
    and the command that trains it again.
    """
    folder = folder_of(run)
    series = read_series(folder)
    parts = [_head(folder), tables.overview(series).to_html()]
    asynchronous = {"staleness": tables.staleness} if series.staleness else {}
    for name, table in (tables.ALL | asynchronous).items():
        figure = getattr(figures, name)(series)
        parts.append(f"<figure>{_draw(figure, is_first=name == 'loss')}{_unfold(table(series))}</figure>")
    config = folder.read_config()
    parts.append(f"<h2>Again</h2><pre>{html.escape(as_command(config))}</pre>")
    parts.append(f"<h2>Configuration</h2><pre>{html.escape(to_yaml(config))}</pre>")
    write_atomically(folder.report_file, _page(f"{folder.path.parent.name}/{folder.key}", "".join(parts)))
    return Path(folder.report_file)


def _head(folder: RunFolder) -> str:
    status, verdict = folder.read_status(), read_verdict(folder)
    title = f"{html.escape(folder.path.parent.name)} {folder.key}"
    parts = [f"<h1>{title}</h1><p>State: <b>{status.state}</b></p>"]
    if verdict is not None:
        parts.append(verdict._repr_html_())
    if status.state is not RunState.FINISHED and status.error is not None:
        parts.append(f'<pre role="alert">{html.escape(failure_text(folder, status))}</pre>')
    return "".join(parts)


def _unfold(table: tables.Table) -> str:
    return f"<details><summary>The same as a table</summary>{table.to_html()}</details>"


def _draw(figure: go.Figure, is_first: bool) -> str:
    """A figure as HTML; the first one on a page brings plotly.js along."""
    return str(figure.to_html(full_html=False, include_plotlyjs=is_first, config={"displaylogo": False}))


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )


def write_notebook_html(notebook: Path, page: Path | None = None) -> Path:
    """Write an executed notebook as one HTML file with its figures, which nbconvert leaves out.

    Args:
        notebook: The executed notebook.
        page: Where to write; default: beside the notebook, with `.html`.

    Returns:
        Where it was written.
    """
    from nbconvert import HTMLExporter  # slow to import, and only needed here

    content = _with_drawn_figures(nbformat.read(notebook, as_version=4))
    exporter = HTMLExporter()  # type: ignore[no-untyped-call]
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""  # nothing from a network
    body, _ = exporter.from_notebook_node(content)
    page = page or notebook.with_suffix(".html")
    write_atomically(page, body)
    return page


def _with_drawn_figures(notebook: Any) -> Any:
    notebook = copy.deepcopy(notebook)
    is_first = True
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            bundle = output.get("data", {})
            if PLOTLY_MIME in bundle:
                content = bundle.pop(PLOTLY_MIME)
                figure = go.Figure({"data": content["data"], "layout": content["layout"]})
                bundle["text/html"] = _draw(figure, is_first)
                is_first = False
    return notebook
