"""Learning-rate schedules: pure functions of the step, counted from 1."""

import math

from labkit.config import ScheduleConfig


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
