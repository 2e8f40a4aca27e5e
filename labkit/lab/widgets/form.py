"""A form for one experiment: choose, see at once what is wrong, launch, watch."""

from typing import Any

import ipywidgets

from labkit import launch
from labkit.config import ExperimentConfig, from_overrides
from labkit.errors import ConfigError, LabkitError
from labkit.lab.command import as_command, cluster_text, override
from labkit.lab.widgets import markup
from labkit.lab.widgets.controls import make_control, value_of
from labkit.lab.widgets.dashboard import Dashboard
from labkit.lab.widgets.keyboard import column
from labkit.runfolder import RunStatus

SETTINGS = {
    "name": "Experiment",
    "model.name": "Model",
    "data.name": "Data",
    "cluster": "Cluster",
    "sync.name": "Synchronisation",
    "optimizer.name": "Optimizer",
    "optimizer.learning_rate": "Learning rate",
    "engine.global_batch_size": "Global batch",
    "engine.num_epochs": "Epochs",
    "seed": "Seed",
}
"""The settings with a control of their own, by dotted key; all others go into "More settings"."""

_CLUSTER_HELP = "NODESxWORKERS, for example 2x2, or a cluster file"
_REUSED = "This was trained before, so its result is shown. Tick the box to train it again."
_MORE_HELP = "one key=value a line, for example engine.clip_norm=1.0"


class Form:
    """Settings with controls, checked as one types; `form.config` is the experiment.

    Launch starts it and shows its dashboard below; `form.run` is then its handle.

    Args:
        config: What the form starts from; settings without a control keep their value from it.
    """

    def __init__(self, config: ExperimentConfig | None = None) -> None:
        self._base = config or ExperimentConfig()
        self.run: launch.Run | None = None
        self.dashboard: Dashboard | None = None
        self._is_training = False
        self._is_valid = True
        self._controls = {key: self._control(key, label) for key, label in SETTINGS.items()}
        self._initial = {key: control.value for key, control in self._controls.items()}
        self._make_widgets()
        self._controls["optimizer.name"].observe(self._follow_optimizer, "value")
        for control in (*self._controls.values(), self._more):
            control.observe(lambda _: self._check(), "value")
        self._check()

    def _control(self, key: str, label: str) -> Any:
        if key != "cluster":
            return make_control(key, label, value_of(self._base, key))
        control = make_control("name", label, cluster_text(self._base))
        control.tooltip = control.placeholder = _CLUSTER_HELP
        if not control.value:
            control.placeholder = "as given; or NODESxWORKERS, or a cluster file"
        return control

    def _make_widgets(self) -> None:
        self._more = ipywidgets.Textarea(
            description="More settings",
            placeholder=_MORE_HELP,
            tooltip=_MORE_HELP,
            rows=2,
            layout={"width": "auto"},
            style={"description_width": "9.5em"},
        )
        self._message = ipywidgets.HTML()
        self._command = ipywidgets.HTML()
        self._repeat = ipywidgets.Checkbox(
            description="train again if this was trained before", indent=False, layout={"width": "auto"}
        )
        self._launch_button = ipywidgets.Button(
            description="Launch", button_style="primary", tooltip="Start training"
        )
        self._launch_button.on_click(lambda _: self.launch())
        self._below = ipywidgets.VBox()
        grid = ipywidgets.GridBox(
            list(self._controls.values()),
            layout={"grid_template_columns": "repeat(auto-fit, minmax(20em, 1fr))", "grid_gap": "2px 24px"},
        )
        buttons = ipywidgets.HBox([self._launch_button, self._repeat], layout={"flex_flow": "row wrap"})
        self.widget = column([grid, self._more, self._message, buttons, self._command, self._below])

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)

    @property
    def config(self) -> ExperimentConfig:
        """The experiment as the form stands.

        Raises:
            ConfigError: a value is bad; the message is the one the form shows.
        """
        changed = [
            override(key, control.value)
            for key, control in self._controls.items()
            if control.value != self._initial[key]
        ]
        more = [line.strip() for line in self._more.value.splitlines() if line.strip()]
        return from_overrides([*changed, *more], base=self._fresh_base())

    def _fresh_base(self) -> dict[str, Any]:
        """What the form starts from; another member of a family starts from its own defaults."""
        base = self._base.model_dump(mode="json")
        for key, control in self._controls.items():
            section, _, leaf = key.partition(".")
            if leaf == "name" and control.value != self._initial[key]:
                base[section] = {"name": control.value}
        return base

    def _check(self) -> None:
        """Say what is wrong, or the command that does the same; Launch only when nothing is."""
        try:
            config = self.config
        except ConfigError as error:
            self._is_valid = False
            self._launch_button.disabled = True
            self._message.value = markup.alert(str(error))
            return
        self._is_valid = True
        self._message.value = ""
        self._command.value = markup.command(as_command(config))
        self._launch_button.disabled = self._is_training

    def _follow_optimizer(self, change: Any) -> None:
        """A learning rate that nobody has touched becomes the new optimizer's own default."""
        rate = self._controls["optimizer.learning_rate"]
        if rate.value == _default_rate(change["old"]):
            rate.value = _default_rate(change["new"])

    def launch(self) -> None:
        """Start the experiment as the form stands and show its dashboard."""
        self._is_training = True
        self._check()
        try:
            config = self.config
            self.run = launch.start(config, is_repeat=self._repeat.value, command=as_command(config))
        except LabkitError as error:
            self._is_training = False
            self._check()
            self._message.value = markup.alert(str(error))
            return
        if self.dashboard is not None:
            self.dashboard.close()
        if self.run.is_reused:
            self._message.value = markup.note(_REUSED)
        self.dashboard = Dashboard(self.run, on_final=self._on_final)
        self._below.children = (self.dashboard.widget,)

    def _on_final(self, status: RunStatus) -> None:
        self._is_training = False
        self._launch_button.disabled = not self._is_valid


def _default_rate(optimizer: str) -> float:
    return from_overrides({"optimizer": optimizer}).optimizer.learning_rate
