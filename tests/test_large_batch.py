"""The study of large batches: equal budgets, choices by hand, figures, verdicts, and the notebook itself."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from test_notebooks import MAX_KB, _outputs, _papermill, _printed

from labkit.config import LarsConfig, SgdConfig, from_overrides
from labkit.errors import ConfigError, RunFailed
from labkit.lab import large_batch
from labkit.lab.large_batch import METHODS, RULES, Result, Row, Score, Study, Tuning
from labkit.lab.run_all import run_all
from labkit.lab.show import PLOTLY_MIME
from labkit.launch import Run
from labkit.runfolder import all_runs

SMALL: dict[str, Any] = {
    "name": "study",
    "model": "mlp",
    "batch_sizes": [500, 1200],
    "num_epochs": 1,
    "warmup_epochs": 0.5,
    "sgd_rates": [0.1],
    "lars_rates": [2.0],
    "trust_coefficient": 0.02,
    "num_tuning_seeds": 1,
    "num_seeds": 2,
    "num_at_once": 2,
    "overrides": {"data.num_val": 597, "optimizer.weight_decay": 1e-4, "launch.is_tracked": False},
}


def _study(**changes: Any) -> Study:
    return Study.from_parameters({**SMALL, **changes})


# --- the study ------------------------------------------------------------------------------------


def test_epochs_are_equal_and_the_warm_up_grows_with_them() -> None:
    study = _study(batch_sizes=[100, 500], num_epochs=20, warmup_epochs=4.0)
    small, large = (study.config("sgd", batch, 0.1, 0) for batch in (100, 500))
    assert (small.engine.num_epochs, large.engine.num_epochs) == (20, 20)
    # 1,200 samples: 12 and 3 steps in an epoch.
    assert (small.schedule.warmup_steps, large.schedule.warmup_steps) == (48, 12)
    assert (small.schedule.name, small.schedule.power) == ("polynomial", 2.0)


def test_methods_differ_in_nothing_but_the_optimizer() -> None:
    study = _study()
    sgd, lars = (study.config(method, 500, 0.3, 7) for method in METHODS)
    assert isinstance(sgd.optimizer, SgdConfig) and isinstance(lars.optimizer, LarsConfig)
    assert (sgd.optimizer.momentum, sgd.optimizer.weight_decay) == (0.9, 1e-4)
    assert (lars.optimizer.momentum, lars.optimizer.weight_decay) == (0.9, 1e-4)
    assert lars.optimizer.trust_coefficient == 0.02
    assert sgd.model_copy(update={"optimizer": lars.optimizer}) == lars


def test_seeds_of_the_tuning_are_not_those_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    study = _study(num_seeds=3, num_tuning_seeds=2, seed=5)
    asked: list[set[int]] = []

    def scores(self: Study, points: Any, seeds: range, *others: Any) -> list[Score]:
        asked.append({self.config(*points[0], seed).seed for seed in seeds})
        return [Score((0.5,), (1.0,)) for _ in points]

    monkeypatch.setattr(Study, "_scores", scores)
    study.compare(study.tune())
    assert asked == [{1005, 1006}, {5, 6, 7}]


def test_the_number_of_runs_is_said_before_they_start() -> None:
    study = _study(sgd_rates=[0.1, 0.2, 0.3], lars_rates=[1, 2, 3], num_tuning_seeds=2, num_seeds=5)
    assert study.num_runs == 2 * 2 * 3 * 2 + 2 * 2 * 2 * 5
    assert "tuning: 3 rates x 2 seeds" in str(study) and "At most 64 runs" in str(study)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lars_rates": [1.0, 2.0]}, r"lars_rates must be as many as sgd_rates \(1\), got 2. Both methods"),
        ({"sgd_rates": [], "lars_rates": []}, r"must be as many as sgd_rates \(0\), got 0"),
        ({"batch_sizes": [512, 64]}, r"batch_sizes must rise, got \[512, 64\]"),
        ({"batch_sizes": []}, r"batch_sizes must rise, got \[\]"),
        ({"batch_sizes": [64, 1201]}, r"engine.global_batch_size must be at most .* \(1200\), got 1201"),
        ({"num_seeds": 0}, "num_seeds must be at least 1, got 0"),
        ({"num_tuning_seeds": 0}, "num_tuning_seeds must be at least 1, got 0"),
        ({"trust_coefficient": -0.1}, "optimizer.trust_coefficient must be greater than 0"),
        ({"num_at_once": 0}, "num_at_once must be at least 1, got 0"),
        ({"sgd_rates": [0.1, -0.1], "lars_rates": [1, 2]}, "optimizer.learning_rate must be greater than 0"),
        ({"num_epoch": 3}, "Did you mean 'num_epochs'?"),
        ({"model": "gpt", "data": "text", "overrides": {}}, "num_samples must be given with data.name 'text'"),
    ],
)  # fmt: skip
def test_refuses_a_study_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _study(**changes)


def test_refuses_a_parameters_cell_that_lacks_something() -> None:
    with pytest.raises(ConfigError, match="num_seeds must be given, got nothing"):
        Study.from_parameters({name: value for name, value in SMALL.items() if name != "num_seeds"})


# --- choices by hand -----------------------------------------------------------------------------------


def _tuning(values: Mapping[tuple[str, int, float], tuple[float, float]]) -> Tuning:
    return Tuning({point: Score((accuracy,), (loss,)) for point, (accuracy, loss) in values.items()})


TUNING = _tuning(
    {
        ("sgd", 64, 0.1): (0.98, 0.2), ("sgd", 64, 0.2): (0.98, 0.1), ("sgd", 64, 0.4): (0.99, 0.3),
        ("sgd", 256, 0.1): (0.8, 0.3), ("sgd", 256, 0.2): (0.9, 0.2), ("sgd", 256, 0.4): (0.1, math.inf),
        ("lars", 64, 1.0): (0.99, 0.1), ("lars", 64, 2.0): (0.98, 0.2), ("lars", 64, 4.0): (0.97, 0.3),
        ("lars", 256, 1.0): (0.9, 0.3), ("lars", 256, 2.0): (0.91, 0.2), ("lars", 256, 4.0): (0.92, 0.1),
    }
)  # fmt: skip


def test_the_best_rate_has_the_lowest_loss() -> None:
    assert [TUNING.best("sgd", batch) for batch in (64, 256)] == [0.2, 0.2]
    assert [TUNING.best("lars", batch) for batch in (64, 256)] == [1.0, 4.0]


def test_the_scaled_rate_starts_from_the_best_of_the_smallest_batch() -> None:
    assert [TUNING.scaled("sgd", batch) for batch in (64, 256)] == pytest.approx([0.2, 0.8])
    assert [TUNING.scaled("lars", batch) for batch in (64, 256)] == pytest.approx([1.0, 4.0])


def test_a_best_rate_at_the_end_of_the_grid_is_said() -> None:
    table = large_batch.rates_table(TUNING)
    said = {(row[0], row[1]): row[-1] for row in table.rows}
    assert said == {("SGD", "64"): "", ("SGD", "256"): "", ("LARS", "64"): "yes", ("LARS", "256"): "yes"}


def _result(sgd: tuple[float, ...], lars: tuple[float, ...]) -> Result:
    """Both reach 0.98 at 64 samples; at 1,024 as given, and half of it with the scaled rate."""
    rows = []
    for method, values in (("sgd", sgd), ("lars", lars)):
        for rule, factor in (("scaled", 0.5), ("tuned", 1.0)):
            losses = (0.1,) * len(values)
            rows.append(Row(method, rule, 64, 0.1, Score((0.98,) * len(values), losses)))
            rows.append(Row(method, rule, 1024, 1.6, Score(tuple(v * factor for v in values), losses)))
    return Result(tuple(rows), 20)


def test_gaps_are_by_seed() -> None:
    result = _result(sgd=(0.8, 0.9), lars=(0.9, 0.95))
    assert result.gaps("tuned") == pytest.approx([0.1, 0.05])
    assert result.gaps("scaled") == pytest.approx([0.05, 0.025])


@pytest.mark.parametrize(
    ("sgd", "lars", "is_met", "words"),
    [
        ((0.80, 0.81, 0.82), (0.90, 0.91, 0.92), True, "LARS leads by 10.0 points"),
        ((0.90, 0.91, 0.92), (0.80, 0.81, 0.82), False, "LARS trails by 10.0 points"),
        ((0.90, 0.80, 0.95), (0.92, 0.85, 0.93), False, "no difference that"),
        ((0.90, 0.90, 0.90), (0.90, 0.90, 0.90), False, "no difference that"),
        ((0.50,), (0.90,), False, "one seed cannot tell"),
    ],
    ids=["leads", "trails", "noise", "equal", "one seed"],
)
def test_the_verdict_falls_whichever_way_the_numbers_do(
    sgd: tuple[float, ...], lars: tuple[float, ...], is_met: bool, words: str
) -> None:
    verdict = large_batch.verdict(_result(sgd, lars))
    assert verdict.is_met is is_met
    assert f": {words}" in verdict.text
    assert "At 64 samples, LARS reaches 0.9800 and SGD 0.9800" in verdict.text


# --- figures ----------------------------------------------------------------------------------------------


def _lines(figure: go.Figure) -> list[Any]:
    return [trace for trace in figure.data if trace.mode == "lines+markers"]


def test_accuracy_has_a_line_and_a_band_for_each_method_under_each_rule() -> None:
    figure = large_batch.accuracy(_result((0.8, 0.9), (0.9, 0.95)))
    lines = _lines(figure)
    assert [trace.name for trace in lines] == ["SGD", "LARS"] * len(RULES)
    assert list(lines[3].y) == pytest.approx([0.98, 0.925])
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    assert len(bands) == 4 and (max(bands[3].y), min(bands[3].y)) == (0.98, 0.9)
    assert "mean and range of 2 seeds" in figure.layout.annotations[0].text


def test_no_line_is_told_from_another_by_colour_alone() -> None:
    accuracy = _lines(large_batch.accuracy(_result((0.8,), (0.9,))))
    assert len({(trace.line.dash, trace.marker.symbol) for trace in accuracy}) == 2
    rates = _lines(large_batch.rates(TUNING))
    assert len({trace.marker.symbol for trace in rates}) == len(TUNING.batch_sizes)


def test_chosen_rates_are_ringed_and_a_loss_that_is_not_finite_is_a_gap() -> None:
    figure = large_batch.rates(TUNING)
    rings = [trace for trace in figure.data if trace.marker.symbol == "circle-open"]
    assert [(ring.x[0], ring.y[0]) for ring in rings] == [(0.2, 0.1), (0.2, 0.2), (1.0, 0.1), (4.0, 0.1)]
    assert list(_lines(figure)[1].y) == [0.3, 0.2, None]


def test_tables_hold_every_point() -> None:
    table = large_batch.accuracy_table(_result((0.8, 0.9), (0.9, 0.95)))
    assert len(table.rows) == 8
    assert ("LARS", RULES["tuned"], "1024", "1.6", "0.9250", "0.9000 to 0.9500") in table.rows


# --- real runs ------------------------------------------------------------------------------------------------


def test_equal_configurations_are_trained_once_and_finished_ones_not_again(runs: Path) -> None:
    quick = {"model": "mlp", "engine.max_steps": 1, "launch.is_tracked": False}
    one, two = (from_overrides({**quick, "seed": seed}) for seed in (1, 2))
    told: list[int] = []
    found = run_all([one, two, one], num_at_once=2, on_done=lambda index, run: told.append(index))
    assert found[0].key == found[2].key != found[1].key
    assert sorted(told) == [0, 1, 2]
    again = run_all([two, one])
    assert all(run.is_reused for run in again)
    assert [run.key for run in again] == [found[1].key, found[0].key]
    assert len(all_runs(runs)) == 2


def test_a_failed_run_is_named_and_the_others_are_stopped(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_study.py").write_text("def build(info):\n    raise ValueError('no such layer')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = from_overrides({"model": "broken_study:build", "launch.is_tracked": False})
    long = from_overrides({"model": "mlp", "engine.num_epochs": 100_000, "launch.is_tracked": False})
    with pytest.raises(RunFailed, match="no such layer"):
        run_all([long, broken, from_overrides({"seed": 9})], num_at_once=2)
    states = {Run(folder).status().state.value for folder in all_runs(runs)}
    assert states == {"failed", "killed"}, "the third one never started"


def test_refuses_to_run_none_at_once() -> None:
    with pytest.raises(ConfigError, match="num_at_once must be at least 1, got 0"):
        run_all([], num_at_once=0)


@pytest.mark.slow
def test_the_notebook_runs_small_records_its_verdict_and_goes_on_from_what_is_there(
    runs: Path, tmp_path: Path
) -> None:
    values = {**SMALL, "num_seeds": 1}
    overrides = values.pop("overrides")
    parameters = [f"{name}={value}" for name, value in values.items() if not isinstance(value, list)]
    yaml = json.dumps(
        {name: value for name, value in values.items() if isinstance(value, list)} | {"overrides": overrides}
    )
    code, said, executed = _papermill("04_large_batch.ipynb", runs, tmp_path, *parameters, yaml=yaml)
    assert code == 0, said
    assert len(_outputs(executed, PLOTLY_MIME)) == 2
    assert (tmp_path / "out.ipynb").stat().st_size < MAX_KB * 1000
    assert "4/4 LARS at 1200: best accuracy" in _printed(executed)
    assert "8/8 LARS at 1200, rate tuned at each batch size: best accuracy" in _printed(executed)
    record = json.loads(large_batch.record_file("study").read_text())
    assert len(record["comparison"]) == 8 and len(record["tuning"]) == 4
    assert record["verdict"]["text"].startswith("At 1200 samples per update and equal epochs (1)")
    before = {folder.key for folder in all_runs(runs)}
    study = Study.from_parameters({**values, "overrides": overrides})
    result = study.compare(study.tune(say=lambda line: None), say=lambda line: None)
    assert {folder.key for folder in all_runs(runs)} == before, "every run was reused"
    assert [list(row.score.accuracies) for row in result.rows] == [
        row["score"]["accuracies"] for row in record["comparison"]
    ]
