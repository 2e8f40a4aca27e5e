"""Figures of a grid of runs, and the same in a table.

Nothing is told by colour alone: a strategy has its own dash and marker too, and a bound is dotted black.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.lab.figures import TEMPLATE
from labkit.lab.scaling._point import Point
from labkit.lab.scaling._study import Result, bound_samples_per_s, efficiency
from labkit.lab.tables import Cell, Table

_BLACK = "#222222"
_PENS = {
    "parameter_server": ("#D55E00", "dash", "square"),
    "allreduce": ("#E69F00", "dashdot", "triangle-up"),
    "hierarchical": ("#0072B2", "solid", "circle"),
    "hierarchical_bfloat16": ("#56B4E9", "solid", "circle-open"),
    "local_sgd": ("#009E73", "longdash", "diamond"),
}
_BOUND = "bound: compute or wire, float32, every step"
_LEGEND = {"orientation": "h", "x": 0, "y": 0.01, "yref": "container", "yanchor": "bottom"}


def throughput(result: Result) -> go.Figure:
    """Samples per second by shape, one panel for each link rate, with the bound."""
    figure = _panels(result, "samples/s", "all workers together; {rate}")
    for col, rate in enumerate(result.rates, start=1):
        _add_lines(figure, result, rate, lambda point: point.samples_per_s, "%{y:,.0f} samples/s", col)
        bounds = [bound_samples_per_s(point, result.alone) for point in _of_any(result, rate)]
        _add_bound(figure, result.shapes, bounds, "%{y:,.0f} samples/s", col)
    figure.update_yaxes(rangemode="tozero")
    return _finished(figure)


def efficiencies(result: Result) -> go.Figure:
    """Throughput over that of as many workers that need not talk, one panel for each link rate."""
    figure = _panels(result, "efficiency", "of as many workers that need not talk; {rate}")
    for col, rate in enumerate(result.rates, start=1):
        _add_lines(figure, result, rate, lambda point: efficiency(point, result.alone), "%{y:.0%}", col)
        bounds = [
            bound_samples_per_s(point, result.alone) / (point.num_workers * result.alone.samples_per_s)
            for point in _of_any(result, rate)
        ]
        _add_bound(figure, result.shapes, bounds, "%{y:.0%}", col)
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    return _finished(figure)


def node_costs(result: Result) -> go.Figure:
    """What a node pays: bytes on its link per step, and memory for the model. Neither depends on the rate."""
    rate = result.rates[0]
    is_counted = all(point.sent_bytes for point in result.points if point.num_nodes > 1)
    how = "as counted on its interface" if is_counted else "by formula: loopback is not counted"
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.14,
        subplot_titles=[
            _heading("Bytes on the wire", f"sent per step by the node that sends most, {how}"),
            _heading("Memory per node", "resident, all its workers, beyond interpreter and torch"),
        ],
    )  # fmt: skip
    several = [shape for shape in result.shapes if _of_any(result, rate, shape)[0].num_nodes > 1]
    megabytes: Callable[[Point], float] = lambda point: point.busiest_bytes / 1e6  # noqa: E731
    _add_lines(figure, result, rate, megabytes, "%{y:.2f} MB", 1, several)
    bounds = [_least_bytes(point) / 1e6 for point in _of_any(result, rate) if point.num_nodes > 1]
    _add_bound(
        figure, several, bounds, "%{y:.2f} MB", 1, "least for float32 every step: 2 (N-1)/N of the model"
    )
    mebibytes: Callable[[Point], float] = lambda point: result.memory_bytes(point) / 2**20  # noqa: E731
    _add_lines(figure, result, rate, mebibytes, "%{y:.0f} MiB", 2)
    figure.update_yaxes(title_text="MB per step", **_log_axis(figure), row=1, col=1)
    figure.update_yaxes(title_text="MiB", rangemode="tozero", row=1, col=2)
    return _finished(figure)


def _log_axis(figure: go.Figure) -> dict[str, Any]:
    """A logarithmic axis over all of the left panel, with a tick at 1, 2 and 5 of each power of ten."""
    values = [y for trace in figure.data if trace.xaxis == "x" for y in trace.y if y > 0] or [1.0]
    low, high = math.log10(min(values)), math.log10(max(values))
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return {
        "type": "log",
        "range": [low - 0.2, high + 0.2],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _least_bytes(point: Point) -> float:
    return 2 * (point.num_nodes - 1) / point.num_nodes * 4 * point.num_params


def table(result: Result) -> Table:
    """Every point in numbers."""
    rows: list[tuple[Cell, ...]] = [
        (
            point.strategy,
            point.shape,
            f"{point.link_mbit:g}" if point.link_mbit else None,
            point.samples_per_s,
            f"{efficiency(point, result.alone):.1%}",
            1e3 * point.step_s,
            1e3 * point.wire_s,
            1e3 * point.bound_s,
            point.busiest_bytes / 1e6,
            max(point.expected_bytes) / 1e6,
            result.memory_bytes(point) / 2**20,
            point.accuracy,
            "; ".join(point.doubts) or "-",
        )
        for point in result.points
    ]
    columns = (
        "strategy",
        "shape",
        "Mbit/s",
        "samples/s",
        "efficiency",
        "step (ms)",
        "its wire time (ms)",
        "least wire time (ms)",
        "sent (MB)",
        "by formula (MB)",
        "memory (MiB)",
        "val accuracy",
        "doubts",
    )
    return Table("Strategies, shapes and links", columns, tuple(rows))


# --- marks and layout ------------------------------------------------------------------------------------


def _of_any(result: Result, rate: float | None, shape: str | None = None) -> list[Point]:
    """One point of each shape (or of one), of whatever strategy."""
    shapes = [shape] if shape else result.shapes
    return [result.at(result.strategies[0], each, rate) for each in shapes]


def _add_lines(
    figure: go.Figure,
    result: Result,
    rate: float | None,
    value: Callable[[Point], float],
    text: str,
    col: int,
    shapes: Sequence[str] | None = None,
) -> None:
    wanted = shapes if shapes is not None else result.shapes
    for name in result.strategies:
        color, dash, symbol = _PENS.get(name, (_BLACK, "solid", "x"))
        figure.add_trace(
            go.Scatter(
                x=list(wanted),
                y=[value(result.at(name, shape, rate)) for shape in wanted],
                name=name.replace("_", " "),
                legendgroup=name,
                showlegend=col == 1,
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 2},
                marker={"color": color, "symbol": symbol, "size": 9, "line": {"width": 2, "color": color}},
                hovertemplate=f"{name} on %{{x}}: {text}<extra></extra>",
            ),
            row=1,
            col=col,
        )


def _add_bound(
    figure: go.Figure, shapes: Sequence[str], values: Sequence[float], text: str, col: int, name: str = _BOUND
) -> None:
    figure.add_trace(
        go.Scatter(
            x=list(shapes),
            y=list(values),
            name=name,
            legendgroup="bound",
            showlegend=col == 1,
            mode="lines+markers",
            line={"color": _BLACK, "dash": "dot", "width": 1.5},
            marker={"color": _BLACK, "symbol": "line-ew-open", "size": 12, "line": {"width": 2}},
            hovertemplate=f"bound on %{{x}}: {text}<extra></extra>",
        ),
        row=1,
        col=col,
    )


def _panels(result: Result, y: str, subtitle: str) -> go.Figure:
    names = [f"links of {rate:g} Mbit/s" if rate else "loopback, links not shaped" for rate in result.rates]
    title = y[0].upper() + y[1:] if y != "samples/s" else "Throughput"
    figure = make_subplots(
        rows=1, cols=len(names), shared_yaxes=True, horizontal_spacing=0.05,
        subplot_titles=[_heading(title, subtitle.format(rate=name)) for name in names],
    )  # fmt: skip
    figure.update_yaxes(title_text=y, row=1, col=1)
    return figure


def _heading(title: str, subtitle: str) -> str:
    return f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>"


def _finished(figure: go.Figure) -> go.Figure:
    figure.update_xaxes(title_text="nodes x workers per node", type="category", rangemode="normal")
    figure.update_annotations(font={"size": 15}, align="left", xanchor="left")
    axes: list[Any] = list(figure.select_xaxes())
    for annotation, axis in zip(figure.layout.annotations, axes, strict=False):
        annotation.x = axis.domain[0]
    figure.update_layout(
        template=TEMPLATE,
        height=450,
        margin={"l": 70, "r": 40, "t": 80, "b": 105},
        legend={**_LEGEND, "font": {"size": 13}, "traceorder": "normal"},
    )
    return figure
