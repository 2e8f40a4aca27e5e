"""Hierarchical synchronous SGD: shared memory inside a node, chunks between nodes.

After Wang et al. 2020 (abstract): several replicas per node whose parameters live in shared memory, and
two-level synchronisation. The details are our own choice: one arena per node holds one block of
parameters that every replica views, one row of gradients per replica, and nothing else; the optimizer's
state is split over the replicas, each of which updates its slice. Between nodes only the node's sum
travels, in chunks, while back-propagation still runs: 2(N-1)/N of the gradient per node and step, the
lower bound for N nodes (Patarasuk and Yuan, 2009).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.cluster.placement import Placement
from labkit.comm import Arena, Communicator, Counters, give_back_memory, padded_bytes
from labkit.config import HierarchicalConfig, OptimizerConfig
from labkit.optim.build import build_optimizer
from labkit.sync import flat
from labkit.sync.batch_norm import RunningStatistics
from labkit.sync.node_reduce import Chunk, NodeReducer, cut
from labkit.sync.record import StepRecord
from labkit.sync.slice_optimizer import Part, SliceOptimizer, agreed_names
from labkit.sync.strategy import StepTotals
from labkit.sync.synchronous import Synchronous
from labkit.sync.tune import Plan, candidates, choose


@dataclass(frozen=True)
class Topology:
    """Who sits where.

    Attributes:
        nodes: Ranks of each node.
        own: This worker's node.
        local_rank: Its rank there.
    """

    nodes: tuple[tuple[int, ...], ...]
    own: int
    local_rank: int

    @classmethod
    def of(cls, places: Sequence[Placement], rank: int) -> "Topology":
        """From the placements of all workers."""
        names = list(dict.fromkeys(place.node for place in places))
        nodes = tuple(tuple(p.rank for p in places if p.node == name) for name in names)
        return cls(nodes, names.index(places[rank].node), places[rank].local_rank)

    @property
    def num_local(self) -> int:
        """Workers of this node."""
        return len(self.nodes[self.own])

    def senders(self, count: int) -> list[list[int]]:
        """For each of `count` senders the rank that plays it on each node."""
        return [[node[index % len(node)] for node in self.nodes] for index in range(count)]


class Hierarchical(Synchronous):
    """Two-level synchronous data parallelism. Batch statistics aside, it equals one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_config: OptimizerConfig,
        comm: Communicator,
        config: HierarchicalConfig,
        places: Sequence[Placement],
        *,
        timeout_s: float,
        clip_norm: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Move the model into the node's arena, starting from worker 0's values on every worker.

        Args:
            model: Same structure on all workers, on the CPU.
            optimizer_config: The optimizer; each worker updates a slice.
            comm: The workers.
            config: Wire format, chunks, senders.
            places: Where every worker runs.
            timeout_s: Longest wait for a worker of the same node.
            clip_norm: Largest norm of the globally averaged gradient.
            clock: Seconds at which the device's work so far is done.
            say: Told what was chosen, and why.

        Raises:
            ConfigError: the node has not enough memory, or the model mixes types.
        """
        self._comm, self._clip_norm = comm, clip_norm
        self._record = StepRecord(comm.rank, comm.world_size, clock)
        self._topology = Topology.of(places, comm.rank)
        nodes = comm.groups(self._topology.nodes)
        node = nodes[self._topology.own]
        assert node is not None
        self._node = node
        self._spans = flat.spans(model)
        num = self._spans[-1].end
        self._num_parameters = num
        dtype = self._spans[0].parameter.dtype
        names = [f"worker {rank} on {places[rank].node}" for rank in self._topology.nodes[self._topology.own]]
        self._build_arena(num, dtype, names, timeout_s)
        self._share_parameters(model)
        self._reducer = self._build_reducer(config, say)
        start, end = flat.slices(num, self._topology.num_local)[self._topology.local_rank]
        self._whole = build_optimizer(optimizer_config, model.parameters())  # for its groups' settings only
        self._slice = SliceOptimizer(
            optimizer_config,
            self._whole,
            self._spans,
            [Part(start, self._parameters[start:end], self._rows[0, start:end])],
            self._share,
        )
        row = self._rows[self._topology.local_rank]
        if config.is_overlapped:
            self._collected = flat.GradientRow(self._spans, row, self._reducer.fill)
        else:
            self._collected = flat.GradientRow(self._spans, row)
        super().__init__(self._record, self._collected, RunningStatistics(model, comm))
        self._node_s = self._reducer.node_s

    # --- set-up ------------------------------------------------------------------------------------------

    def _build_arena(self, num: int, dtype: torch.dtype, names: list[str], timeout_s: float) -> None:
        count = self._topology.num_local
        row = num + self._record.size
        num_pieces = len(flat.pieces(self._spans))
        sizes = [padded_bytes(num, dtype), padded_bytes(count * row, dtype)]
        sizes += [padded_bytes(3 * num_pieces, torch.float64), 4 * Counters.bytes_for(count)]
        arena = Arena(self._node, sum(sizes))
        self._parameters = arena.tensor(num, dtype)
        self._rows = arena.tensor(count * row, dtype).view(count, row)
        self._norms = arena.tensor(3 * num_pieces, torch.float64).view(3, num_pieces)
        self._ready, self._done, self._added, self._updated = (
            Counters(arena, self._node, names, timeout_s) for _ in range(4)
        )
        self._num_added = self._num_updated = 0

    def _share_parameters(self, model: nn.Module) -> None:
        is_first = self._topology.local_rank == 0
        flat.move_into(self._parameters, self._spans, is_first=is_first)
        give_back_memory()  # the private copies just replaced
        heads = [node[0] for node in self._topology.nodes]
        (between,) = self._comm.groups([heads])
        if between is not None:
            between.broadcast_(self._parameters)
        shared = {id(span.parameter) for span in self._spans}
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in shared:
                self._comm.broadcast_(tensor.data)
        self._node.barrier()

    def _build_reducer(self, config: HierarchicalConfig, say: Callable[[str], None]) -> NodeReducer:
        wire = torch.bfloat16 if config.wire == "bfloat16" else self._rows.dtype
        element_bytes = self._rows.element_size()
        options = candidates(config, self._topology.nodes, self._num_parameters * element_bytes)
        communicators = {
            count: self._comm.groups(self._topology.senders(count))
            for count in sorted({p.num_senders for p in options})
        }

        def reducer(
            plan: Plan, num: int, ready: Counters, done: Counters, *, is_overlapped: bool = False
        ) -> NodeReducer:
            chunks = cut(num, max(1, plan.chunk_bytes // element_bytes), plan.num_senders)
            if num == self._num_parameters:
                chunks = self._with_record(chunks, is_rounded=wire != self._rows.dtype)
            rows = self._rows[:, : chunks[-1].end]
            senders = communicators[plan.num_senders]
            return NodeReducer(rows, chunks, senders, ready, done, wire=wire, is_overlapped=is_overlapped)

        plan, reason = choose(options, self._comm, self._time_of(reducer))
        say(f"hierarchical: {reason}")
        self._rows[self._topology.local_rank].zero_()  # of what the trials left
        num, is_overlapped = self._num_parameters, config.is_overlapped
        return reducer(plan, num, self._ready, self._done, is_overlapped=is_overlapped)

    def _with_record(self, chunks: list[Chunk], *, is_rounded: bool) -> list[Chunk]:
        """The step's counts go with the last chunk, or alone where the wire would round them."""
        num, end = self._num_parameters, self._num_parameters + self._record.size
        if is_rounded:
            return [*chunks, Chunk(num, end, 0, is_exact=True)]
        return [*chunks[:-1], replace(chunks[-1], end=end)]

    def _time_of(
        self, reducer: Callable[[Plan, int, Counters, Counters], NodeReducer]
    ) -> Callable[[Plan, int], float]:
        """Seconds that a plan takes to reduce so many bytes, the slowest worker's."""

        def seconds(plan: Plan, size_bytes: int) -> float:
            num = min(self._num_parameters - 1, size_bytes // self._rows.element_size())
            if num < 1:
                return 0.0
            trial = reducer(plan, num, *self._trial_counters())
            self._comm.barrier()
            began_at = time.perf_counter()
            trial.fill(num)
            trial.finish()
            took = torch.tensor([time.perf_counter() - began_at], dtype=torch.float64)
            return max(float(t) for t in self._comm.gather(took))

        return seconds

    def _trial_counters(self) -> tuple[Counters, Counters]:
        names = [f"worker {rank}" for rank in self._topology.nodes[self._topology.own]]
        arena = Arena(self._node, 2 * Counters.bytes_for(len(names)))
        return Counters(arena, self._node, names, 60.0), Counters(arena, self._node, names, 60.0)

    def close(self) -> None:
        super().close()
        self._reducer.close()

    @property
    def reducer(self) -> NodeReducer:
        """The two-level sum, for benchmarks."""
        return self._reducer

    # --- a step --------------------------------------------------------------------------------------------

    def end_step(self, learning_rate: float) -> StepTotals:
        self._collected.finish()
        busy_node_s = self._reducer.node_s - self._node_s
        self._record.fill(self._rows[self._topology.local_rank, self._num_parameters :])
        self._reducer.fill(self._reducer.num_elements)
        self._reducer.finish()
        extra = self._rows[0, self._num_parameters :]
        spent_s = self._reducer.node_s - self._node_s
        self._node_s += spent_s
        totals = replace(
            self._record.totals(extra), node_busy_s=busy_node_s, node_exposed_s=spent_s - busy_node_s
        )
        self._slice.divide_(self._record.correction(extra))
        self._slice.step(learning_rate, self._clip_norm)
        self._num_updated += 1
        self._updated.set(self._num_updated)
        self._updated.wait(self._num_updated)
        self._running.count(self._record.num_samples)
        return totals

    def _share(self, row: int, own: Tensor, sums: Tensor) -> Tensor:
        """Sums of squares of all pieces: each worker writes its own into the row, then all read it.

        A row is written again only in the next step, when all have long read it.
        """
        self._norms[row, own] = sums
        self._add_up()
        return self._norms[row]

    def _add_up(self) -> None:
        """Wait until every worker of the node is here."""
        self._num_added += 1
        self._added.set(self._num_added)
        self._added.wait(self._num_added)

    # --- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        names, scalars = self._slice.state()
        whole: dict[str, Tensor] = {}
        scratch = self._rows[0, : self._num_parameters]  # free between steps
        for name in agreed_names(names, self._node, self._rows.device):
            self._slice.write_state(name, scratch)
            self._add_up()
            whole[name] = scratch.clone() if self._comm.rank == 0 else scratch
            self._add_up()
        return flat.full_state(self._whole, self._spans, whole, scalars) if self._comm.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._slice.load(state)
        self._add_up()  # the model was loaded just before, by every replica into the same memory
