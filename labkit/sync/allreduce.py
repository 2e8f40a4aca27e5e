"""Flat synchronous all-reduce: the baseline of all that follows.

Every worker back-propagates the *sum* of its samples' losses. Gradient sums, the number of samples, the
sums of loss and accuracy and each worker's busy time are reduced together, and the gradient is divided
by the reduced number: exact for unequal, partial and empty local batches (Hivemind and torchtune weight
in this way; DistributedDataParallel divides by the number of workers and is wrong for them).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Communicator
from labkit.config import AllReduceConfig
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.buckets import GradientBuckets
from labkit.sync.record import StepRecord
from labkit.sync.strategy import StepTotals


class AllReduce:
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
        self._model = model
        self._optimizer = optimizer
        self._comm = comm
        self._clip_norm = clip_norm
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        self._record = StepRecord(comm.rank, comm.world_size, clock)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = GradientBuckets(
            self._parameters,
            comm,
            bucket_bytes=config.bucket_bytes,
            num_extra=self._record.size,
            before_last=self._record.fill,
        )
        self._running = RunningStatistics(model, comm)

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
        self._buckets.begin()

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        if self._record.add(losses, accuracies):
            self._buckets.expect_last_micro_step()
        self._record.loss(losses).backward()

    def end_step(self, learning_rate: float) -> StepTotals:
        # Without samples nothing has been sent yet; with them the last bucket may be on its way.
        extra = self._buckets.finish()
        self._buckets.divide_(self._record.correction(extra))
        totals = self._record.totals(extra)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._running.count(self._record.num_samples)
        return totals

    def merged_buffers(self) -> AbstractContextManager[None]:
        return self._running.merged()

    def local_state(self) -> Tensor:
        return self._running.local_state()

    def load_local_state(self, state: Tensor) -> None:
        self._running.load_local_state(state)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def close(self) -> None:
        self._buckets.close()
