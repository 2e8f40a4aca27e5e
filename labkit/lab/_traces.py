"""The marks that figures are made of: lines with their names at the end, stacked bars by part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit.lab.series import PARTS, Line, Series
from labkit.lab.stretches import decimate, speeds, step_bounds, stretch_means, worker_means_ms

MAX_POINTS = 2000
"""Points of one trace at the most; the full data stays in the run folder."""

_NUM_STRETCHES = 30
_BLUE, _VERMILLION, BLACK = "#0072B2", "#D55E00", "#222222"


@dataclass(frozen=True)
class _Pen:
    color: str
    dash: str
    symbol: str


_PENS = {"train": _Pen(_BLUE, "solid", "circle"), "val": _Pen(_VERMILLION, "dash", "diamond")}

_PART_STYLES = {
    "compute": ("computing", "#0072B2", ""),
    "node": ("summing in the node", "#56B4E9", "-"),
    "communicate": ("communicating", "#E69F00", "/"),
    "wait": ("waiting", "#CC79A7", "x"),
    "data": ("loading data", "#009E73", "."),
}


def learning(series: Series, name: str) -> list[Any]:
    """Train and val lines of `loss` or `accuracy`: line, end label and mark of each."""
    lines = {kind: series.line(f"{kind}/{name}") for kind in _PENS}
    is_val_above = (newest(lines["val"]) or 0.0) > (newest(lines["train"]) or 0.0)
    places = {"train": "bottom right", "val": "top right"}
    if not is_val_above:
        places = {"train": "top right", "val": "bottom right"}
    return [
        trace
        for kind, pen in _PENS.items()
        for trace in _line_traces(lines[kind], pen, kind, places[kind], series.step)
    ]


def staleness_bars(series: Series) -> list[Any]:
    """Pushes by their staleness."""
    values = sorted(series.staleness)
    return [
        go.Bar(
            x=values,
            y=[series.staleness[value] for value in values],
            marker={"color": _BLUE},
            hovertemplate="staleness %{x}: %{y} pushes<extra></extra>",
        )
    ]


def speed(series: Series) -> list[Any]:
    """Samples per second, mean over stretches of steps: single steps jump by a factor of ten."""
    bounds = step_bounds(series, _NUM_STRETCHES)
    line = Line()
    for high, rate in zip(bounds[1:], speeds(series, bounds), strict=True):
        if rate is not None:
            line.add(high - 1, rate)
    return _line_traces(line, _PENS["train"], "", "middle right", series.step)


WORKER_PENS = (
    ("#0072B2", "solid", "circle"),
    ("#D55E00", "dash", "square"),
    ("#009E73", "dashdot", "diamond"),
    ("#CC79A7", "dot", "triangle-up"),
    ("#E69F00", "longdash", "cross"),
    ("#56B4E9", "longdashdot", "x"),
)
"""Colour, dash and mark of a worker's line, by rank, over again after the sixth."""


def share_lines(series: Series) -> list[Any]:
    """A stair per worker: its samples of each step, its name at the end."""
    traces = []
    for rank in sorted(series.workers):
        worker, line = series.workers[rank], series.line(f"shares/rank{rank:02d}")
        color, dash, _ = WORKER_PENS[rank % len(WORKER_PENS)]
        steps = [1, *(step + 1 for step in line.steps), max(1, series.step)]
        sizes = [worker.local_batch_size, *line.values]
        traces.append(
            go.Scatter(
                x=steps, y=[*sizes, sizes[-1]], name=worker.label, mode="lines+text",
                text=[""] * len(sizes) + [worker.label], textposition="middle right", cliponaxis=False,
                line={"shape": "hv", "color": color, "dash": dash}, showlegend=False,
                hovertemplate=f"{worker.label}<br>from step %{{x}}: %{{y}} samples<extra></extra>",
            )
        )  # fmt: skip
    return traces


def _line_traces(line: Line, pen: _Pen, name: str, place: str, end: int) -> list[Any]:
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
        _end_label(line, pen, name, place, end),
        _cross(line, name),
    ]


def _end_label(line: Line, pen: _Pen, name: str, place: str, end: int) -> Any:
    value = line.last  # after a gap there is no end to write at; its cross says what happened
    at = [] if value is None else [end]
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
    height = before[-1] if before else (newest(line) or 0.0)
    return go.Scatter(
        x=[] if step is None else [step],
        y=[] if step is None else [height],
        text=[] if step is None else [f"{name} {line.nonfinite[step]} at step {step}"],
        mode="markers+text",
        textposition="bottom right",
        textfont={"color": BLACK, "size": 13},
        marker={"symbol": "x", "size": 12, "color": BLACK},
        cliponaxis=False,
        showlegend=False,
        hoverinfo="text",
    )


def split(series: Series) -> list[Any]:
    """Stacked bars over stretches of steps, one trace for each part."""
    bounds = step_bounds(series, _NUM_STRETCHES)
    pairs = list(zip(bounds, bounds[1:], strict=False))
    heights = {part: stretch_means(series.line(f"perf/{part}_ms"), bounds) for part in PARTS}
    return [
        go.Bar(
            x=[(low + high - 1) / 2 for low, high in pairs],
            width=[(high - low) * 0.9 for low, high in pairs],
            y=heights[part],
            text=[f"steps {low}-{high - 1}" if high - low > 1 else f"step {low}" for low, high in pairs],
            textposition="none",
            hovertemplate=f"%{{text}}: {_PART_STYLES[part][0]} %{{y:.2f}} ms<extra></extra>",
            **part_style(part, has_legend=any(heights[part])),
        )
        for part in PARTS
    ]


def worker_bars(series: Series, has_legend: bool = True) -> list[Any]:
    """Stacked horizontal bars, one for each worker, one trace for each part."""
    rows = [series.workers[rank] for rank in sorted(series.workers)]
    means = [worker_means_ms(worker) for worker in rows]
    return [
        go.Bar(
            orientation="h",
            y=[worker.label for worker in rows],
            x=[mean[part] for mean in means],
            hovertemplate=f"%{{y}}: {_PART_STYLES[part][0]} %{{x:.2f}} ms<extra></extra>",
            **part_style(part, has_legend=has_legend and any(mean[part] for mean in means)),
        )
        for part in PARTS
    ]


def part_style(part: str, has_legend: bool) -> dict[str, Any]:
    """Name, colour and pattern of a part; one that takes no time needs no legend."""
    name, color, pattern = _PART_STYLES[part]
    return {
        "name": name,
        "legendgroup": part,
        "showlegend": has_legend,
        "marker": {
            "color": color,
            "pattern": {"shape": pattern, "size": 6, "solidity": 0.25, "fgcolor": "white", "bgcolor": color},
            "line": {"width": 0},
        },
    }


def newest(line: Line) -> float | None:
    """The newest value that is finite."""
    return next((line.values[-1 - back] for back in _finite_from_end(line)), None)


def _finite_from_end(line: Line) -> Iterator[int]:
    """How far from the end the finite values stand, the last first."""
    return (back for back, value in enumerate(reversed(line.values)) if value is not None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
