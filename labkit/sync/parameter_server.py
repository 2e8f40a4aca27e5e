"""Flat synchronous parameter server: the native distributed strategy of 2016-2020, kept as a baseline.

Worker 0 is the server too. Every other worker sends it the whole gradient and gets back all parameters,
one worker after the other and after back-propagation: all traffic goes over one node's link, W - R
gradients in and as many models out for W workers of which R sit beside the server.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.comm import Communicator
from labkit.sync import flat
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.record import StepRecord
from labkit.sync.strategy import StepTotals
from labkit.sync.synchronous import Synchronous
from labkit.sync.whole_optimizer import update


class ParameterServer(Synchronous):
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
        record = StepRecord(comm.rank, comm.world_size, clock)
        self._spans = flat.spans(model)
        first = self._spans[0].parameter
        num = self._spans[-1].end
        self._parameters = torch.empty(num, dtype=first.dtype, device=first.device)
        flat.move_into(self._parameters, self._spans, is_first=True)
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        self._row = torch.zeros(num + record.size, dtype=first.dtype, device=first.device)
        self._extra = self._row[num:]
        self._inbox = torch.empty_like(self._row) if comm.rank == 0 else self._row
        self._collected = flat.GradientRow(self._spans, self._row)
        super().__init__(record, self._collected, RunningStatistics(model, comm))

    def end_step(self, learning_rate: float) -> StepTotals:
        self._collected.finish()
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
        parameters = [span.parameter for span in self._spans]
        update(self._optimizer, parameters, learning_rate, self._clip_norm)
        for worker in workers:
            self._comm.send(self._parameters, worker)
            self._comm.send(self._extra, worker)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
