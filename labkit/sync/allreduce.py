"""Flat synchronous all-reduce: the baseline of all that follows.

Every worker back-propagates the sum of its samples' losses over the samples of the global batch. These
gradients, the number of samples, the sums of loss and accuracy and each worker's busy time are reduced
together, and the gradient is corrected where another number came: exact for unequal, partial and empty
local batches (Hivemind and torchtune weight in this way; DistributedDataParallel divides by the number of
workers and is wrong for them).
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.comm import Communicator
from labkit.config import AllReduceConfig
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.buckets import GradientBuckets
from labkit.sync.record import StepRecord
from labkit.sync.strategy import StepTotals
from labkit.sync.synchronous import Synchronous
from labkit.sync.whole_optimizer import update


class AllReduce(Synchronous):
    """Synchronous data parallelism over all workers. Batch statistics aside, it equals one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        config: AllReduceConfig,
        *,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start from worker 0's parameters and buffers on every worker.

        Args:
            model: Same structure on all workers.
            optimizer: Over the model's parameters.
            comm: The workers.
            config: Bucket size.
            clip_norm: Largest norm of the globally averaged gradient.
            clock: Seconds at which the device's work so far is done.
        """
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        record = StepRecord(comm.rank, comm.world_size, clock)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = GradientBuckets(
            self._parameters,
            comm,
            bucket_bytes=config.bucket_bytes,
            num_extra=record.size,
            before_last=record.fill,
        )
        super().__init__(record, self._buckets, RunningStatistics(model, comm))

    def end_step(self, learning_rate: float) -> StepTotals:
        # Without samples nothing has been sent yet; with them the last bucket may be on its way.
        extra = self._buckets.finish()
        self._buckets.divide_(self._record.correction(extra))
        totals = self._record.totals(extra)
        update(self._optimizer, self._parameters, learning_rate, self._clip_norm)
        self._running.count(self._record.num_samples)
        return totals

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
