"""`labkit memory`, the study of activations and its notebook, and a benchmark in small."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_notebooks import MAX_KB, _outputs, _papermill

import labkit
from labkit.bench import memory as bench_memory
from labkit.cli import main
from labkit.errors import ConfigError
from labkit.lab import activations
from labkit.lab.activations import Contention, MaxBatch, MemoryRun, Result, Study, what_if
from labkit.lab.activations._study import verdict
from labkit.lab.show import PLOTLY_MIME
from labkit.launch.forked import run_workers
from labkit.memory import Block, Decision, Link, Profile, Uplink, make_plan
from labkit.memory.recorded import Recorded
from labkit.memory.turns import make_state
from labkit.runfolder import RunState

KEEP, OFFLOAD = Decision.KEEP, Decision.OFFLOAD
SMALL: dict[str, Any] = {
    "budgets": [0.7, 0.5],
    "link_rate": "100MB",
    "devices": [1, 2],
    "most_measured": 1,
    "global_batch_size": 4,
    "max_steps": 6,
    "overrides": {
        "model.num_layers": 3,
        "model.width": 32,
        "data.max_bytes": 100000,
        "engine.num_threads": 1,
        "engine.step_padding_s": 0.1,
        "memory.host_budget": "16MiB",
        "launch.is_tracked": False,
    },
}
GPT = [
    "name=t", "model=gpt", "model.num_layers=3", "model.width=32", "data=text", "data.max_bytes=100000",
    "engine.global_batch_size=8", "engine.max_steps=6", "launch.is_tracked=false", "engine.num_threads=1",
]  # fmt: skip


def _recorded(sizes: list[int], budget: int | None) -> Recorded:
    count, each = len(sizes), 1.0 / len(sizes)
    blocks = tuple(
        Block(size, (index + 1) * each, 1.0 + 2 * each * (count - 1 - index), index, True, f"{size}")
        for index, size in enumerate(sizes)
    )
    profile = Profile(blocks, 1.0, 3.0, (each,) * count, (0,) * count)
    plan = make_plan(profile, Link(400, 400), budget_bytes=budget)
    return Recorded(profile, plan.decisions, plan.link, budget, plan.window_bytes, 1000)


def _run(budget: int | None, samples_per_s: float = 100.0) -> MemoryRun:
    recorded = _recorded([100] * 6, budget)
    predicted = recorded.predicted()
    report: dict[str, Any] = {
        "predicted_step_s": predicted.step_s, "measured_step_s": 1.02 * predicted.step_s,
        "predicted_peak_bytes": predicted.peak_bytes, "measured_peak_bytes": predicted.peak_bytes,
        "moved_bytes": 600, "freed_bytes": 600, "num_steps": 3,
    }  # fmt: skip
    copies = tuple((t.direction, t.size_bytes, t.begin_s, t.end_s) for t in predicted.transfers)
    return MemoryRun("k", report, recorded, predicted, predicted.live, copies, 0.1, samples_per_s)


def _result(kept: float = 0.97) -> Result:
    return Result(
        {1.0: _run(None), 0.5: _run(300, 100 * kept)},
        {0.5: MaxBatch(10, 20, (10,), (20,))},
        (Contention(1, 3.0, 3.0, 3.0, 300, 300, 3.1), Contention(2, 3.2, 4.0, 3.0, 300, 200)),
    )


def test_a_plan_survives_its_file() -> None:
    recorded = _recorded([100, 50, 70], 150)
    again = Recorded.from_mapping(json.loads(json.dumps(recorded.to_mapping())))
    assert again.decisions == recorded.decisions and again.link == recorded.link
    assert again.predicted().step_s == pytest.approx(recorded.predicted().step_s)
    assert again.predicted().peak_bytes == recorded.predicted().peak_bytes


def test_what_if_says_what_others_on_the_link_cost() -> None:
    recorded = _recorded([100] * 6, 300)
    one, four = (what_if(recorded, Uplink.ideal(600), count) for count in (1, 4))
    assert one.predicted_s == one.predicted_alone_s < four.predicted_s <= four.predicted_alone_s
    assert four.floor_s <= four.predicted_s and four.peak_bytes <= 300
    assert "4 on the link" in str(four)


def test_the_verdict_weighs_speed_batch_and_prediction() -> None:
    good = verdict(_result())
    assert (
        good.is_met and "At 50% of the memory training keeps 97%" in good.text and "2.00 times" in good.text
    )
    slow = verdict(_result(0.5))
    assert not slow.is_met and "No budget keeps 95%" in slow.text


def test_figures_and_tables_say_the_same() -> None:
    result = _result()
    run = result.runs[0.5]
    timeline, transfers = activations.timeline(run), activations.transfers(run)
    assert [trace.name for trace in timeline.data] == ["predicted", "measured"]
    assert max(timeline.data[0].y) * 2**20 == pytest.approx(run.predicted.peak_bytes)
    assert {trace.name for trace in transfers.data} == {"out", "in"}
    trade = activations.trade_off(result)
    assert list(trade.data[1].y) == pytest.approx([100, 97]) and list(trade.data[3].y) == [20]
    shared = activations.contention(result)
    assert list(shared.data[0].y) == [3000, 3200] and shared.data[3].y[1] is None
    table = activations.table(result)
    assert table.rows[1][0] == "50%" and table.rows[1][-2:] == ("10", "20")
    assert activations.contention_table(result).rows[1][-1] is None
    plan = activations.plan_table(run)
    moved = [row for row in plan.rows if row[3] == "offload"]
    assert len(moved) == run.recorded.decisions.count(OFFLOAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": [1.5]}, r"budgets must be between 0 and 1, got \[1.5\]"),
        ({"budgets": []}, "budgets must be between 0 and 1"),
        ({"devices": [0]}, r"devices must be at least 1 each, got \[0\]"),
        ({"link_rate": "fast"}, "link_rate: size must be a number of bytes"),
        ({"cluster": "1x2"}, "cluster must have one worker, got 2"),
        ({"model": "gtp"}, "model"),
    ],
)
def test_bad_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Study.from_parameters({"model": "gpt", "data": "text", **SMALL, **change})


# --- runs ----------------------------------------------------------------------------------------------------


def test_show_simulate_and_a_run_without_a_plan(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = labkit.start(labkit.from_overrides([*GPT, "memory.device_budget=3600KB"]))
    status = run.wait(60)
    assert status.state is RunState.FINISHED, status.error
    assert main(["memory", "show", run.folder.key]) == 0
    said = capsys.readouterr().out
    assert "Plan of a step" in said and "offload" in said and "peak of blocks" in said and "predicted" in said
    assert main(["memory", "show", run.folder.key, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["measured_peak_bytes"] == pytest.approx(shown["predicted_peak_bytes"], rel=0.15)
    assert shown["freed_bytes"] > 0 and shown["plan"]["blocks"]
    assert main(["memory", "simulate", run.folder.key, "--devices", "4", "--rate", "40MB"]) == 0
    assert "4 on the link" in capsys.readouterr().out
    assert main(["memory", "simulate", run.folder.key, "--budget", "3500KB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_devices"] == 1
    assert main(["memory", "simulate", run.folder.key, "--budget", "900KB"]) == 2
    assert "too few" in capsys.readouterr().err
    assert main(["memory", "simulate", run.folder.key, "--rate", "lots"]) == 2
    assert "--rate: size must be" in capsys.readouterr().err
    plain = labkit.start(labkit.from_overrides(GPT))
    plain.wait(60)
    assert main(["memory", "show", plain.folder.key]) == 2
    assert "run must have planned its memory" in capsys.readouterr().err


def test_the_largest_batch_is_one_that_all_workers_agree_on(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uneven = '{"nodes": [{"name": "a", "workers": [{"local_batch_size": 6}, {"local_batch_size": 2}]}]}'
    words = [*GPT, "memory.device_budget=4MB", f"cluster={uneven}"]
    assert main(["memory", "maxbatch", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hybrid"] >= 1.6 * found["plain"] > 0
    assert sum(found["hybrid_parts"]) == found["hybrid"]
    assert found["hybrid_parts"][0] == pytest.approx(3 * found["hybrid_parts"][1], abs=3)
    assert main(["memory", "maxbatch", *GPT]) == 1
    assert "memory.device_budget must be given" in capsys.readouterr().err


def test_a_tier_without_room_keeps_all_and_says_so(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GPT, "memory.policy=offload", "memory.host_budget=900000GiB"]
    assert main(["run", *words]) == 0
    said = capsys.readouterr().out
    assert "nothing is offloaded: memory.host_budget must be at most" in said and "moves 0 B" in said


@pytest.mark.slow
def test_the_notebook_answers_its_question(runs: Path, tmp_path: Path) -> None:
    code, said, executed = _papermill("07_memory.ipynb", runs, tmp_path, yaml=json.dumps(SMALL))
    assert code == 0, said
    assert len(_outputs(executed, PLOTLY_MIME)) == 4
    content = json.loads((runs / "memory" / "memory.json").read_text())
    assert [entry["budget"] for entry in content["runs"]] == [1.0, 0.7, 0.5]
    assert all(entry["hybrid"] > entry["plain"] for entry in content["batches"])
    assert [entry["num_devices"] for entry in content["contention"]] == [1, 2]
    assert content["contention"][0]["measured_s"] and content["contention"][1]["measured_s"] is None
    for entry in content["runs"]:
        assert entry["measured_peak_bytes"] == pytest.approx(entry["predicted_peak_bytes"], rel=0.05)
    assert (tmp_path / "out.ipynb").stat().st_size < MAX_KB * 1000


@pytest.mark.slow
def test_the_study_in_small(runs: Path) -> None:
    one = {**SMALL, "budgets": [0.6], "devices": [2], "most_measured": 2}
    study = Study.from_parameters({"name": "s", "model": "gpt", "data": "text", "cluster": "1x1", **one})
    said: list[str] = []
    result = study.run(said.append)
    assert result.kept(0.6) > 0.5 and result.batches[0.6].growth > 1
    (shared,) = result.contention
    assert shared.measured_s == pytest.approx(shared.predicted_s, rel=0.35)
    assert any("2 on the link" in line for line in said)
    final = activations.record(study, result)
    assert json.loads((runs / "s" / "memory.json").read_text())["verdict"]["text"] == final.text


# --- the benchmark in small ------------------------------------------------------------------------------------


def test_the_emulated_network_does_what_the_benchmark_says() -> None:
    fd = make_state()
    (found,) = run_workers(bench_memory._train, 1, bench_memory._OURS, fd)
    assert found["time"] < 1.3 and found["peak"] < 1.1 and found["stall_share"] < 0.2


def test_the_benchmark_on_a_gpu_says_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run `labkit bench memory-cuda`")
    assert main(["bench", "memory-cuda"]) == 2
    assert "bench memory-cuda must run on a machine with CUDA" in capsys.readouterr().err
