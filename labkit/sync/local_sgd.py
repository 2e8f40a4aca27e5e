"""Local SGD: every worker steps alone, and parameters are averaged now and then, at each level.

Averages are weighted by the samples that each worker has seen since the last one, so unequal batches and
groups of unequal size count right. With period 1 and averaged momentum it is synchronous SGD (Stich,
2019); synchronous at first and local later is post-local SGD (Lin et al., 2020).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.cluster.placement import Placement
from labkit.comm import Communicator
from labkit.config import LocalSgdConfig
from labkit.sync import flat
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.record import StepRecord
from labkit.sync.strategy import StepTotals
from labkit.sync.whole_optimizer import update


def is_due(step: int, period_steps: int, switch_step: int) -> bool:
    """Whether parameters are averaged after a step: always up to the switch, then every so many steps."""
    return step <= switch_step or (step - switch_step) % period_steps == 0


class LocalSgd:
    """Local steps with periodic averages inside the node and over all workers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        config: LocalSgdConfig,
        places: Sequence[Placement],
        *,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start from worker 0's parameters and buffers on every worker.

        Args:
            model: Same structure on all workers.
            optimizer: Over the model's parameters.
            comm: The workers.
            config: Periods and what happens to the momentum.
            places: Where every worker runs.
            clip_norm: Largest norm of a worker's own averaged gradient.
            clock: Seconds at which the device's work so far is done.
        """
        self._optimizer, self._comm, self._config, self._clip_norm = optimizer, comm, config, clip_norm
        names = list(dict.fromkeys(place.node for place in places))
        nodes = [[place.rank for place in places if place.node == name] for name in names]
        (self._node,) = (group for group in comm.groups(nodes) if group is not None)
        self._record = StepRecord(comm.rank, comm.world_size, clock)
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        self._spans = flat.spans(model)
        self._running = RunningStatistics(model, comm)
        self._step = 0
        self._samples_here = self._samples_since = 0
        first = self._spans[0].parameter
        self._unsaid = torch.zeros(self._record.size, dtype=torch.float64, device=first.device)

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
        self._optimizer.zero_grad(set_to_none=True)

    def count_data(self, waited_s: float, num_missing: int = 0) -> None:
        self._record.count_data(waited_s, num_missing)

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        self._record.add(losses, accuracies)
        losses.sum().backward()

    def end_step(self, learning_rate: float) -> StepTotals:
        extra = torch.zeros_like(self._unsaid)
        self._record.fill(extra)
        self._unsaid += extra
        self._update(learning_rate)
        self._step += 1
        self._running.count(self._record.num_samples)
        config = self._config
        is_global = is_due(self._step, config.period_steps, config.switch_step)
        if is_global:
            self._average(self._comm, self._samples_since)
            self._comm.all_reduce_(self._unsaid).wait()
            self._samples_since = self._samples_here = 0
        elif is_due(self._step, config.node_period_steps, config.switch_step):
            self._average(self._node, self._samples_here)
            self._samples_here = 0
        return self._totals(extra, is_global=is_global)

    def _totals(self, own: Tensor, *, is_global: bool) -> StepTotals:
        """Sums over all workers since the last average when there is one now, else this worker's own."""
        if is_global:
            totals = self._record.totals(self._unsaid)
            self._unsaid.zero_()
            return totals
        totals = self._record.totals(own)
        busy = (max(totals.busy_s),) * self._comm.world_size  # of the others nothing is known
        return replace(totals, busy_s=busy, exposed_s=0.0, is_stop_wanted=False)

    def _update(self, learning_rate: float) -> None:
        count = self._record.num_samples
        if count == 0:
            return
        self._samples_since += count
        self._samples_here += count
        parameters = [span.parameter for span in self._spans if span.parameter.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            flat.require_dense(parameter.grad)
            parameter.grad.div_(count)
        update(self._optimizer, parameters, learning_rate, self._clip_norm)

    # --- averages ------------------------------------------------------------------------------------------

    def _tensors(self) -> list[Tensor]:
        """All that is averaged, in one order on all workers."""
        found = [span.parameter.data for span in self._spans]
        if self._config.momentum == "averaged" or self._step <= self._config.switch_step:
            for name in _state_names(self._optimizer):
                found += [self._state(span.parameter, name) for span in self._spans]
        return found

    def _state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """An elementwise state of a parameter; zeros are put where a worker has not begun yet."""
        state = self._optimizer.state[parameter]
        if state.get(name) is None:
            state[name] = torch.zeros_like(parameter)
            if name == "exp_avg":  # torch's Adam asks for its own count beside it
                state["step"] = torch.tensor(float(self._step))
        value: Tensor = state[name]
        return value

    @torch.no_grad()
    def _average(self, comm: Communicator, num_samples: int) -> None:
        """Replace everything by its mean over the workers of a group, weighted by their samples."""
        if comm.world_size == 1:
            return
        tensors = self._tensors()
        packed = torch.cat([tensor.flatten() for tensor in tensors]).mul_(num_samples)
        count = packed.new_full((1,), num_samples)
        packed = torch.cat([packed, count])
        comm.all_reduce_(packed).wait()
        total = float(packed[-1])
        if total == 0:
            return  # nobody has moved since the last average
        packed.div_(total)
        offset = 0
        for tensor in tensors:
            tensor.copy_(packed[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()

    # --- state ---------------------------------------------------------------------------------------------

    @contextmanager
    def _merged(self) -> Iterator[None]:
        """Have the average of all workers in model and optimizer for a while."""
        own = self.local_state()
        with ExitStack() as stack:
            stack.enter_context(self._running.merged())
            self._average(self._comm, self._samples_since)
            try:
                yield
            finally:
                self._load_tensors(own)

    def merged_buffers(self) -> AbstractContextManager[None]:
        return self._merged()

    def local_state(self) -> Tensor:
        numbers = [self._step, self._samples_here, self._samples_since]
        own = [torch.tensor(numbers, dtype=torch.float64), self._unsaid.cpu()]
        own += [tensor.double().cpu().flatten() for tensor in self._all_tensors()]
        return torch.cat([*own, self._running.local_state()])

    def load_local_state(self, state: Tensor) -> None:
        state = state.cpu()
        self._step, self._samples_here, self._samples_since = (int(value) for value in state[:3])
        self._unsaid.copy_(state[3 : 3 + len(self._unsaid)])
        self._running.load_local_state(state[self._load_tensors(state) :])

    def _all_tensors(self) -> list[Tensor]:
        names = _state_names(self._optimizer)
        states = [self._state(span.parameter, name) for name in names for span in self._spans]
        return [*(span.parameter.data for span in self._spans), *states]

    @torch.no_grad()
    def _load_tensors(self, state: Tensor) -> int:
        offset = 3 + len(self._unsaid)
        for tensor in self._all_tensors():
            tensor.copy_(state[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()
        return offset

    def state_dict(self) -> dict[str, Any]:
        with self._merged():
            state = self._optimizer.state_dict()
            # The merged values last only as long as this block.
            for values in state["state"].values():
                values.update({n: v.clone() for n, v in values.items() if isinstance(v, Tensor)})
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def close(self) -> None:
        return None


def _state_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Elementwise states that an optimizer keeps per parameter."""
    if isinstance(optimizer, torch.optim.AdamW):
        return ["exp_avg", "exp_avg_sq"]
    return ["momentum_buffer"] if optimizer.defaults.get("momentum") else []
