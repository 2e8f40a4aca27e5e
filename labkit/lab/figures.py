"""Figures of a run: pure functions of its series. `labkit.lab.tables` says the same in text.

A line has its own colour, dash and marker, and its name stands at its end; a part of a step has
its own colour and pattern. So nothing is told by colour alone. Colours: Okabe and Ito, Color
Universal Design, 2008, https://jfly.uni-koeln.de/color/.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.lab.series import PARTS, Line, Series, decimate, step_bounds, stretch_means, worker_means_ms

MAX_POINTS = 2000
"""Points of one trace at the most; the full data stays in the run folder."""

_NUM_STRETCHES = 30
_BLUE, _VERMILLION, _BLACK = "#0072B2", "#D55E00", "#222222"


@dataclass(frozen=True)
class _Pen:
    color: str
    dash: str
    symbol: str


_PENS = {"train": _Pen(_BLUE, "solid", "circle"), "val": _Pen(_VERMILLION, "dash", "diamond")}

_PART_STYLES = {
    "compute": ("computing", "#0072B2", ""),
    "communicate": ("communicating", "#E69F00", "/"),
    "wait": ("waiting", "#CC79A7", "x"),
    "data": ("loading data", "#009E73", "."),
}

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
        "font": {"family": "Verdana, DejaVu Sans, sans-serif", "size": 13, "color": _BLACK},
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
    _add(figure, _learning(series, "loss"))
    return _with_axes(figure, "step", "loss")


def accuracy(series: Series) -> go.Figure:
    """Training and validation accuracy by step."""
    figure = _figure("Accuracy", f"{_LEARNING}; {_extent(series)}")
    _add(figure, _learning(series, "accuracy"))
    return _with_axes(figure, "step", "accuracy")


def throughput(series: Series) -> go.Figure:
    """Samples per second of all workers together, by step."""
    figure = _figure("Throughput", f"all workers together; {_extent(series)}")
    _add(figure, _speed(series))
    return _with_axes(figure, "step", "samples/s", is_from_zero=True)


def step_time(series: Series) -> go.Figure:
    """What a step's time is made of, by step: mean over workers, stacked."""
    figure = _figure("Time of a step", f"mean over workers, without step 1; {_extent(series)}")
    _add(figure, _split(series))
    figure.update_layout(barmode="stack", bargap=0, legend=_LEGEND, margin={"b": 95})
    return _with_axes(figure, "step", "ms")


def workers(series: Series) -> go.Figure:
    """What each worker spent its time on: mean time of a step, by part."""
    figure = _figure("Time of a step, by worker", f"mean over steps, without step 1; {_extent(series)}")
    _add(figure, _worker_bars(series))
    figure.update_layout(barmode="stack", legend=_LEGEND, margin={"b": 95}, height=_height_px(series))
    figure.update_yaxes(autorange="reversed")
    return _with_axes(figure, "ms per step", "")


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
                z=[series.workers[rank].busy_ms(bounds) for rank in sorted(series.workers)],
                colorscale="Cividis",
                colorbar={"title": {"text": "ms"}, "tickfont": {"size": 12}},
                hovertemplate="%{y}<br>from step %{x}: %{z:.1f} ms<extra></extra>",
                hoverongaps=False,
            )
        ],
    )
    figure.update_layout(height=_height_px(series))
    figure.update_yaxes(autorange="reversed")
    return _with_axes(figure, "step", "")


def overview(series: Series) -> go.Figure:
    """Does it learn, how fast, and on what is the time spent: four panels.

    Always the same traces in the same order, so that a live view can replace their data one by one.
    """
    panels = [
        _heading("Loss", _LEARNING),
        _heading("Throughput", "all workers together"),
        _heading("Time of a step", "mean over workers, without step 1"),
        _heading("Time of a step, by worker", "mean over steps, without step 1"),
    ]
    figure = make_subplots(
        rows=2, cols=2, subplot_titles=panels, horizontal_spacing=0.16, vertical_spacing=0.22
    )
    _add(figure, _learning(series, "loss"), row=1, col=1)
    _add(figure, _speed(series), row=1, col=2)
    _add(figure, _split(series), row=2, col=1)
    _add(figure, _worker_bars(series, has_legend=False), row=2, col=2)
    _style_overview(figure)
    return figure


def _style_overview(figure: go.Figure) -> None:
    _with_axes(figure, "step", "loss", row=1, col=1)
    _with_axes(figure, "step", "samples/s", is_from_zero=True, row=1, col=2)
    _with_axes(figure, "step", "ms", row=2, col=1)
    _with_axes(figure, "ms per step", "", row=2, col=2)
    figure.update_yaxes(autorange="reversed", row=2, col=2)
    figure.update_annotations(font={"size": 15}, align="left", xanchor="left")
    for annotation, axis in zip(figure.layout.annotations, ("", "2", "3", "4"), strict=True):
        annotation.x = figure.layout[f"xaxis{axis}"].domain[0]
    figure.update_layout(
        template=TEMPLATE,
        height=700,
        barmode="stack",
        bargap=0.15,
        margin={"l": 70, "r": 90, "t": 70, "b": 95},
        legend=_LEGEND,
        uirevision="keep",
    )


# --- traces --------------------------------------------------------------------------------------


def _learning(series: Series, name: str) -> list[Any]:
    """Train and val lines of `loss` or `accuracy`: line, end label and mark of each."""
    lines = {kind: series.line(f"{kind}/{name}") for kind in _PENS}
    is_val_above = (_newest(lines["val"]) or 0.0) > (_newest(lines["train"]) or 0.0)
    places = {"train": "bottom right", "val": "top right"}
    if not is_val_above:
        places = {"train": "top right", "val": "bottom right"}
    return [
        trace for kind, pen in _PENS.items() for trace in _line_traces(lines[kind], pen, kind, places[kind])
    ]


def _speed(series: Series) -> list[Any]:
    return _line_traces(series.line("perf/samples_per_s"), _PENS["train"], "", "middle right")


def _line_traces(line: Line, pen: _Pen, name: str, place: str) -> list[Any]:
    """A line; its name and newest value at its end; a cross where it first was not finite."""
    steps, values = decimate(line, MAX_POINTS)
    return [
        go.Scatter(
            x=steps,
            y=values,
            name=name,
            mode="lines+markers",
            line={"color": pen.color, "dash": pen.dash, "width": 2},
            marker={"color": pen.color, "symbol": pen.symbol, "size": 7, "maxdisplayed": 15},
            showlegend=False,
            hovertemplate=f"step %{{x}}: {name} %{{y:.4g}}<extra></extra>",
        ),
        _end_label(line, pen, name, place),
        _cross(line, name),
    ]


def _end_label(line: Line, pen: _Pen, name: str, place: str) -> Any:
    value = _newest(line)
    at = [] if value is None else [line.steps[-1 - next(_finite_from_end(line))]]
    return go.Scatter(
        x=at,
        y=[value] if at else [],
        text=[f"  {name} {_number(value or 0.0)}"] if at else [],
        mode="text",
        textposition=place,
        textfont={"color": pen.color, "size": 13},
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )


def _cross(line: Line, name: str) -> Any:
    step = line.first_nonfinite
    before = [v for s, v in zip(line.steps, line.values, strict=True) if v is not None and s < (step or 0)]
    height = before[-1] if before else (_newest(line) or 0.0)
    return go.Scatter(
        x=[] if step is None else [step],
        y=[] if step is None else [height],
        text=[] if step is None else [f"{name} {line.nonfinite[step]} at step {step}"],
        mode="markers+text",
        textposition="bottom right",
        textfont={"color": _BLACK, "size": 13},
        marker={"symbol": "x", "size": 12, "color": _BLACK},
        cliponaxis=False,
        showlegend=False,
        hoverinfo="text",
    )


def _split(series: Series) -> list[Any]:
    """Stacked bars over stretches of steps, one trace for each part."""
    bounds = step_bounds(series, _NUM_STRETCHES)
    pairs = list(zip(bounds, bounds[1:], strict=False))
    return [
        go.Bar(
            x=[(low + high - 1) / 2 for low, high in pairs],
            width=[(high - low) * 0.9 for low, high in pairs],
            y=stretch_means(series.line(f"perf/{part}_ms"), bounds),
            text=[f"steps {low}-{high - 1}" if high - low > 1 else f"step {low}" for low, high in pairs],
            textposition="none",
            hovertemplate=f"%{{text}}: {_PART_STYLES[part][0]} %{{y:.2f}} ms<extra></extra>",
            **_part_style(part),
        )
        for part in PARTS
    ]


def _worker_bars(series: Series, has_legend: bool = True) -> list[Any]:
    """Stacked horizontal bars, one for each worker, one trace for each part."""
    rows = [series.workers[rank] for rank in sorted(series.workers)]
    means = [worker_means_ms(worker) for worker in rows]
    return [
        go.Bar(
            orientation="h",
            y=[worker.label for worker in rows],
            x=[mean[part] for mean in means],
            hovertemplate=f"%{{y}}: {_PART_STYLES[part][0]} %{{x:.2f}} ms<extra></extra>",
            **{**_part_style(part), "showlegend": has_legend},
        )
        for part in PARTS
    ]


def _part_style(part: str) -> dict[str, Any]:
    name, color, pattern = _PART_STYLES[part]
    return {
        "name": name,
        "legendgroup": part,
        "marker": {
            "color": color,
            "pattern": {"shape": pattern, "size": 6, "solidity": 0.25, "fgcolor": "white", "bgcolor": color},
            "line": {"width": 0},
        },
    }


# --- layout --------------------------------------------------------------------------------------

_LEARNING = "train: batch of each step; val: held-out samples"
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


def _newest(line: Line) -> float | None:
    """The newest value that is finite."""
    return next((line.values[-1 - back] for back in _finite_from_end(line)), None)


def _finite_from_end(line: Line) -> Iterator[int]:
    """How far from the end the finite values stand, the last first."""
    return (back for back, value in enumerate(reversed(line.values)) if value is not None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _heading(title: str, subtitle: str) -> str:
    return f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>"


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
