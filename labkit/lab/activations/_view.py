"""A study of hybrid memory as figures and tables."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.config import format_bytes
from labkit.lab.activations._recorded import MemoryRun
from labkit.lab.activations._study import Result
from labkit.lab.figures import TEMPLATE
from labkit.lab.tables import Cell, Table
from labkit.memory.profile import Decision

_MIB = 2**20
_PREDICTED, _MEASURED, _LIMIT = "#0072B2", "#D55E00", "#222222"
_WAYS = {"out": "#56B4E9", "in": "#E69F00"}
_LEGEND = {"orientation": "h", "x": 0, "y": 0.01, "yref": "container", "yanchor": "bottom"}


def _title(title: str, under: str) -> str:
    return f"<b>{title}</b><br><span style='font-size:12px'>{under}</span>"


def timeline(run: MemoryRun) -> go.Figure:
    """Bytes of saved blocks on the device over one step: predicted beside measured, and the budget."""
    figure = go.Figure()
    series = (
        ("predicted", run.predicted.live, _PREDICTED, "solid"),
        ("measured", run.live, _MEASURED, "dot"),
    )
    for name, points, color, dash in series:
        figure.add_scatter(
            x=[1e3 * at for at, _ in points], y=[size / _MIB for _, size in points], name=name,
            mode="lines", line={"color": color, "dash": dash, "shape": "hv"},
            hovertemplate=f"{name}, %{{x:.1f}} ms: %{{y:.1f}} MiB<extra></extra>",
        )  # fmt: skip
    if run.recorded.budget_bytes is not None and run.recorded.budget_bytes < 2**48:
        figure.add_hline(
            y=run.recorded.budget_bytes / _MIB, line={"color": _LIMIT, "dash": "dash"},
            annotation_text="budget", annotation_position="top left",
        )  # fmt: skip
    figure.add_vline(x=1e3 * run.recorded.profile.forward_s, line={"color": "#999999", "width": 1})
    figure.update_xaxes(title_text="ms since the step began; grey line: backward pass begins")
    figure.update_yaxes(title_text="MiB of blocks on the device", rangemode="tozero")
    figure.update_layout(
        template=TEMPLATE, height=400, legend=_LEGEND, margin={"t": 80, "b": 110},
        title_text=_title("Live bytes", "what the forward pass saves and the backward pass still needs"),
    )  # fmt: skip
    return figure


def transfers(run: MemoryRun) -> go.Figure:
    """Copies out and back over one step, predicted above measured, one row for each direction."""
    figure = go.Figure()
    rows: list[tuple[str, list[tuple[str, int, float, float]]]] = [
        ("predicted", [(t.direction, t.size_bytes, t.begin_s, t.end_s) for t in run.predicted.transfers]),
        ("measured", list(run.copies)),
    ]
    for kind, copies in rows:
        for way in ("out", "in"):
            mine = [copy for copy in copies if copy[0] == way]
            figure.add_bar(
                y=[f"{way}, {kind}"] * max(1, len(mine)),
                base=[1e3 * begin for _, _, begin, _ in mine] or [0],
                x=[1e3 * (end - begin) for _, _, begin, end in mine] or [0],
                orientation="h", name=way, legendgroup=way, showlegend=kind == "predicted",
                marker={"color": _WAYS[way], "line": {"color": "white", "width": 1}},
                text=[format_bytes(size) for _, size, _, _ in mine] or [""], textposition="none",
                hovertemplate=f"{way}, {kind}: %{{text}} from %{{base:.1f}} ms, %{{x:.1f}} ms<extra></extra>",
            )  # fmt: skip
    figure.add_vline(x=1e3 * run.recorded.profile.forward_s, line={"color": "#999999", "width": 1})
    figure.update_xaxes(title_text="ms since the step began", range=[0, 1e3 * run.predicted.step_s * 1.03])
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        template=TEMPLATE, height=340, barmode="overlay", legend=_LEGEND, margin={"t": 80, "b": 110},
        title_text=_title("Copies over the link", "each bar is a block on its way"),
    )  # fmt: skip
    return figure


def trade_off(result: Result) -> go.Figure:
    """Budget against speed, predicted and measured, and against the largest batch."""
    panels = ["<b>Speed</b>", "<b>Largest batch</b>"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=panels)
    x = [100 * budget for budget in result.runs]
    plain = result.plain
    predicted = [
        100 * plain.report["predicted_step_s"] / run.report["predicted_step_s"]
        if run.report["predicted_step_s"]
        else None
        for run in result.runs.values()
    ]
    measured = [100 * result.kept(budget) for budget in result.runs]
    for name, y, color, symbol in (
        ("predicted", predicted, _PREDICTED, "circle"),
        ("measured", measured, _MEASURED, "diamond"),
    ):
        figure.add_scatter(
            x=x, y=y, name=name, mode="lines+markers", line={"color": color},
            marker={"symbol": symbol, "size": 9}, row=1, col=1,
            hovertemplate=f"{name}, budget %{{x:.0f}} %: %{{y:.1f}} % of the speed<extra></extra>",
        )  # fmt: skip
    for name, batches, color, symbol in (
        ("without", [found.plain for found in result.batches.values()], "#999999", "square"),
        ("with hybrid memory", [found.hybrid for found in result.batches.values()], "#009E73", "circle"),
    ):
        figure.add_scatter(
            x=[100 * budget for budget in result.batches], y=batches, name=name, mode="lines+markers",
            line={"color": color}, marker={"symbol": symbol, "size": 9}, row=1, col=2,
            hovertemplate=f"{name}, budget %{{x:.0f}} %: %{{y:,}} samples<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="budget (% of what all blocks take)", autorange="reversed")
    figure.update_yaxes(title_text="% of the speed without limit", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="samples", rangemode="tozero", row=1, col=2)
    figure.update_layout(template=TEMPLATE, height=420, legend=_LEGEND, margin={"t": 60, "b": 110})
    return figure


def contention(result: Result) -> go.Figure:
    """A step against the number of devices on one link."""
    figure = go.Figure()
    x = [str(one.num_devices) for one in result.contention]
    for name, y, color, dash, symbol in (
        ("planned with the share", [c.predicted_s for c in result.contention], _PREDICTED, "solid", "circle"),
        (
            "planned as if alone",
            [c.predicted_alone_s for c in result.contention],
            "#CC79A7",
            "solid",
            "x",
        ),
        ("floor", [c.floor_s for c in result.contention], _LIMIT, "dash", "line-ew-open"),
        ("measured", [c.measured_s for c in result.contention], _MEASURED, "dot", "diamond"),
    ):
        figure.add_scatter(
            x=x, y=[None if value is None else 1e3 * value for value in y], name=name,
            mode="lines+markers", line={"color": color, "dash": dash}, marker={"symbol": symbol, "size": 9},
            hovertemplate=f"{name}, %{{x}} devices: %{{y:.0f}} ms<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="devices on one link", type="category")
    figure.update_yaxes(title_text="ms a step", rangemode="tozero")
    under = "floor: the bytes that move over what the link brings through, or the computing"
    figure.update_layout(
        template=TEMPLATE, height=420, legend=_LEGEND, margin={"t": 80, "b": 110},
        title_text=_title("Devices that share a link", under),
    )  # fmt: skip
    return figure


def plan_table(run: MemoryRun) -> Table:
    """What becomes of each block, but for small ones that stay."""
    profile = run.recorded.profile
    moved = {(t.block, t.direction): t for t in run.predicted.transfers}
    rows: list[tuple[Cell, ...]] = []
    for index, (block, what) in enumerate(zip(profile.blocks, run.recorded.decisions, strict=True)):
        if not block.is_movable and what is Decision.KEEP:
            continue
        back = moved.get((index, "in"))
        rows.append(
            (
                str(index),
                block.name or "-",
                format_bytes(block.size_bytes),
                str(what),
                1e3 * block.saved_s,
                1e3 * block.needed_s,
                None if back is None else 1e3 * back.end_s,
                1e3 * run.predicted.stalls_s[index],
            )
        )
    columns = (
        "block", "shape", "size", "decision", "saved at (ms)", "needed at", "back at", "stall (ms)",
    )  # fmt: skip
    return Table(
        "Plan of a step, by block; times as predicted, in seconds of computing", columns, tuple(rows)
    )


def table(result: Result) -> Table:
    """All budgets in numbers."""
    rows: list[tuple[Cell, ...]] = []
    for budget, run in result.runs.items():
        report, batch = run.report, result.batches.get(budget)
        rows.append(
            (
                f"{budget:.0%}",
                round(run.samples_per_s, 1),
                100 * result.kept(budget),
                1e3 * report["predicted_step_s"],
                1e3 * report["measured_step_s"],
                report["predicted_peak_bytes"] / _MIB,
                report["measured_peak_bytes"] / _MIB,
                report["moved_bytes"] / max(1, report["num_steps"]) / _MIB,
                report["freed_bytes"] / max(1, report["num_steps"]) / _MIB,
                None if batch is None else str(batch.plain),
                None if batch is None else str(batch.hybrid),
            )
        )
    columns = (
        "budget", "samples/s", "% of speed", "step predicted (ms)", "measured", "peak predicted (MiB)",
        "measured", "moved a step (MiB)", "freed", "largest batch without", "with",
    )  # fmt: skip
    return Table("Budgets; a step is timed until its last block is needed", columns, tuple(rows))


def contention_table(result: Result) -> Table:
    """Numbers of devices on one link, in numbers."""
    rows: list[tuple[Cell, ...]] = [
        (
            str(one.num_devices),
            1e3 * one.predicted_s,
            1e3 * one.predicted_alone_s,
            1e3 * one.floor_s,
            None if one.measured_s is None else 1e3 * one.measured_s,
        )
        for one in result.contention
    ]
    columns = ("devices", "planned with the share (ms)", "planned as if alone", "floor", "measured")
    return Table("Devices that share a link", columns, tuple(rows))
