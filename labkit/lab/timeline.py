"""A few steps of every worker on one time axis: who computes, who sums, who sends, who waits."""

from typing import Any

import plotly.graph_objects as go

from labkit.lab._traces import part_style
from labkit.lab.figures import TEMPLATE
from labkit.lab.series import PARTS, folder_of
from labkit.lab.tables import Cell, Table
from labkit.lab.trace import trace_events


def timeline(run: Any, *, first_step: int | None = None, num_steps: int = 3) -> go.Figure:
    """One row per worker, one block per part of a step.

    A worker reports how long each part of a step took, not when: its blocks end at the moment of its report
    and lie one after the other, also those that overlapped.

    Args:
        run: A run's handle, its folder, its key or `latest`.
        first_step: Where to begin; default: in the middle of the run.
        num_steps: Steps shown.
    """
    blocks, rows, first = _blocks(run, first_step, num_steps)
    began_us = min((block["ts"] for block in blocks), default=0.0)
    figure = go.Figure(
        [
            go.Bar(
                orientation="h",
                y=[rows[block["tid"]] for block in own],
                x=[block["dur"] / 1e3 for block in own],
                base=[(block["ts"] - began_us) / 1e3 for block in own],
                customdata=[block["args"]["step"] for block in own],
                hovertemplate=f"%{{y}}, step %{{customdata}}: {part} from %{{base:.1f}} ms<extra></extra>",
                **part_style(part, has_legend=bool(own)),
            )
            for part in PARTS
            for own in [[block for block in blocks if block["name"] == part]]
        ]
    )
    last = first + num_steps - 1
    subtitle = f"steps {first} to {last}; blocks end when a worker reports its step"
    figure.update_layout(
        template=TEMPLATE,
        title={"text": "<b>Timeline</b>", "subtitle": {"text": subtitle, "font": {"size": 13}}},
        barmode="overlay",
        bargap=0.25,
        height=200 + 26 * max(1, len(rows)),
        margin={"l": 70, "r": 40, "t": 80, "b": 100},
        legend={"orientation": "h", "x": 0, "y": 0.01, "yref": "container", "yanchor": "bottom"},
    )
    figure.update_xaxes(title_text="ms")
    figure.update_yaxes(
        title_text="worker · node", autorange="reversed", categoryorder="array",
        categoryarray=[rows[rank] for rank in sorted(rows)], type="category",
    )  # fmt: skip
    return figure


def timeline_table(run: Any, *, first_step: int | None = None, num_steps: int = 3) -> Table:
    """Milliseconds of each part for every worker, over the steps that `timeline` shows."""
    blocks, rows, first = _blocks(run, first_step, num_steps)
    sums: dict[tuple[int, str], float] = {}
    for block in blocks:
        place = block["tid"], block["name"]
        sums[place] = sums.get(place, 0.0) + block["dur"] / 1e3
    lines: list[tuple[Cell, ...]] = [
        (rows[rank], *(sums.get((rank, part), 0.0) for part in PARTS)) for rank in sorted(rows)
    ]
    title = f"Timeline: steps {first} to {first + num_steps - 1}, milliseconds"
    return Table(title, ("worker · node", *PARTS), tuple(lines))


def _blocks(
    run: Any, first_step: int | None, num_steps: int
) -> tuple[list[dict[str, Any]], dict[int, str], int]:
    """Blocks of the steps wanted, the name of each worker's row, and the first step."""
    events = trace_events(folder_of(run))
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {e["tid"]: f"{e['tid']} · {nodes[e['pid']]}" for e in events if e["name"] == "thread_name"}
    steps = sorted({event["args"]["step"] for event in events if event["ph"] == "X"})
    first = first_step or (steps[max(0, len(steps) // 2 - num_steps // 2)] if steps else 1)
    wanted = range(first, first + num_steps)
    return [e for e in events if e["ph"] == "X" and e["args"]["step"] in wanted], rows, first
