"""Benchmarks interleave their sides and report medians with their spread, as one JSON line."""

import json

import pytest

from labkit.bench import run_benchmark
from labkit.bench.harness import Report, interleave, ratios
from labkit.errors import ConfigError


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
