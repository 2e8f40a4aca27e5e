"""Reading a run's events into series, and summing them up for the screen."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.events import EventLog
from labkit.errors import ConfigError
from labkit.lab.progress import clock_text, progress_line, progress_of, wait_with_lines
from labkit.lab.series import Line, Series, SeriesReader, read_series
from labkit.lab.stretches import (
    busy_ms,
    decimate,
    speeds,
    step_bounds,
    stretch_means,
    time_shares,
    worker_means_ms,
)
from labkit.launch import attach
from labkit.runfolder import RunState
from tests.made_runs import PARTS_S, MadeRun


def _line(values: list[float | None]) -> Line:
    line = Line()
    for step, value in enumerate(values, start=1):
        line.add(step, value)
    return line


# --- reading ---------------------------------------------------------------------------------------


def test_the_newest_staleness_counts(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 10)
    assert read_series(made.folder).staleness == {}
    made.say_staleness(10, {"0": 3})
    made.say_staleness(20, {"0": 5, "2": 1})
    assert read_series(made.folder).staleness == {0: 5, 2: 1}


def test_a_message_before_the_start_of_an_attempt_does_not_wipe_out_the_one_before(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 10)
    log = EventLog(made.folder.events_file(0), 2)
    log.write("message", text="group 1 joined at version 20")
    log.close()
    made.start(start_step=8).steps(9, 12)
    assert read_series(made.folder).line("train/loss").steps == list(range(1, 13))


def test_reads_metrics_of_rank_0_and_step_times_of_all_workers(runs: Path) -> None:
    made = MadeRun(runs, total_steps=30).start().steps(1, 20)
    series = read_series(made.folder)
    assert series.step == 20 and series.total_steps == 30
    assert series.line("train/loss").steps == list(range(1, 21))
    assert series.line("val/loss").steps == [10, 20]
    assert [w.label for w in series.workers.values()] == ["0 · node0", "1 · node0", "2 · node1", "3 · node1"]
    assert series.workers[3].times["wait_s"].values == [PARTS_S["wait_s"]] * 20


def test_reading_bit_by_bit_gives_what_reading_at_once_gives(runs: Path) -> None:
    made = MadeRun(runs).start()
    reader = SeriesReader(made.folder)
    for first in range(1, 40, 7):
        made.steps(first, first + 6)
        assert reader.update() is True
        assert reader.update() is False
    assert reader.series == read_series(made.folder)


def test_a_line_that_is_still_being_written_waits_for_the_next_reading(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 3)
    text = made.folder.events_file(0).read_text()
    cut = text.rindex('"values"')
    made.folder.events_file(0).write_text(text[:cut])
    reader = SeriesReader(made.folder)
    reader.update()
    assert reader.series.step == 2
    made.folder.events_file(0).write_text(text)
    reader.update()
    assert reader.series.step == 3


def test_after_a_resume_the_last_attempt_wins_and_no_step_is_there_twice(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 25, loss=1.0)
    reader = SeriesReader(made.folder)
    reader.update()
    made.start(start_step=10).steps(11, 15, loss=2.0)
    reader.update()
    for series in (reader.series, read_series(made.folder)):
        assert series.line("train/loss").steps == list(range(1, 16))
        assert series.line("train/loss").values == [1.0] * 10 + [2.0] * 5
        assert series.line("val/loss").steps == [10], "an evaluation of the old attempt is not shown"
        assert series.workers[2].times["step_s"].steps == list(range(1, 16))
        assert series.attempt == 2


def test_a_resume_that_has_done_nothing_yet_shows_what_it_starts_from(runs: Path) -> None:
    made = MadeRun(runs).start().steps(1, 25)
    made.start(start_step=10)
    assert read_series(made.folder).step == 10


def test_a_number_that_is_not_finite_is_a_gap_with_its_name(runs: Path) -> None:
    made = MadeRun(runs).start()
    for step, loss in enumerate([2.0, float("inf"), float("nan"), 1.0], start=1):
        made.step(step, loss=loss)
    line = read_series(made.folder).line("train/loss")
    assert line.values == [2.0, None, None, 1.0]
    assert line.nonfinite == {2: "inf", 3: "nan"}
    assert line.first_nonfinite == 2


def test_a_run_that_has_not_begun_gives_an_empty_series(runs: Path) -> None:
    series = read_series(MadeRun(runs).folder)
    assert series.step == 0 and series.metrics == {} and series.last("train/loss") is None
    assert series.change("train/loss") == "train/loss has no value"


def test_a_run_that_is_not_there_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="run must be"):
        read_series("nothing")


# --- thinning --------------------------------------------------------------------------------------

_VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(_VALUES, st.integers(8, 60))
def test_a_thinned_line_keeps_ends_minimum_maximum_and_a_gap(values: list[float | None], limit: int) -> None:
    steps, kept = decimate(_line(values), limit)
    assert len(steps) == len(kept) <= max(limit, 8)
    assert steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == len(values)
    assert all(values[step - 1] == value for step, value in zip(steps, kept, strict=True))
    finite = [value for value in values if value is not None]
    if finite:
        assert {min(finite), max(finite)} <= set(kept)
    assert (None in values) == (None in kept)


def test_a_short_line_is_not_thinned() -> None:
    assert decimate(_line([3.0, None, 1.0]), 8) == ([1, 2, 3], [3.0, None, 1.0])


def test_a_long_line_is_thinned_fast_enough_for_a_live_view() -> None:
    line = _line([random.random() for _ in range(100_000)])
    begin = time.perf_counter()
    steps, _ = decimate(line)
    assert len(steps) <= 2000
    assert time.perf_counter() - begin < 1.0


# --- stretches -------------------------------------------------------------------------------------


def test_stretches_cover_every_step_but_the_first_once(runs: Path) -> None:
    series = read_series(MadeRun(runs).start().steps(1, 25).folder)
    bounds = step_bounds(series, 7)
    assert bounds[0] == 2 and bounds[-1] == 26 and len(bounds) == 8
    assert all(low < high for low, high in zip(bounds, bounds[1:], strict=False))


def test_a_run_of_one_step_shows_that_step(runs: Path) -> None:
    series = read_series(MadeRun(runs).start().steps(1, 1).folder)
    assert step_bounds(series, 7) == [1, 2]
    assert worker_means_ms(series.workers[0])["compute"] == pytest.approx(10.0)


def test_means_over_stretches_by_hand() -> None:
    assert stretch_means(_line([1.0, 3.0, None, 5.0]), [1, 3, 5, 9]) == [2.0, 5.0, None]


def test_speed_is_samples_over_the_time_of_the_steps(runs: Path) -> None:
    series = read_series(MadeRun(runs).start().steps(1, 9).folder)
    assert speeds(series, [2, 5, 10]) == pytest.approx([64 / 0.017] * 2)


def test_the_slow_worker_is_seen(runs: Path) -> None:
    series = read_series(MadeRun(runs).start().steps(1, 9).folder)
    assert worker_means_ms(series.workers[1])["compute"] == pytest.approx(20.0)
    assert busy_ms(series.workers[1], [2, 10]) == pytest.approx([21.0])


def test_shares_of_time_sum_to_one_and_there_are_none_before_the_first_step(runs: Path) -> None:
    made = MadeRun(runs).start()
    assert time_shares(read_series(made.folder)) == {}
    shares = time_shares(read_series(made.steps(1, 5).folder))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert max(shares, key=lambda part: shares[part]) == "compute"


# --- progress --------------------------------------------------------------------------------------


def _timed(num_steps: int, step_s: float, total: int) -> Series:
    series = Series(total_steps=total)
    for step in range(1, num_steps + 1):
        series.clock.add(step, 1000.0 + step * step_s)
        series.samples.add(step, 64.0 * step)
    return series


def test_speed_and_time_left_by_hand() -> None:
    progress = progress_of(_timed(40, 0.5, total=100))
    assert progress.samples_per_s == pytest.approx(128.0)
    assert progress.eta_s == pytest.approx(30.0)


def test_the_pause_before_a_resume_does_not_slow_the_estimate() -> None:
    series = _timed(40, 0.5, total=100)
    series.started_at = 5000.0
    for step in range(41, 46):
        series.clock.add(step, 5000.0 + (step - 40) * 0.5)
        series.samples.add(step, 64.0 * step)
    assert progress_of(series).samples_per_s == pytest.approx(128.0)


def test_before_the_first_step_nothing_is_promised() -> None:
    progress = progress_of(Series(total_steps=100))
    assert progress.eta_s is None and progress.samples_per_s is None
    assert progress_line(progress) == "step 0/100"


def test_the_progress_line_is_plain() -> None:
    series = _timed(40, 0.5, total=100)
    series.metrics["train/loss"] = _line([1.83])
    assert progress_line(progress_of(series)) == "step 40/100 loss 1.83 128 samples/s eta 0:30"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (31, "0:31"), (59.6, "1:00"), (3723, "1:02:03")]
)
def test_durations_are_read_like_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_waiting_writes_how_it_ended_and_the_cause_first(runs: Path) -> None:
    made = MadeRun(runs, total_steps=100).start().steps(1, 20)
    made.fail(rank=2)
    lines: list[str] = []
    status = wait_with_lines(attach(made.folder), write=lines.append)
    assert status.state is RunState.FAILED
    assert lines[0].startswith("failed at step 20/100 loss ")
    assert lines[1].splitlines()[0] == "worker 2 on node1 failed: ValueError: odd shape"
    assert "Traceback" in lines[1] and lines[1].endswith("odd shape ahead")


def test_while_a_run_goes_on_waiting_writes_a_line_every_interval(runs: Path) -> None:
    made = MadeRun(runs, total_steps=100).start().steps(1, 20)
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            made.set_state(RunState.FINISHED)

    wait_with_lines(attach(made.folder), interval_s=0.2, write=write)
    assert [line.split(" loss")[0] for line in lines] == [
        "step 20/100",
        "step 20/100",
        "finished at step 20/100",
    ]


def test_events_are_strict_json_whatever_the_loss_is(runs: Path) -> None:
    made = MadeRun(runs).start()
    made.step(1, loss=float("nan"))
    for line in made.folder.events_file(0).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
