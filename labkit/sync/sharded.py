"""Hierarchical synchronous SGD on accelerators, each with a model of its own.

Inside a node the gradient is reduce-scattered (NCCL over NVLink or PCIe), so that every worker holds the
node's sum of one slice; slices are all-reduced between nodes, every worker its own, in parallel (Horovod
PR 411); each worker updates its slice; the parameters are all-gathered inside the node. Between nodes
2(N-1)/N of the gradient travels per node, and the optimizer's state lies in the node once.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.cluster.placement import Placement
from labkit.comm import Communicator
from labkit.config import HierarchicalConfig, OptimizerConfig
from labkit.errors import ConfigError
from labkit.optim.build import build_optimizer
from labkit.sync import flat
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.record import StepRecord
from labkit.sync.slice_optimizer import SliceOptimizer, agreed_names
from labkit.sync.strategy import StepTotals
from labkit.sync.synchronous import Synchronous


class ShardedHierarchical(Synchronous):
    """Two-level synchronous data parallelism over devices. Batch statistics aside, it equals one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_config: OptimizerConfig,
        comm: Communicator,
        config: HierarchicalConfig,
        places: Sequence[Placement],
        *,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start from worker 0's parameters and buffers on every worker.

        Args:
            model: Same structure on all workers, on this worker's device.
            optimizer_config: The optimizer; each worker updates a slice.
            comm: The workers.
            config: Wire format between nodes.
            places: Where every worker runs; all nodes have equally many workers.
            clip_norm: Largest norm of the globally averaged gradient.
            clock: Seconds at which the device's work so far is done.

        Raises:
            ConfigError: nodes have different numbers of workers.
        """
        self._comm, self._clip_norm = comm, clip_norm
        names = list(dict.fromkeys(place.node for place in places))
        nodes = [[place.rank for place in places if place.node == name] for name in names]
        if len({len(node) for node in nodes}) != 1:
            sizes = ", ".join(str(len(node)) for node in nodes)
            raise ConfigError(
                f"cluster must have equally many GPUs on every node under hierarchical, got {sizes}. "
                "Use sync.name=allreduce."
            )
        (self._node,) = (group for group in comm.groups(nodes) if group is not None)
        (self._between,) = (
            group for group in comm.groups(list(zip(*nodes, strict=True))) if group is not None
        )
        self._wire = torch.bfloat16 if config.wire == "bfloat16" else None
        record = StepRecord(comm.rank, comm.world_size, clock)
        self._spans = flat.spans(model)
        first = self._spans[0].parameter
        count = len(nodes[0])
        self._num = self._spans[-1].end
        # Slices are equal, so the end is padded; they end at grains, so norms add up alike everywhere.
        size = -(-self._num // (count * flat.GRAIN)) * flat.GRAIN
        self._parameters = torch.zeros(count * size, dtype=first.dtype, device=first.device)
        self._row = torch.zeros_like(self._parameters)
        self._extra = torch.zeros(record.size, dtype=torch.float64, device=first.device)
        flat.move_into(self._parameters, self._spans, is_first=True)
        for tensor in [self._parameters, *model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        start = self._node.rank * size
        self._own = self._parameters[start : start + size]
        self._shard = torch.zeros_like(self._own)
        self._error = torch.zeros_like(self._own) if self._wire is not None else None
        self._whole = build_optimizer(optimizer_config, model.parameters())
        bounds = (min(start, self._num), min(start + size, self._num))
        length = bounds[1] - bounds[0]
        self._slice = SliceOptimizer(
            optimizer_config,
            self._whole,
            self._spans,
            self._own[:length],
            self._shard[:length],
            bounds,
            self._share,
        )
        self._collected = flat.GradientRow(self._spans, self._row)
        super().__init__(record, self._collected, RunningStatistics(model, comm))

    def _share(self, row: int, first: int, sums: Tensor) -> Tensor:
        total = torch.zeros(len(flat.pieces(self._spans)), dtype=torch.float64, device=self._row.device)
        total[first : first + len(sums)] = sums
        self._node.all_reduce_(total).wait()
        return total

    def end_step(self, learning_rate: float) -> StepTotals:
        self._collected.finish()
        self._record.fill(self._extra)
        counts = self._comm.all_reduce_(self._extra)
        self._node.reduce_scatter_(self._shard, self._row).wait()
        self._reduce_between()
        counts.wait()
        totals = self._record.totals(self._extra)
        self._slice.divide_(self._record.correction(self._extra))
        self._slice.step(learning_rate, self._clip_norm)
        self._node.all_gather_(self._parameters, self._own.clone()).wait()
        self._running.count(self._record.num_samples)
        return totals

    def _reduce_between(self) -> None:
        if self._error is None or self._wire is None or self._between.world_size == 1:
            self._between.all_reduce_(self._shard).wait()
            return
        self._error.add_(self._shard)  # error feedback (Seide et al., 2014)
        packed = self._error.to(self._wire)
        self._error.sub_(packed)
        self._between.all_reduce_(packed).wait()
        self._shard.copy_(packed)

    def state_dict(self) -> dict[str, Any]:
        parts, scalars = self._slice.state()
        whole = torch.zeros_like(self._parameters)
        found: dict[str, Tensor] = {}
        for name in agreed_names(parts, self._node, self._row.device):
            own = torch.zeros_like(self._own)
            if name in parts:
                own[: len(parts[name])] = parts[name]
            self._node.all_gather_(whole, own).wait()
            found[name] = whole[: self._num].clone()
        return flat.full_state(self._whole, self._spans, found, scalars)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        bounds = (self._slice.start, self._slice.end)
        self._slice.load(*flat.flat_state(self._whole, self._spans, state, *bounds))
