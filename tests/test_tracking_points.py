"""Laws of what is made of events before MLflow sees it: nothing lost, nothing twice, nothing it refuses."""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import ExperimentConfig, from_mapping, from_overrides
from labkit.engine.events import EventLog
from labkit.lab.tracking import _collect
from labkit.lab.tracking._collect import Collector
from labkit.lab.tracking._describe import cut, flat_params, mlflow_status, note, run_name
from labkit.lab.tracking._points import Point, plain_name
from labkit.lab.tracking._state import TrackingState, read_state, write_state
from labkit.lab.tracking._store import sqlite_file, sqlite_uri, without_password
from labkit.runfolder import RunFolder, RunState


def _folder(root: Path) -> RunFolder:
    folder = RunFolder(root / "experiment" / "abc")
    folder.create(from_overrides([]))
    return folder


def _line(kind: str, step: int, t: float, attempt: int = 1, **fields: Any) -> str:
    return json.dumps({"t": t, "kind": kind, "attempt": attempt, "step": step, **fields}) + "\n"


def _step(step: int, t: float, step_s: float = 0.01, attempt: int = 1) -> str:
    return _line("step", step, t, attempt, step_s=step_s, compute_s=step_s / 2)


def _metrics(step: int, t: float, loss: float, attempt: int = 1) -> str:
    return _line("metrics", step, t, attempt, values={"train/loss": loss})


def _drain(folder: RunFolder, state: TrackingState, *, is_final: bool) -> tuple[list[Point], TrackingState]:
    """All batches until everything is read."""
    collector = Collector(folder)
    points: list[Point] = []
    while True:
        batch, state = collector.next_batch(state, is_final=is_final)
        points += batch
        if len(batch) < _collect.BATCH_POINTS:
            return points, state


def _all_points(folder: RunFolder) -> list[Point]:
    return _drain(folder, TrackingState(), is_final=True)[0]


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("train/loss", "train/loss"),
        ("a//b", "a/b"),
        ("/loss", "loss"),
        ("../../loss", "loss"),
        ("acc@5 (top%)", "acc_5 _top__"),
        ("größe/län ge", "größe/län ge"),
        ("a/./b/", "a/b"),
        ("", "_"),
        ("..", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_name_becomes_the_nearest_that_mlflow_takes(given_name: str, name: str) -> None:
    assert plain_name(given_name) == name


def test_mlflow_takes_every_name_made_so() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param

    @given(st.text(max_size=300))
    @settings(max_examples=300, deadline=None)
    def holds(name: str) -> None:
        _validate_metric_name(plain_name(name))
        _validate_param(plain_name(name), "value")

    holds()


# --- events to points ------------------------------------------------------------------------------


def test_an_event_by_hand(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    folder.events_file(0).write_text(
        _line("start", 0, 99.0)
        + _metrics(1, 100.5, 2.25)
        + _line("eval", 1, 101.0, values={"val/loss": 2.0, "val/accuracy": 0.5})
        + _line("checkpoint", 1, 101.5, file="step00000001.pt", size_bytes=1, save_s=0.1)
    )
    assert _all_points(folder) == [
        Point("train/loss", 2.25, 100_500, 1),
        Point("val/loss", 2.0, 101_000, 1),
        Point("val/accuracy", 0.5, 101_000, 1),
    ]


def test_only_rank_0_speaks_for_the_run(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    folder.events_file(1).write_text(_metrics(1, 100.0, 2.0))
    assert _all_points(folder) == []


def test_values_that_are_not_finite_are_counted_and_never_sent(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    log = EventLog(folder.events_file(0), attempt=1)
    for step, loss in enumerate([2.0, math.inf, math.nan], start=1):
        log.write("metrics", step=step, epoch=0, samples=step, values={"train/loss": loss, "other": 1.0})
    log.close()
    points, state = _drain(folder, TrackingState(), is_final=True)
    assert [(p.key, p.step, p.value) for p in points if p.key != "other"] == [
        ("train/loss", 1, 2.0),
        ("health/nonfinite", 2, 1.0),
        ("health/nonfinite", 3, 2.0),
    ]
    assert state.diverged_at == 2
    assert state.latest["train/loss"] == 2.0


def test_a_broken_or_foreign_line_is_passed_over(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    odd = (
        '{"broken\n[1,2]\n{"kind":"metrics"}\n{"t":1,"kind":"metrics","step":1,"values":{"a":"text"}}\n\xff\n'
    )
    folder.events_file(0).write_text(odd + _metrics(2, 100.0, 1.0))
    assert [point.step for point in _all_points(folder)] == [2]


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    whole, second = _metrics(1, 100.0, 1.0), _metrics(2, 101.0, 2.0)
    folder.events_file(0).write_text(whole + second[:20])
    points, state = _drain(folder, TrackingState(), is_final=False)
    assert [point.step for point in points] == [1]
    folder.events_file(0).write_text(whole + second)
    assert [point.step for point in _drain(folder, state, is_final=False)[0]] == [2]


def test_a_line_longer_than_one_read_is_read_whole(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    values = {f"metric{index:06d}": float(index) for index in range(40_000)}
    folder.events_file(0).write_text(_line("metrics", 1, 1.0, values=values))
    assert len(_all_points(folder)) == 40_000


# --- step times ------------------------------------------------------------------------------------


def test_fast_steps_give_at_most_a_point_a_second_and_worker(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    for rank in range(2):
        folder.events_file(rank).write_text("".join(_step(s, 1000 + s / 200, 0.005) for s in range(1, 2001)))
    points = [point for point in _all_points(folder) if point.key == "rank01/step_ms"]
    assert 9 <= len(points) <= 11  # 2000 steps in 10 s
    assert all(point.value == pytest.approx(5.0) for point in points)
    assert points[-1].step == 2000  # the last step is not lost


def test_slow_steps_give_a_point_each(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    folder.events_file(3).write_text("".join(_step(s, 1000 + 2 * s, 2.0) for s in range(1, 6)))
    points = _all_points(folder)
    assert [p.step for p in points if p.key == "rank03/step_ms"] == [1, 2, 3, 4, 5]
    assert {p.value for p in points if p.key == "rank03/compute_ms"} == {1000.0}


def test_the_mean_of_a_window_by_hand(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    lines = [_step(1, 10.0, 0.1), _step(2, 10.5, 0.3), _step(3, 11.2, 0.7)]
    folder.events_file(0).write_text("".join(lines))
    found = [(p.step, p.value) for p in _all_points(folder) if p.key == "rank00/step_ms"]
    assert found == [(2, pytest.approx(200.0)), (3, pytest.approx(700.0))]


def test_two_attempts_do_not_share_a_window(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    folder.events_file(0).write_text(_step(1, 10.0, 0.1) + _step(1, 10.1, 0.3, attempt=2))
    found = [p.value for p in _all_points(folder) if p.key == "rank00/step_ms"]
    assert found == [pytest.approx(100.0), pytest.approx(300.0)]


# --- once, whatever happens --------------------------------------------------------------------------


def _long_file(num_steps: int = 60) -> bytes:
    lines = [_metrics(s, 100 + s / 7, 1 / s) + _step(s, 100 + s / 7, s / 1000) for s in range(1, num_steps)]
    return "".join(lines).encode()


@given(cuts=st.lists(st.integers(0, 100_000), max_size=8), batch=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_points_do_not_depend_on_when_the_file_was_read(cuts: list[int], batch: int) -> None:
    """Pieces of any size, also within a line, and batches of any size give the points of one reading."""
    data = _long_file()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = _folder(Path(name))
        folder.events_file(0).write_bytes(data)
        at_once = _all_points(folder)
        patch.setattr(_collect, "BATCH_POINTS", batch)
        state, points = TrackingState(), []
        for end in sorted({cut % len(data) for cut in cuts}):
            folder.events_file(0).write_bytes(data[:end])
            more, state = _drain(folder, state, is_final=False)
            points += more
        folder.events_file(0).write_bytes(data)
        points += _drain(folder, state, is_final=True)[0]
    assert points == at_once


@given(crash_at=st.integers(0, 20), batch=st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_a_batch_sent_again_after_a_crash_is_made_of_the_same_points(crash_at: int, batch: int) -> None:
    """The tracker dies after MLflow took a batch and before tracking.json said so."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = _folder(Path(name))
        folder.events_file(0).write_bytes(_long_file())
        at_once = _all_points(folder)
        patch.setattr(_collect, "BATCH_POINTS", batch)
        state, taken = TrackingState(), []
        for number in range(1000):
            sent, after = Collector(folder).next_batch(state, is_final=True)
            taken += sent
            if number != crash_at:
                write_state(folder, after)
                state = read_state(folder)
            if not sent:
                break
    assert set(taken) == set(at_once)
    assert len(taken) <= len(at_once) + batch + 3  # one batch twice, the same points


# --- a resume ----------------------------------------------------------------------------------------


def test_a_repeated_step_with_the_same_value_is_sent_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = [_metrics(s, 100.0 + s, 1 / s) for s in range(1, 7)]
    again = [_metrics(s, 200.0 + s, 1 / s, attempt=2) for s in range(5, 9)]  # resumed after step 4
    folder.events_file(0).write_text("".join(first + again))
    assert [point.step for point in _all_points(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_repeated_step_with_another_value_is_sent_with_a_later_time(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = [_metrics(s, 100.0 + s, 1.0) for s in range(1, 7)]
    again = [_metrics(s, 200.0 + s, 0.5, attempt=2) for s in range(5, 9)]
    folder.events_file(0).write_text("".join(first + again))
    newest = {point.step: point.value for point in sorted(_all_points(folder), key=lambda p: p.timestamp_ms)}
    assert newest == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 0.5, 6: 0.5, 7: 0.5, 8: 0.5}


def test_a_third_attempt_is_compared_with_the_newest_before_it(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = [_metrics(s, 100.0 + s, 1.0) for s in range(1, 7)]
    second = [_metrics(s, 200.0 + s, 2.0, attempt=2) for s in range(3, 6)]
    third = [_metrics(s, 300.0 + s, value, attempt=3) for s, value in ((5, 2.0), (6, 1.0), (7, 3.0))]
    folder.events_file(0).write_text("".join(first + second + third))
    last = [(p.step, p.value) for p in _all_points(folder) if p.timestamp_ms > 300_000]
    assert last == [(7, 3.0)]


def test_a_tracker_that_starts_within_an_attempt_knows_the_repeated_steps(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = "".join(_metrics(s, 100.0 + s, 1 / s) for s in range(1, 7))
    again = [_metrics(s, 200.0 + s, 1 / s, attempt=2) for s in range(3, 9)]
    folder.events_file(0).write_text(first + again[0])
    _, state = _drain(folder, TrackingState(), is_final=False)
    folder.events_file(0).write_text(first + "".join(again))
    points, _ = _drain(folder, state, is_final=False)  # a new Collector
    assert [point.step for point in points] == [7, 8]


# --- names, parameters, addresses ----------------------------------------------------------------------


def test_a_run_is_named_by_what_tells_it_apart() -> None:
    config = from_overrides(["cluster=2x2", "seed=3"])
    assert run_name(config, "0123456789") == "convnet-allreduce-w4-s3-012345"
    assert run_name(config, "0123456789-r2") == "convnet-allreduce-w4-s3-012345-r2"


def test_parameters_are_flat_texts() -> None:
    params = flat_params(from_overrides(["optimizer.learning_rate=0.05", "model.channels=[4,8]"]))
    assert params["optimizer.learning_rate"] == "0.05"
    assert params["model.channels"] == "[4, 8]"
    assert params["engine.max_steps"] == "null"
    assert params["model.has_batch_norm"] == "true"


def test_a_users_option_may_have_any_name() -> None:
    model = {"name": "my_models:build", "options": {"top@5": 1, "a//b": 2}}
    params = flat_params(from_mapping({"model": model}))
    assert params["model.options.top_5"] == "1"
    assert params["model.options.a/b"] == "2"


def long_config() -> ExperimentConfig:
    """An experiment with an option of 7000 characters."""
    model = {"name": "my_models:build", "options": {"notes": "x" * 7000}}
    return from_mapping({"name": "long", "model": model})


def test_a_long_value_is_cut_with_a_remark() -> None:
    text = flat_params(long_config())["model.options.notes"]
    assert len(text) == 6000
    assert text.endswith("(whole in config.json)")
    assert cut("short", 6000) == "short"


def test_every_final_state_has_mlflows_word() -> None:
    words = {state.value: mlflow_status(state) for state in RunState if state.is_final}
    assert words == {
        "finished": "FINISHED",
        "failed": "FAILED",
        "killed": "KILLED",
        "timeout": "FAILED",
        "lost": "FAILED",
    }


def test_the_note_has_the_command_that_reproduces_the_run(tmp_path: Path) -> None:
    text = note(_folder(tmp_path), from_overrides([]), command="labkit run seed=1")
    assert "python -m labkit reproduce abc" in text
    assert "labkit run seed=1" in text


@pytest.mark.parametrize("name", ["plain", "a b", "ü", "50%20 off", "q?x", "h#x"])
def test_a_database_uri_leads_back_to_its_file(name: str) -> None:
    path = Path("/runs") / name / "mlflow.db"
    assert sqlite_file(sqlite_uri(path)) == path


def test_other_uris_have_no_file() -> None:
    for uri in ("http://host:5000", "sqlite://", "sqlite:///:memory:", "postgresql://host/db"):
        assert sqlite_file(uri) is None


def test_passwords_are_not_written_down() -> None:
    assert without_password("http://me:secret@host:5000/x") == "http://me:***@host:5000/x"
    assert without_password("postgresql://me:s:e:c@host/db") == "postgresql://me:***@host/db"
    assert without_password("http://host:5000") == "http://host:5000"


def test_importing_it_imports_neither_mlflow_nor_torch() -> None:
    code = "import sys, labkit.lab.tracking; print(sorted({'mlflow', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
