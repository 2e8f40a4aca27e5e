"""Hierarchical synchronous SGD on accelerators, each with a model of its own.

Inside a node the gradient is reduce-scattered (NCCL over NVLink or PCIe), so that every worker holds the
node's sum of one slice; slices are all-reduced between nodes, every worker its own, in parallel (Horovod
PR 411); each worker updates its slice; the parameters are all-gathered inside the node. Between nodes
2(N-1)/N of the gradient travels per node, and the optimizer's state lies in the node once. The gradient is
cut into buckets that go out while back-propagation still runs; a slice is one part of every bucket.
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
from labkit.sync.device_reduce import DeviceReducer
from labkit.sync.record import StepRecord
from labkit.sync.slice_optimizer import Part, SliceOptimizer, agreed_names
from labkit.sync.strategy import StepTotals
from labkit.sync.synchronous import Synchronous

DEFAULT_BUCKET_BYTES = 8 * 2**20


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
            config: Wire format between nodes, bytes of a bucket, whether buckets go out early.
            places: Where every worker runs; all nodes have equally many workers.
            clip_norm: Largest norm of the globally averaged gradient.
            clock: Seconds at which the device's work so far is done.

        Raises:
            ConfigError: nodes have different numbers of workers.
        """
        self._comm, self._clip_norm = comm, clip_norm
        self._node, between = _levels(comm, places)
        self._spans = flat.spans(model)
        self._num = self._spans[-1].end
        record = StepRecord(comm.rank, comm.world_size, clock)
        first = self._spans[0].parameter
        bucket_elements = (config.chunk_bytes or DEFAULT_BUCKET_BYTES) // first.element_size()
        self._buckets = flat.buckets(self._num, self._node.world_size, bucket_elements)
        self._parameters = torch.zeros(self._buckets[-1][1], dtype=first.dtype, device=first.device)
        self._row = torch.zeros_like(self._parameters)
        self._extra = torch.zeros(record.size, dtype=torch.float64, device=first.device)
        flat.move_into(self._parameters, self._spans, is_first=True)
        for tensor in [self._parameters, *model.parameters(), *model.buffers()]:
            comm.broadcast_(tensor.data)
        wire = torch.bfloat16 if config.wire == "bfloat16" else first.dtype
        self._reducer = DeviceReducer(self._row, self._buckets, self._node, between, wire=wire)
        self._num_pieces = len(flat.pieces(self._spans))
        self._whole = build_optimizer(optimizer_config, model.parameters())  # for its groups' settings only
        self._slice = SliceOptimizer(optimizer_config, self._whole, self._spans, self._parts(), self._share)
        if config.is_overlapped:
            self._collected = flat.GradientRow(self._spans, self._row, self._fill)
        else:
            self._collected = flat.GradientRow(self._spans, self._row)
        super().__init__(record, self._collected, RunningStatistics(model, comm))

    def close(self) -> None:
        super().close()
        self._reducer.close()

    def _own(self, bucket: tuple[int, int]) -> tuple[int, int]:
        """Which part of a bucket is this worker's."""
        start, end = bucket
        size = (end - start) // self._node.world_size
        return start + self._node.rank * size, start + (self._node.rank + 1) * size

    def _parts(self) -> list[Part]:
        """What this worker updates: its part of every bucket, up to the model's end."""
        found = []
        for bucket, gradient in zip(self._buckets, self._reducer.parts, strict=True):
            start, end = (min(border, self._num) for border in self._own(bucket))
            found.append(Part(start, self._parameters[start:end], gradient[: end - start]))
        return found

    def _share(self, row: int, own: Tensor, sums: Tensor) -> Tensor:
        """Sums of squares of all pieces, from each worker's own."""
        total = torch.zeros(self._num_pieces, dtype=torch.float64, device=sums.device)
        total[own] = sums
        self._node.all_reduce_(total).wait()
        return total

    def _fill(self, num_elements: int) -> None:
        """Gradients are complete up to here; behind the last one lies only what fills up its bucket."""
        self._reducer.fill(len(self._row) if num_elements == self._num else num_elements)

    def end_step(self, learning_rate: float) -> StepTotals:
        self._collected.finish()
        self._record.fill(self._extra)
        self._fill(self._num)
        # Behind the buckets, also on a worker without samples: NCCL wants one order on all workers.
        counts = self._comm.all_reduce_(self._extra)
        self._reducer.finish()
        counts.wait()
        totals = self._record.totals(self._extra)
        self._slice.divide_(self._record.correction(self._extra))
        self._slice.step(learning_rate, self._clip_norm)
        self._gather_(self._parameters)
        self._running.count(self._record.num_samples)
        return totals

    def _gather_(self, whole: Tensor) -> None:
        """Fill in the parts of the node's other workers, in a tensor cut as the parameters are."""
        own = [slice(*self._own(bucket)) for bucket in self._buckets]
        work = [
            self._node.all_gather_(whole[start:end], whole[part])
            for (start, end), part in zip(self._buckets, own, strict=True)
        ]
        for each in work:
            each.wait()

    def state_dict(self) -> dict[str, Any]:
        names, scalars = self._slice.state()
        found: dict[str, Tensor] = {}
        for name in agreed_names(names, self._node, self._row.device):
            whole = torch.zeros_like(self._parameters)
            self._slice.write_state(name, whole)
            self._gather_(whole)
            found[name] = whole
        return flat.full_state(self._whole, self._spans, found, scalars) if self._comm.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._slice.load(state)


def _levels(comm: Communicator, places: Sequence[Placement]) -> tuple[Communicator, Communicator]:
    """The workers of this worker's node, and those that have its parts on other nodes."""
    names = list(dict.fromkeys(place.node for place in places))
    nodes = [[place.rank for place in places if place.node == name] for name in names]
    if len({len(node) for node in nodes}) != 1:
        sizes = ", ".join(str(len(node)) for node in nodes)
        raise ConfigError(
            f"cluster must have equally many GPUs on every node under hierarchical, got {sizes}. "
            "Use sync.name=allreduce."
        )
    (node,) = (group for group in comm.groups(nodes) if group is not None)
    (between,) = (group for group in comm.groups(list(zip(*nodes, strict=True))) if group is not None)
    return node, between
