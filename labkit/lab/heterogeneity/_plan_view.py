"""A plan as a table, as a figure and in a few lines."""

import plotly.graph_objects as go

from labkit.cluster.placement import placements
from labkit.cluster.plan import Plan, predict
from labkit.cluster.profile import describe_model
from labkit.config import ExperimentConfig
from labkit.lab.figures import TEMPLATE
from labkit.lab.tables import Cell, Table

_ORIGINS = {
    "given": "given by the cluster or a plan file",
    "planned": "so that all finish together",
    "even": "evenly",
}


def plan_table(config: ExperimentConfig, plan: Plan) -> Table:
    """Who gets what: samples and micro-steps, and where profiles are known, predicted time and idling."""
    split = plan.partition
    rows: list[tuple[Cell, ...]] = []
    for place in placements(config.cluster):
        size, limit = plan.local_batch_sizes[place.rank], plan.micro_batch_sizes[place.rank]
        row: tuple[Cell, ...] = (
            place.label,
            str(size),
            f"{size / config.engine.global_batch_size:.1%}",
            str(-(-size // limit) if limit else min(size, 1)),
        )
        if len(plan.groups) > 1:
            row += (str(next(i for i, ranks in enumerate(plan.groups) if place.rank in ranks)),)
        if split is not None:
            busy_s = split.times_s[place.rank]
            row += (1e3 * busy_s, f"{split.utilisation[place.rank]:.0%}", split.devices[place.rank].speed)
        rows.append(row)
    columns: tuple[str, ...] = ("worker", "samples", "share", "micro-steps")
    if len(plan.groups) > 1:
        columns += ("group",)
    if split is not None:
        columns += ("busy (ms)", "utilisation", "at most samples/s")
    title = f"Plan: {config.engine.global_batch_size} samples per step, split {_ORIGINS[plan.origin]}"
    return Table(title, columns, tuple(rows))


def plan_lines(config: ExperimentConfig, plan: Plan) -> list[str]:
    """What the plan promises, and what to doubt."""
    found = predict(config, plan)
    why = [
        f"groups: {line}" if index == 0 else f"  {line}"
        for index, line in enumerate(plan.why_groups.splitlines())
    ]
    if found is None:
        return [
            *why,
            "No prediction: not every worker has a profile. Measure: labkit probe CLUSTER EXPERIMENT",
        ]
    hidden = "" if config.cluster.gradient_bytes else "; links and model size unknown"
    lines = [
        f"predicted step {1e3 * found.step_s:.4g} ms: {1e3 * found.compute_s:.4g} ms for the slowest worker, "
        f"{1e3 * found.exposed_s:.3g} ms of {config.sync.name} that nothing hides{hidden}",
        f"{found.samples_per_s:,.1f} samples/s, {found.samples_per_s / found.limit_samples_per_s:.0%} of the "
        f"{found.limit_samples_per_s:,.1f} that all devices reach together",
        f"an equal split: {1e3 * found.equal_split_s:.4g} ms, {found.equal_split_s / found.step_s:.2f} times "
        "as long",
    ]
    return [*lines, *why, *doubts(config, plan)]


def doubts(config: ExperimentConfig, plan: Plan) -> list[str]:
    """Why the prediction may be off."""
    found = []
    own = describe_model(config)
    if config.cluster.profiled_model not in (None, own):
        found.append(f"profiles are of {config.cluster.profiled_model}, not of {own}: probe again")
    for place in placements(config.cluster):
        worker = config.cluster.nodes[place.node_index].workers[place.local_rank]
        size, profile = plan.local_batch_sizes[place.rank], worker.profile
        step = min(size, plan.micro_batch_sizes[place.rank] or size)
        if profile is not None and not profile.smallest <= step <= profile.largest and size:
            found.append(
                f"worker {place.rank} would compute {step} samples at once; {profile.smallest} to "
                f"{profile.largest} were measured"
            )
    return found


def plan_figure(config: ExperimentConfig, plan: Plan) -> go.Figure:
    """Every worker's predicted busy time under the plan, and under an equal split; None known: samples."""
    split = plan.partition
    names = [place.label for place in placements(config.cluster)]
    sizes = [f"{size} samples" for size in plan.local_batch_sizes]
    figure = go.Figure()
    if split is None:
        figure.add_bar(
            y=names, x=list(plan.local_batch_sizes), orientation="h", marker_color="#0072B2", text=sizes
        )
        unit = "samples"
    else:
        equal_ms = 1e3 * split.equal_split_step_time_s
        figure.add_bar(
            y=names, x=[1e3 * seconds for seconds in split.times_s], orientation="h",
            marker_color="#0072B2", text=sizes, textposition="auto", name="busy under this plan",
            hovertemplate="%{y}: %{x:.4g} ms<extra></extra>",
        )  # fmt: skip
        for value, text, dash in (
            (1e3 * split.step_time_s, "this plan", "solid"),
            (equal_ms, "equal split", "dot"),
        ):
            figure.add_vline(
                x=value, line={"color": "#222222", "dash": dash}, annotation_text=f"{text}: {value:.4g} ms",
                annotation_position="top left", annotation_yshift=20,
            )  # fmt: skip
        figure.update_xaxes(range=[0, 1.08 * max(equal_ms, 1e3 * split.step_time_s)])
        unit = "ms busy per step"
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text=unit)
    title = (
        "<b>Who computes how long</b><br><span style='font-size:12px'>a step ends with the longest bar</span>"
    )
    height = max(280, 160 + 32 * len(names))
    figure.update_layout(
        template=TEMPLATE, title_text=title, height=height, showlegend=False, bargap=0.3, margin={"t": 100}
    )
    return figure


def diff_table(config: ExperimentConfig, old: Plan, new: Plan) -> Table:
    """Where two plans differ."""
    rows: list[tuple[Cell, ...]] = [
        (place.label, str(a), str(b), f"{b - a:+d}")
        for place, a, b in zip(
            placements(config.cluster), old.local_batch_sizes, new.local_batch_sizes, strict=True
        )
        if a != b
    ]
    title = "Changed shares" if rows else "Nothing differs"
    return Table(title, ("worker", "file", "plan now", "change"), tuple(rows))
