"""Laws of the device model: its times by hand, its speed as a limit, and a fit that hiccups do not move."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.cluster.device_model import DeviceModel, fit
from labkit.errors import ConfigError

devices = st.builds(
    DeviceModel,
    st.floats(0, 10),
    st.floats(0.01, 10),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 30),
)


def test_times_by_hand() -> None:
    device = DeviceModel(3.0, 0.5, max_micro_batch_size=4)
    assert [device.time_s(b) for b in (0, 1, 4, 5, 8, 9)] == [0, 3.5, 5, 8.5, 10, 13.5]
    assert [device.num_micro_steps(b) for b in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert DeviceModel(3.0, 0.5).time_s(100) == 53.0  # without a cap always one micro-step


@pytest.mark.parametrize(
    ("device", "speed"),
    [
        (DeviceModel(0, 0.25), 4),
        (DeviceModel(5, 0.25), 4),  # large batches hide the fixed cost
        (DeviceModel(1, 0.5, max_micro_batch_size=2), 1),  # 2 samples in 2 s, whatever the batch
        (DeviceModel(1, 0.5, max_batch_size=2), 1),
        (DeviceModel(1, 0.5, 8, 2), 1),
        (DeviceModel(0, 0.5, 1, 1), 2),
    ],
)
def test_speed_by_hand(device: DeviceModel, speed: float) -> None:
    assert device.speed == pytest.approx(speed)


@given(devices, st.integers(1, 200))
def test_no_batch_is_faster_than_the_speed_and_time_grows(device: DeviceModel, size: int) -> None:
    size = min(size, device.max_batch_size or size)
    assert size / device.time_s(size) <= device.speed * (1 + 1e-9)
    assert device.time_s(size) > device.time_s(size - 1)


@given(devices)
def test_the_speed_is_reached(device: DeviceModel) -> None:
    size = min(device.max_micro_batch_size or 10**9, device.max_batch_size or 10**9)
    assert size / device.time_s(size) == pytest.approx(device.speed, rel=1e-4)


@given(st.floats(0.1, 8))
def test_a_scaled_device_takes_that_many_times_as_long(factor: float) -> None:
    device = DeviceModel(1.0, 2.0, 4, 9)
    slower = device.scaled(factor)
    assert slower.time_s(9) == pytest.approx(factor * device.time_s(9))
    assert (slower.max_micro_batch_size, slower.max_batch_size) == (4, 9)


# The fit


@given(st.floats(0, 5), st.floats(0.01, 5), st.sets(st.integers(1, 300), min_size=2, max_size=8))
def test_a_line_is_found_again(alpha_s: float, beta_s: float, sizes: set[int]) -> None:
    ordered = sorted(sizes)
    device, residual = fit(ordered, [alpha_s + beta_s * size for size in ordered])
    for size in (*ordered, 1000):
        assert device.time_s(size) == pytest.approx(alpha_s + beta_s * size, rel=1e-6)
    assert residual < 1e-9


def test_of_a_size_the_fastest_time_counts() -> None:
    assert fit([1, 1, 1, 3, 3], [9.0, 2.0, 2.5, 50.0, 4.0]).device == DeviceModel(1.0, 1.0)


@pytest.mark.parametrize("slow", range(5))
@pytest.mark.parametrize("factor", [1.5, 3, 10, 100])
def test_one_size_measured_in_a_hiccup_does_not_move_the_line(slow: int, factor: float) -> None:
    sizes = [4, 8, 16, 32, 64]
    times_s = [2 + 0.5 * size for size in sizes]
    times_s[slow] *= factor
    device, residual = fit(sizes, times_s)
    assert device.alpha_s == pytest.approx(2) and device.beta_s == pytest.approx(0.5)
    assert residual == pytest.approx((factor - 1) / 5)  # but it shows


@given(st.lists(st.floats(1, 1.05), min_size=6, max_size=6))
def test_a_little_noise_gives_a_line_as_near(noise: list[float]) -> None:
    sizes = [2, 4, 8, 16, 32, 64]
    device = fit(sizes, [(1 + 0.2 * size) * more for size, more in zip(sizes, noise, strict=True)]).device
    for size in sizes:
        assert device.time_s(size) == pytest.approx(1 + 0.2 * size, rel=0.1)


def test_alpha_is_never_negative() -> None:
    assert fit([1, 2, 4], [1.0, 2.2, 4.6]).device.alpha_s == 0  # a free line would start below 0


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1.0), "alpha_s must be finite and at least 0, got -1.0. Measure"),
        ((float("nan"), 1.0), "alpha_s must be finite and at least 0, got nan"),
        ((0.0, 0.0), "beta_s must be finite and above 0, got 0.0. Measure"),
        ((0.0, -2.0), "beta_s must be finite and above 0, got -2.0"),
        ((0.0, float("inf")), "beta_s must be finite and above 0, got inf"),
        ((0.0, 1.0, 0), "max_micro_batch_size must be at least 1, got 0. Leave"),
        ((0.0, 1.0, None, 0), "max_batch_size must be at least 1, got 0. Leave"),
    ],
)
def test_refuses_a_device_that_cannot_be(arguments: tuple[float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DeviceModel(*arguments)


@pytest.mark.parametrize(
    ("sizes", "times_s", "message"),
    [
        ([], [], "sizes must have two distinct values, got []. Measure another"),
        ([4, 4], [1.0, 2.0], "sizes must have two distinct values, got [4]"),
        ([1, 2], [1.0], "times_s must have one value per size, got 1 for 2"),
        ([0, 2], [1.0, 2.0], "sizes must be at least 1, got 0"),
        ([1, 2], [0.0, 2.0], "times_s must be finite and above 0, got 0.0"),
        ([1, 2], [float("nan"), 2.0], "times_s must be finite and above 0, got nan"),
        ([1, 2, 4], [2.0, 2.0, 2.0], "times_s must grow with size"),
        ([1, 2], [2.0, 1.9], "times_s must grow with size, got {1: 2.0, 2: 1.9}"),
    ],
)
def test_refuses_measurements_without_a_line(sizes: list[int], times_s: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        fit(sizes, times_s)
