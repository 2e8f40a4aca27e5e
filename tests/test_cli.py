"""The command line: what each verb prints, its exit codes, and that bad input starts nothing."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.cli import app, main
from labkit.cli.glance import newest
from labkit.cli.notebook import _print as print_notebook
from labkit.cli.output import plain_table
from labkit.cli.reproduce import comparison
from labkit.cli.status import age_text
from labkit.config import ExperimentConfig, load
from labkit.lab.batch import NotebookResult
from labkit.lab.notebook_folder import NotebookFolder
from labkit.runfolder import ProcessId, RunFolder, RunState, RunStatus, write_atomically
from tests.made_notebooks import make_notebook, printed, read_strictly
from tests.made_runs import MadeRun

VERBS = "run status logs stop attach resume reproduce sync trace lab ui doctor config schema".split()
VERBS += "cluster probe plan memory shards bench".split()
TINY = ["engine.num_epochs=1", "cluster=1x2", "model=mlp"]


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory beside the test's own runs folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def start_command(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "labkit", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """A verb in a process of its own, as a person runs it."""
    return subprocess.run(
        [sys.executable, "-m", "labkit", *words], capture_output=True, text=True, timeout=120
    )


# --- every verb ------------------------------------------------------------------------------------


def test_the_verbs_are_these() -> None:
    assert list(app.commands) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Examples:\n    labkit {verb}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_no_verb_prints_the_list_of_verbs_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert re.search(r"^  status +List runs", capsys.readouterr().err, flags=re.MULTILINE)


def test_status_imports_neither_torch_nor_mlflow(runs: Path) -> None:
    MadeRun(runs).start().steps(1, 3).close()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "labkit", "status"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "made000000" in done.stdout
    assert "labkit" in imported
    assert not imported & {"torch", "mlflow", "papermill", "plotly", "pandas", "IPython", "sklearn"}


# --- bad input: one line, exit code 2, nothing started ---------------------------------------------


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "engin.num_epochs=3"], "engin must be a known key. Did you mean 'engine'?"),
        (["run", "engine.num_epoch=3"], "Did you mean 'num_epochs'?"),
        (["run", "engine.num_epochs=many"], "engine.num_epochs must be a whole number, got 'many'"),
        (["run", "engine.global_batch_size=0"], "engine.global_batch_size must be greater than 0, got 0"),
        (["run", "engine.global_batch_size=-8"], "engine.global_batch_size must be greater than 0, got -8"),
        (
            ["run", "--cluster", "2x3", "engine.global_batch_size=5"],
            "at least the number of workers (6), got 5",
        ),
        (["run", "--cluster", "absent.yaml"], "cluster must be an existing file, got"),
        (["run", "--cluster", "two"], "cluster must be NODESxWORKERS, a .yaml file or a mapping, got 'two'"),
        (["run", "model=absent:build"], "there is no module 'absent' here"),
        (["run", "model=json:absent"], "must name a function of json, got 'absent'"),
        (["run", "seed"], "what to run must be an experiment (.yaml) or a notebook (.ipynb), got 'seed'"),
        (["run", "absent.yaml"], "what to run must be an existing file, got absent.yaml"),
        (["run", "-f", "absent.yaml"], "-f must be a readable file, got absent.yaml"),
        (["run", "-p", "seed"], "override must be key=value, got 'seed'"),
        (["run", "--timeout", "0"], "launch.timeout_s must be greater than 0.0, got 0.0"),
        (["run", "--output", "a.ipynb"], "--output must be given with a notebook"),
        (["run", "--nonsense"], "No such option '--nonsense'"),
        (["status", "absent"], "run must be a run folder, a run key or 'latest', got 'absent'"),
        (["logs", "absent"], "got 'absent'"),
        (["stop", "absent"], "got 'absent'"),
        (["attach", "absent"], "got 'absent'"),
        (["resume", "absent"], "got 'absent'"),
        (["reproduce", "absent"], "got 'absent'"),
        (["sync", "absent"], "got 'absent'"),
        (["stop"], "Missing argument"),
        (["statu"], "verb must be a known one, got 'statu'. Did you mean 'status'?"),
        (["lab", "--port", "99999"], "99999"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_that_names_it(
    words: list[str], said: str, here: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("labkit: ") and shown.err.count("\n") == 1
    assert said in shown.err
    assert list(runs.glob("**/config.json")) == []


def test_bad_files_are_one_line_that_names_them(
    here: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "not_yaml.yaml": ("nodes: [", "must be YAML"),
        "list.yaml": ("- 1\n", "must hold a mapping of sections, got list"),
        "key.yaml": ("sync: {name: allreduce, bukket_bytes: 1}\n", "Did you mean 'bucket_bytes'?"),
        "batches.yaml": (
            "cluster: {nodes: [{name: a, workers: [{local_batch_size: 30}, {local_batch_size: 30}]}]}\n",
            "local batches must sum to engine.global_batch_size (64), got 30 + 30 = 60",
        ),
        "notebook.ipynb": ("{}", "notebook must be"),
    }
    for name, (text, said) in cases.items():
        assert main(["run", write(here / name, text)]) == 2, name
        shown = capsys.readouterr().err
        assert shown.startswith("labkit: ") and said in shown and name in shown or name == "batches.yaml"
        assert shown.count("\n") == 1, shown
    assert list(runs.glob("*/*")) == []


def test_a_cluster_file_that_does_not_parse_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "cluster.yaml", "nodes: [{name: a")
    assert main(["config", "--cluster", "cluster.yaml"]) == 2
    assert "cluster.yaml must be YAML" in capsys.readouterr().err


def test_a_runs_folder_that_cannot_be_made_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "file", "")
    monkeypatch.setenv("LABKIT_RUNS", str(here / "file" / "runs"))
    assert main(["run", *TINY]) == 2
    shown = capsys.readouterr().err
    assert "run folder must be writable, got" in shown and "LABKIT_RUNS" in shown
    assert shown.count("\n") == 1


# --- config and schema ----------------------------------------------------------------------------


def test_config_prints_yaml_that_loads_back_equal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--cluster", "2x2", "--name", "007", "optimizer.learning_rate=1e-4"]) == 0
    printed = write(here / "printed.yaml", capsys.readouterr().out)
    config = load(printed)
    assert (config.name, config.optimizer.learning_rate, config.cluster.num_workers) == ("007", 1e-4, 4)
    assert main(["config", printed]) == 0
    assert load(write(here / "again.yaml", capsys.readouterr().out)) == config


def test_later_sources_win_file_then_options_then_words(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write(here / "e.yaml", "seed: 1\nname: base\nengine: {num_epochs: 1, max_steps: 7}\n")
    values = write(here / "values.yaml", "seed: 2\nname: file\nengine.num_epochs: 2\n")
    words = [experiment, "-f", values, "--name", "option", "engine.num_epochs=3"]
    assert main(["config", *words, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["seed"], read["name"], read["engine"]["num_epochs"]) == (2, "option", 3)
    assert read["engine"]["max_steps"] == 7


def test_a_cluster_file_is_relative_to_where_it_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "deep").mkdir()
    write(here / "deep" / "c.yaml", "nodes: [{name: inner, workers: 1}]\n")
    write(here / "c.yaml", "nodes: [{name: outer, workers: 1}]\n")
    experiment = write(here / "deep" / "e.yaml", "cluster: c.yaml\n")
    for words, name in (([experiment], "inner"), ([experiment, "--cluster", "c.yaml"], "outer")):
        assert main(["config", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cluster"]["nodes"][0]["name"] == name


def test_schema_describes_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(ExperimentConfig.model_fields)


def test_dry_run_says_what_it_would_do_and_does_nothing(
    here: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--dry-run", "--json", *TINY]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["would"] == "start" and Path(plan["folder"]).parent == runs / "experiment"
    assert list(runs.iterdir()) == []


# --- runs that are there ---------------------------------------------------------------------------


def test_status_of_no_runs_says_how_to_start_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "Start one: labkit run" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_status_shows_step_loss_accuracy_and_age(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MadeRun(runs).start().steps(1, 20).close()
    assert main(["status"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "experiment", "state", "step", "loss", "val", "acc", "age"]
    assert row.split()[:4] == ["made000000", "made", "running", "20/100"]
    assert row.split()[4:6] == ["1.181", "0.4353"]


def test_status_as_json_has_every_figure(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(runs).start().steps(1, 20)
    run.step(21, loss=float("nan"))
    run.fail(rank=2)
    run.close()
    assert main(["status", "made", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (shown["state"], shown["step"], shown["total_steps"]) == ("failed", 21, 100)
    assert shown["train_loss"] is None and shown["val_accuracy"] == pytest.approx(0.4353, abs=1e-4)
    assert "odd shape" in shown["error"] and shown["folder"] == str(run.folder.path)


def test_status_after_a_resume_shows_the_newest_attempt(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(runs).start().steps(1, 30)
    run.total_steps = 40
    run.start(start_step=20).steps(21, 22).close()
    assert main(["status", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["attempt"], shown["step"], shown["total_steps"]) == (2, 22, 40)


def test_status_says_lost_when_the_owner_is_dead_and_tells_mlflow(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(runs).start().steps(1, 2)
    run.close()
    dead = ProcessId.current().model_copy(update={"started_at": 1.0})
    run.set_state(RunState.RUNNING, owner=dead)
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "lost"
    assert run.folder.read_status().state is RunState.LOST
    with contextlib.closing(sqlite3.connect(runs / "mlflow.db")) as database:
        assert database.execute("select status from runs").fetchall() == [("FAILED",)]


def test_status_says_unresponsive_when_the_owner_shows_no_life(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(runs).start()
    run.close()
    run.set_state(RunState.RUNNING, heartbeat_at=time.time() - 60)
    assert main(["status"]) == 0
    assert "unresponsive" in capsys.readouterr().out
    run.beat()
    assert main(["status"]) == 0
    assert "unresponsive" not in capsys.readouterr().out


def test_status_shows_the_newest_twenty_unless_asked_for_all(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(22):
        MadeRun(runs, key=f"run{number:02d}").set_state(RunState.PLANNED, created_at=number)
    for words, expected in (([], 20), (["--all"], 22)):
        assert main(["status", "--json", *words]) == 0
        keys = [item["key"] for item in json.loads(capsys.readouterr().out)]
        assert len(keys) == expected and keys[-1] == "run21"


def test_the_part_of_another_machines_run_is_shown_as_such(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(runs).start().steps(1, 12)
    run.close()
    for file in (run.folder.events_file(0), run.folder.events_file(1), run.folder.status_file):
        file.unlink()
    part = RunFolder(run.folder.path, node="node1")
    part.status_file.parent.mkdir()
    part.write_status(RunStatus(state=RunState.FINISHED, created_at=time.time()))
    assert main(["status", "latest", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["step"], shown["total_steps"]) == ("finished", 12, 100)
    assert shown["train_loss"] is None and shown["age_s"] < 60


def test_what_workers_had_to_say_is_in_the_report(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(runs).start()
    run._logs[1].write("message", text="an old checkpoint was taken")
    run.set_state(RunState.FINISHED)
    run.close()
    assert main(["attach", "latest"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split("note")[1].strip() == "an old checkpoint was taken"


def test_watching_ends_with_the_run(runs: Path) -> None:
    run = MadeRun(runs).start().steps(1, 2)
    with start_command("status", "latest", "--watch") as watcher:
        assert watcher.stdout is not None
        first = watcher.stdout.readline() + watcher.stdout.readline()
        assert "running" in first
        run.steps(3, 4).set_state(RunState.FINISHED)
        rest = watcher.stdout.read()
    run.close()
    assert "finished" in rest and "4/100" in rest
    assert watcher.returncode == 0


def test_logs_show_the_root_cause_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(runs).start()
    run.folder.log_files(0)[0].write_text("hello from 0\n")
    run.fail(rank=2)
    run.close()
    assert main(["logs", "latest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "worker 2 on node1 failed: ValueError: odd shape"
    assert (
        lines.index("ValueError: odd shape") < lines.index("--- rank0002.err") < lines.index("hello from 0")
    )


def test_logs_of_one_worker_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(runs).start()
    for rank in range(3):
        run.folder.log_files(rank)[0].write_text(f"one {rank}\ntwo {rank}\n")
    run.close()
    assert main(["logs", "latest", "--rank", "1", "-n", "1"]) == 0
    assert capsys.readouterr().out == "--- rank0001.out\ntwo 1\n"
    assert main(["logs", "latest", "--rank", "7"]) == 2
    assert "--rank must be a worker of the run, got 7. Known: 0, 1, 2." in capsys.readouterr().err


def test_logs_follow_until_the_end(runs: Path) -> None:
    run = MadeRun(runs).start()
    log = run.folder.log_files(0)[0]
    log.write_text("before\n")
    with start_command("logs", "latest", "--follow") as follower:
        assert follower.stdout is not None
        assert [follower.stdout.readline() for _ in range(2)] == ["--- rank0000.out\n", "before\n"]
        with open(log, "a") as file:
            file.write("after\n")
        run.set_state(RunState.FINISHED)
        rest = follower.stdout.read()
    run.close()
    assert rest == "rank0000.out: after\n" and follower.returncode == 0


def test_attach_ends_with_the_exit_code_of_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = {
        RunState.FINISHED: 0,
        RunState.FAILED: 1,
        RunState.LOST: 1,
        RunState.TIMEOUT: 124,
        RunState.KILLED: 130,
    }
    for state, code in codes.items():
        run = MadeRun(runs, key=f"{state}0").start().steps(1, 10)
        run.set_state(state)
        run.close()
        assert main(["attach", f"{state}0"]) == code
        assert f"{state} after 0:00: step 10/100, loss" in capsys.readouterr().out


def test_the_end_of_a_failed_run_is_reported_cause_first(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(runs).start().steps(1, 10)
    run.fail(rank=2)
    run.close()
    assert main(["attach", "latest"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "worker 2 on node1 failed: ValueError: odd shape"
    assert lines[-1].split() == ["resume", "labkit", "resume", "made000000"]


def test_ctrl_c_while_attached_lets_the_run_go_on(runs: Path) -> None:
    run = MadeRun(runs).start().steps(1, 2)
    with start_command("attach", "latest") as attached:
        assert attached.stderr is not None
        assert "step 2/100" in attached.stderr.readline()
        attached.send_signal(signal.SIGINT)
        complaint = attached.stderr.read()
    run.close()
    assert attached.returncode == 130 and "the run goes on" in complaint
    assert not run.folder.stop_file.exists()


def test_stop_of_a_run_that_is_over_changes_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(runs)
    run.set_state(RunState.FINISHED)
    assert main(["stop", "latest"]) == 0
    assert capsys.readouterr().out == "made000000 was already finished\n"
    assert not run.folder.stop_file.exists()


def test_one_wrong_name_and_no_run_is_stopped(runs: Path) -> None:
    run = MadeRun(runs).start()
    run.close()
    assert main(["stop", "latest", "absent"]) == 2
    assert not run.folder.stop_file.exists()


def test_a_run_that_has_not_finished_is_not_reproduced(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MadeRun(runs).set_state(RunState.KILLED)
    assert main(["reproduce", "latest"]) == 2
    assert "run must have finished to be compared with, got made000000" in capsys.readouterr().err


def test_comparison_names_what_differs_and_leaves_out_time(runs: Path) -> None:
    finals = (
        {"val/loss": 1.0, "perf/step_ms": 5.0, "a": None},
        {"val/loss": 1.5, "perf/step_ms": 9.0, "a": None},
    )
    folders = [RunFolder(runs / "x" / str(number)) for number in range(2)]
    for folder, final in zip(folders, finals, strict=True):
        folder.create(ExperimentConfig())
        write_atomically(folder.result_file, json.dumps({"final": final}))
    assert comparison(*folders) == {"equal": False, "differences": {"val/loss": [1.0, 1.5]}}
    assert comparison(folders[0], folders[0]) == {"equal": True, "differences": {}}


def test_a_closed_pipe_is_no_error(runs: Path) -> None:
    MadeRun(runs).start().close()
    shell = f"{sys.executable} -m labkit schema | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n0\n" and done.stderr == ""


# --- parts -----------------------------------------------------------------------------------------


def test_the_newest_event_is_found_from_the_end(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    lines = [
        '{"kind":"start","n":1}',
        '{"kind":"eval","n":2}',
        '{"kind":"message","text":"\\"kind\\":\\"eval\\""}',
    ]
    file.write_text("\n".join([*lines, '{"kind":"start","n":3}', '{"kind":"eval","n":4']))
    assert newest(file, ("start", "eval", "metrics")) == [
        {"kind": "start", "n": 3},
        {"kind": "eval", "n": 2},
        {},
    ]
    file.write_text("")
    assert newest(file, ("start",)) == newest(tmp_path / "absent", ("start",)) == [{}]


def test_ages_have_one_unit() -> None:
    assert [age_text(s) for s in (0.9, 59, 60, 3599, 7200, 200_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "59 min",
        "2 h",
        "2 d",
    ]


def test_a_plain_table_is_aligned() -> None:
    assert plain_table(("a", "bb"), [("xxx", "y"), ("", "z")]) == "a    bb\nxxx  y\n     z"


# --- runs that really train ------------------------------------------------------------------------


def test_run_again_resume_and_reproduce(here: Path, runs: Path) -> None:
    done = command("run", *TINY, "--json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    assert first["state"] == "finished" and first["step"] == first["total_steps"] == 24
    assert first["final"]["val/accuracy"] == first["val_accuracy"] > 0.5

    again = command("run", *TINY)
    assert again.returncode == 0 and "nothing was started" in again.stderr
    assert first["folder"] in again.stdout

    repeat = command("reproduce", "latest", "--json")
    assert repeat.returncode == 0, repeat.stderr
    second = json.loads(repeat.stdout)
    assert second["key"] == f"{first['key']}-r2" and second["original"] == first["key"]
    assert second["equal"] is True and "warning" not in repeat.stderr


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_resume_goes_on(here: Path, runs: Path) -> None:
    words = ["cluster=1x2", "model=mlp", "engine.num_epochs=2", "engine.step_padding_s=0.2"]
    with start_command("run", *words, "--json") as running:
        assert running.stderr is not None and running.stdout is not None
        while "step" not in running.stderr.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        complaint = running.stderr.read()
        stopped = json.loads(running.stdout.read())
    assert running.returncode == 130 and stopped["state"] == "killed" and "Stopping" in complaint
    assert 0 < stopped["step"] < 48
    resumed = command("resume", "latest", "--json")
    assert json.loads(resumed.stdout)["step"] == 48, resumed.stderr


def test_a_failing_model_is_reported_with_worker_and_traceback(here: Path, runs: Path) -> None:
    write(here / "broken.py", "def build(info, **options):\n    raise ValueError('odd shape')\n")
    done = command("run", "model=broken:build", "cluster=1x2")
    assert done.returncode == 1
    first = done.stdout.splitlines()[0]
    assert re.fullmatch(r"worker \d on node0 failed: ValueError: odd shape", first)
    assert "broken.py" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_detached_run_outlives_the_command_and_is_stopped_by_name(here: Path, runs: Path) -> None:
    words = ["cluster=1x1", "model=mlp", "engine.num_epochs=50", "engine.step_padding_s=0.1"]
    assert command("run", *words, "--detach").returncode == 0
    busy = command("run", *words)
    assert busy.returncode == 2 and "run must not be running" in busy.stderr
    stopped = command("stop", "latest", "--json")
    assert json.loads(stopped.stdout)[0]["state"] == "killed"
    timed = command("run", *words, "engine.step_padding_s=0.05", "--timeout", "1")
    assert timed.returncode == 124 and "timeout" in timed.stdout
    assert os.listdir(runs / "experiment")


# --- notebooks -------------------------------------------------------------------------------------


def test_of_a_notebooks_many_runs_only_those_that_failed_are_told_one_by_one(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [MadeRun(runs, key=f"made00000{index}").start().steps(1, 2) for index in range(9)]
    for run in made:
        run.close()
        run.set_state(RunState.FINISHED)
    made[4].set_state(RunState.FAILED)
    folder = NotebookFolder(runs / "notebooks" / "study" / "key")
    folders = tuple(run.folder for run in made)
    print_notebook(NotebookResult(RunState.FAILED, 1, folder, folder.notebook_file, runs=folders))
    said = capsys.readouterr().out
    assert "made000004" in said and "made000003" not in said and "8 of 9 runs finished" in said
    print_notebook(NotebookResult(RunState.FAILED, 1, folder, folder.notebook_file, runs=folders[:3]))
    assert capsys.readouterr().out.count("step 2/100") == 3


def test_a_notebook_is_run_with_checked_parameters(
    here: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = make_notebook(here / "ask.ipynb", "print(rate * 2)", parameters="rate: float = 1.0")
    assert main(["run", str(notebook), "rate=1e-4", "--output", "deep/out.ipynb", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert (result["state"], result["exit_code"], result["runs"]) == ("finished", 0, [])
    assert printed(read_strictly(here / "deep" / "out.ipynb")) == "0.0002\n"
    assert Path(result["notebook"]).is_relative_to(runs / "notebooks" / "ask")
    assert "cell 3/3 done" in shown.err

    assert main(["run", str(notebook), "-p", "rate=0.0001"]) == 0
    shown = capsys.readouterr()
    assert "already finished" in shown.err and result["notebook"] in shown.out


def test_a_notebook_that_fails_says_where(here: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = make_notebook(here / "bad.ipynb", "1 / 0")
    assert main(["run", str(notebook)]) == 1
    assert capsys.readouterr().out.startswith("cause: ZeroDivisionError: division by zero in cell 2/2\n")
    killed = make_notebook(here / "dead.ipynb", "import os; os.kill(os.getpid(), 9)")
    assert main(["run", str(killed)]) == 138
    assert "kernel died (signal 9)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parameters", "said"),
    [
        (["leraning_rate=1"], "learning_rate: float = 0.1", "Did you mean 'learning_rate'?"),
        (["x=much"], "x: int = 1", "must be"),
        ([], None, "must have"),
        (["--detach"], "x: int = 1", "--detach must be given with an experiment (.yaml)"),
        (["--rendezvous", "a:1"], "x: int = 1", "--rendezvous must be given with an experiment (.yaml)"),
        (["-f", "absent.yaml"], "x: int = 1", "absent.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_parameter_is_one_line_and_no_kernel(
    words: list[str],
    parameters: str | None,
    said: str,
    here: Path,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    notebook = make_notebook(here / "n.ipynb", "print(1)", parameters=parameters)
    assert main(["run", str(notebook), *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("labkit: ") and said in shown.err and shown.err.count("\n") == 1
    assert shown.out == "" and list(runs.iterdir()) == []


def test_dry_run_of_a_notebook_shows_its_parameters(
    here: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = make_notebook(here / "n.ipynb", "1", parameters='x: int = 1\nname: str = "a"')
    assert main(["run", str(notebook), "--dry-run", "--name", "007"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["x = 1", "name = '007'  (given)"]
    assert list(runs.iterdir()) == []
