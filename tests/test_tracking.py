"""Laws of the tracker, against a real MLflow, a real SQLite file and real processes."""

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from labkit.config import from_mapping, from_overrides
from labkit.lab import tracking
from labkit.runfolder import ProcessId, RunError, RunState, write_atomically
from tests.tracked_runs import Store, TrackedRun, artifacts, copy_store, finish, wait_until


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with an empty store."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        tracking.ensure_store(folder)
    return folder


@pytest.fixture
def store(runs: Path, template: Path) -> Store:
    """The store of this test's runs folder."""
    copy_store(template, runs)
    return Store(runs)


@pytest.fixture
def run(runs: Path, store: Store) -> Iterator[TrackedRun]:
    """A run of two workers that is running."""
    made = TrackedRun(runs)
    yield made
    made.close()


def _dead_uri() -> str:
    """The address of a server that is not there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_four_first_starts_at_once_give_four_good_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder with a space, an umlaut and a percent sign in its path; four working directories."""
    runs = tmp_path / "my rüns 20%20" / "runs"
    runs.mkdir(parents=True)
    monkeypatch.setenv("LABKIT_RUNS", str(runs))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    places = [tmp_path, runs, runs.parent, tmp_path / "é f"]
    places[3].mkdir()
    stale = tmp_path / "mlruns" / "0" / "meta.yaml"  # flips MLflow's own default back to its file store
    stale.parent.mkdir(parents=True)
    stale.touch()
    made = [TrackedRun(runs, key=f"key{number}").steps(1, 5) for number in range(4)]
    trackers = [one.track(cwd=cwd) for one, cwd in zip(made, places, strict=True)]
    for one in made:
        one.end().close()
    assert finish(*trackers) == [0] * 4, "\n".join(one.tracker_log() for one in made)
    store = Store(runs)
    assert {one.run_id for one in made} == {row[0] for row in store.rows("select run_uuid from runs")}
    assert {store.status(one.run_id) for one in made} == {"FINISHED"}
    assert store.rows("select name from experiments order by name") == [("Default",), ("experiment",)]
    for one in made:
        assert [step for step, _ in store.history(one.run_id, "train/loss")] == [1, 2, 3, 4, 5]
        assert (artifacts(runs, one) / "config.json").is_file()
        assert not one.tracker_log()  # nothing to say when all is well
    assert {path.name for path in tmp_path.iterdir()} - {"my rüns 20%2520"} == {
        "my rüns 20%20",
        "é f",
        "mlruns",
    }
    assert not list(places[3].iterdir())
    assert not [path.name for path in runs.iterdir() if path.name.startswith(".")]


def test_a_whole_run_arrives(run: TrackedRun, store: Store, runs: Path) -> None:
    folder = run.folder
    write_atomically(
        folder.env_file, json.dumps({"git": {"sha": "abc", "is_dirty": True}, "command": "labkit run"})
    )
    write_atomically(folder.result_file, json.dumps({"best_val_accuracy": {"value": 0.75, "step": 2}}))
    folder.log_files(0)[0].write_text("hello\n")
    tracker = run.track()
    run.steps(1, 1000).steps(1001, 1003, **{"bad name@": float("inf"), "fine": 1.0})
    wait_until(lambda: store.rows("select * from metrics where key like 'system/%'"))
    wait_until(lambda: len(store.history(run.run_id, "train/loss")) == 1003)  # while it runs
    assert store.status(run.run_id) == "RUNNING"
    run.end()
    assert finish(tracker) == [0], run.tracker_log()

    assert store.status(run.run_id) == "FINISHED"
    assert store.history(run.run_id, "train/loss") == [(step, 1 / step) for step in range(1, 1004)]
    assert store.history(run.run_id, "fine") == [(1001, 1.0), (1002, 1.0), (1003, 1.0)]
    assert [value for _, value in store.history(run.run_id, "health/nonfinite")] == [1, 2, 3]
    assert store.rows("select * from metrics where is_nan or abs(value) > 1e300") == []
    assert store.history(run.run_id, "rank01/step_ms")[-1] == (1003, pytest.approx(10.0))
    assert store.history(run.run_id, "final/train_loss") == [(0, 1 / 1003)]
    assert store.history(run.run_id, "final/best_val_accuracy") == [(0, 0.75)]

    tags = store.tags(run.run_id)
    assert tags["mlflow.runName"] == "convnet-allreduce-w2-s0-012345"
    assert tags["labkit.state"] == "finished"
    assert tags["labkit.diverged_at"] == "1001"
    assert tags["labkit.topology"] == "2"
    assert (tags["labkit.git_sha"], tags["labkit.git_dirty"]) == ("abc", "true")
    assert "python -m labkit reproduce 0123456789" in tags["mlflow.note.content"]
    assert store.params(run.run_id)["optimizer.learning_rate"] == "0.1"
    assert store.rows("select value from experiment_tags where key = 'mlflow.experimentKind'") == [
        ("custom_model_development",)
    ]
    kept = {str(path.relative_to(artifacts(runs, run))) for path in artifacts(runs, run).rglob("*.*")}
    assert kept == {"config.json", "env.json", "result.json", "logs/rank0000.out"}
    assert tracking.read_state(folder).is_complete(folder)
    assert not tracking.sync(folder)  # there is nothing left to send


def test_a_long_configuration_is_whole_in_its_artifact(runs: Path, store: Store) -> None:
    model = {"name": "my_models:build", "options": {"notes": "ü" * 7000}}
    run = TrackedRun(runs, config=from_mapping({"name": "long", "model": model})).end()
    assert tracking.sync(run.folder)
    text = (artifacts(runs, run) / "config.json").read_text()
    assert json.loads(text) == run.config.model_dump(mode="json")
    assert len(store.params(run.run_id)["model.options.notes"]) == 6000
    run.close()


def test_a_run_that_failed_says_so_and_why(run: TrackedRun, store: Store) -> None:
    tracker = run.track()
    run.steps(1, 3)
    run.end(
        RunState.FAILED, RunError(message="worker 1 on node0 ended: ValueError: no", rank=1, node="node0")
    )
    assert finish(tracker) == [0], run.tracker_log()
    assert store.status(run.run_id) == "FAILED"
    assert store.rows("select end_time from runs")[0][0] == round((run.status.ended_at or 0) * 1000)
    tags = store.tags(run.run_id)
    assert tags["labkit.state"] == "failed"
    assert tags["labkit.error"] == "worker 1 on node0 ended: ValueError: no"
    assert tags["labkit.failed_rank"] == "1"


def test_sigterm_and_ctrl_c_do_not_cost_the_truth(run: TrackedRun, store: Store) -> None:
    """Both reach every process of a group. The supervisor then writes the end, and the tracker tells it."""
    tracker = run.track()
    run.steps(1, 3)
    wait_until(lambda: bool(run.run_id))
    tracker.send_signal(signal.SIGINT)
    tracker.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    run.end(RunState.KILLED)
    assert finish(tracker) == [0], run.tracker_log()
    assert store.status(run.run_id) == "KILLED"


def test_a_killed_supervisor_leaves_a_true_state_and_no_worker(run: TrackedRun, store: Store) -> None:
    sleeper = [
        sys.executable,
        "-c",
        "import sys, time; f = open(sys.argv[1]); print(flush=True); time.sleep(99)",
    ]
    sleeper.append(str(run.folder.events_file(0)))
    supervisor, worker = (subprocess.Popen(sleeper, stdout=subprocess.PIPE) for _ in range(2))
    for process in (supervisor, worker):
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    run.begin(owner=_identity(supervisor.pid))
    records = [{"rank": 0, "node": "node0", "local_rank": 0, "pid": worker.pid}]
    run.folder.write_status(type(run.status).model_validate({**run.status.model_dump(), "workers": records}))
    tracker = run.track()
    run.steps(1, 3)
    wait_until(lambda: len(store.history(run.run_id, "train/loss")) == 3)
    supervisor.kill()
    supervisor.wait()
    assert finish(tracker) == [0], run.tracker_log()
    assert worker.wait(5) == -signal.SIGKILL
    assert run.folder.read_status().state is RunState.LOST
    assert store.status(run.run_id) == "FAILED"
    assert "supervisor died" in store.tags(run.run_id)["labkit.error"]
    assert store.rows("select end_time from runs")[0][0] is not None


def _identity(pid: int) -> ProcessId:
    started_at = psutil.Process(pid).create_time()
    return ProcessId(pid=pid, host=ProcessId.current().host, started_at=started_at)


@pytest.mark.slow
def test_when_supervisor_and_tracker_are_both_killed_close_lost_tells_the_end(
    run: TrackedRun, store: Store
) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    run.begin(owner=_identity(supervisor.pid))
    assert tracking.close_lost(run.folder)  # it runs: nothing to do
    tracker = run.track()
    run.steps(1, 3)
    wait_until(lambda: len(store.history(run.run_id, "train/loss")) == 3)
    assert tracking.is_tracked(run.folder)
    tracker.kill()
    supervisor.kill()
    supervisor.wait()
    finish(tracker)
    assert not tracking.is_tracked(run.folder)
    assert store.status(run.run_id) == "RUNNING"  # nobody was left to say anything else
    assert tracking.close_lost(run.folder)
    assert run.folder.read_status().state is RunState.LOST
    assert store.status(run.run_id) == "FAILED"


def test_a_killed_tracker_loses_and_doubles_nothing(run: TrackedRun, store: Store) -> None:
    """Killed while it sends; `sync` goes on from tracking.json, and sends at most one batch again."""
    run.steps(1, 4000)
    tracker = run.track()
    wait_until(lambda: tracking.read_state(run.folder).num_sent > 0)
    tracker.kill()
    finish(tracker)
    assert 0 < len(store.history(run.run_id, "train/loss")) < 4000
    # As if it had died between MLflow's answer and the note of it: the last batch is sent again.
    state = tracking.read_state(run.folder)
    run.folder.tracking_file.write_text(
        state.model_copy(update={"offsets": {}, "windows": {}}).model_dump_json()
    )
    run.end()
    assert tracking.sync(run.folder)
    for key in ("train/loss", "train/accuracy"):
        assert [step for step, _ in store.history(run.run_id, key)] == list(range(1, 4001))
    steps = [step for step, _ in store.history(run.run_id, "rank01/step_ms")]
    assert len(steps) == len(set(steps))
    assert len(store.rows("select * from runs")) == 1
    assert store.status(run.run_id) == "FINISHED"


def test_a_locked_database_costs_no_metric(run: TrackedRun, store: Store, runs: Path) -> None:
    tracker = run.track()
    run.steps(1, 20)
    wait_until(lambda: bool(run.run_id))
    lock = sqlite3.connect(runs / "mlflow.db", timeout=30, isolation_level=None)
    lock.execute("begin exclusive")
    run.steps(21, 40, pause_s=0.1)
    lock.execute("rollback")
    lock.close()
    run.end()
    assert finish(tracker) == [0], run.tracker_log()
    assert [step for step, _ in store.history(run.run_id, "train/loss")] == list(range(1, 41))
    assert store.status(run.run_id) == "FINISHED"


def test_without_a_server_the_tracker_ends_in_bounded_time_and_sync_catches_up(
    run: TrackedRun, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", _dead_uri())
    tracker = run.track(end_timeout_s=2)
    run.steps(1, 30).end()
    before = time.monotonic()
    assert finish(tracker) == [1]
    assert time.monotonic() - before < 45
    assert "labkit sync" in run.tracker_log()
    assert run.run_id == ""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking.sync(run.folder)
    assert [step for step, _ in store.history(run.run_id, "train/loss")] == list(range(1, 31))
    assert store.status(run.run_id) == "FINISHED"


def test_a_resume_goes_on_in_the_same_mlflow_run(run: TrackedRun, store: Store) -> None:
    run.steps(1, 6).end(RunState.FAILED, RunError(message="no", rank=1))
    assert tracking.sync(run.folder)
    first_id = run.run_id
    longer = from_overrides(["engine.max_steps=8"], base=run.config)
    run.folder.write_config(longer)
    run.begin(attempt=2)
    tracker = run.track()
    wait_until(lambda: store.status(first_id) == "RUNNING")
    run.steps(5, 8)  # from the checkpoint after step 4
    run.end()
    assert finish(tracker) == [0], run.tracker_log()

    assert run.run_id == first_id
    assert store.status(first_id) == "FINISHED"
    assert [step for step, _ in store.history(first_id, "train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.params(first_id)["engine.max_steps"] == "null"
    tags = store.tags(first_id)
    assert tags["labkit.attempt.2.engine.max_steps"] == "8"
    assert tags["labkit.attempt"] == "2"
    assert "labkit.error" not in tags  # the first attempt's
    assert "labkit.failed_rank" not in tags
    assert store.rows("select value from latest_metrics where key = 'final/train_loss'") == [(1 / 8,)]


@pytest.mark.slow
def test_a_restart_of_the_workers_is_another_attempt_of_the_same_run(run: TrackedRun, store: Store) -> None:
    tracker = run.track()
    run.steps(1, 6)
    wait_until(lambda: len(store.history(run.run_id, "train/loss")) == 6)
    run.begin(attempt=2)
    run.steps(5, 8)
    wait_until(lambda: len(store.history(run.run_id, "train/loss")) == 8)
    run.end()
    assert finish(tracker) == [0], run.tracker_log()
    assert store.tags(run.run_id)["labkit.attempt"] == "2"
    assert len(store.rows("select * from runs")) == 1


@pytest.mark.slow
def test_a_deleted_experiment_comes_back(run: TrackedRun, store: Store, runs: Path) -> None:
    run.steps(1, 2).end()
    assert tracking.sync(run.folder)
    with sqlite3.connect(runs / "mlflow.db") as connection:  # what the UI's delete button does
        connection.execute("update experiments set lifecycle_stage = 'deleted' where name = 'experiment'")
        connection.execute("update runs set lifecycle_stage = 'deleted'")
    connection.close()
    second = TrackedRun(runs, key="another").steps(1, 2).end()
    assert tracking.sync(second.folder)
    assert store.rows("select lifecycle_stage from experiments where name = 'experiment'") == [("active",)]
    assert store.status(second.run_id) == "FINISHED"
    second.close()


def test_a_tracker_whose_run_folder_was_deleted_ends(run: TrackedRun) -> None:
    tracker = run.track()
    run.steps(1, 3)
    wait_until(lambda: bool(run.run_id))
    run.close()
    run.folder.path.rename(run.runs / "deleted")
    assert tracker.wait(20) == 1  # though its supervisor still holds the pipe
    finish(tracker)


def test_the_executed_notebook_is_logged_after_the_run(run: TrackedRun, store: Store, runs: Path) -> None:
    run.steps(1, 2).end()
    assert not tracking.log_notebook(run.folder)  # there is none yet
    assert tracking.sync(run.folder)
    run.folder.notebook_file.write_text("{}")
    assert tracking.log_notebook(run.folder)
    assert (artifacts(runs, run) / "notebook" / "notebook.ipynb").read_text() == "{}"


def test_a_creation_of_the_store_that_was_killed_is_done_again(runs: Path) -> None:
    for name in ("mlflow.db", ".mlflow.db.new-journal"):
        (runs / name).touch()
    (runs / ".mlflow.db.new").write_bytes(b"half a database")
    tracking.ensure_store()
    assert Store(runs).rows("select name from experiments") == [("Default",)]
    assert {path.name for path in runs.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_a_store_that_is_there_costs_one_look(store: Store, runs: Path) -> None:
    before = time.perf_counter()
    uri = tracking.ensure_store()
    assert time.perf_counter() - before < 0.05
    assert uri == f"sqlite:///{runs}/mlflow.db"


def test_the_users_own_store_is_used(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5999")
    assert tracking.ensure_store() == "http://127.0.0.1:5999"
    assert not list(runs.iterdir())
