"""A paced device takes the time it is said to take: exact ratios, lateness carried, overruns told."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from labkit.config import from_overrides
from labkit.engine.pace import FORWARD_SHARE, Pace, pace_of, spread_over_backward


class FakeClock:
    """Time that passes only when somebody works or sleeps."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []
        self._oversleep_s = oversleep_s

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self._oversleep_s


def _run(pace: Pace, clock: FakeClock, work_s: list[float], num_samples: int = 1) -> list[float]:
    """Duration of each micro-step whose real compute takes so long, a third of it forward."""
    durations = []
    for seconds in work_s:
        began_at = clock.now
        pace.begin(num_samples)
        clock.work(seconds * FORWARD_SHARE)
        pace.advance(FORWARD_SHARE)
        clock.work(seconds * (1 - FORWARD_SHARE))
        pace.end()
        durations.append(clock.now - began_at)
    return durations


def _pace(seconds_per_sample: float, clock: FakeClock) -> Pace:
    return Pace(seconds_per_sample, clock=clock, sleep=clock.sleep)


def test_a_micro_step_takes_its_samples_times_the_time_of_one() -> None:
    clock = FakeClock()
    pace = _pace(0.01, clock)
    assert _run(pace, clock, [0.001], num_samples=8) == pytest.approx([0.08])
    assert _run(pace, clock, [0.001], num_samples=2) == pytest.approx([0.02])


def test_a_micro_step_without_samples_takes_no_time() -> None:
    clock = FakeClock()
    pace = _pace(0.01, clock)
    assert _run(pace, clock, [0.0], num_samples=0) == [0.0]
    assert pace.num_micro_steps == 0


def test_without_emulation_nothing_ever_waits() -> None:
    clock = FakeClock()
    pace = _pace(0.0, clock)
    assert _run(pace, clock, [0.5], num_samples=8) == pytest.approx([0.5])
    assert not pace.is_on and clock.sleeps == []


def test_the_forward_pass_is_over_after_its_share() -> None:
    clock = FakeClock()
    pace = _pace(0.3, clock)
    pace.begin(1)
    pace.advance(FORWARD_SHARE)
    assert clock.now - 100 == pytest.approx(0.1)


def test_lateness_is_carried_so_that_the_mean_is_exact() -> None:
    clock = FakeClock(oversleep_s=0.004)
    pace = _pace(0.1, clock)
    durations = _run(pace, clock, [0.02] * 50 + [0.15] + [0.02] * 50)
    assert max(durations) > 0.149
    assert sum(durations) / len(durations) == pytest.approx(0.1, rel=1e-3)
    assert pace.num_overruns == 1


def test_a_hiccup_longer_than_a_micro_step_is_forgiven() -> None:
    clock = FakeClock()
    pace = _pace(0.1, clock)
    durations = _run(pace, clock, [5.0, 0.01, 0.01, 0.01])
    assert durations == pytest.approx([5.0, 0.01, 0.09, 0.1])  # one micro-step is paid back, no more


def test_overruns_are_counted_and_told_when_there_are_too_many() -> None:
    clock = FakeClock()
    pace = _pace(0.1, clock)
    _run(pace, clock, [0.01] * 19 + [0.11])
    assert pace.overrun_share == 0.05 and pace.remark() == ""
    _run(pace, clock, [0.11])
    assert "2 of 21 micro-steps really took longer" in pace.remark()


def test_what_happens_after_the_last_gradient_is_no_compute() -> None:
    clock = FakeClock()
    pace = _pace(0.1, clock)
    pace.begin(1)
    pace.advance(1.0)
    clock.work(0.5)  # a strategy waits for other workers
    pace.end()
    assert pace.num_overruns == 0
    assert _run(pace, clock, [0.01]) == pytest.approx([0.1])  # and it is no debt


# --- what the configuration says ---------------------------------------------------------------------------

CLUSTER = "cluster={nodes: [{name: a, workers: 1}, {name: b, workers: 1, speed: 0.5}, {name: c, workers: 2, speed: 4}]}"


def test_padding_is_for_an_even_share_at_speed_one() -> None:
    config = from_overrides([CLUSTER, "engine.global_batch_size=64", "engine.step_padding_s=0.16"])

    def duration_s(rank: int, num_samples: int) -> float:
        clock = FakeClock()
        pace = pace_of(config, rank, clock)
        pace._sleep = clock.sleep
        (found,) = _run(pace, clock, [0.0], num_samples)
        return found

    assert duration_s(0, 16) == pytest.approx(0.16)
    assert duration_s(0, 8) == pytest.approx(0.08)  # half the samples, half the time
    assert duration_s(1, 16) == pytest.approx(0.32)  # half the speed, twice the time
    assert duration_s(3, 16) == pytest.approx(0.04)


# --- real gradients ------------------------------------------------------------------------------------------


def _gradient_times(pace: Pace, clock: Callable[[], float], model: nn.Module) -> list[float]:
    """When each gradient appeared, from the last layer to the first."""
    times: list[float] = []
    spread_over_backward(model.parameters(), pace)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: times.append(clock()))
    began_at = clock()
    pace.begin(1)
    loss = model(torch.ones(1, 4)).sum()
    pace.advance(FORWARD_SHARE)
    loss.backward()
    pace.end()
    return [at - began_at for at in times]


def test_gradients_appear_over_the_backward_pass_in_proportion_to_their_sizes() -> None:
    clock = FakeClock()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    times = _gradient_times(_pace(0.3, clock), clock, model)
    # 32 of 48 elements first: a third of the time forward, then two thirds of what is left.
    assert times == pytest.approx([0.1 + 0.2 * 32 / 48, 0.3])


def test_frozen_parameters_take_no_part_of_the_backward_pass() -> None:
    clock = FakeClock()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    model[0].weight.requires_grad_(False)
    clock_times: list[float] = []
    pace = _pace(0.3, clock)
    spread_over_backward(model.parameters(), pace)
    model[1].weight.register_post_accumulate_grad_hook(lambda _: clock_times.append(clock() - 100))
    pace.begin(1)
    model(torch.ones(1, 4)).sum().backward()
    pace.end()
    assert clock.now - 100 == pytest.approx(0.3)
    assert clock_times == pytest.approx([0.2])  # the forward share was not announced here


def test_half_the_speed_takes_twice_the_time_on_a_real_clock() -> None:
    def seconds(per_sample_s: float) -> float:
        pace = Pace(per_sample_s)
        began_at = time.perf_counter()
        for _ in range(20):
            pace.begin(1)
            pace.advance(FORWARD_SHARE)
            pace.end()
        return time.perf_counter() - began_at

    fast, slow = seconds(0.01), seconds(0.02)
    assert slow / fast == pytest.approx(2.0, rel=0.25)
