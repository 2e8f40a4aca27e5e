"""A study of unlike devices as figures and a table."""

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.lab.figures import TEMPLATE
from labkit.lab.heterogeneity._study import Result
from labkit.lab.tables import Cell, Table
from labkit.runfolder import RunFolder, find_run

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


_COMPARED_PENS = {
    "allreduce, equal split": ("#999999", "dot", "square"),
    "hierarchical, planned": ("#0072B2", "solid", "circle"),
    "hybrid, planned": ("#D55E00", "dash", "diamond"),
}


def accuracies(keys: Mapping[str, str]) -> go.Figure:
    """Accuracy on the held-out samples against samples, and against seconds since the first step."""
    panels = ["<b>After as many samples</b>", "<b>After as much time</b>"]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.06, subplot_titles=panels)
    for name, key in keys.items():
        color, dash, symbol = _COMPARED_PENS.get(name, ("#222222", "solid", "x"))
        for col, points in enumerate(accuracy_points(find_run(key)), start=1):
            unit = "samples" if col == 1 else "s"
            figure.add_scatter(
                x=[x for x, _ in points], y=[y for _, y in points], name=name, legendgroup=name,
                showlegend=col == 1, mode="lines+markers", line={"color": color, "dash": dash},
                marker={"symbol": symbol}, row=1, col=col,
                hovertemplate=f"{name}<br>%{{x:,.4g}} {unit}: %{{y:.3f}}<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(title_text="samples", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title_text="seconds", rangemode="tozero", row=1, col=2)
    figure.update_yaxes(title_text="accuracy", row=1, col=1)
    legend = {"orientation": "h", "x": 0, "y": 0.01, "yref": "container", "yanchor": "bottom"}
    figure.update_layout(template=TEMPLATE, height=440, legend=legend, margin={"t": 60, "b": 100})
    return figure


def accuracy_points(folder: RunFolder) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Accuracy by samples, and by seconds since the first step began."""
    metrics = folder.history(0, ("metrics",))
    began_at = metrics[0]["t"] - metrics[0]["values"]["perf/step_ms"] / 1e3
    evals = [
        event for event in folder.history(0, ("eval",)) if event["values"].get("val/accuracy") is not None
    ]
    values = [event["values"]["val/accuracy"] for event in evals]
    samples = [(float(event["samples"]), value) for event, value in zip(evals, values, strict=True)]
    seconds = [(event["t"] - began_at, value) for event, value in zip(evals, values, strict=True)]
    return samples, seconds


def accuracy_table(keys: Mapping[str, str]) -> Table:
    """Accuracy at the end, and seconds to get within one point of the best run's."""
    points = {name: accuracy_points(find_run(key))[1] for name, key in keys.items()}
    best = max((value for own in points.values() for _, value in own), default=0.0)
    rows: list[tuple[Cell, ...]] = []
    for name, own in points.items():
        reached = next((seconds for seconds, value in own if value >= best - 0.01), None)
        rows.append((name, own[-1][1] if own else None, own[-1][0] if own else None, reached))
    columns = ("run", "accuracy at the end", "seconds", f"seconds to {best - 0.01:.3f}")
    return Table("Accuracy", columns, tuple(rows))


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
