"""A study of unlike devices as figures and a table."""

import plotly.graph_objects as go

from labkit.lab.figures import TEMPLATE
from labkit.lab.heterogeneity._study import Result
from labkit.lab.tables import Cell, Table

_PENS = {
    "equal split": ("#999999", "dot"),
    "planned": ("#0072B2", "solid"),
    "planned, throttled": ("#D55E00", "dash"),
    "planned, throttled, rebalanced": ("#009E73", "dashdot"),
}


def speeds(result: Result) -> go.Figure:
    """Samples per second of the equal split and of the plan, beside the sum of the devices' own speeds."""
    names = ["equal split", "planned"]
    rates = [result.points[name].samples_per_s for name in names]
    figure = go.Figure(
        go.Bar(
            y=names, x=rates, orientation="h", marker_color=[_PENS[name][0] for name in names],
            text=[f"{rate:,.0f}" for rate in rates], textposition="inside",
            hovertemplate="%{y}: %{x:,.1f} samples/s<extra></extra>",
        )
    )  # fmt: skip
    limit = result.limit_samples_per_s
    figure.add_vline(
        x=limit, line={"color": "#222222", "dash": "dot"},
        annotation_text=f"all devices' own speeds: {limit:,.0f}", annotation_position="top left",
    )  # fmt: skip
    figure.update_xaxes(range=[0, 1.05 * max(limit, *rates)], title_text="samples/s")
    figure.update_yaxes(autorange="reversed")
    _title(figure, "Throughput", "all workers together", 260)
    return figure


def step_times(result: Result) -> go.Figure:
    """Time of every step while one worker slows down: under the fixed plan and under the rebalanced one."""
    figure = go.Figure()
    for name in ("planned, throttled", "planned, throttled, rebalanced"):
        color, dash = _PENS[name]
        seconds = result.step_s[name][1:]
        figure.add_scatter(
            x=list(range(2, len(seconds) + 2)), y=[1e3 * value for value in seconds], name=name,
            mode="lines", line={"color": color, "dash": dash},
            hovertemplate="step %{x}: %{y:.4g} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.add_vline(
        x=result.throttled_from, line={"color": "#222222", "dash": "dot"},
        annotation_text="one worker slows down", annotation_position="top left",
    )  # fmt: skip
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="ms", rangemode="tozero")
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 0.01, "yref": "container"})
    _title(figure, "Time of a step", "without step 1", 420)
    figure.update_layout(margin={"b": 90})
    return figure


def _title(figure: go.Figure, title: str, subtitle: str, height: int) -> None:
    text = f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>"
    figure.update_layout(template=TEMPLATE, title_text=text, height=height, margin={"t": 80})


def table(result: Result) -> Table:
    """All runs in numbers."""
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            1e3 * result.final_step_s(name),
            point.batch_size / result.final_step_s(name),
            f"{point.batch_size / result.final_step_s(name) / result.limit_samples_per_s:.0%}",
            point.loss,
            point.doubts[0] if point.doubts else "-",
        )
        for name, point in result.points.items()
    ]
    columns = ("run", "step (ms)", "samples/s", "of the limit", "loss at the end", "doubts")
    return Table("Unlike devices, over the last quarter of each run", columns, tuple(rows))
