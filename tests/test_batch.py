"""Laws of the notebook runner: what is run, what is kept, and that the state is true however it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from made_notebooks import make_notebook, notebook_of, printed, read_strictly

from labkit.config import ExperimentConfig
from labkit.errors import ConfigError
from labkit.lab.batch import Limits, NotebookResult, run_notebook
from labkit.lab.notebook_folder import NotebookFolder, all_notebooks
from labkit.runfolder import ProcessId, RunFolder, RunState, RunStatus


def statuses(result: NotebookResult) -> list[str]:
    """papermill's word for each cell, without the marks it puts around a failed one."""
    cells = read_strictly(result.notebook).cells
    return [cell.metadata.papermill.status for cell in cells if "papermill" in cell.metadata]


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# A notebook that runs well


def test_a_good_notebook_runs_here_once_and_leaves_a_small_true_copy(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_RUNS", "runs")  # relative to here, which is not the kernel's folder
    folder = tmp_path / "a {b} ü"
    path = make_notebook(
        folder / "n {x}.ipynb",
        "import os, sys\nprint(sys.executable, os.getcwd(), os.environ['LABKIT_BATCH'], sep='\\n')",
        "import labkit.runfolder\nprint(labkit.runfolder.runs_root())",
        "print('half', end=''); print(' line'); print('no end', end='')",
        "import tqdm\nfor _ in tqdm.tqdm(range(3)): pass",
        "x * 2",
        "import ipywidgets; ipywidgets.IntSlider()",
        kernel="conda-env-foo-py",
    )
    output = tmp_path / "out {y}" / "deep" / "copy.ipynb"
    result = run_notebook(path, {"x": 21}, output=output)

    assert (result.state, result.exit_code, result.error) == (RunState.FINISHED, 0, None)
    assert result.notebook == runs / "notebooks" / "n {x}" / result.folder.key / "notebook.ipynb"
    assert len(result.folder.key) == 10
    executed = read_strictly(result.notebook)
    assert printed(executed).splitlines()[:4] == [sys.executable, str(folder), "1", str(runs)]
    assert set(statuses(result)) == {"completed"}
    assert "widgets" not in executed.metadata and executed.metadata.kernelspec.name == "python3"
    assert result.notebook.stat().st_size < 20_000
    assert str(tmp_path) not in str(executed.metadata)
    assert read_strictly(output) == executed

    status = result.folder.status()
    assert status.state is RunState.FINISHED and status.owner == ProcessId.current()
    assert status.ended_at is not None and status.ended_at >= (status.started_at or 0) > 0
    assert json.loads(result.folder.parameters_file.read_text())["parameters"] == {"x": 21}

    shown, noise = capfd.readouterr()
    lines = shown.splitlines()
    assert "conda-env-foo-py" in lines[0] and sum("conda-env" in line for line in lines) == 1
    assert {"    half line", "    no end"} <= set(lines)
    assert "    42" in lines and sum(line.startswith("cell ") for line in lines) == 8
    assert noise == ""

    again = run_notebook(path, {"x": 21}, output=tmp_path / "second.ipynb")
    assert again.is_reused and again.folder.path == result.folder.path and again.exit_code == 0
    assert "already finished" in capfd.readouterr().out
    assert read_strictly(tmp_path / "second.ipynb") == executed
    assert [folder.key for folder in all_notebooks(runs)] == [result.folder.key]


def test_other_parameters_or_code_or_a_repeat_run_in_a_folder_of_their_own(
    runs: Path, tmp_path: Path
) -> None:
    path = make_notebook(tmp_path / "nb.ipynb", "print(x)")
    first, other = run_notebook(path), run_notebook(path, {"x": 2})
    repeat = run_notebook(path, is_repeat=True)
    make_notebook(path, "print(x + 0)")
    edited = run_notebook(path)
    keys = [result.folder.key for result in (first, other, repeat, edited)]
    assert len(set(keys)) == 4 and not any(r.is_reused for r in (first, other, repeat, edited))
    assert keys[2] == f"{keys[0]}-r2"
    # A default given as a value is the same run; so is a run of the executed copy.
    make_notebook(path, "print(x)")
    assert run_notebook(path, texts=["x=1"]).folder.path == first.folder.path
    copy = tmp_path / "nb2.ipynb"
    copy.write_text(other.notebook.read_text())
    assert run_notebook(copy).folder.key == other.folder.key


def test_the_copy_goes_to_the_runs_that_the_notebook_started(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(runs / "e" / "0123456789")
    run.create(ExperimentConfig())
    note = json.dumps({"run": str(run.path)})
    lines = "\n".join([note, note, '{"run": "/nowhere"}', '{"ru'])  # twice, deleted, cut off
    path = make_notebook(
        tmp_path / "nb.ipynb",
        "import os\nfile = open(os.environ['LABKIT_NOTEBOOK_DIR'] + '/runs.jsonl', 'a')\n"
        f"file.write({lines!r})\nfile.close()",
        "1 / 0",
    )
    result = run_notebook(path)
    assert [str(started.path) for started in result.runs] == [str(run.path)]
    assert read_strictly(run.notebook_file) == read_strictly(result.notebook)
    assert "ZeroDivisionError" in run.notebook_file.read_text()


def test_a_cell_that_may_raise_does_not_fail_the_notebook(runs: Path, tmp_path: Path) -> None:
    notebook = notebook_of("1 / 0", "print('after')")
    notebook.cells[1].metadata.tags = ["raises-exception"]
    path = tmp_path / "nb.ipynb"
    nbformat.write(notebook, path)
    result = run_notebook(path)
    assert result.state is RunState.FINISHED and printed(read_strictly(result.notebook)) == "after\n"
    assert "papermill-error" not in result.notebook.read_text()


# A notebook that does not


def test_a_failing_cell_is_said_first_and_short(runs: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    path = make_notebook(tmp_path / "nb.ipynb", "def f(a):\n    return 1 / a", "f(0)", "print('never')")
    result = run_notebook(path, echo=lines.append)
    assert (result.state, result.exit_code) == (RunState.FAILED, 1)
    assert result.error is not None
    assert result.error.message == "ZeroDivisionError: division by zero in cell 3/4"
    assert "return 1 / a" in result.error.traceback and "\x1b" not in result.error.traceback
    assert statuses(result) == ["completed", "completed", "failed", "pending"]
    assert lines[-1].startswith("cell 3/4 failed after") and lines[-1].endswith("f(0)")
    assert result.folder.status().error == result.error


def test_a_killed_kernel_fails_the_notebook_and_the_next_run_executes_it_again(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_notebook(
        tmp_path / "nb.ipynb",
        "import os, pathlib, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "if not pathlib.Path('again').exists(): os.kill(os.getpid(), 9)",
        "child.kill(); child.wait()",
    )
    result = run_notebook(path)
    assert (result.state, result.exit_code) == (RunState.FAILED, 138)
    assert result.error is not None and result.error.message.startswith("kernel died (signal 9) in cell 2/3")
    assert statuses(result) == ["completed", "failed", "pending"]
    assert "kernel died (signal 9)" in result.notebook.read_text()
    wait_for(lambda: is_gone(int((tmp_path / "child").read_text())))
    assert capfd.readouterr().err == ""

    (tmp_path / "again").touch()
    again = run_notebook(path)
    assert again.state is RunState.FINISHED and again.folder.path == result.folder.path
    assert again.folder.status().attempt == 2 and again.folder.status().error is None


@pytest.mark.parametrize(
    ("cells", "state"),
    [
        (["import sys; sys.exit(0)", "print('never')"], RunState.FAILED),
        (["print(1)", "import sys; sys.exit(0)"], RunState.FINISHED),
        (["import sys; sys.exit(3)"], RunState.FAILED),
    ],
)
def test_an_exit_is_a_success_only_at_the_end_and_with_code_0(
    runs: Path, tmp_path: Path, cells: list[str], state: RunState
) -> None:
    result = run_notebook(make_notebook(tmp_path / "nb.ipynb", *cells))
    assert (result.state, result.exit_code) == (state, 0 if state is RunState.FINISHED else 1)


@pytest.mark.parametrize(
    "cell",
    [
        "import time; time.sleep(600)",
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)",
    ],
    ids=["interrupted", "killed"],
)
def test_a_notebook_past_its_time_out_is_ended(runs: Path, tmp_path: Path, cell: str) -> None:
    began = time.monotonic()
    result = run_notebook(make_notebook(tmp_path / "nb.ipynb", cell), limits=Limits(timeout_s=3))
    assert (result.state, result.exit_code) == (RunState.TIMEOUT, 124)
    assert result.error is not None
    assert result.error.message == "notebook ran past its time-out of 3 s in cell 2/2"
    assert time.monotonic() - began < 15
    assert "failed" in statuses(result)


def test_a_kernel_that_hangs_after_the_last_cell_is_killed_and_the_state_kept(
    runs: Path, tmp_path: Path
) -> None:
    path = make_notebook(
        tmp_path / "nb.ipynb", "import asyncio, time\nasyncio.get_event_loop().call_soon(time.sleep, 600);"
    )
    began = time.monotonic()
    result = run_notebook(path, limits=Limits(exit_timeout_s=1))
    assert result.state is RunState.FINISHED and set(statuses(result)) == {"completed"}
    assert time.monotonic() - began < 20
    assert Limits().exit_timeout_s + 10 <= 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_notebook_and_the_handlers_come_back(
    runs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    path = make_notebook(
        tmp_path / "nb.ipynb",
        f"import os, time\nos.kill(os.getppid(), {int(number)})\ntime.sleep(600)",
    )
    result = run_notebook(path)
    assert (result.state, result.exit_code) == (RunState.KILLED, 130)
    assert (
        result.error is not None and result.error.message == f"interrupted (signal {int(number)}) in cell 2/2"
    )
    assert "KeyboardInterrupt" in result.error.traceback  # where it was when it was stopped
    assert signal.getsignal(number) is before


def test_a_stop_file_stops_it_and_a_thread_may_run_it(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(
        tmp_path / "nb.ipynb",
        "import os, pathlib, time\npathlib.Path(os.environ['LABKIT_NOTEBOOK_DIR'], 'STOP').touch()",
        "time.sleep(600)",
    )
    results: list[NotebookResult] = []
    thread = threading.Thread(target=lambda: results.append(run_notebook(path)))
    thread.start()
    thread.join(timeout=60)
    assert results and results[0].state is RunState.KILLED and results[0].exit_code == 130


@pytest.mark.slow
def test_a_kernel_stopped_by_a_signal_is_noticed(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(tmp_path / "nb.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    result = run_notebook(path, limits=Limits(stopped_timeout_s=2))
    assert (result.state, result.exit_code) == (RunState.FAILED, 138)
    assert result.error is not None and "stopped (SIGSTOP) for more than 2 s" in result.error.message


def test_a_killed_runner_leaves_no_kernel_and_its_notebook_is_lost(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(
        tmp_path / "nb.ipynb",
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)",
    )
    code = f"from labkit.lab.batch import run_notebook; run_notebook({str(path)!r})"
    sockets = tempfile.mkdtemp()  # what a killed runner can't remove
    environment = {**os.environ, "TMPDIR": sockets}
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=environment)
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        (folder,) = all_notebooks(runs)
        assert folder.status().state is RunState.RUNNING
        with pytest.raises(ConfigError, match=f"must not be running .* process {runner.pid} "):
            folder.claim()
    finally:
        runner.kill()
        runner.wait()
        shutil.rmtree(sockets)
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())))
    status = folder.status()
    assert status.state is RunState.LOST and status.error is not None and "died" in status.error.message
    assert json.loads(folder.status_file.read_text())["state"] == "lost"


def test_a_kernel_that_does_not_come_up_is_started_once_more(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        "tries = pathlib.Path(os.environ['TRIES'])\n"
        "if 'ipykernel_launcher' in ' '.join(sys.orig_argv):\n"
        "    tries.write_text(tries.read_text() + 'x')\n"
        "    if len(tries.read_text()) <= int(os.environ['FAILURES']): os._exit(3)\n"
    )
    (tmp_path / "tries").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    path = make_notebook(tmp_path / "nb.ipynb", "print(x)")
    lines: list[str] = []

    monkeypatch.setenv("FAILURES", "1")
    assert run_notebook(path, echo=lines.append).state is RunState.FINISHED
    assert sum("trying once more" in line for line in lines) == 1

    monkeypatch.setenv("FAILURES", "9")
    result = run_notebook(path, is_repeat=True, echo=lines.append)
    assert (result.state, result.exit_code) == (RunState.FAILED, 138)
    assert result.error is not None and result.error.message.startswith("kernel did not start: ")
    assert (tmp_path / "tries").read_text() == "xxxx"


@pytest.mark.slow
def test_a_long_temporary_path_which_no_socket_fits_is_no_obstacle(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    result = run_notebook(make_notebook(tmp_path / "nb.ipynb", "print(x)"))
    assert result.state is RunState.FINISHED and not list(deep.iterdir())
    assert "Kernel is running over TCP" in result.folder.kernel_log.read_text()
    assert capfd.readouterr().err == ""


# Bad input: one line, nothing started


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a Jupyter notebook"),
        ("{}", "must be a Jupyter notebook"),
        ('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "one without cells"),
        (None, "must be an existing file"),
    ],
)
def test_refuses_what_is_no_notebook(runs: Path, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "nb.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        run_notebook(path)
    assert "\n" not in str(caught.value) and not list(runs.iterdir())


def test_refuses_a_notebook_in_another_language(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(tmp_path / "nb.ipynb")
    path.write_text(path.read_text().replace('"language": "python"', '"language": "R"'))
    with pytest.raises(ConfigError, match="must be in Python and have cells, got a notebook in R"):
        run_notebook(path)


def test_refuses_an_output_that_would_destroy_something(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(tmp_path / "nb.ipynb")
    for output in (path, tmp_path):
        with pytest.raises(ConfigError, match="output must be the path of a new notebook"):
            run_notebook(path, output=output)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output's folder must be writable"):
        run_notebook(path, output=tmp_path / "file" / "out.ipynb")


def test_refuses_a_runs_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError, match="notebook's folder must be writable, got .* set LABKIT_RUNS"):
        run_notebook(make_notebook(tmp_path / "nb.ipynb"))


def test_a_folder_whose_owner_lives_is_not_lost(tmp_path: Path) -> None:
    folder = NotebookFolder(tmp_path)
    folder.write_status(RunStatus(state=RunState.RUNNING, owner=ProcessId.current()))
    assert folder.status().state is RunState.RUNNING


# Several at once


@pytest.mark.slow
def test_eight_notebooks_in_four_processes_all_finish(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(tmp_path / "nb.ipynb", "import os; print(os.getpid())")
    code = (
        "import sys\nfrom labkit.lab.batch import run_notebook\n"
        f"sys.exit(max(run_notebook({str(path)!r}, dict(x=int(x))).exit_code for x in sys.argv[1:]))"
    )
    start = [[sys.executable, "-c", code, str(n), str(n + 4)] for n in range(4)]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ) for command in start]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0, 0]
    folders = all_notebooks(runs)
    assert len(folders) == 8
    assert len({printed(read_strictly(folder.notebook_file)) for folder in folders}) == 8
