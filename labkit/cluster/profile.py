"""From a probe's measurements to what a cluster file says of a device."""

import statistics
from collections.abc import Sequence

from labkit.cluster.device_model import Fit, fit
from labkit.config import ExperimentConfig, ProfileConfig

Round = dict[int, float]
"""Seconds of a forward and backward pass by batch size."""


def fit_rounds(rounds: Sequence[Round]) -> Fit:
    """The line through every size's median over the rounds, and its relative residual.

    A step waits for what a batch usually takes, not for the fastest that was ever seen.

    Raises:
        ConfigError: fewer than two batch sizes were measured.
    """
    sizes = sorted(rounds[0])
    return fit(sizes, [statistics.median(each[size] for each in rounds) for size in sizes])


def uncertainty(rounds: Sequence[Round]) -> float:
    """How far the halves of the rounds disagree about a middle and a large batch, relative; 1: unknown."""
    sizes = sorted(rounds[0])
    if len(sizes) < 2 or len(rounds) < 2:
        return 1.0
    first, second = (fit_rounds(half).device for half in (rounds[0::2], rounds[1::2]))
    pairs = [(first.time_s(size), second.time_s(size)) for size in (sizes[len(sizes) // 2], sizes[-1])]
    return max(abs(a - b) / (a + b) for a, b in pairs)


def profile(rounds: Sequence[Round], max_micro_batch_size: int | None = None) -> ProfileConfig:
    """What the cluster file says of a device.

    Args:
        rounds: All measurements of the device.
        max_micro_batch_size: Largest batch that fitted into its memory, if a larger one did not.

    Raises:
        ConfigError: fewer than two batch sizes were measured.
    """
    device, residual = fit_rounds(rounds)
    sizes = sorted(rounds[0])
    return ProfileConfig(
        alpha_s=_rounded(device.alpha_s),
        beta_s=_rounded(device.beta_s),
        max_micro_batch_size=max_micro_batch_size,
        smallest=sizes[0],
        largest=sizes[-1],
        residual=round(residual, 4),
        uncertainty=round(uncertainty(rounds), 4),
    )


def _rounded(value: float) -> float:
    """To five digits: more is noise, and a person reads the file."""
    return float(f"{value:.5g}")


def describe_model(config: ExperimentConfig) -> str:
    """What a profile is good for, in one line: the same model on the same data in the same type."""
    settings = config.model.model_dump(mode="json", exclude={"name"})
    inside = ", ".join(f"{key}={value}" for key, value in settings.items())
    padding = config.engine.step_padding_s
    emulated = f", padded to {1e3 * padding:g} ms" if padding else ""
    return f"{config.model.name}({inside}) on {config.data.name}, {config.engine.dtype}{emulated}"
