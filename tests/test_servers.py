"""`labkit lab` and `labkit ui`: both answer, on loopback alone, behind a token, and nothing is left."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from labkit.cli import main
from labkit.errors import ConfigError
from labkit.lab import links, servers
from labkit.runfolder import RunFolder

START_TIMEOUT_S = 120


class Lab:
    """`labkit lab` (or `ui`) in a process of its own."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "labkit", *words, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(str(self.process.communicate()[1]))
        self.links: dict[str, str] = json.loads(line)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals) -> str:
        """Send a signal; return what was said, once nothing of it is left."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> str:
        """What was said on stderr, once it has ended and nothing of it is left."""
        _, said = self.process.communicate(timeout=60)
        gone, alive = psutil.wait_procs(self.family, timeout=20)
        for process in alive:
            process.kill()
        assert not alive, [process.cmdline() for process in alive]
        return said


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One lab for several tests, in a folder with a space and an umlaut."""
    runs = tmp_path_factory.mktemp("a ü") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(runs))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        started = Lab("lab")
        yield started
        said = started.end(signal.SIGINT)
        assert links.served_url() is None
    assert started.process.returncode == 0 and "Traceback" not in said


@pytest.fixture
def lab_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs folder of the lab that runs, whose store is made already."""
    monkeypatch.setenv("LABKIT_RUNS", lab.links["runs"])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Path(lab.links["runs"])


def get(url: str, **headers: str) -> tuple[int, str]:
    """Status, and the address at the end of redirections."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
            return reply.status, reply.geturl()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, url


def test_both_links_answer(lab: Lab) -> None:
    assert get(lab.links["JupyterLab"]) == (200, lab.links["JupyterLab"])
    assert get(lab.links["MLflow UI"])[0] == 200
    assert "workflowType=machine_learning" in lab.links["MLflow UI"]


def test_jupyterlab_without_its_token_is_closed(lab: Lab) -> None:
    page = urlsplit(lab.links["JupyterLab"])
    base = f"http://{page.netloc}"
    assert len(page.query.removeprefix("token=")) >= 32
    assert "/login" in get(base + page.path)[1]
    assert get(f"{base}/api/contents")[0] == 403
    assert get(f"{base}/api/contents?token=wrong")[0] == 403
    assert get(f"{base}/api/contents?{page.query}")[0] == 200


def test_the_token_is_on_no_command_line(lab: Lab) -> None:
    token = urlsplit(lab.links["JupyterLab"]).query.removeprefix("token=")
    assert not any(token in " ".join(process.cmdline()) for process in lab.family)


def test_jupyterlab_does_not_ask_about_news(lab: Lab) -> None:
    page = urlsplit(lab.links["JupyterLab"])
    setting = "@jupyterlab/apputils-extension:notification"
    with urllib.request.urlopen(f"http://{page.netloc}/lab/api/settings/{setting}?{page.query}") as reply:
        properties = json.load(reply)["schema"]["properties"]
    assert properties["fetchNews"]["default"] == "false"
    assert properties["checkForUpdates"]["default"] is False


def test_nothing_listens_beyond_loopback(lab: Lab) -> None:
    family = [process for process in lab.family if process.is_running()]
    connections = [c for process in family for c in process.net_connections("inet")]
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    expected = {urlsplit(lab.links[name]).port for name in ("JupyterLab", "MLflow UI")}
    assert expected <= {address.port for address in listening}


def test_links_of_runs_lead_to_the_ui_that_runs(lab: Lab, lab_runs: Path) -> None:
    assert links.home_url() == lab.links["MLflow UI"]
    folder = RunFolder(lab_runs / "x" / "y")
    folder.path.mkdir(parents=True)
    folder.tracking_file.write_text('{"experiment_id": "1", "run_id": "2"}')
    assert str(links.run_url(folder)).startswith(
        lab.links["MLflow UI"].partition("/#")[0] + "/#/experiments/1"
    )


def test_everything_of_it_lies_in_the_runs_folder(lab: Lab) -> None:
    runs = Path(lab.links["runs"])
    assert (runs / "mlflow.db").is_file()
    assert {path.name for path in runs.parent.iterdir()} == {"runs"}


def test_a_kernel_finds_labkit_and_the_runs(lab: Lab) -> None:
    jupyter = next(process for process in lab.family if "jupyterlab" in process.cmdline())
    environment = jupyter.environ()
    code = "import labkit.runfolder as r; print(r.runs_root())"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout.strip() == lab.links["runs"], done.stderr


def test_a_second_lab_takes_other_ports_and_ends_with_its_mlflow(lab: Lab, lab_runs: Path) -> None:
    second = Lab("lab")
    ours = {urlsplit(second.links[name]).netloc for name in ("JupyterLab", "MLflow UI")}
    assert not ours & {urlsplit(lab.links[name]).netloc for name in ("JupyterLab", "MLflow UI")}
    mlflow = next(process for process in second.family if "mlflow" in process.cmdline())
    mlflow.terminate()
    said = second.wait()
    assert second.process.returncode == 1 and "labkit: MLflow UI ended with exit code" in said


def test_on_all_addresses_the_host_name_is_let_in_and_a_kill_takes_the_server_along(lab_runs: Path) -> None:
    ui = Lab("ui", "--host", "0.0.0.0")
    assert set(ui.links) == {"MLflow UI", "runs"}
    try:
        base = f"http://127.0.0.1:{(port := urlsplit(ui.links['MLflow UI']).port)}/"
        assert get(base, Host=f"{socket.gethostname()}:{port}")[0] == 200
        assert get(base, Host=f"elsewhere.example:{port}")[0] == 403
    finally:
        ui.end(signal.SIGKILL)


@contextlib.contextmanager
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("words", [("lab", "--port"), ("lab", "--mlflow-port"), ("ui", "--port")])
def test_a_port_in_use_is_named_and_nothing_is_started(
    words: tuple[str, ...], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()
    with busy_port() as port:
        assert main([*words, str(port)]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"labkit: {words[-1]} must be a free port, got {port}, which is in use\. Choose another.*\n", said
    )
    assert list(runs.iterdir()) == [] and psutil.Process().children() == before


def test_a_free_port_near_the_preferred_one_is_chosen() -> None:
    with busy_port() as port:
        assert servers.choose_port(None, port) != port
    assert servers.choose_port(port, 1) == port
    with pytest.raises(ConfigError, match="in use"):
        servers.choose_port(port, 1, taken=[port])


def test_a_host_that_is_not_ours_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--host", "192.0.2.1"]) == 2
    assert "host must be an address of this machine, got '192.0.2.1'" in capsys.readouterr().err


def test_with_a_server_of_the_users_own_there_is_no_ui_to_start(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker.example:5000")
    assert main(["ui"]) == 2
    assert "http://tracker.example:5000" in capsys.readouterr().err


def test_a_stale_note_of_a_dead_ui_is_not_believed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with links.served_at("http://127.0.0.1:5123"):
        assert links.base_url() == "http://127.0.0.1:5123"
        record = json.loads((runs / "ui.json").read_text())
    assert links.base_url() == links.DEFAULT_BASE
    record["owner"]["started_at"] = 1.0
    (runs / "ui.json").write_text(json.dumps(record))
    assert links.base_url() == links.DEFAULT_BASE


def test_a_server_that_does_not_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; print('cannot do that'); sys.exit(3)"
    plan = servers.ServerPlan(
        name="thing",
        command=[sys.executable, "-c", code],
        environment=os.environ,
        folder=tmp_path,
        health_url="http://127.0.0.1:9/",
        link="",
    )
    with pytest.raises(Exception, match="thing ended with exit code 3. Its last lines:\ncannot do that"):
        servers.serve([plan], lambda: pytest.fail("it never answered"))


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_STOP_GRACE_S", 0.2)
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignore}; print('up', flush=True); time.sleep(60)"
    plan = servers.ServerPlan("deaf", [sys.executable, "-c", code], os.environ, tmp_path, "", "")
    with servers.started(plan) as server:
        while "up" not in server.log_tail():
            time.sleep(0.05)
    assert server.process.returncode == -signal.SIGKILL
