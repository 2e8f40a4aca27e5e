"""What the synchronous strategies share: everything of a step but how gradients meet and weights move."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.record import StepRecord


class Gradients(Protocol):
    """Collects gradients as they appear."""

    def begin(self) -> None:
        """Forget the step before."""
        ...

    def expect_last_micro_step(self) -> None:
        """From now on a gradient that appears is complete."""
        ...

    def close(self) -> None:
        """Remove the hooks."""
        ...


class Synchronous:
    """The first half of a step, and the batch statistics. A strategy adds `end_step` and its state."""

    def __init__(self, record: StepRecord, gradients: Gradients, running: RunningStatistics) -> None:
        """Take the parts that a strategy has built.

        Args:
            record: Counts the step.
            gradients: Where they are collected.
            running: Batch statistics.
        """
        self._record = record
        self._gradients = gradients
        self._running = running

    def begin_step(
        self,
        num_samples: int,
        num_micro_steps: int,
        *,
        expected_samples: int = 1,
        is_stop_wanted: bool = False,
    ) -> None:
        self._record.begin(
            num_samples,
            num_micro_steps,
            expected_samples=expected_samples,
            is_stop_wanted=is_stop_wanted,
        )
        self._gradients.begin()

    def count_data(self, waited_s: float, num_missing: int = 0) -> None:
        self._record.count_data(waited_s, num_missing)

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        if self._record.add(losses, accuracies):
            self._gradients.expect_last_micro_step()
        self._record.loss(losses).backward()

    def merged_buffers(self) -> AbstractContextManager[None]:
        return self._running.merged()

    def local_state(self) -> Tensor:
        return self._running.local_state()

    def load_local_state(self, state: Tensor) -> None:
        self._running.load_local_state(state)

    def close(self) -> None:
        self._gradients.close()
