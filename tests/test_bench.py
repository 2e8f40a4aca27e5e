"""Benchmarks interleave their sides and report medians with their spread, as one JSON line."""

import importlib.util
import json
import os
from dataclasses import replace

import pytest

from labkit.bench import lars, memory, run_benchmark, server
from labkit.bench.harness import Report, interleave, ratios
from labkit.cluster.placement import placements
from labkit.config import from_overrides
from labkit.errors import ConfigError
from labkit.launch.forked import run_workers


def test_sides_run_in_turn_and_the_order_is_reversed_every_other_round() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = interleave({"a": lambda: side("a"), "b": lambda: side("b")}, repeats=2, warmup=1)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert values == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_ratios_are_formed_pair_by_pair() -> None:
    # The machine became ten times slower between the rounds: the ratio does not see it.
    assert ratios([2.0, 20.0], [1.0, 10.0]) == [2.0, 2.0]


def test_a_report_says_median_spread_and_whether_the_aim_is_met() -> None:
    report = Report("x")
    report.add("share", [0.03, 0.01, 0.5], "<= 0.02")
    report.add("ratio", [1.5], ">= 1.0")
    content = json.loads(report.to_json())
    assert content["bench"] == "x"
    assert content["figures"] == {"share": 0.03, "ratio": 1.5}
    assert content["spread"]["share"] == {"min": 0.01, "max": 0.5, "count": 3}
    assert content["machine"]["num_cores"] >= 1
    assert "\n" not in report.to_json()
    assert (report.is_met("share"), report.is_met("ratio")) == (False, True)


def test_refuses_an_unknown_benchmark() -> None:
    with pytest.raises(
        ConfigError, match=r"benchmark must be one of .*, got 'overhed'. Did you mean 'overhead'\?"
    ):
        run_benchmark("overhed", print)


@pytest.mark.slow
def test_bench_lars_measures_its_steps_and_says_when_the_peer_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lars, "_REPEATS", 3)
    assert sum(parameter.numel() for parameter in lars._network()) == 25_557_032  # ResNet-50's
    report = Report("lars")
    lars._steps(report)
    is_there = importlib.util.find_spec("pytorch_optimizer") is not None
    assert ("vs_peer" in report.figures) == is_there
    assert any("pytorch-optimizer is missing" in note for note in report.notes) != is_there
    assert 0.1 < report.figures["step_vs_sgd"] < 10 and report.figures["over_memory_bound"] > 0.1


def test_bench_server_moves_every_transports_bytes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_NUM_FLOATS": 300_000, "_SIZE_BYTES": 1_200_000, "_REPEATS": 2, "_PINGS": 2}.items():
        monkeypatch.setattr(server, name, value)
    placement = placements(from_overrides({"cluster": "2x1"}).cluster)[0]
    hosts = ["127.0.0.1", "127.0.0.1"]
    for side in run_workers(server._exchange, 2, placement, hosts, os.getpid()):
        assert list(side) == ["ours", "zmq", "gloo", "tcp"]
        for found in side.values():
            assert all(len(times) == 2 and min(times) > 0 for times in found["times"].values())
            assert found["cpu_s"] > 0


@pytest.mark.slow
def test_bench_memory_compares_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_INNER_KIB": (40, 40, 20), "_FORWARD_S": 0.003, "_BATCH": 4}.items():
        monkeypatch.setattr(memory, name, value)
    budget = int(0.6 * memory._saved_bytes(4))
    seconds = {
        side.name: memory._timed(replace(side, batch=4, budget_bytes=budget), 2, print, {})()
        for side in memory._SHARED
    }
    assert len(seconds) == 4 and all(value >= 3 * 3 * 0.003 for value in seconds.values())
    report = Report("memory")
    memory._compare_largest(report, print)
    assert report.figures["vs_best_baseline"] > 0.5
    assert {"vs_best_baseline_alone", "vs_best_baseline_at_full_speed"} <= report.figures.keys()
