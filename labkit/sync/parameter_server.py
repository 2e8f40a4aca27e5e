"""Flat synchronous parameter server: the native distributed strategy of 2016-2020, kept as a baseline.

Worker 0 is the server too. Every other worker sends it the whole gradient and gets back all parameters,
one worker after the other and after back-propagation: all traffic goes over one node's link, W - R
gradients in and as many models out for W workers of which R sit beside the server.
"""

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


class ParameterServer:
    """Synchronous data parallelism through one server. Batch statistics aside, it equals one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        *,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start from worker 0's parameters and buffers on every worker.

        Args:
            model: Same structure on all workers.
            optimizer: Over the model's parameters; only the server's is used.
            comm: The workers.
            clip_norm: Largest norm of the globally averaged gradient.
            clock: Seconds at which the device's work so far is done.
        """
        self._optimizer, self._comm, self._clip_norm = optimizer, comm, clip_norm
        self._record = StepRecord(comm.rank, comm.world_size, clock)
        self._spans = flat.spans(model)
        first = self._spans[0].parameter
        num = self._spans[-1].end
        self._parameters = torch.empty(num, dtype=first.dtype, device=first.device)
        flat.move_into(self._parameters, self._spans, is_first=True)
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        self._row = torch.zeros(num + self._record.size, dtype=first.dtype, device=first.device)
        self._extra = self._row[num:]
        self._inbox = torch.empty_like(self._row) if comm.rank == 0 else self._row
        self._gradients = flat.GradientRow(self._spans, self._row)
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
        self._gradients.begin()

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        if self._record.add(losses, accuracies):
            self._gradients.expect_last_micro_step()
        self._record.loss(losses).backward()

    def end_step(self, learning_rate: float) -> StepTotals:
        self._gradients.finish()
        self._record.fill(self._extra)
        if self._comm.rank == 0:
            self._serve(learning_rate)
        else:
            self._comm.send(self._row, 0)
            self._comm.receive_(self._parameters, 0)
            self._comm.receive_(self._extra, 0)
        self._running.count(self._record.num_samples)
        return self._record.totals(self._extra)

    def _serve(self, learning_rate: float) -> None:
        workers = range(1, self._comm.world_size)
        for worker in workers:
            self._comm.receive_(self._inbox, worker)
            self._row.add_(self._inbox)
        correction = self._record.correction(self._extra)
        if correction != 1.0:
            self._row[: len(self._parameters)].div_(correction)
        for span in self._spans:
            span.parameter.grad = self._row[span.start : span.end].view_as(span.parameter)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_([span.parameter for span in self._spans], self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for worker in workers:
            self._comm.send(self._parameters, worker)
            self._comm.send(self._extra, worker)

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
        self._gradients.close()
