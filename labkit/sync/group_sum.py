"""The synchronous half of the hybrid: workers of a group add up their gradients; the update is a server's."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Communicator
from labkit.sync import flat
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.buckets import GradientBuckets
from labkit.sync.record import StepRecord
from labkit.sync.strategy import StepTotals
from labkit.sync.synchronous import Synchronous

_BUCKET_BYTES = 2**20  # small: the group's sum shares the links with pushes and pulls


class GroupSum(Synchronous):
    """Gives every worker of a group the mean gradient of the group's samples, and updates nothing.

    Buckets go out while back-propagation still runs.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Move the model's trained parameters into one flat tensor, in the order of `flat.spans`.

        Args:
            model: Same structure on all workers of the group.
            comm: The group.
            clip_norm: Largest norm of the group's mean gradient.
            clock: Seconds at which the device's work so far is done.
        """
        self._clip_norm = clip_norm
        record = StepRecord(comm.rank, comm.world_size, clock)
        spans = flat.spans(model)
        first = spans[0].parameter
        self.parameters = torch.zeros(spans[-1].end, dtype=first.dtype, device=first.device)
        flat.move_into(self.parameters, spans, is_first=True)
        self._spans = spans
        self._buckets = GradientBuckets(
            [span.parameter for span in reversed(spans)],
            comm,
            bucket_bytes=_BUCKET_BYTES,
            num_extra=record.size,
            before_last=record.fill,
        )
        super().__init__(record, self._buckets, RunningStatistics(model, comm))

    def end_step(self, learning_rate: float) -> StepTotals:
        """Finish the sums; the learning rate is the server's business."""
        extra = self._buckets.finish()
        self._buckets.divide_(self._record.correction(extra))
        totals = self._record.totals(extra)
        self._running.count(self._record.num_samples)
        return totals

    def gradient(self) -> Tensor:
        """A copy of the group's mean gradient, clipped; shape (n,)."""
        gradients = [span.parameter.grad for span in self._spans]
        whole = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        if self._clip_norm is not None:
            whole.mul_(min(1.0, self._clip_norm / (float(whole.norm()) + 1e-6)))
        return whole

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None
