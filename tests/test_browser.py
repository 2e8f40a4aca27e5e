"""The notebooks, the report and the MLflow pages in a real browser.

Chromium and playwright's Python package drive a JupyterLab on loopback whose root is a copy of the
notebooks, so that nothing in the checkout changes.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat.v4 as v4
import psutil
import pytest

from labkit.lab import servers
from labkit.lab.report import write_report
from labkit.runfolder import RunFolder, RunState, all_runs
from tests.made_runs import MadeRun
from tests.support import need

try:
    from playwright.sync_api import Page, expect, sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

CHROMIUM = "/usr/bin/chromium"
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
RENDER_MS = 90_000
"""A plotly widget brings 4.8 MB of script; on a busy machine its first drawing takes half a minute."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


# --- surroundings ------------------------------------------------------------------------------------


@dataclass
class Tab:
    """A page, and the errors that its scripts raised."""

    page: Any
    errors: list[str]


@pytest.fixture
def tab() -> Iterator[Tab]:
    need(sync_playwright is not None, "playwright is missing: pip install playwright")
    need(Path(CHROMIUM).exists(), f"{CHROMIUM} is missing: apt-get install chromium fonts-dejavu-core")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield Tab(page, errors)
        browser.close()
    # On a busy machine anywidget says this of models that it has not loaded within two seconds.
    assert [error for error in errors if "Failed to initialize model" not in error] == []


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that runs."""

    url: str
    token: str
    folder: Path
    runs: Path

    def api(self, path: str, method: str = "GET") -> Any:
        """Ask the server."""
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def open(self, tab: Tab, notebook: str) -> None:
        """Open a notebook in a fresh workspace and wait until its kernel is there."""
        tab.page.goto(f"{self.url}/lab/tree/{notebook}?token={self.token}&reset")
        _wait_for_kernel(tab.page)

    def write(self, name: str, *cells: str) -> None:
        """Put a notebook of these code cells into the folder."""
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells], metadata=kernel)
        (self.folder / name).write_text(json.dumps(notebook), encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need(Path(CHROMIUM).exists(), f"{CHROMIUM} is missing: apt-get install chromium fonts-dejavu-core")
    root = tmp_path_factory.mktemp("lab")
    folder, runs = root / "notebooks", root / "runs"
    folder.mkdir()
    runs.mkdir()
    plan = _in_folder(servers.jupyterlab(servers.choose_port(None, 9310)), folder, runs, root / "jupyter")
    url, token = plan.health_url.removesuffix("/api"), plan.environment["JUPYTER_TOKEN"]
    with servers.started(plan):
        _wait_for(lambda: _answers(plan.health_url), 60)
        yield Lab(url, token, folder, runs)


def _in_folder(plan: Any, folder: Path, runs: Path, jupyter: Path) -> Any:
    """The lab's own plan, over another folder and without the user's settings."""
    own = ["CONFIG_DIR", "RUNTIME_DIR"]
    environment = {
        **plan.environment,
        "LABKIT_RUNS": str(runs),
        **{f"JUPYTER_{name}": str(jupyter) for name in own},
        **{f"JUPYTERLAB_{name}_DIR": str(jupyter) for name in ("SETTINGS", "WORKSPACES")},
    }
    command = [
        f"--ServerApp.root_dir={folder}" if part.startswith("--ServerApp.root_dir") else part
        for part in plan.command
    ]
    return dataclasses.replace(plan, command=command, environment=environment, folder=folder)


@pytest.fixture
def lab(server: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The lab with its folders empty; afterwards no kernel is left."""
    for path in (*server.folder.iterdir(), *server.runs.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setenv("LABKIT_RUNS", str(server.runs))
    yield server
    for session in server.api("sessions"):
        server.api(f"sessions/{session['id']}", "DELETE")
    for kernel in server.api("kernels"):
        server.api(f"kernels/{kernel['id']}", "DELETE")
    _wait_for(lambda: all(run.read_status().state.is_final for run in all_runs(server.runs)), 30)
    _wait_for(lambda: not _trackers(server.runs), 60)


def _trackers(runs: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "labkit.lab.tracking" in command and str(runs) in command:
            found.append(process.pid)
    return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError as error:
        return getattr(error, "code", 0) == 403  # up, and asks for its token


def _wait_for(holds: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


def _wait_for_kernel(page: "Page") -> None:
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=RENDER_MS)
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=60_000)


def _quickstart(lab: Lab, num_epochs: int) -> None:
    """The quickstart, with a training long enough to be watched."""
    text = (NOTEBOOKS / "00_quickstart.ipynb").read_text(encoding="utf-8")
    long = text.replace("num_epochs: int = 20", f"num_epochs: int = {num_epochs}")
    assert long != text
    (lab.folder / "00_quickstart.ipynb").write_text(long, encoding="utf-8")


def _run_all(page: "Page") -> None:
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click('li[data-command="runmenu:run-all"]')


def _steps(page: "Page") -> list[int]:
    """Steps of the training loss that the first plot shows."""
    found = page.evaluate("Array.from(document.querySelector('.js-plotly-plot')?.data?.[0]?.x ?? [])")
    return [int(step) for step in found]


def _status(page: "Page") -> str:
    return " | ".join(element.inner_text() for element in page.query_selector_all("[role=status]"))


def _after_a_moment(page: "Page", look: Callable[[], Any]) -> Any:
    """Let the page work while we wait for something: playwright does so only inside its own calls."""
    page.wait_for_timeout(200)
    return look()


def _wait_for_status(page: "Page", text: str, seconds: float = 60) -> None:
    _wait_for(lambda: text in _after_a_moment(page, lambda: _status(page)), seconds)


def _wait_for_steps(page: "Page", more_than: int, seconds: float = 60) -> list[int]:
    def look() -> list[int]:
        steps = _steps(page)
        return steps if len(steps) > more_than else []

    found: list[int] = _wait_for(lambda: _after_a_moment(page, look), seconds)
    return found


def _run_cell_with(page: "Page", text: str) -> None:
    """Click into the cell that contains a text and run it."""
    cell = page.locator(".jp-CodeCell", has_text=text).first
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")


def _only_run(lab: Lab) -> RunFolder:
    (folder,) = all_runs(lab.runs)
    return folder


def _drawn(page: "Page") -> int:
    return len(
        page.query_selector_all(".js-plotly-plot .main-svg .trace, .js-plotly-plot .heatmaplayer image")
    )


_CONTROL = re.compile(r'^\s*- (button|textbox|combobox|spinbutton|checkbox|slider)( ".+?")?', re.MULTILINE)


def _controls(page: "Page") -> list[tuple[str, str]]:
    """Role and accessible name of every control under the first cell."""
    shown = page.locator(".jp-Cell-outputArea").first.aria_snapshot()
    return [(role, name.strip(' "')) for role, name in _CONTROL.findall(shown)]


# --- live ----------------------------------------------------------------------------------------------


def test_the_quickstart_moves_survives_a_reload_and_stops(lab: Lab, tab: Tab) -> None:
    page = tab.page
    _quickstart(lab, num_epochs=1000)
    lab.open(tab, "00_quickstart.ipynb")
    _run_all(page)
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    early = _wait_for_steps(page, 0)
    late = _wait_for_steps(page, len(early))
    assert late[: len(early)] == early or len(late) >= 1900, "the curve only grows"
    assert "running" in _status(page) and "samples/s" in _status(page) and "ETA" in _status(page)
    assert page.evaluate("document.querySelector('.js-plotly-plot').clientWidth") > 750, "takes its width"

    page.reload()
    _wait_for_kernel(page)
    _run_cell_with(page, "Run this cell again after a page reload")
    again = _wait_for_steps(page, len(late), 90)
    if len(again) < 1900:  # not thinned yet: every step once, from the first on
        assert again == list(range(1, len(again) + 1))
    assert len(_wait_for_steps(page, len(again))) > len(again)

    run = _only_run(lab)
    pids = [worker.pid for worker in run.read_status().workers]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids if pid)
    page.get_by_role("button", name="Stop", exact=True).last.click()
    _wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid), 8)
    assert _wait_for(lambda: run.read_status().state.is_final, 8)
    assert run.read_status().state is RunState.KILLED
    _wait_for_status(page, "killed", 10)


def test_the_form_works_by_keyboard_alone(lab: Lab, tab: Tab) -> None:
    page = tab.page
    page.set_viewport_size({"width": 1024, "height": 1000})
    lab.write(
        "form.ipynb",
        "import labkit\nlabkit.warm_up()\n"
        "labkit.show(labkit.Form(labkit.from_overrides(['name=form', 'cluster=1x2'])))",
    )
    lab.open(tab, "form.ipynb")
    _run_all(page)
    batch = page.get_by_label("Global batch")
    batch.wait_for(timeout=60_000)
    launch = page.get_by_role("button", name="Launch", exact=True)
    expect(launch).to_be_enabled()

    batch.focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("0")
    alert = page.get_by_role("alert").filter(
        has_text="engine.global_batch_size must be greater than 0, got 0"
    )
    alert.wait_for(timeout=10_000)
    expect(launch).to_be_disabled()
    page.keyboard.press("Control+A")
    page.keyboard.type("50")
    alert.wait_for(state="detached", timeout=10_000)
    expect(launch).to_be_enabled()
    command = page.get_by_label("The same as a command")
    _wait_for(lambda: "engine.global_batch_size=50" in _after_a_moment(page, command.input_value), 10)

    page.get_by_label("Model").focus()
    page.keyboard.press("m")  # JupyterLab's own key for "make this cell Markdown"
    page.keyboard.press("ArrowDown")  # and for "next cell"
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Model")).to_have_value("mlp")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim() === 'Launch'"):
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "focus is visible"
    page.keyboard.press("Enter")
    run = _wait_for(lambda: all_runs(lab.runs), 60)[0]
    config = run.read_config()
    assert (config.engine.global_batch_size, config.model.name) == (50, "mlp")
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    _wait_for_status(page, "finished")

    controls = _controls(page)
    wanted = {"Learning rate", "Cluster", "Launch", "Stop", "The same as a command"}
    assert wanted <= {name for _, name in controls}
    assert [role for role, name in controls if not name] == []
    output = "document.querySelector('.jp-OutputArea-output')"
    assert page.evaluate(f"{output}.scrollWidth <= {output}.clientWidth + 1"), "no sideways scrolling"


def test_the_view_comes_back_after_a_kernel_restart_with_the_truth(lab: Lab, tab: Tab) -> None:
    page = tab.page
    _quickstart(lab, num_epochs=1000)
    lab.open(tab, "00_quickstart.ipynb")
    for text in ("folder under runs/", "labkit.warm_up", "labkit.start"):
        _run_cell_with(page, text)
    run = _wait_for(lambda: all_runs(lab.runs), 60)[0]
    _wait_for(lambda: run.history(0), 60)
    (kernel,) = lab.api("kernels")
    lab.api(f"kernels/{kernel['id']}/restart", "POST")
    _wait_for(lambda: run.read_status().state is RunState.KILLED, 20)
    done = len(run.history(0))
    _run_cell_with(page, "Run this cell again after a page reload")
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    assert _wait_for_steps(page, min(done, 1900) - 1)[-1] == run.history(0)[-1]["step"]
    assert "killed" in _status(page)


@pytest.mark.slow
def test_the_figure_moves_also_where_anywidget_has_given_the_model_up(lab: Lab, tab: Tab) -> None:
    """It does so after two seconds, which a busy machine needs for less; here it does so at once."""
    page = tab.page
    made = MadeRun(lab.runs, total_steps=30).start().steps(1, 20)
    lab.write("busy.ipynb", "import labkit\nlabkit.show('latest')")
    lab.open(tab, "busy.ipynb")
    page.evaluate("const real = AbortSignal.timeout; AbortSignal.timeout = () => real.call(AbortSignal, 0)")
    _run_all(page)
    assert _wait_for_steps(page, 0, 90) == list(range(1, 21))
    made.steps(21, 30)
    assert _wait_for_steps(page, 20)[-1] == 30
    made.set_state(RunState.FINISHED)
    _wait_for_status(page, "finished")
    assert any("Failed to initialize model" in error for error in tab.errors), "the trap is still there"


EXPLORE = """
import labkit
profile = lambda beta: {"alpha_s": 0.001, "beta_s": beta, "largest": 64}
nodes = [{"name": n, "workers": [{"profile": profile(b)}]} for n, b in (("fast", 0.001), ("slow", 0.003))]
links = [{"source": "fast", "target": "slow", "mbit": 900.0, "latency_s": 0.0001}]
cluster = {"nodes": nodes, "measured_links": links, "gradient_bytes": 40000}
labkit.show(labkit.PlanExplorer(labkit.from_mapping({"cluster": cluster, "model": "mlp"})))
"""


def test_a_plan_follows_its_sliders(lab: Lab, tab: Tab) -> None:
    page = tab.page
    lab.write("explore.ipynb", EXPLORE)
    lab.open(tab, "explore.ipynb")
    _run_all(page)
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    shares = page.locator("tbody tr td:nth-child(2)")
    expect(shares).to_have_text(["48", "16"])
    assert {name for role, name in _controls(page) if role == "slider"} == {
        "Global batch",
        "Speed of fast",
        "Speed of slow",
        "Links, Mbit/s",
    }
    page.get_by_role("slider", name="Speed of slow").press("End")  # ten times as fast as measured
    expect(shares).to_have_text(["14", "50"])
    expect(page.get_by_text("at most samples/s")).to_be_visible()
    assert page.locator(".js-plotly-plot").bounding_box()["width"] > 600  # type: ignore[index]


@pytest.mark.slow
def test_without_anywidget_the_dashboard_still_shows_the_figure(lab: Lab, tab: Tab) -> None:
    page = tab.page
    made = MadeRun(lab.runs, total_steps=30).start().steps(1, 20)
    hide = "import sys\nsys.modules['anywidget'] = None\n"
    lab.write("still.ipynb", f"{hide}import labkit\nlabkit.show('latest')")
    lab.open(tab, "still.ipynb")
    _run_all(page)
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    assert _steps(page) == list(range(1, 21))
    expect(page.get_by_text("pip install anywidget")).to_be_visible()
    made.steps(21, 30)
    made.set_state(RunState.FINISHED)
    assert _wait_for_steps(page, 29)[-1] == 30
    assert not page.query_selector("[data-mime-type='application/vnd.jupyter.stderr']")


# --- batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["finished", pytest.param("diverged", marks=pytest.mark.slow)])
def test_an_executed_notebook_opens_and_draws(lab: Lab, tab: Tab, what: str) -> None:
    rate = {"finished": "0.05", "diverged": "1e30"}[what]
    out = lab.folder / "done.ipynb"
    command = [sys.executable, "-m", "papermill", str(NOTEBOOKS / "02_train.ipynb"), str(out)]
    parameters = ["-p", "num_epochs", "2", "-p", "learning_rate", rate, "-p", "name", what]
    subprocess.run([*command, *parameters], env=dict(os.environ), cwd=lab.folder, check=True, timeout=200)
    lab.open(tab, "done.ipynb")
    page = tab.page
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    assert page.get_by_text("File Load Error").count() == 0
    assert page.get_by_text("Error displaying widget").count() == 0
    assert _wait_for(lambda: _after_a_moment(page, lambda: _drawn(page)), 30) > 0
    assert _steps(page) == list(range(1, 49))
    if what == "diverged":
        page.get_by_text("at step").first.wait_for(timeout=10_000)
    page.get_by_text("The same as a table").first.click()
    expect(page.locator("table caption").first).to_be_visible()


def test_the_report_draws_without_a_network(runs: Path, tab: Tab) -> None:
    made = MadeRun(runs, total_steps=30).start().steps(1, 30)
    made.set_state(RunState.FINISHED)
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    tab.page.context.set_offline(True)
    tab.page.goto(write_report(made.folder).as_uri())
    tab.page.wait_for_selector(".js-plotly-plot .main-svg", timeout=RENDER_MS)
    assert len(tab.page.query_selector_all(".js-plotly-plot")) == 6 and _drawn(tab.page) > 0
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
