"""The synchronous half of the hybrid: workers of a group add up their gradients; the update is a server's."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Communicator
from labkit.sync import flat
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.record import StepRecord
from labkit.sync.strategy import StepTotals


class GroupSum:
    """Gives every worker of a group the mean gradient of the group's samples, and updates nothing."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Move the model's trained parameters into one flat tensor.

        Args:
            model: Same structure on all workers of the group.
            comm: The group.
            clip_norm: Largest norm of the group's mean gradient.
            clock: Seconds at which the device's work so far is done.
        """
        self._comm, self._clip_norm = comm, clip_norm
        self._record = StepRecord(comm.rank, comm.world_size, clock)
        self._running = RunningStatistics(model, comm)
        spans = flat.spans(model)
        first = spans[0].parameter
        num = spans[-1].end
        self.parameters = torch.zeros(num, dtype=first.dtype, device=first.device)
        flat.move_into(self.parameters, spans, is_first=True)
        row = torch.zeros(num + self._record.size, dtype=first.dtype, device=first.device)
        self._row, self.gradient = row, row[:num]
        self._collected = flat.GradientRow(spans, row)

    def begin_step(
        self,
        num_samples: int,
        num_micro_steps: int,
        *,
        expected_samples: int = 1,
        is_stop_wanted: bool = False,
    ) -> None:
        self._record.begin(
            num_samples, num_micro_steps, expected_samples=expected_samples, is_stop_wanted=is_stop_wanted
        )
        self._collected.begin()

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        if self._record.add(losses, accuracies):
            self._collected.expect_last_micro_step()
        self._record.loss(losses).backward()

    def end_step(self, learning_rate: float) -> StepTotals:
        """Leave the mean gradient in `gradient`; the learning rate is the server's business."""
        self._collected.finish()
        extra = self._row[len(self.gradient) :]
        self._record.fill(extra)
        self._comm.all_reduce_(self._row).wait()
        totals = self._record.totals(extra)
        self._running.count(self._record.num_samples)
        correction = self._record.correction(extra)
        if correction not in (0.0, 1.0):
            self.gradient.div_(correction)
        if self._clip_norm is not None:
            norm = float(self.gradient.norm())
            self.gradient.mul_(min(1.0, self._clip_norm / (norm + 1e-6)))
        return totals

    def merged_buffers(self) -> AbstractContextManager[None]:
        return self._running.merged()

    def local_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    def load_local_state(self, state: Tensor) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        self._collected.close()
