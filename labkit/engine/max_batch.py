"""Find the largest global batch that every worker has room for, with and without hybrid memory.

Each worker tries its own part of a batch alone: forward, backward and update, outside any collective, so none
waits inside one for another that ran out. Then all vote. Event of every worker, beside `start` and `end`:

    max_batch  is_hybrid, global_batch_size (for all workers), local_batch_size (its own part)
"""

import contextlib
from fractions import Fraction

import torch
from torch import nn

from labkit.cluster.partition import largest_remainder
from labkit.cluster.placement import Placement
from labkit.cluster.plan import make_plan
from labkit.comm import Communicator
from labkit.config import ExperimentConfig
from labkit.engine.device import to_device
from labkit.engine.events import EventLog
from labkit.engine.memory import build_memory, reserved_bytes
from labkit.engine.random_state import seed_everything
from labkit.errors import ConfigError
from labkit.memory import HybridMemory, find_max_batch, fits_in_memory
from labkit.optim.build import build_optimizer
from labkit.runfolder import RunFolder
from labkit.tasks import build_model, load_data

_TRIES = 3  # steps: recorded, planned, moved
_RESOLUTION = 0.02
_MOST = 2**24


class BatchSearch:
    """One worker's part of the search."""

    def __init__(
        self,
        config: ExperimentConfig,
        placement: Placement,
        comm: Communicator,
        log: EventLog,
        folder: RunFolder,
        device: torch.device,
    ) -> None:
        """Load the data and build model and optimizer, as a run of this experiment would.

        Raises:
            ConfigError: nothing bounds the memory of the device.
        """
        if config.memory.device_budget is None and device.type != "cuda":
            raise ConfigError(
                "memory.device_budget must be given to search for the largest batch on a CPU, whose memory "
                "is the whole machine's, got nothing. For example memory.device_budget=2GiB."
            )
        self._config, self._placement, self._comm, self._log = config, placement, comm, log
        self._folder, self._device = folder, device
        self._dtype: torch.dtype = getattr(torch, config.engine.dtype)
        self._data = load_data(config.data)
        self._parts = make_plan(config).local_batch_sizes

    def run(self) -> None:
        """Search without and with.

        Raises:
            PeerError: another worker is gone.
        """
        self._log.start(
            self._placement, str(self._device), num_params=0, gradient_bytes=0, total_steps=2, start_step=0
        )
        for step, is_hybrid in enumerate((False, True), start=1):
            found = self._search(is_hybrid)
            self._log.write(
                "max_batch",
                is_hybrid=is_hybrid,
                global_batch_size=found,
                local_batch_size=self._own_part(found),
            )
            if self._placement.rank == 0:
                self._log.write("metrics", step=step, epoch=0.0, samples=found, values={})
        self._data.close()
        self._log.write("end", step=2)

    def _own_part(self, global_batch_size: int) -> int:
        """Of a batch that is split as the experiment's own."""
        total = sum(self._parts)
        shares = [Fraction(global_batch_size * part, total) for part in self._parts]
        return largest_remainder(shares, global_batch_size)[self._placement.rank]

    def _search(self, is_hybrid: bool) -> int:
        seed_everything(self._config.seed, "model")
        model = build_model(self._config.model, self._data.info).to(self._device, self._dtype)
        model.train()
        optimizer = build_optimizer(self._config.optimizer, model.parameters())
        memory = self._memory(model, is_hybrid)

        def clear() -> None:
            optimizer.zero_grad(set_to_none=True)
            if memory is not None:
                memory.settle()

        def fits(size: int) -> bool:
            return fits_in_memory(lambda: self._try(size, model, optimizer, memory), clear)

        try:
            return find_max_batch(
                lambda size: fits(self._own_part(size)), most=_MOST, vote=self._vote, resolution=_RESOLUTION
            )
        finally:
            if memory is not None:
                memory.close()

    def _memory(self, model: nn.Module, is_hybrid: bool) -> HybridMemory | None:
        if is_hybrid:
            found = build_memory(self._config, model, self._placement, self._device, self._folder)
            if found is not None:
                return found
        if self._config.memory.device_budget is None:
            return None  # a CUDA device says itself when it is full
        # Everything stays: the plan is there to be refused by the budget.
        return HybridMemory(
            model,
            device_budget=self._config.memory.device_budget,
            reserved_bytes=reserved_bytes(self._config, model),
            segments=(),
        )

    def _try(
        self,
        size: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        memory: HybridMemory | None,
    ) -> None:
        """A few whole steps, the last ones as they will be planned."""
        if size == 0:
            return
        indices = [index % len(self._data.train) for index in range(size)]
        for _ in range(_TRIES):
            inputs, targets = to_device(self._data.train.batch(indices), self._device, self._dtype)
            with memory.step() if memory is not None else contextlib.nullcontext():
                losses, _ = self._data.losses(model(inputs), targets)
            losses.mean().backward()
            del losses
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _vote(self, is_good: bool) -> bool:
        flag = torch.tensor([float(is_good)], device=self._device)
        self._comm.all_reduce_(flag).wait()
        return int(flag) == self._comm.world_size
