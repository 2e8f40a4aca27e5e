"""The ladder as a figure and as a table."""

from collections.abc import Callable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.lab.figures import TEMPLATE
from labkit.lab.scaling._ladder import PARTS, Climb
from labkit.lab.tables import Cell, Table

_BASE, _RUNG = "#999999", "#0072B2"


def ladder(climb: Climb) -> go.Figure:
    """Throughput, bytes on the wire, memory per node and accuracy of every rung, each adding one part."""
    point = climb.rungs["native"]
    link = f"links of {point.link_mbit:g} Mbit/s" if point.link_mbit else "LINKS NOT SHAPED"
    is_counted = all(rung.sent_bytes for rung in climb.rungs.values())
    panels: list[tuple[str, str, Callable[[str], float], Callable[[str], str]]] = [
        (
            "Throughput",
            f"samples/s on {point.shape}, {link}",
            lambda name: climb.rungs[name].samples_per_s,
            lambda name: f"{climb.rungs[name].samples_per_s:,.0f}  (x{climb.vs_native(name):.1f})",
        ),
        (
            "Bytes on the wire",
            "MB per sample, all links" + ("" if is_counted else ", by formula"),
            lambda name: climb.bytes_per_sample(name) / 1e6,
            lambda name: f"{climb.bytes_per_sample(name) / 1e6:.2f}",
        ),
        (
            "Memory per node",
            "MiB, beyond torch",
            lambda name: climb.memory_bytes(name) / 2**20,
            lambda name: f"{climb.memory_bytes(name) / 2**20:.0f}",
        ),
        (
            "Accuracy",
            "held out, equal epochs",
            lambda name: climb.rungs[name].accuracy or 0.0,
            lambda name: f"{climb.rungs[name].accuracy or 0.0:.3f}",
        ),
    ]
    figure = make_subplots(
        rows=1, cols=4, shared_yaxes=True, horizontal_spacing=0.03, column_widths=[0.34, 0.22, 0.22, 0.22],
        subplot_titles=[_heading(title, subtitle) for title, subtitle, _, _ in panels],
    )  # fmt: skip
    for col, (title, _, value, text) in enumerate(panels, start=1):
        figure.add_trace(_bars(climb, title, value, text), row=1, col=col)
    return _finished(figure, climb, panels)


def _bars(climb: Climb, title: str, value: Callable[[str], float], text: Callable[[str], str]) -> go.Bar:
    names = list(climb.rungs)
    return go.Bar(
        orientation="h",
        y=[label(name) for name in names],
        x=[value(name) for name in names],
        text=[text(name) for name in names],
        textposition="outside",
        cliponaxis=False,
        customdata=[climb.gives(name) for name in names],
        marker={"color": [_BASE if name == "native" else _RUNG for name in names]},
        showlegend=False,
        hovertemplate=f"%{{y}}<br>{title} %{{text}}<br>gives: %{{customdata}}<extra></extra>",
    )


def label(name: str) -> str:
    """A rung in words; `+` stands before a part that is added to all below."""
    return PARTS[name] if name == "native" else f"+ {PARTS[name]}"


def _finished(
    figure: go.Figure,
    climb: Climb,
    panels: list[tuple[str, str, Callable[[str], float], Callable[[str], str]]],
) -> go.Figure:
    for col, (_, _, value, _) in enumerate(panels, start=1):
        largest = max(value(name) for name in climb.rungs)
        room = 1.55 if col == 1 else 1.35  # for the text at the end of the longest bar
        figure.update_xaxes(range=[0, room * largest], nticks=4, row=1, col=col)
    figure.update_annotations(font={"size": 15}, align="left", xanchor="left")
    for annotation, axis in zip(figure.layout.annotations, figure.select_xaxes(), strict=False):
        annotation.x = axis.domain[0]
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        template=TEMPLATE, height=400, bargap=0.35, margin={"l": 70, "r": 30, "t": 80, "b": 40}
    )
    return figure


def _heading(title: str, subtitle: str) -> str:
    return f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>"


def ladder_table(climb: Climb) -> Table:
    """Every rung in numbers, and what it gives beside the one below."""
    rows: list[tuple[Cell, ...]] = [
        (
            label(name),
            point.samples_per_s,
            f"{climb.vs_native(name):.2f}",
            1e3 * point.step_s,
            1e3 * point.wire_s,
            climb.bytes_per_sample(name) / 1e6,
            climb.memory_bytes(name) / 2**20,
            point.accuracy,
            climb.gives(name),
            "; ".join(point.doubts) or "-",
        )
        for name, point in climb.rungs.items()
    ]
    columns = (
        "rung",
        "samples/s",
        "times native",
        "step (ms)",
        "its wire time (ms)",
        "MB per sample",
        "memory (MiB)",
        "val accuracy",
        "it gives",
        "doubts",
    )
    return Table("The ladder", columns, tuple(rows))


def ladder_remarks(climb: Climb) -> list[str]:
    """What one must know to read the ladder."""
    texts = [climb.remark] if climb.remark else []
    if climb.rates:
        last = climb.rungs["large_batch"]
        texts.append(
            f"Compute is emulated: {1e3 * climb.step_padding_s:.0f} ms at {climb.rungs['native'].batch_size} "
            f"samples per step, x{climb.compute_growth:.2f} at {last.batch_size}, as measured for this "
            f"network on one core. Had it grown with the batch, the last rung would give "
            f"{climb.proportional_samples_per_s():,.0f} samples/s."
        )
        texts.append(
            f"Learning rates were tuned with equal tries on seeds of their own: SGD {climb.rates['sgd']:g}, "
            f"LARS {climb.rates['lars']:g}. At {last.batch_size} samples, LARS reached "
            f"{climb.tuned_accuracies['lars']:.4f} there and SGD, tuned there too, "
            f"{climb.tuned_accuracies['sgd']:.4f}."
        )
    return texts
