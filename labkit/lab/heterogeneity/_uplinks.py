"""Measure the links between devices and their hosts, and write them into a cluster file."""

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit.config import ClusterConfig, ExperimentConfig, MeasuredUplinkConfig
from labkit.lab.figures import TEMPLATE
from labkit.lab.heterogeneity._probe import run_probe
from labkit.lab.progress import wait_with_lines
from labkit.lab.tables import Cell, Table
from labkit.launch import Run

_COLORS = {"out": "#0072B2", "in": "#D55E00"}


@dataclass(frozen=True)
class LinkProbe:
    """What links between devices and hosts bring through.

    Attributes:
        config: The experiment on whose cluster they were measured.
        uplinks: One for each link.
    """

    config: ExperimentConfig
    uplinks: tuple[MeasuredUplinkConfig, ...]

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster with them."""
        return self.config.cluster.model_copy(update={"measured_uplinks": self.uplinks})


def probe_links(
    config: ExperimentConfig,
    *,
    is_repeat: bool = True,
    wait: Callable[[Run], object] = wait_with_lines,
    rendezvous: str | None = None,
    node: str | None = None,
) -> LinkProbe:
    """Measure what 1, 2, ... devices behind each link bring through together: out, in, and both ways.

    Args:
        config: Whose cluster it is.
        is_repeat: Measure again although an equal probe has finished before.
        wait: Waits for the run that measures, and shows how far it is.
        rendezvous: As for `start`, on several machines.
        node: As for `start`.

    Raises:
        RunFailed: a worker died.
    """
    folder = run_probe(config, "links", is_repeat, wait, rendezvous, node)
    events = [event for rank in folder.ranks() for event in folder.history(rank, ("uplink",))]
    carries = {
        (given_node.name, link.behind(len(given_node.workers))): link.carries_gradients
        for given_node in config.cluster.nodes
        for link in given_node.uplinks
    }
    found = []
    for event in events:
        values = {name: event[name] for name in MeasuredUplinkConfig.model_fields if name in event}
        values["carries_gradients"] = carries.get((event["node"], tuple(event["workers"])), False)
        found.append(MeasuredUplinkConfig(**values))
    return LinkProbe(config, tuple(found))


def uplink_table(probe: LinkProbe) -> Table:
    """Every link and what it brings through together, in GB/s."""
    rows: list[tuple[Cell, ...]] = []
    for link in probe.uplinks:
        for count in range(1, len(link.out_rates) + 1):
            rates = (link.out_rates, link.in_rates, link.both_out_rates, link.both_in_rates)
            rows.append((link.node, str(count), *(round(rate[count - 1] / 1e9, 3) for rate in rates)))
    columns = ("node", "devices at once", "out (GB/s)", "in", "out, both ways", "in, both ways")
    return Table("Links between devices and their host; all devices together", columns, tuple(rows))


def uplink_curves(probe: LinkProbe) -> go.Figure:
    """What devices bring through together, against how many copy at once."""
    figure = go.Figure()
    for link in probe.uplinks:
        for way, alone, both in (
            ("out", link.out_rates, link.both_out_rates),
            ("in", link.in_rates, link.both_in_rates),
        ):
            for kind, rates, dash in (("alone", alone, "solid"), ("both ways", both, "dot")):
                name = f"{link.node}: {way}, {kind}"
                figure.add_scatter(
                    x=list(range(1, len(rates) + 1)), y=[rate / 1e9 for rate in rates], name=name,
                    mode="lines+markers", line={"color": _COLORS[way], "dash": dash},
                    hovertemplate=f"{name}, %{{x}} devices: %{{y:.3g}} GB/s<extra></extra>",
                )  # fmt: skip
    figure.update_xaxes(title_text="devices that copy at once", dtick=1)
    figure.update_yaxes(title_text="GB/s, all together", rangemode="tozero")
    title = "<b>Links between devices and their host</b>"
    figure.update_layout(template=TEMPLATE, title_text=title, height=420)
    return figure
