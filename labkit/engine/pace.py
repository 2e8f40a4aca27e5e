"""Emulate a device of a given speed: do the real compute, then wait until the emulated one would be done.

The processor idles meanwhile, as it does while an accelerator computes, so several emulated devices fit on
few cores and communication overlaps with their compute as it would. What one micro-step takes too long, the
next ones wait less: ratios between workers come out exact though single micro-steps are late.
"""

import time
from collections.abc import Callable, Iterable

import torch

from labkit.cluster.cost import FORWARD_SHARE
from labkit.config import ExperimentConfig

MAX_OVERRUN_SHARE = 0.05
_ROUNDING = 1e-9


class Pace:
    """The clock of one emulated device."""

    def __init__(
        self,
        seconds_per_sample: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        stalled_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Make the device.

        Args:
            seconds_per_sample: Forward and backward pass of one sample; 0: no emulation, nothing ever waits.
            clock: Seconds from some point on.
            sleep: Waits so many seconds, or somewhat longer.
            stalled_s: Seconds so far that computing has waited for something else, which the emulated device
                would have done as well: they are no part of its compute.
        """
        self._seconds_per_sample = seconds_per_sample
        self._clock = clock
        self._sleep = sleep
        self.stalled_s = stalled_s
        self._stalled_before_s = 0.0
        self.factor = 1.0  # how many times as long everything takes now
        self._began_at = self._duration_s = self._slept_s = self._share = self._debt_s = 0.0
        self._is_forward_done = False
        self.num_micro_steps = 0
        self.num_overruns = 0

    @property
    def is_on(self) -> bool:
        """It emulates something."""
        return self._seconds_per_sample > 0

    @property
    def overrun_share(self) -> float:
        """Micro-steps whose real compute took longer than the emulated one, over all."""
        return self.num_overruns / max(1, self.num_micro_steps)

    def begin(self, num_samples: int) -> None:
        """A micro-step of so many samples begins; one without samples takes no time."""
        self._duration_s = self._seconds_per_sample * num_samples * self.factor
        self._share = self._slept_s = 0.0
        self._is_forward_done = False
        if self._duration_s:
            self._stalled_before_s = self.stalled_s()
            self._began_at = self._clock()

    def advance(self, share: float) -> None:
        """Some more of the micro-step's work is done: wait until it would be on the emulated device.

        Args:
            share: Part of the whole, 0 to 1.
        """
        if not self._duration_s or self._share == 1.0:
            return
        self._share += share
        if self._share > 1.0 - _ROUNDING:
            self._share = 1.0
        stalled_s = self.stalled_s()
        self._began_at += stalled_s - self._stalled_before_s
        self._stalled_before_s = stalled_s
        now = self._clock()
        busy_s = now - self._began_at - self._slept_s
        missing_s = self._share * max(0.0, self._duration_s - self._debt_s) - (now - self._began_at)
        if missing_s > 0:
            self._sleep(missing_s)
            self._slept_s += self._clock() - now
        if self._share == 1.0:
            self._book(busy_s)

    def forward(self, share: float) -> None:
        """A part of the forward pass is done; once more, if all of it was done before.

        Args:
            share: Part of the micro-step.
        """
        if not self._duration_s:
            return
        if not self._is_forward_done:
            self.advance(share)
            return
        again_s = share * self._duration_s
        self._sleep(again_s)
        self._began_at += again_s  # the rest of the micro-step is that much later

    def end_forward(self) -> None:
        """All of the forward pass is done."""
        self.advance(max(0.0, FORWARD_SHARE - self._share))
        self._is_forward_done = True

    def end(self) -> None:
        """All of the micro-step's work is done. What a strategy did after the last of it is no compute."""
        self.advance(1.0)

    def _book(self, busy_s: float) -> None:
        self.num_micro_steps += 1
        self.num_overruns += busy_s > self._duration_s
        late_s = self._debt_s + self._clock() - self._began_at - self._duration_s
        # More than a whole micro-step is a hiccup (the first step, a stopped process): it is counted and
        # forgiven, or the steps after it would not be paced at all.
        self._debt_s = min(max(0.0, late_s), self._duration_s)

    def remark(self) -> str:
        """What whoever reads the figures must know of the emulation; "" when it was true to its word."""
        if self.overrun_share <= MAX_OVERRUN_SHARE:
            return ""
        return (
            f"emulated compute was too short: {self.num_overruns} of {self.num_micro_steps} micro-steps "
            "really took longer. Raise engine.step_padding_s, or use fewer workers on this machine."
        )


def pace_of(config: ExperimentConfig, rank: int, clock: Callable[[], float]) -> Pace:
    """The pace of a worker: `engine.step_padding_s` is for an even share of the batch at speed 1.

    Args:
        config: The experiment.
        rank: The worker.
        clock: Seconds, after all work given to the device is done.
    """
    speeds = config.cluster.speeds
    even_share = config.engine.global_batch_size / len(speeds)
    return Pace(config.engine.step_padding_s / even_share / speeds[rank], clock=clock)


def spread_over_forward(model: torch.nn.Module, pace: Pace) -> None:
    """Let the emulated forward pass go on layer by layer instead of waiting at its end.

    Each layer takes the part that its parameters make up, and takes it again when it is computed again: what
    moves activations beside the computing sees a device that computes.
    """
    if not pace.is_on:
        return
    layers = [
        (module, sum(p.numel() for p in module.parameters(recurse=False))) for module in model.modules()
    ]
    total = max(1, sum(numel for _, numel in layers))
    for module, numel in layers:
        if numel:
            share = FORWARD_SHARE * numel / total
            module.register_forward_hook(lambda *_, share=share: pace.forward(share))


def spread_over_backward(parameters: Iterable[torch.nn.Parameter], pace: Pace) -> None:
    """Let gradients appear over the emulated backward pass instead of all at its end.

    Each waits until the part of the pass is over that its size makes up. Call this before a strategy
    puts hooks of its own on the parameters: hooks run in the order in which they were put there.
    """
    if not pace.is_on:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    per_element = (1 - FORWARD_SHARE) / max(1, sum(parameter.numel() for parameter in trained))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda p: pace.advance(per_element * p.numel()))
