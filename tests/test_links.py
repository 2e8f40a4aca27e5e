"""Laws of the links into the MLflow UI, and of the server behind them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.errors import ConfigError
from labkit.lab import links, tracking
from tests.support import need
from tests.tracked_runs import Store, TrackedRun, finish

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def _known(runs: Path, key: str, experiment_id: str, run_id: str) -> TrackedRun:
    run = TrackedRun(runs, key=key)
    run.close()
    state = {"experiment_id": experiment_id, "run_id": run_id}
    run.folder.tracking_file.write_text(json.dumps(state))
    return run


# --- addresses ---------------------------------------------------------------------------------------


def test_links_open_the_pages_for_training(runs: Path) -> None:
    run = _known(runs, "a", "7", "r1").folder
    base = "http://127.0.0.1:5000/#/experiments"
    assert links.home_url() == f"{base}?workflowType=machine_learning"
    assert links.experiment_url(run) == f"{base}/7/runs?compareRunsMode=CHART&workflowType=machine_learning"
    assert links.run_url(run) == f"{base}/7/runs/r1/model-metrics?workflowType=machine_learning"


def test_a_comparison_names_every_run_and_each_experiment_once(runs: Path) -> None:
    folders = [_known(runs, key, "7", f"r{key}").folder for key in "ab"]
    url = links.compare_url(folders)
    assert url is not None
    query = urllib.parse.parse_qs(url.partition("?")[2])
    assert json.loads(query["runs"][0]) == ["ra", "rb"]
    assert json.loads(query["experiments"][0]) == ["7"]


def test_a_run_that_mlflow_does_not_know_has_no_link(runs: Path) -> None:
    run = TrackedRun(runs)
    run.close()
    assert links.run_url(run.folder) is None
    assert links.experiment_url(run.folder) is None
    assert links.compare_url([run.folder]) is None


def test_links_lead_to_the_users_server_without_his_password(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@host:8443/mlflow/")
    run = _known(runs, "a", "7", "r1").folder
    url = links.run_url(run)
    assert url is not None
    assert url.startswith("https://host:8443/mlflow/#/experiments/7/")


# --- the server's command ------------------------------------------------------------------------------


def test_the_server_listens_to_loopback_unless_told_otherwise(runs: Path) -> None:
    (runs / "mlflow.db").write_text("there")
    command = tracking.ui_command()
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--allowed-hosts" not in command


def test_an_open_server_names_the_hosts_it_answers_to(runs: Path) -> None:
    (runs / "mlflow.db").write_text("there")
    command = tracking.ui_command("node1", 5055)
    hosts = command[command.index("--allowed-hosts") + 1].split(",")
    assert {"localhost:*", "127.0.0.1:*", "node1:*", "node1"} <= set(hosts)
    assert "http://node1:5055" in command[command.index("--cors-allowed-origins") + 1].split(",")
    assert "*" not in hosts


def test_there_is_nothing_to_serve_where_a_server_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:5000")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI must be unset") as caught:
        tracking.ui_command()
    assert "secret" not in str(caught.value)


# --- a real server -------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, host: str | None = None, body: str | None = None, origin: str | None = None) -> int:
    """The HTTP status of a request."""
    headers = {"Content-Type": "application/json"}
    headers |= {"Host": host} if host else {}
    headers |= {"Origin": origin} if origin else {}
    request = urllib.request.Request(url, headers=headers, data=body.encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


class Served:
    """A server over a runs folder with two finished runs."""

    def __init__(self, runs: Path, port: int) -> None:
        self.runs = runs
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.store = Store(runs)
        self.made = [TrackedRun(runs, key=f"key{number}") for number in range(2)]
        for run in self.made:
            run.steps(1, 20).end()
            run.close()
            tracking.sync(run.folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As `labkit ui --host 0.0.0.0` serves it, but here it listens to loopback only."""
    runs = tmp_path_factory.mktemp("served") / "rüns 1"
    runs.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(runs))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        made = Served(runs, _free_port())
        command = tracking.ui_command("0.0.0.0", made.port)
        command[command.index("--host") + 1] = "127.0.0.1"
        log = (runs / "server.log").open("wb")
        process = subprocess.Popen(
            command, env=tracking.ui_environment(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    if _get(f"{made.url}/health") == 200:
                        break
                except OSError:
                    assert process.poll() is None, (runs / "server.log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            yield made
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                _kill_rest(process.pid)
                process.wait()
                log.close()


def _kill_rest(group: int) -> None:
    """Kill what is left of a group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.slow
def test_other_machines_may_call_the_server_by_its_name_and_strangers_may_not(served: Served) -> None:
    name = socket.gethostname()
    search = json.dumps({"max_results": 1})
    url = f"{served.url}/api/2.0/mlflow/experiments/search"
    assert _get(url, host=f"{name}:{served.port}", body=search) == 200
    origin = f"http://{name}:{served.port}"
    assert _get(url, host=f"{name}:{served.port}", body=search, origin=origin) == 200  # what a browser sends
    assert _get(url, host=f"evil.example:{served.port}", body=search) == 403
    assert _get(url, body=search, origin="http://evil.example") == 403


@pytest.mark.slow
def test_artifacts_open_through_the_server(served: Served) -> None:
    run_id = served.made[0].run_id
    assert _get(f"{served.url}/get-artifact?path=config.json&run_uuid={run_id}") == 200


@pytest.mark.slow
def test_a_run_tracked_through_the_server_has_all_its_metrics_and_artifacts(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the database: metrics and files go over HTTP and lie under the server's runs."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.url)
    run = TrackedRun(tmp_path / "elsewhere", key="remote")
    tracker = run.track(cwd=tmp_path)
    run.steps(1, 300).end().close()
    assert finish(tracker) == [0], run.tracker_log()
    assert len(served.store.history(run.run_id, "train/loss")) == 300
    assert served.store.status(run.run_id) == "FINISHED"
    assert len(list((served.runs / "artifacts").rglob(f"{run.run_id}/artifacts/config.json"))) == 1
    assert not list(tmp_path.rglob("mlflow.db"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run.begin(attempt=2)
    run.steps(301, 310).end().close()
    assert tracking.sync(run.folder)  # without the variable it goes to where the run already is
    assert len(served.store.history(run.run_id, "train/loss")) == 310


@pytest.mark.slow
@pytest.mark.browser
def test_links_show_charts_and_not_the_page_for_agents(served: Served) -> None:
    need(CHROMIUM is not None, "install chromium")
    from playwright.sync_api import sync_playwright

    folders = [run.folder for run in served.made]
    names = [served.store.tags(run.run_id)["mlflow.runName"] for run in served.made]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(60_000)
            page.goto(links.experiment_url(folders[0], served.url) or "")
            page.get_by_text("train", exact=False).first.wait_for()
            page.locator(".js-plotly-plot").nth(1).wait_for()
            assert "Traces" not in page.inner_text("main")
            page.goto(links.run_url(folders[0], served.url) or "")
            page.get_by_text("train_loss", exact=True).first.wait_for()
            page.locator(".js-plotly-plot").first.wait_for()
            page.goto(links.compare_url(folders, served.url) or "")
            page.get_by_text("Comparing 2 Runs", exact=False).first.wait_for()
            assert all(name in page.content() for name in names)
        finally:
            browser.close()
