"""A study of input as figures and a table."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.config import format_bytes
from labkit.lab.figures import TEMPLATE
from labkit.lab.input._study import Result, Setting
from labkit.lab.tables import Cell, Table

_COLD, _WARM, _LINE = "#0072B2", "#D55E00", "#222222"
_PANELS = (
    ("shard_bytes", "shard"),
    ("extent_bytes", "extent"),
    ("window_bytes", "window"),
    ("num_readers", "readers"),
)


def _varied(result: Result, name: str) -> list[Setting]:
    """Settings that differ from the experiment's own in one thing at the most."""
    own = next(iter(result.measured))
    others = [field for field, _ in _PANELS if field != name]
    same = [s for s in result.measured if all(getattr(s, o) == getattr(own, o) for o in others)]
    return sorted(same, key=lambda setting: int(getattr(setting, name)))


def _label(name: str, setting: Setting) -> str:
    value = getattr(setting, name)
    return str(value) if name == "num_readers" else format_bytes(value)


def rates(result: Result) -> go.Figure:
    """Samples a second, cold and warm, by the sizes of shards, extents, windows and by readers."""
    titles = [f"<b>{title}</b>" for _, title in _PANELS]
    figure = make_subplots(
        rows=1, cols=len(_PANELS), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles
    )
    for col, (name, title) in enumerate(_PANELS, start=1):
        settings = _varied(result, name)
        x = [_label(name, setting) for setting in settings]
        for kind, color, symbol in (("cold", _COLD, "circle"), ("warm", _WARM, "diamond")):
            y = [getattr(result.measured[setting], kind) for setting in settings]
            figure.add_scatter(
                x=x, y=y, name=kind, legendgroup=kind, showlegend=col == 1, mode="lines+markers",
                line={"color": color}, marker={"symbol": symbol, "size": 9}, row=1, col=col,
                hovertemplate=f"{title} %{{x}}: %{{y:,.0f}} samples/s, {kind}<extra></extra>",
            )  # fmt: skip
        figure.add_hline(y=result.training.model, line={"color": _LINE, "dash": "dot"}, row=1, col=col)
    figure.add_annotation(
        text=f"dotted: the model takes {result.training.model:,.0f} samples/s",
        xref="paper", yref="paper", x=0, y=1.22, showarrow=False,
    )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_yaxes(title_text="samples/s", rangemode="tozero", col=1)
    legend = {"orientation": "h", "x": 0, "y": 0.01, "yref": "container", "yanchor": "bottom"}
    figure.update_layout(template=TEMPLATE, height=420, legend=legend, margin={"t": 90, "b": 90})
    return figure


def mixing(result: Result) -> go.Figure:
    """How well windows mix, beside how fast they are read."""
    settings = _varied(result, "window_bytes")
    x = [_label("window_bytes", setting) for setting in settings]
    panels = ["<b>Mixing</b>", "<b>Speed, cold</b>"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=panels)
    figures = (
        ("class imbalance of a batch", "class_imbalance", _COLD, "circle"),
        ("neighbours in a batch", "neighbours", _WARM, "diamond"),
    )
    for name, key, color, symbol in figures:
        y = [getattr(result.measured[setting], key) for setting in settings]
        figure.add_scatter(
            x=x, y=y, name=name, mode="lines+markers", line={"color": color}, marker={"symbol": symbol},
            hovertemplate=f"{name}, window of %{{x}}: %{{y:.2f}} times a full shuffle's<extra></extra>",
            row=1, col=1,
        )  # fmt: skip
    figure.add_hline(y=1, line={"color": _LINE, "dash": "dot"}, row=1, col=1)
    y = [result.measured[setting].cold for setting in settings]
    figure.add_bar(x=x, y=y, showlegend=False, marker_color="#56B4E9", row=1, col=2)
    figure.update_xaxes(type="category", title_text="window")
    figure.update_yaxes(title_text="times a full shuffle's", type="log", row=1, col=1)
    figure.update_yaxes(title_text="samples/s", rangemode="tozero", row=1, col=2)
    legend = {"orientation": "h", "x": 0, "y": 0.01, "yref": "container", "yanchor": "bottom"}
    figure.update_layout(template=TEMPLATE, height=420, legend=legend, margin={"t": 60, "b": 110})
    return figure


def waits(result: Result) -> go.Figure:
    """Part of its time in which each worker waited for data."""
    own = result.training.waits
    names = [f"worker {rank}" for rank in own]
    shares = [100 * share for share in own.values()]
    figure = go.Figure(
        go.Bar(
            y=names, x=shares, orientation="h", marker_color=_COLD,
            text=[f"{share:.1f} %" for share in shares],
            hovertemplate="%{y}: %{x:.2f} % of its time<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title_text="% of a worker's time", range=[0, max(5.0, 1.1 * max(shares, default=0))])
    figure.update_yaxes(autorange="reversed")
    text = "<b>Waiting for data</b><br><span style='font-size:12px'>training from a cold disk</span>"
    figure.update_layout(template=TEMPLATE, title_text=text, height=120 + 40 * len(names), margin={"t": 80})
    return figure


def table(result: Result) -> Table:
    """All settings in numbers."""
    rows: list[tuple[Cell, ...]] = [
        (
            format_bytes(s.shard_bytes),
            format_bytes(s.extent_bytes),
            format_bytes(s.window_bytes),
            s.num_readers,
            round(m.cold),
            round(m.warm),
            round(m.disk),
            round(m.decode),
            m.class_imbalance,
            m.neighbours,
            100 * result.trained[s].wait_share,
        )
        for s, m in result.measured.items()
    ]
    columns = (
        "shard", "extent", "window", "readers", "cold (samples/s)", "warm", "disk alone", "decode alone",
        "class imbalance", "neighbours", "training waits (%)",
    )  # fmt: skip
    return Table("Input; mixing in multiples of a full shuffle's", columns, tuple(rows))
