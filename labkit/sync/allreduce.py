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
        self._clock = clock
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = GradientBuckets(
            self._parameters,
            comm,
            bucket_bytes=config.bucket_bytes,
            num_extra=4 + comm.world_size,
            before_last=self._fill_extra,
        )
        self._running = RunningStatistics(model, comm)
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._num_samples = 0
        self._micro_steps_left = 0
        self._is_stop_wanted = False
        self._started_at = self._ready_at = 0.0

    def begin_step(self, num_samples: int, num_micro_steps: int, *, is_stop_wanted: bool = False) -> None:
        self._is_stop_wanted = is_stop_wanted
        self._started_at = self._clock()
        self._num_samples = num_samples
        self._micro_steps_left = num_micro_steps
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._parameters[0].device)
        self._buckets.begin()

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        self._micro_steps_left -= 1
        self._sums += torch.stack([losses.detach().sum(), accuracies.detach().sum()])
        if self._micro_steps_left == 0:
            self._buckets.expect_last_micro_step()
        losses.sum().backward()

    def _fill_extra(self, extra: Tensor) -> None:
        self._ready_at = self._clock()
        extra.zero_()
        extra[0] = self._num_samples
        extra[1:3] = self._sums
        extra[3] = float(self._is_stop_wanted)
        extra[4 + self._comm.rank] = self._ready_at - self._started_at

    def end_step(self, learning_rate: float) -> StepTotals:
        # Without samples nothing has been sent yet; with them the last bucket may be on its way.
        extra = self._buckets.finish().tolist()
        self._buckets.divide_(extra[0])
        exposed_s = self._clock() - self._ready_at
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._running.count(self._num_samples)
        return StepTotals(round(extra[0]), extra[1], extra[2], tuple(extra[4:]), exposed_s, extra[3] > 0)

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
