"""Sliders that change a cluster, and the plan that follows at once."""

from typing import Any

import ipywidgets

from labkit.cluster.cost import payload_rate
from labkit.cluster.plan import Plan, make_plan
from labkit.config import ExperimentConfig
from labkit.errors import ConfigError
from labkit.lab.heterogeneity import plan_figure, plan_lines, plan_table, what_if
from labkit.lab.show import table_html
from labkit.lab.widgets import markup
from labkit.lab.widgets.figure_view import figure_view
from labkit.lab.widgets.keyboard import column

_STYLE = {"description_width": "9.5em"}
_LAYOUT = {"width": "auto"}
_MOST_NODES = 8  # with a slider of their own


class PlanExplorer:
    """What the partitioner would do if the batch, the devices or the links were different.

    `explorer.config` is the experiment as the sliders stand, `explorer.plan` its plan.

    Args:
        config: An experiment on a probed cluster.

    Raises:
        ConfigError: the cluster has no profiles, or the plan is impossible as it is.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self._base = config
        self.config = what_if(config)
        self.plan: Plan = make_plan(self.config)
        if self.plan.devices is None:
            raise ConfigError(
                "cluster must have a profile of every worker to be explored, got one without. Run "
                "`labkit probe` first."
            )
        self._make_widgets()
        for control in self._controls:
            control.observe(lambda _: self._update(), "value")
        self._update()

    def _make_widgets(self) -> None:
        size = self._base.engine.global_batch_size
        self._batch = ipywidgets.IntSlider(
            value=size,
            min=self._base.cluster.num_workers,
            max=max(4 * size, self._base.cluster.num_workers + 1),
            description="Global batch",
            tooltip="samples per step",
            style=_STYLE,
            layout=_LAYOUT,
        )
        names = [node.name for node in self._base.cluster.nodes[:_MOST_NODES]]
        self._speeds = {name: self._slider(f"Speed of {name}", 1.0, -1.0, 1.0) for name in names}
        rate = payload_rate(self._base.cluster)
        self._link = self._slider("Links, Mbit/s", rate, 1.0, 5.0) if rate else None
        self._controls = [self._batch, *self._speeds.values(), *([self._link] if self._link else [])]
        self._message = ipywidgets.HTML()
        self._view = figure_view(plan_figure(self.config, self.plan))
        self._table = ipywidgets.HTML()
        grid = ipywidgets.GridBox(
            self._controls,
            layout={"grid_template_columns": "repeat(auto-fit, minmax(22em, 1fr))", "grid_gap": "2px 24px"},
        )
        self.widget = column([grid, self._message, self._view.widget, self._table])

    @staticmethod
    def _slider(label: str, value: float, low: float, high: float) -> Any:
        """A slider over powers of ten."""
        return ipywidgets.FloatLogSlider(
            value=value, base=10, min=low, max=high, step=0.02, readout_format=".3g",
            description=label, tooltip=label, style=_STYLE, layout=_LAYOUT,
        )  # fmt: skip

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)

    def _update(self) -> None:
        try:
            self.config = what_if(
                self._base,
                global_batch_size=self._batch.value,
                speeds={name: slider.value for name, slider in self._speeds.items()},
                link_mbit=self._link.value if self._link else None,
            )
            self.plan = make_plan(self.config)
        except ConfigError as error:
            self._message.value = markup.alert(str(error))
            return
        self._message.value = markup.lines(plan_lines(self.config, self.plan))
        self._view.show(plan_figure(self.config, self.plan))
        self._table.value = table_html(plan_table(self.config, self.plan))
