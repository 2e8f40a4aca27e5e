"""Learning-rate schedules: pure functions of the step, counted from 1."""

import math

from labkit.config import ScheduleConfig
from labkit.errors import ConfigError


def scaled_learning_rate(base: float, base_batch: int, global_batch: int) -> float:
    """The linear scaling rule: the rate grows with the global batch, whatever the number of workers.

    k batches of `base_batch` samples move the weights about as far as one of k times as many at k times
    the rate, as long as the gradient changes little meanwhile; hence the warm-up that belongs to it
    (Goyal et al., Accurate, Large Minibatch SGD, 2017, https://arxiv.org/abs/1706.02677).

    Args:
        base: Learning rate that is good at `base_batch`.
        base_batch: Samples per update it was found with, at least 1.
        global_batch: Samples per update it is wanted for, at least 1.

    Raises:
        ConfigError: a batch is smaller than 1.
    """
    for name, size in (("base_batch", base_batch), ("global_batch", global_batch)):
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}. Give the samples per update.")
    return base * global_batch / base_batch


def learning_rate_at(schedule: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """The learning rate of a step.

    Warm-up over K steps is linear and reaches the peak at step K; its first step is peak / K, not 0
    (Goyal et al., 2017). The decay starts at the peak and would reach its end one step after the last,
    so that no step is wasted at 0: without warm-up it is shape((step - 1) / total_steps).

    Args:
        schedule: Which schedule.
        peak: Highest learning rate.
        step: The step about to be taken, from 1.
        total_steps: Steps of the whole run.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return peak * schedule.factor ** sum(step > milestone for milestone in schedule.milestones)
    first = max(1, schedule.warmup_steps)
    progress = min(1.0, (step - first) / max(1, total_steps - first + 1))
    if schedule.name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        shape = (1.0 - progress) ** schedule.power
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * shape)
