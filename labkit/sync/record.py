"""What a worker counts during a step, and how it travels with the gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.sync.strategy import StepTotals

_NUM_FIXED = 4  # samples, loss, accuracy, stop; then one busy time per worker


class StepRecord:
    """Counts of one step, as numbers that are summed over the workers beside the gradient."""

    def __init__(self, rank: int, world_size: int, clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            rank: This worker.
            world_size: All workers.
            clock: Seconds at which the device's work so far is done.
        """
        self.size = _NUM_FIXED + world_size
        self._rank = rank
        self._clock = clock
        self.num_samples = 0
        self.expected_samples = 1
        self.num_micro_steps_left = 0
        self._is_stop_wanted = False
        self._sums: list[Tensor] = []
        self._started_at = self._ready_at = 0.0

    def begin(
        self, num_samples: int, num_micro_steps: int, *, expected_samples: int, is_stop_wanted: bool
    ) -> None:
        """A step begins."""
        self.expected_samples = expected_samples
        self.num_samples, self.num_micro_steps_left = num_samples, num_micro_steps
        self._is_stop_wanted = is_stop_wanted
        self._sums = []
        self._started_at = self._ready_at = self._clock()

    def count_data(self, waited_s: float, num_missing: int) -> None:
        """Waiting for data is no work of this device; samples that did not come are not counted."""
        self._started_at += waited_s
        self.num_samples -= num_missing

    def add(self, losses: Tensor, accuracies: Tensor) -> bool:
        """Count one micro-step; shapes (b,), (b,).

        Returns:
            Whether it is the last one.
        """
        self._sums.append(torch.stack([losses.detach().sum().double(), accuracies.detach().sum().double()]))
        self.num_micro_steps_left -= 1
        return self.num_micro_steps_left == 0

    def loss(self, losses: Tensor) -> Tensor:
        """What to back-propagate: the sum over the expected samples, so that gradients come out as means.

        Dividing the loss costs nothing; dividing the gradient costs a pass over memory.
        """
        return losses.sum() / self.expected_samples

    def correction(self, extra: Tensor) -> float:
        """What the summed gradient is still to be divided by: 1 when all expected samples were there."""
        count = float(extra[0])
        return count / self.expected_samples if count else 1.0  # none could be read: nothing to divide

    def fill(self, extra: Tensor) -> None:
        """This worker's own work is done: write its numbers; shape (size,), zeros where others write."""
        self._ready_at = self._clock()
        extra.zero_()
        extra[0] = self.num_samples
        if self._sums:
            extra[1:3] = torch.stack(self._sums).sum(0)
        extra[3] = float(self._is_stop_wanted)
        extra[_NUM_FIXED + self._rank] = self._ready_at - self._started_at

    def totals(self, extra: Tensor) -> StepTotals:
        """Read the summed numbers when synchronising is done."""
        exposed_s = self._clock() - self._ready_at
        values = extra.tolist()
        busy = tuple(values[_NUM_FIXED:])
        return StepTotals(round(values[0]), values[1], values[2], busy, exposed_s, values[3] > 0)
