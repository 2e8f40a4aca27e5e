"""Schedules are pure functions of the step, counted from 1."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import AdamWConfig, ScheduleConfig, SgdConfig
from labkit.errors import ConfigError
from labkit.optim.build import build_optimizer
from labkit.optim.schedule import learning_rate_at, scaled_learning_rate


def _rates(total: int, **settings: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(settings)
    return [learning_rate_at(schedule, 1.0, step, total) for step in range(1, total + 1)]


def test_warm_up_reaches_the_peak_at_its_last_step_and_wastes_none() -> None:
    assert _rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_step_schedule_by_hand() -> None:
    rates = _rates(5, name="step", milestones=[2, 3], factor=0.5)
    assert rates == [1.0, 1.0, 0.5, 0.25, 0.25]


def test_polynomial_by_hand() -> None:
    assert _rates(4, name="polynomial", power=2.0) == [1.0, 0.75**2, 0.5**2, 0.25**2]


def test_cosine_falls_from_the_peak_to_the_final_fraction() -> None:
    rates = _rates(100, name="cosine", final_fraction=0.1)
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.55)
    assert 0.1 < rates[-1] < 0.11


@given(
    st.sampled_from(["constant", "cosine", "polynomial", "step"]),
    st.integers(0, 30),
    st.integers(1, 60),
)
def test_every_rate_is_above_zero_and_at_most_the_peak(name: str, warmup: int, total: int) -> None:
    rates = _rates(total, name=name, warmup_steps=warmup, milestones=[7])
    assert all(0 < rate <= 1 for rate in rates)
    if total >= warmup:
        assert max(rates) == 1.0
    after = rates[max(0, warmup - 1) :]
    assert after == sorted(after, reverse=True)


def test_optimizers_are_torchs_own_with_the_given_settings() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = build_optimizer(SgdConfig(momentum=0.5, weight_decay=0.1, is_nesterov=True), [weight])
    assert isinstance(sgd, torch.optim.SGD)
    assert {k: sgd.defaults[k] for k in ("momentum", "weight_decay", "nesterov")} == {
        "momentum": 0.5, "weight_decay": 0.1, "nesterov": True,
    }  # fmt: skip
    adamw = build_optimizer(AdamWConfig(beta1=0.8, epsilon=1e-5), [weight])
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.8, 0.999) and adamw.defaults["eps"] == 1e-5


def test_the_rate_scales_with_the_global_batch() -> None:
    assert scaled_learning_rate(0.1, 256, 8192) == pytest.approx(3.2)  # Goyal et al., 2017
    assert scaled_learning_rate(0.1, 64, 16) == pytest.approx(0.025)
    assert scaled_learning_rate(0.3, 48, 48) == 0.3


@pytest.mark.parametrize(
    ("base_batch", "global_batch", "name"), [(0, 8, "base_batch"), (8, -1, "global_batch")]
)
def test_refuses_to_scale_by_no_batch(base_batch: int, global_batch: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got"):
        scaled_learning_rate(0.1, base_batch, global_batch)
