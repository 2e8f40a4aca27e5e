"""Figures of a study of large batches, and the same in tables.

Nothing is told by colour alone: a method has its own dash and marker too, and its name stands at its end.
"""

import math
from collections.abc import Iterator
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.lab.figures import TEMPLATE
from labkit.lab.large_batch._result import METHODS, RULES, Result, Tuning
from labkit.lab.tables import Table

_COLORS = {"sgd": "#0072B2", "lars": "#D55E00"}
_BANDS = {"sgd": "rgba(0, 114, 178, 0.16)", "lars": "rgba(213, 94, 0, 0.16)"}
_DASHES = {"sgd": "dash", "lars": "solid"}
_SYMBOLS = {"sgd": "circle", "lars": "diamond"}
# From light to dark, for batch sizes in their order.
_SEQUENCE = ("#A6C8E4", "#7FB0D8", "#5A97CB", "#3B7DBB", "#2263A4", "#124A85", "#0A3266", "#061D44")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "hexagon")


def accuracy(result: Result) -> go.Figure:
    """Accuracy by batch size, mean and range over seeds: rates scaled on the left, tuned on the right."""
    base = result.batch_sizes[0]
    titles = {"scaled": f"Rate scaled linearly from {base}", "tuned": "Rate tuned at each batch size"}
    count = len(result.rows[0].score.accuracies)
    subtitle = f"{result.num_epochs} epochs at every batch size; mean and range of {count} seeds"
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.09,
        subplot_titles=[_heading(titles[rule], subtitle) for rule in RULES],
    )  # fmt: skip
    for col, rule in enumerate(RULES, start=1):
        for method in METHODS:
            for trace in _accuracy_traces(result, method, rule):
                figure.add_trace(trace, row=1, col=col)
    figure.update_xaxes(
        type="log", title_text="samples per update (global batch)", tickmode="array",
        tickvals=result.batch_sizes, ticktext=[str(size) for size in result.batch_sizes],
    )  # fmt: skip
    figure.update_yaxes(title_text="accuracy on held-out samples", row=1, col=1)
    return _styled(figure)


def _accuracy_traces(result: Result, method: str, rule: str) -> Iterator[Any]:
    rows = [result.row(method, rule, batch) for batch in result.batch_sizes]
    sizes, means = [row.batch for row in rows], [row.score.accuracy for row in rows]
    lows, highs = [min(row.score.accuracies) for row in rows], [max(row.score.accuracies) for row in rows]
    yield go.Scatter(
        x=sizes + sizes[::-1], y=highs + lows[::-1], fill="toself", fillcolor=_BANDS[method],
        line={"width": 0}, mode="lines", hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    yield go.Scatter(
        x=sizes,
        y=means,
        name=METHODS[method],
        customdata=[[row.rate, low, high] for row, low, high in zip(rows, lows, highs, strict=True)],
        mode="lines+markers",
        line={"color": _COLORS[method], "dash": _DASHES[method], "width": 2},
        marker={"color": _COLORS[method], "symbol": _SYMBOLS[method], "size": 9},
        showlegend=False,
        hovertemplate=(
            f"{METHODS[method]} at %{{x}}: %{{y:.4f}} (%{{customdata[1]:.4f}} to %{{customdata[2]:.4f}})"
            "<br>rate %{customdata[0]:.3g}<extra></extra>"
        ),
    )
    other = result.row("sgd" if method == "lars" else "lars", rule, sizes[-1]).score.accuracy
    yield go.Scatter(
        x=[sizes[-1]],
        y=[means[-1]],
        text=[f"  {METHODS[method]} {means[-1]:.3f}"],
        mode="text",
        textposition="top right" if (means[-1], method) > (other, "m") else "bottom right",
        textfont={"color": _COLORS[method], "size": 13},
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )


def accuracy_table(result: Result) -> Table:
    """Mean accuracy, its range over seeds, and the rate, of every point."""
    rows = tuple(
        (
            METHODS[row.method],
            RULES[row.rule],
            str(row.batch),
            f"{row.rate:.3g}",
            f"{row.score.accuracy:.4f}",
            f"{min(row.score.accuracies):.4f} to {max(row.score.accuracies):.4f}",
        )
        for row in result.rows
    )
    columns = ("method", "rule", "batch", "rate", "mean accuracy", "range")
    return Table(f"Accuracy after {result.num_epochs} epochs", columns, rows)


def rates(tuning: Tuning) -> go.Figure:
    """Loss by learning rate, a line for each batch size: where the best rate lies, and how wide it is."""
    count = len(next(iter(tuning.scores.values())).accuracies)
    subtitle = f"mean of {count} tuning seed{'s' if count != 1 else ''}; ring: lowest, chosen"
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.09,
        subplot_titles=[_heading(name, subtitle) for name in METHODS.values()],
    )  # fmt: skip
    for col, method in enumerate(METHODS, start=1):
        for index, batch in enumerate(tuning.batch_sizes):
            for trace in _rate_traces(tuning, method, batch, index):
                figure.add_trace(trace, row=1, col=col)
        tried = tuning.rates(method)
        figure.update_xaxes(
            type="log", title_text="peak learning rate", tickmode="array", tickvals=tried,
            ticktext=[f"{rate:g}" for rate in tried], row=1, col=col,
        )  # fmt: skip
    figure.update_yaxes(type="log", dtick=1, tickformat="~g")
    figure.update_yaxes(title_text="loss on held-out samples", row=1, col=1)
    figure.update_layout(legend={"title": {"text": "batch"}})
    return _styled(figure)


def _rate_traces(tuning: Tuning, method: str, batch: int, index: int) -> Iterator[Any]:
    tried, best = tuning.rates(method), tuning.best(method, batch)
    share = index / max(1, len(tuning.batch_sizes) - 1)
    color, symbol = _SEQUENCE[round(share * (len(_SEQUENCE) - 1))], _MARKERS[index % len(_MARKERS)]
    yield go.Scatter(
        x=tried,
        y=[_finite(tuning.scores[method, batch, rate].loss) for rate in tried],
        name=str(batch),
        legendgroup=str(batch),
        showlegend=method == "sgd",
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"color": color, "symbol": symbol, "size": 8},
        hovertemplate=f"{METHODS[method]}, batch {batch}, rate %{{x:g}}: loss %{{y:.4g}}<extra></extra>",
    )
    yield go.Scatter(
        x=[best],
        y=[_finite(tuning.scores[method, batch, best].loss)],
        mode="markers",
        marker={"symbol": "circle-open", "size": 17, "color": color, "line": {"width": 2}},
        showlegend=False,
        hoverinfo="skip",
    )


def rates_table(tuning: Tuning) -> Table:
    """The chosen rate of every batch size, beside the one that linear scaling gives."""
    rows = []
    for method in METHODS:
        tried = tuning.rates(method)
        for batch in tuning.batch_sizes:
            best = tuning.best(method, batch)
            edge = "yes" if len(tried) > 2 and best in (tried[0], tried[-1]) else ""
            score, scaled = tuning.scores[method, batch, best], tuning.scaled(method, batch)
            values = (best, score.loss, score.accuracy, scaled)
            rows.append((METHODS[method], str(batch), *(f"{value:.4g}" for value in values), edge))
    columns = ("method", "batch", "best rate", "its loss", "its accuracy", "scaled rate", "end of the grid")
    return Table("Learning rates: best of those tried, and scaled linearly", columns, tuple(rows))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _heading(title: str, subtitle: str) -> str:
    return f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>"


def _styled(figure: go.Figure) -> go.Figure:
    figure.update_annotations(font={"size": 15}, align="left", xanchor="left")
    for annotation, axis in zip(figure.layout.annotations, ("", "2"), strict=True):
        annotation.x = figure.layout[f"xaxis{axis}"].domain[0]
    figure.update_layout(template=TEMPLATE, height=430, margin={"l": 70, "r": 100, "t": 80, "b": 60})
    return figure
