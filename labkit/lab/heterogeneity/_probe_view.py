"""What a probe found, as a figure and as tables."""

import plotly.graph_objects as go

from labkit.lab._traces import WORKER_PENS
from labkit.lab.figures import TEMPLATE
from labkit.lab.heterogeneity._probe import Probe
from labkit.lab.tables import Cell, Table


def profiles(probe: Probe) -> go.Figure:
    """Time of a micro-step by its size: every measurement, and the fitted line of each worker."""
    figure = go.Figure()
    for worker in probe.workers:
        color, dash, symbol = WORKER_PENS[worker.place.rank % len(WORKER_PENS)]
        name = worker.place.label
        sizes = sorted(worker.rounds[0])
        points = [(size, 1e3 * each[size]) for each in worker.rounds for size in sizes]
        line = [1e3 * (worker.profile.alpha_s + worker.profile.beta_s * size) for size in sizes]
        figure.add_scatter(
            x=[size for size, _ in points], y=[ms for _, ms in points], mode="markers", legendgroup=name,
            showlegend=False, marker={"color": color, "symbol": symbol, "size": 6, "opacity": 0.5},
            hovertemplate=f"{name}<br>%{{x}} samples: %{{y:.3g}} ms<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=sizes, y=line, mode="lines", name=name, legendgroup=name, line={"color": color, "dash": dash},
            hovertemplate=f"{name}<br>line at %{{x}}: %{{y:.3g}} ms<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(type="log", title_text="samples of a micro-step", dtick="D2")
    figure.update_yaxes(type="log", title_text="forward and backward pass (ms)")
    title = "<b>Time of a micro-step</b><br><span style='font-size:12px'>points: measured; lines: "
    title += "alpha + beta x samples</span>"
    figure.update_layout(template=TEMPLATE, title_text=title, height=460, legend={"title_text": "worker"})
    return figure


def profile_table(probe: Probe) -> Table:
    """Every worker's line, how sure it is, and its memory's limit."""
    rows: list[tuple[Cell, ...]] = [
        (
            worker.place.label,
            1e3 * worker.profile.alpha_s,
            1e3 * worker.profile.beta_s,
            1 / worker.profile.beta_s,
            f"{worker.profile.smallest}-{worker.profile.largest}",
            f"{worker.profile.residual:.1%}",
            f"{worker.profile.uncertainty:.1%}",
            str(worker.profile.max_micro_batch_size or "no limit met"),
            str(len(worker.rounds)),
        )
        for worker in probe.workers
    ]
    columns = (
        "worker",
        "alpha (ms)",
        "beta (ms/sample)",
        "at most samples/s",
        "sizes",
        "residual",
        "uncertainty",
        "largest micro-step",
        "rounds",
    )
    return Table("Devices", columns, tuple(rows))


def link_table(probe: Probe) -> Table:
    """Every measured link, inside a node and between nodes."""
    rows: list[tuple[Cell, ...]] = [
        (
            link.source if link.source == link.target else f"{link.source} -> {link.target}",
            "inside" if link.source == link.target else "between",
            link.mbit,
            1e3 * link.latency_s,
        )
        for link in probe.links
    ]
    return Table("Links", ("link", "", "Mbit/s", "latency (ms)"), tuple(rows))
