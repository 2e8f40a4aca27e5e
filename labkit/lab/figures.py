"""Figures of a run: pure functions of its series. `labkit.lab.tables` says the same in text.

A line has its own colour, dash and marker, and its name stands at its end; a part of a step has
its own colour and pattern. So nothing is told by colour alone. Colours: Okabe and Ito, Color
Universal Design, 2008, https://jfly.uni-koeln.de/color/.
"""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.lab import _traces
from labkit.lab.series import Series
from labkit.lab.stretches import busy_ms, step_bounds

_AXIS = {
    "showline": True,
    "linecolor": "#888888",
    "gridcolor": "#e5e5e5",
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": "#888888",
    "automargin": True,
    "tickfont": {"size": 12},
    "title": {"standoff": 8, "font": {"size": 13}},
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "Verdana, DejaVu Sans, sans-serif", "size": 13, "color": _traces.BLACK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 15}},
        "xaxis": {**_AXIS, "rangemode": "nonnegative"},
        "yaxis": _AXIS,
        "hoverlabel": {"font": {"size": 13}},
    }
)
"""Light, few lines, text of at least 12 px. plotly's own template would cost 6 kB in every figure."""


# --- figures -----------------------------------------------------------------------------------


def loss(series: Series) -> go.Figure:
    """Training and validation loss by step."""
    figure = _figure("Loss", f"{_LEARNING}; {_extent(series)}")
    _add(figure, _traces.learning(series, "loss"))
    return _with_axes(figure, "step", "loss")


def accuracy(series: Series) -> go.Figure:
    """Training and validation accuracy by step."""
    figure = _figure("Accuracy", f"{_LEARNING}; {_extent(series)}")
    _add(figure, _traces.learning(series, "accuracy"))
    return _with_axes(figure, "step", "accuracy")


def throughput(series: Series) -> go.Figure:
    """Samples per second of all workers together, by step."""
    figure = _figure("Throughput", f"{_SPEED}; {_extent(series)}")
    _add(figure, _traces.speed(series))
    _mark_shares(figure, series)
    return _with_axes(figure, "step", "samples/s", is_from_zero=True)


def shares(series: Series) -> go.Figure:
    """Samples of each worker per step, as the rebalancer changed them."""
    figure = _figure("Shares of a batch", f"samples of each worker per step; {_extent(series)}")
    _add(figure, _traces.share_lines(series))
    return _with_axes(figure, "step", "samples", is_from_zero=True)


def staleness(series: Series) -> go.Figure:
    """How stale the pushes to the parameter servers were: updates between pull and push."""
    figure = _figure("Staleness of pushes", f"updates between pull and push; {_extent(series)}")
    _add(figure, _traces.staleness_bars(series))
    figure.update_xaxes(dtick=1 if len(series.staleness) <= 20 else None)
    return _with_axes(figure, "staleness", "pushes", is_from_zero=True)


def step_time(series: Series) -> go.Figure:
    """What a step's time is made of, by step: mean over workers, stacked."""
    figure = _figure("Time of a step", f"mean over workers, without step 1; {_extent(series)}")
    _add(figure, _traces.split(series))
    _mark_shares(figure, series)
    figure.update_layout(barmode="stack", bargap=0, legend=_LEGEND, margin={"b": 95})
    return _with_axes(figure, "step", "ms")


def workers(series: Series) -> go.Figure:
    """What each worker spent its time on: mean time of a step, by part."""
    figure = _figure("Time of a step, by worker", f"mean over steps, without step 1; {_extent(series)}")
    _add(figure, _traces.worker_bars(series))
    figure.update_layout(barmode="stack", legend=_LEGEND, margin={"b": 95}, height=_height_px(series))
    figure.update_yaxes(autorange="reversed")
    return _with_axes(figure, "ms per step", "worker · node")


def worker_heatmap(series: Series) -> go.Figure:
    """Time each worker was busy (computing, loading data), by step: a straggler is a bright row."""
    figure = _figure("Busy time, by worker", f"computing and loading data, without step 1; {_extent(series)}")
    bounds = step_bounds(series, 100)
    _add(
        figure,
        [
            go.Heatmap(
                x=bounds,
                y=[series.workers[rank].label for rank in sorted(series.workers)],
                z=[busy_ms(series.workers[rank], bounds) for rank in sorted(series.workers)],
                colorscale="Cividis",
                colorbar={"title": {"text": "ms"}, "tickfont": {"size": 12}},
                hovertemplate="%{y}<br>from step %{x}: %{z:.1f} ms<extra></extra>",
                hoverongaps=False,
            )
        ],
    )
    figure.update_layout(height=_height_px(series))
    figure.update_yaxes(autorange="reversed")
    return _with_axes(figure, "step", "worker · node")


def overview(series: Series) -> go.Figure:
    """Does it learn, how fast, and on what is the time spent: four panels.

    Always the same traces in the same order, so that a live view can replace their data one by one.
    """
    panels = [
        _heading("Loss", _LEARNING),
        _heading("Throughput", _SPEED),
        _heading("Time of a step", "mean over workers, no step 1"),
        _heading("Time by worker · node", "mean over steps, no step 1"),
    ]
    figure = make_subplots(
        rows=2, cols=2, subplot_titles=panels, horizontal_spacing=0.2, vertical_spacing=0.22
    )
    _add(figure, _traces.learning(series, "loss"), row=1, col=1)
    _add(figure, _traces.speed(series), row=1, col=2)
    _add(figure, _traces.split(series), row=2, col=1)
    _add(figure, _traces.worker_bars(series, has_legend=False), row=2, col=2)
    _style_overview(figure)
    _mark_shares(figure, series, row=1, col=2)
    return figure


def _style_overview(figure: go.Figure) -> None:
    _with_axes(figure, "step", "loss", row=1, col=1)
    _with_axes(figure, "step", "samples/s", is_from_zero=True, row=1, col=2)
    _with_axes(figure, "step", "ms", row=2, col=1)
    _with_axes(figure, "ms per step", "", row=2, col=2)  # its heading names the workers
    figure.update_yaxes(autorange="reversed", row=2, col=2)
    figure.update_annotations(font={"size": 15}, align="left", xanchor="left")
    for annotation, axis in zip(figure.layout.annotations, ("", "2", "3", "4"), strict=True):
        annotation.x = figure.layout[f"xaxis{axis}"].domain[0]
    figure.update_layout(
        template=TEMPLATE,
        height=700,
        barmode="stack",
        bargap=0.15,
        margin={"l": 60, "r": 80, "t": 70, "b": 95},
        legend=_LEGEND,
        uirevision="keep",
    )


# --- layout --------------------------------------------------------------------------------------

_SPEED = "all workers, mean over steps"
_LEARNING = "train: each step, val: held out"
_LEGEND = {
    "orientation": "h",
    "x": 0,
    "y": 0.01,
    "yref": "container",
    "yanchor": "bottom",
    "font": {"size": 13},
    "traceorder": "normal",
}


def _extent(series: Series) -> str:
    """How much of the run is shown."""
    count = len(series.workers)
    who = f"{count} worker{'s' if count != 1 else ''}"
    if not series.step:
        return "no step is done yet"
    if series.total_steps and series.step < series.total_steps:
        return f"{who}, step {series.step} of {series.total_steps} so far"
    return f"{who}, all {series.step} steps"


def _heading(title: str, subtitle: str) -> str:
    return f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>"


def _mark_shares(figure: go.Figure, series: Series, row: int | None = None, col: int | None = None) -> None:
    """A dotted line at every change of shares; the first one is named."""
    for index, step in enumerate(series.rebalanced_at):
        text = "shares changed" if index == 0 else ""
        figure.add_vline(
            x=step + 0.5, line={"color": "#222222", "dash": "dot", "width": 1}, row=row, col=col,
            annotation_text=text, annotation_font_size=12, annotation_position="bottom right",
        )  # fmt: skip


def _height_px(series: Series) -> int:
    return 230 + 34 * max(1, len(series.workers))


def _figure(title: str, subtitle: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template=TEMPLATE,
        title={"text": f"<b>{title}</b>", "subtitle": {"text": subtitle, "font": {"size": 13}}},
        height=420,
        margin={"l": 70, "r": 100, "t": 80, "b": 60},
    )
    return figure


def _add(figure: go.Figure, traces: list[Any], row: int | None = None, col: int | None = None) -> None:
    for trace in traces:
        figure.add_trace(trace, row=row, col=col)


def _with_axes(
    figure: go.Figure,
    x: str,
    y: str,
    *,
    is_from_zero: bool = False,
    row: int | None = None,
    col: int | None = None,
) -> go.Figure:
    figure.update_xaxes(title_text=x, row=row, col=col)
    figure.update_yaxes(title_text=y, row=row, col=col)
    if is_from_zero:
        figure.update_yaxes(rangemode="tozero", row=row, col=col)
    return figure
