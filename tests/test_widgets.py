"""Form and dashboard without a browser: what they hold, refuse and do."""

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit import launch
from labkit.config import ExperimentConfig, from_overrides
from labkit.errors import ConfigError
from labkit.lab.command import as_command, overrides_of
from labkit.lab.widgets.dashboard import Dashboard
from labkit.lab.widgets.form import SETTINGS, Form
from labkit.runfolder import RunState
from tests.made_runs import MadeRun


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def _points(dashboard: Dashboard) -> list[int]:
    return list(json.loads(dashboard._view.text.value)["data"][0]["x"])


def _alert(form: Form) -> str:
    return str(form._message.value)


# --- command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster=2x2", "model=mlp", "seed=3"],
        ["model=gpt", "data=text", "optimizer=adamw", "optimizer.learning_rate=1e-5"],
        ["cluster.nodes=[{name: a, workers: 2}, {name: b, workers: 1}]", "schedule=cosine"],
        ["model=my.module:build", "model.options={a: [1, x], b: null}", "name='007'"],
        ["engine.clip_norm=0.5", "schedule.name=step", "schedule.milestones=[3, 5]", "launch.timeout_s=9"],
    ],
)
def test_the_command_trains_the_same_experiment(overrides: list[str]) -> None:
    config = from_overrides(overrides)
    assert shlex.split(as_command(config))[:4] == ["python", "-m", "labkit", "run"]
    assert from_overrides(shlex.split(as_command(config))[4:]) == config


def test_the_command_leaves_out_what_is_default() -> None:
    assert overrides_of(ExperimentConfig()) == []
    assert overrides_of(from_overrides(["cluster=2x2"])) == ["cluster=2x2"]


# --- form --------------------------------------------------------------------------------------------


def test_an_untouched_form_is_the_experiment_it_started_from() -> None:
    config = from_overrides(["cluster.nodes=[{name: a, workers: 3}]", "model.channels=[4]", "seed=9"])
    assert Form(config).config == config
    assert Form().config == ExperimentConfig()


def test_every_setting_of_the_form_reaches_the_experiment() -> None:
    form = Form()
    values = {
        "name": "mine", "model.name": "mlp", "cluster": "2x2", "optimizer.name": "adamw",
        "optimizer.learning_rate": 0.003, "engine.global_batch_size": 32, "engine.num_epochs": 2, "seed": 5,
    }  # fmt: skip
    for key, value in values.items():
        form._controls[key].value = value
    form._more.value = "engine.clip_norm=1.0\n\nschedule=cosine"
    flat = [f"{key}={value}" for key, value in values.items()]
    expected = from_overrides([*flat, "engine.clip_norm=1.0", "schedule=cosine"])
    assert form.config == expected
    assert as_command(expected) in form._command.value.replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("engine.global_batch_size", 0, "engine.global_batch_size must be greater than 0, got 0"),
        ("optimizer.learning_rate", -1.0, "optimizer.learning_rate must be greater than 0"),
        ("cluster", "two", "cluster must be NODESxWORKERS"),
        ("cluster", "", "cluster must be NODESxWORKERS"),
        ("name", "a b", "name must match"),
        ("model.name", "gpt", "data.name must be"),
    ],
)
def test_a_bad_value_says_why_and_launch_is_off_until_it_is_right(key: str, value: Any, message: str) -> None:
    form = Form()
    good = form._controls[key].value
    form._controls[key].value = value
    assert message in _alert(form).replace("&#x27;", "'") and 'role="alert"' in _alert(form)
    assert form._launch_button.disabled
    with pytest.raises(ConfigError, match=message):
        _ = form.config
    form._controls[key].value = good
    assert _alert(form) == "" and not form._launch_button.disabled


def test_a_typo_among_more_settings_names_the_nearest_key() -> None:
    form = Form()
    form._more.value = "engine.clip_nrm=1"
    assert "Did you mean" in _alert(form) and "clip_norm" in _alert(form)
    form._more.value = "engine.clip_norm"
    assert "override must be key=value" in _alert(form)


def test_settings_that_only_fit_together_may_come_from_both_places() -> None:
    form = Form()
    form._more.value = "data.context=64"
    form._controls["model.name"].value = "gpt"
    form._controls["data.name"].value = "text"
    assert form.config == from_overrides(["model=gpt", "data=text", "data.context=64"])


def test_another_optimizer_starts_from_its_own_defaults() -> None:
    form = Form()
    form._controls["optimizer.name"].value = "adamw"
    assert form.config == from_overrides(["optimizer=adamw"])
    assert form._controls["optimizer.learning_rate"].value == 0.001
    form._controls["optimizer.learning_rate"].value = 0.02
    form._controls["optimizer.name"].value = "sgd"
    assert form._controls["optimizer.learning_rate"].value == 0.02, "a chosen rate stays"


def test_every_control_has_a_name_and_an_explanation() -> None:
    form = Form()
    for control in [*form._controls.values(), form._more, form._launch_button]:
        assert control.description and control.tooltip
    assert set(form._controls) == set(SETTINGS)


def test_launch_trains_shows_the_run_and_shows_it_again_when_it_is_asked_twice(runs: Path) -> None:
    form = Form(from_overrides(["cluster=1x2", "engine.num_epochs=1", "name=form"]))
    form._launch_button.click()
    assert form.run is not None and form.dashboard is not None, _alert(form)
    assert form._launch_button.disabled, "one run at a time"
    assert form.run.wait().state is RunState.FINISHED
    assert _within(5, lambda: not form._launch_button.disabled)
    assert len(_points(form.dashboard)) == 24
    assert json.loads(form.run.folder.env_file.read_text())["command"] == as_command(form.config)
    form._launch_button.click()
    assert form.run.is_reused and "trained before" in _alert(form)
    form.dashboard.close()


def test_a_launch_that_is_refused_says_so_in_the_form(runs: Path) -> None:
    form = Form(from_overrides(["model=not_there:build"]))
    form._launch_button.click()
    assert form.run is None and "not_there" in _alert(form)
    assert not form._launch_button.disabled


# --- dashboard -----------------------------------------------------------------------------------------


def test_the_dashboard_follows_a_run_to_its_end_and_its_thread_ends(runs: Path) -> None:
    made = MadeRun(runs, total_steps=40).start().steps(1, 10)
    dashboard = Dashboard(made.folder)
    assert _points(dashboard) == list(range(1, 11)), "what was there before is there at once"
    made.steps(11, 30)
    assert _within(3, lambda: _points(dashboard) == list(range(1, 31)))
    assert "step 30 of 40" in dashboard._status.value and 'role="status"' in dashboard._status.value
    made.steps(31, 40)
    made.set_state(RunState.FINISHED)
    assert _within(3, lambda: "finished" in dashboard._status.value)
    assert _within(3, lambda: _points(dashboard) == list(range(1, 41)))
    assert _within(3, lambda: not dashboard._thread.is_alive())
    assert dashboard._stop_button.disabled


def test_a_new_dashboard_of_a_resumed_run_is_complete_without_doubles(runs: Path) -> None:
    made = MadeRun(runs, total_steps=40).start().steps(1, 20)
    made.start(start_step=10).steps(11, 30)
    dashboard = Dashboard("latest")
    assert _points(dashboard) == list(range(1, 31))
    dashboard.close()


def test_closing_the_view_ends_its_thread_and_not_the_run(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    dashboard = Dashboard(made.folder)
    dashboard.close()
    assert not dashboard._thread.is_alive()
    assert made.folder.read_status().state is RunState.RUNNING


def test_a_failed_run_shows_the_cause_then_the_traceback_then_the_log(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    made.fail(rank=2)
    dashboard = Dashboard(made.folder)
    text = dashboard._failure.value
    places = [text.index(part) for part in ("worker 2 on node1 failed", "Traceback", "odd shape ahead")]
    assert places == sorted(places) and 'role="alert"' in text
    dashboard.close()


def test_text_from_a_worker_is_not_taken_for_markup(runs: Path) -> None:
    made = MadeRun(runs).start()
    made.folder.log_files(2)[0].write_text("<img src=x onerror=alert(1)>")
    made.fail(rank=2)
    dashboard = Dashboard(made.folder)
    assert "<img" not in dashboard._failure.value
    dashboard.close()


def test_stop_returns_at_once_from_any_thread_and_twice(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    dashboard = Dashboard(made.folder)
    begin = time.monotonic()
    for thread in [threading.Thread(target=dashboard.stop) for _ in range(3)]:
        thread.start()
        thread.join()
    dashboard._stop_button.click()
    assert time.monotonic() - begin < 1.0
    assert _within(2, made.folder.stop_file.exists)
    assert dashboard._stop_button.description == "Stopping"
    made.set_state(RunState.KILLED)
    assert _within(3, lambda: not dashboard._thread.is_alive())
    assert _within(3, lambda: not [t for t in threading.enumerate() if t.name == "labkit-dashboard-stop"])


def test_a_run_that_lost_its_supervisor_is_shown_as_lost(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    owner = made.status().owner
    assert owner is not None
    made.set_state(RunState.RUNNING, owner=owner.model_copy(update={"pid": dead.pid, "started_at": 1.0}))
    dead.wait()
    dashboard = Dashboard(made.folder)
    assert "lost" in dashboard._status.value
    dashboard.close()


def test_a_dashboard_of_nothing_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="run must be"):
        Dashboard("latest")


_WITHOUT_ANYWIDGET = """
import sys
sys.modules["anywidget"] = None
from labkit.lab.widgets.dashboard import Dashboard
dashboard = Dashboard("latest")
(output,) = dashboard._view.widget.outputs
assert output["data"]["application/vnd.plotly.v1+json"]["data"][0]["x"] == [1, 2, 3], output
print(dashboard._view.hint)
"""


def test_without_anywidget_the_figure_stands_still_and_says_how_to_make_it_move(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 3)
    made.set_state(RunState.FINISHED)
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ANYWIDGET], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install anywidget" in done.stdout and "Traceback" not in done.stderr


# --- surroundings ----------------------------------------------------------------------------------------


def test_the_lab_imports_no_torch_and_no_mlflow() -> None:
    code = (
        "import sys, labkit; labkit.Form, labkit.Dashboard, labkit.figures, labkit.tables, labkit.show; "
        "bad = {'torch', 'mlflow', 'papermill'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))


def test_a_handle_is_what_the_launcher_gives(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 5)
    dashboard = Dashboard(launch.attach(made.folder))
    assert _points(dashboard) == [1, 2, 3, 4, 5]
    dashboard.close()
