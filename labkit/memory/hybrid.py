"""Activations in device and host memory (after Kim et al. 2020, abstract: the functions, not their
algorithm).

Hooks on saved tensors see what the forward pass keeps for the backward pass. A handle stands in its place and
owns it: when the graph goes, so does the handle, and its memory with it, whatever became of the backward
pass.

A first step records what is saved and when it is needed; the planner chooses what moves; then copies out and
back go on beside the computing. One copy is made of a storage, however many views of it are saved, and views
come back with their exact strides. Values that are changed in place after they were saved raise, as without
hooks, whatever the plan.
"""

import contextlib
import random
import threading
import time
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from labkit.errors import ConfigError
from labkit.memory.adapter import Adapter, Copy, CpuAdapter, CudaAdapter
from labkit.memory.arena import HostArena
from labkit.memory.planner import Infeasible, Plan, make_plan
from labkit.memory.profile import Block, Decision, Link, Profile

_WINDOW_SHARE = 8  # of the budget, or of what is saved
_MOST_PLANS = 32


@dataclass
class Report:
    """What happened in the steps so far.

    Attributes:
        num_steps: Steps that were begun.
        num_saved: Tensors that the forward passes saved.
        num_views: Of them, views of storages that were saved before.
        saved_bytes: Of storages, over all steps.
        moved_bytes: Of storages that were brought out.
        freed_bytes: Of those, whose memory on the device really went.
        refused_bytes: Of storages that should have moved, and for which the host had no room.
        num_recomputed: Segments that were computed again.
        stall_s: That computing waited for copies.
        num_replans: Steps whose saved tensors were not those of the plan.
        peak_bytes: Most bytes of saved storages on the device at once.
        held: Bytes that were brought out and stayed, since somebody else holds them, by shape.
    """

    num_steps: int = 0
    num_saved: int = 0
    num_views: int = 0
    saved_bytes: int = 0
    moved_bytes: int = 0
    freed_bytes: int = 0
    refused_bytes: int = 0
    num_recomputed: int = 0
    stall_s: float = 0.0
    num_replans: int = 0
    peak_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)


class HybridMemory:
    """Lets a training step save more than its device holds."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device_budget: int | None = None,
        reserved_bytes: int = 0,
        host_budget: int = 0,
        tier: str = "auto",
        policy: str = "auto",
        segments: Sequence[nn.Module] | None = None,
        window_bytes: int | None = None,
        min_bytes: int = 64 * 1024,
        link: Link | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: Whose parameters and buffers are never moved.
            device_budget: Most bytes on the device; None: no limit.
            reserved_bytes: Of them, for parameters, gradients, optimizer state and what else is not saved.
            host_budget: Bytes of host memory; 0: nothing is offloaded.
            tier: `pinned`, `ram` or `mmap:FOLDER`; auto: pinned on CUDA, else ram.
            policy: auto (as the budget needs), keep, offload or recompute (everything that can be).
            segments: Modules that may be computed again in the backward pass; None: `find_segments`.
            window_bytes: Most bytes of copies under way in each direction; None: an eighth of the budget.
            min_bytes: Smaller storages stay.
            link: Rates between device and host; None: measured when the first plan is made.
            adapter: Does the copies; None: that of the model's device.

        Raises:
            ConfigError: a value makes no sense, the model is compiled, or host memory is not there.
        """
        if policy not in ("auto", "keep", "offload", "recompute"):
            raise ConfigError(f"memory.policy must be one of auto, keep, offload, recompute, got {policy!r}.")
        if device_budget is not None and device_budget <= reserved_bytes:
            raise ConfigError(
                f"memory.device_budget must be above the {reserved_bytes} bytes of parameters, gradients and "
                f"optimizer state, got {device_budget}: {reserved_bytes - device_budget + 1} too few. Raise "
                "it."
            )
        if any(hasattr(module, "_orig_mod") for module in model.modules()):
            raise ConfigError(
                "model must not be compiled with hybrid memory, got one of torch.compile, which saves "
                "tensors past its hooks. Leave out torch.compile, or set memory.policy=keep without a budget."
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if tier == "auto":
            tier = "pinned" if device.type == "cuda" else "ram"
        self._arena = HostArena(host_budget, tier)
        self._adapter = adapter or (CudaAdapter(device) if device.type == "cuda" else CpuAdapter())
        self._model, self._policy, self._min_bytes = model, policy, min_bytes
        self._budget = None if device_budget is None else device_budget - reserved_bytes
        self._reserved_bytes = reserved_bytes
        self._link, self._asked_window = link, window_bytes
        self._window = window_bytes or 0
        self._lock = threading.RLock()
        # What blocks leave behind: their end may come at any moment, on any thread, in the middle of
        # anything, so they only say so, and whoever comes next clears up.
        self._dead: deque[_Remains] = deque()
        self._infeasible: dict[int, tuple[int, int]] = {}
        # By the size of the first tensor: the last batch of an epoch is smaller, and has a plan of its own.
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._plan: Plan | None = None
        self._step: _Step | None = None
        self._live_bytes = 0
        self._own: dict[int, Tensor] = {}  # parameters and buffers by their storages, in this step
        self.totals = Report()
        self._is_prefetching = True  # False: blocks come back when they are asked for, to compare with
        self._active: _Step | None = None
        self._is_recomputing = False
        self._segments = list(find_segments(model) if segments is None else segments)
        if policy in ("auto", "recompute"):
            self._segments = [module for module in self._segments if "forward" not in module.__dict__]
            for module in self._segments:
                _OWNERS[module] = self
                module.forward = types.MethodType(_segment_forward, module)

    @property
    def plan(self) -> Plan | None:
        """What was chosen, from the second step on."""
        return self._plan

    def report(self) -> Report:
        """What happened so far."""
        return self.totals

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A forward pass, and the backward pass too if it comes inside.

        A step without gradients is passed by: it is no step.
        """
        if not torch.is_grad_enabled() or self._policy == "keep":
            yield
            return
        self._begin()
        step = self._step
        assert step is not None
        self._active = step
        try:
            with torch.autograd.graph.saved_tensors_hooks(step.pack, _unpack):
                yield
        finally:
            self._active = None

    def _begin(self) -> None:
        """What the last step showed decides about this one."""
        last, self._step = self._step, None
        if last is not None and last.record is not None:
            self._take_record(last.record)
        elif last is not None and last.is_off_plan:
            self.totals.num_replans += 1
            self._known.pop(last.first_bytes, None)
        # Parameters may have moved to other storages since: under a strategy that shares them, say.
        self._own = {StorageWeakRef(t.untyped_storage()).cdata: t for t in _states(self._model)}
        self.totals.num_steps += 1
        self._step = _Step(self)

    def _take_record(self, record: "_Record") -> None:
        profile = record.profile()
        if profile is None:  # its backward pass has not run: nothing is known
            return
        budget = self._budget
        self._window = self._asked_window or max(1, (budget or profile.saved_bytes) // _WINDOW_SHARE)
        wanted = {"offload": [Decision.OFFLOAD], "recompute": [Decision.RECOMPUTE]}
        allowed = wanted.get(self._policy, list(Decision))
        if not self._arena.size_bytes:
            allowed = [what for what in allowed if what is not Decision.OFFLOAD] or [Decision.KEEP]
        try:
            self._remember(profile, self._make_plan(profile, budget, allowed), record)
        except Infeasible as error:
            # Said when such a step comes again; the error itself would keep its frames alive.
            self._infeasible[record.first_bytes] = (error.budget_bytes, error.peak_bytes)

    def _make_plan(self, profile: Profile, budget: int | None, allowed: list[Decision]) -> Plan:
        return make_plan(
            profile,
            self._link or self._measure_link(),
            budget_bytes=budget,
            host_bytes=self._arena.size_bytes,
            window_bytes=self._window,
            allowed=allowed,
            reserved_bytes=self._reserved_bytes,
        )

    def _remember(self, profile: Profile, plan: Plan, record: "_Record") -> None:
        order = sorted(range(len(profile.blocks)), key=lambda index: profile.blocks[index].needed_s)
        offloaded = (index for index in order if plan.decisions[index] is Decision.OFFLOAD)
        again = {record.keys[index][0] for index in order if plan.decisions[index] is Decision.RECOMPUTE}
        self._known[record.first_bytes] = _Known(
            plan,
            {key: block.size_bytes for key, block in zip(record.keys, profile.blocks, strict=True)},
            dict(zip(record.keys, plan.decisions, strict=True)),
            tuple(record.keys[index] for index in offloaded),
            frozenset(again),
        )
        self._known.move_to_end(record.first_bytes)
        self._plan = plan
        while len(self._known) > _MOST_PLANS:
            self._known.popitem(last=False)

    def _measure_link(self) -> Link:
        """Rates of this worker's copies, one direction at a time."""
        size_bytes = min(16 * 2**20, self._arena.size_bytes)
        host = self._arena.take(size_bytes) if size_bytes else None
        if host is None:
            return Link(1e9, 1e9)
        device = torch.empty(size_bytes, dtype=torch.uint8, device=self._adapter.device)
        rates = []
        for out in (True, False, True, False):
            began_at = time.perf_counter()
            copy = self._adapter.copy_out(device, host) if out else self._adapter.copy_in(host, device, None)
            while not copy.is_done():
                time.sleep(0)
            rates.append(size_bytes / (time.perf_counter() - began_at))
        self._arena.give_back(host)
        self._link = Link(rates[2], rates[3])
        return self._link

    def close(self) -> None:
        """End the copying threads and let go of host memory; graphs of earlier steps must be gone."""
        self._step = None
        for module in self._segments:
            if _OWNERS.get(module) is self:
                del _OWNERS[module]
                module.__dict__.pop("forward", None)
        self.settle()
        self._adapter.close()
        self._arena.close()

    # --- for handles -------------------------------------------------------------------------------------

    def _bury(self, *, is_waiting: bool = False) -> None:
        """Take back what blocks that are gone have left, as soon as its copies are done."""
        for _ in range(len(self._dead)):
            remains = self._dead.popleft()
            if remains.is_counted:
                self._live_bytes -= remains.size_bytes
                remains.is_counted = False
            if remains.step is not None:
                remains.step._waiting_bytes -= remains.size_bytes
                remains.step = None
            while is_waiting and not remains.is_done():
                time.sleep(20e-6)
            if not remains.is_done():
                self._dead.append(remains)
            elif remains.host is not None:
                self._arena.give_back(remains.host)

    def settle(self) -> None:
        """Take back the host memory of all graphs that are gone."""
        with self._lock:
            self._bury(is_waiting=True)

    def _count(self, size_bytes: int) -> None:
        self._live_bytes += size_bytes
        self.totals.peak_bytes = max(self.totals.peak_bytes, self._live_bytes)


def _states(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def find_segments(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are best computed again as a whole: what its lists of modules hold.

    Entries of a `ModuleList`, and those of a `Sequential` that have modules inside. None that computes
    together with other workers, who might not compute again.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            is_part = isinstance(module, nn.ModuleList) or (
                isinstance(module, nn.Sequential) and next(child.children(), None) is not None
            )
            if is_part and not any(getattr(part, "is_collective", False) for part in child.modules()):
                found.append(child)
            else:
                look(child)

    look(model)
    return found


_OWNERS: "weakref.WeakKeyDictionary[nn.Module, HybridMemory]" = weakref.WeakKeyDictionary()


def _segment_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A segment's forward pass: noted while a step is recorded, computed again where the plan says so.

    Bound to its module, so that a copy of the model computes with the copy's parameters.
    """
    memory = _OWNERS.get(self)
    step = memory._active if memory is not None and not memory._is_recomputing else None
    if step is None or step.segment >= 0 or not torch.is_grad_enabled():
        return type(self).forward(self, *args, **kwargs)
    return step.run_segment(self, args, kwargs)


@contextlib.contextmanager
def _again(memory: HybridMemory, module: nn.Module) -> Iterator[None]:
    """Compute again without counting batch statistics twice."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    momenta = [norm.momentum for norm in norms]
    counts = [None if n.num_batches_tracked is None else n.num_batches_tracked.clone() for n in norms]
    for norm in norms:
        norm.momentum = 0.0  # (1 - 0) x + 0 y is x to the bit
    memory._is_recomputing = True
    try:
        yield
    finally:
        memory._is_recomputing = False
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


_Key = tuple[int, int]  # segment, or -1, and which block of it
_RESULT: _Key = (-2, 0)


@dataclass
class _Remains:
    """What a block that is gone has left."""

    host: Tensor | None
    copies: tuple[Copy | None, ...]
    size_bytes: int
    is_counted: bool
    data: Tensor | None  # a copy may still read it
    step: "_Step | None"  # that waited for it to come back

    def is_done(self) -> bool:
        return all(copy is None or copy.is_done() for copy in self.copies)


@dataclass(frozen=True)
class _Known:
    """A plan, and how a step recognises its blocks.

    Attributes:
        plan: As it was made.
        sizes: Bytes of each block.
        decisions: For each block.
        needed_order: Blocks that move, in the order in which they are needed.
        again: Segments that are computed again.
    """

    plan: Plan
    sizes: dict[_Key, int]
    decisions: dict[_Key, Decision]
    needed_order: tuple[_Key, ...]
    again: frozenset[int]


class _Watch:
    """Whether a segment would come to the same, computed again: nothing that it depends on may change."""

    def __init__(
        self,
        step: "_Step",
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> None:
        self._module, self._adapter = module, step.memory._adapter
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.is_repeatable = len(leaves) == len(tensors)  # those inside of lists are not looked after
        self._inputs = [(_witness(tensor), tensor._version) for tensor in tensors]
        self._states = self._state()
        kept = {key[0] for key, known in step._blocks.items() if (b := known()) is not None and b.key[0] < 0}
        storages = {StorageWeakRef(t.untyped_storage()).cdata: t.untyped_storage().nbytes() for t in tensors}
        self.boundary_bytes = sum(size for cdata, size in storages.items() if cdata not in kept)
        self._began_at = self._adapter.now()
        self.seconds = 0.0

    def _state(self) -> list[Any]:
        """Versions of buffers, but for batch statistics, and random streams that are not torch's."""
        norms = {
            id(buffer)
            for norm in self._module.modules()
            if isinstance(norm, nn.modules.batchnorm._NormBase)
            for buffer in norm.buffers()
        }
        versions = [buffer._version for buffer in self._module.buffers() if id(buffer) not in norms]
        numpy_state = np.random.get_state(legacy=False)
        return [versions, random.getstate(), str(numpy_state)]

    def end(self) -> None:
        """The segment has been computed."""
        self.seconds = self._adapter.now() - self._began_at
        self.is_repeatable = self.is_repeatable and self._states == self._state()

    def is_still_repeatable(self) -> bool:
        """After the backward pass: what went in is still as it was."""
        return self.is_repeatable and all(witness._version == version for witness, version in self._inputs)


def _witness(tensor: Tensor) -> Tensor:
    """Shares the version of a tensor without its memory."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


class _Record:
    """When things were saved and needed in a step without a plan, in seconds of compute."""

    def __init__(self, memory: HybridMemory) -> None:
        self._memory = memory
        self._began_at = memory._adapter.now() - memory.totals.stall_s
        self.first_bytes = 0
        self.keys: list[_Key] = []
        self._sizes: list[int] = []
        self._is_movable: list[bool] = []
        self._saved_s: list[float] = []
        self._needed_s: dict[_Key, float] = {}
        self._last_s = 0.0
        self._segments: list[_Watch] = []

    def _now(self) -> float:
        """Since the step began, without what it waited for copies."""
        return self._memory._adapter.now() - self._memory.totals.stall_s - self._began_at

    def saved(self, key: _Key, size_bytes: int, is_movable: bool) -> None:
        self.keys.append(key)
        self._sizes.append(size_bytes)
        self._is_movable.append(is_movable)
        self._saved_s.append(self._now())

    def needed(self, key: _Key) -> None:
        self._last_s = self._now()
        self._needed_s.setdefault(key, self._last_s)

    def segment(self, watch: _Watch) -> None:
        self._segments.append(watch)

    def profile(self) -> Profile | None:
        if not self._needed_s:
            return None
        last = self._last_s
        is_repeatable = [watch.is_still_repeatable() for watch in self._segments]
        blocks = [
            # What the backward pass never asked for is needed at its end: it only ever takes up memory.
            Block(
                size,
                saved,
                self._needed_s.get(key, last),
                key[0] if 0 <= key[0] < len(is_repeatable) and is_repeatable[key[0]] else -1,
                is_movable,
            )
            for key, size, saved, is_movable in zip(
                self.keys, self._sizes, self._saved_s, self._is_movable, strict=True
            )
        ]
        forward_s = min(self._needed_s.values())
        seconds = tuple(watch.seconds for watch in self._segments)
        boundary_bytes = tuple(watch.boundary_bytes for watch in self._segments)
        return Profile(tuple(blocks), forward_s, last, seconds, boundary_bytes)


class _Step:
    """What one forward pass has saved."""

    def __init__(self, memory: HybridMemory) -> None:
        self.memory = memory
        self.record: _Record | None = None
        self._known: _Known | None = None
        self._own_record = _Record(memory)  # its clock begins now
        self._blocks: dict[tuple[int, int], weakref.ref[_Saved]] = {}
        self.first_bytes = 0
        self.segment = -1  # that computes now
        self._num_segments = 0
        self._num_blocks: Counter[int] = Counter()  # of each segment
        self._is_begun = False
        # Results of segments that are computed again, with what keeps their addresses theirs.
        self._results: dict[tuple[int, int], StorageWeakRef] = {}
        self.is_off_plan = False
        # By weak references: a block belongs to the handles that autograd keeps, and goes with them.
        self._leaving: deque[tuple[weakref.ref[_Saved], int]] = deque()
        self._leaving_bytes = 0
        self._lingering: list[weakref.ref[_Saved]] = []  # brought out, and still held by somebody
        self._by_key: dict[_Key, weakref.ref[_Saved]] = {}
        self._coming: deque[_Key] = deque()
        self._waiting_bytes = 0
        self._resident: deque[weakref.ref[_Saved]] = deque()  # that a step without a plan has saved

    # --- forward -----------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> "_Kept | _Handle":
        """Called for every saved tensor."""
        memory = self.memory
        with memory._lock:
            memory._bury()
            memory.totals.num_saved += 1
            if not _is_manageable(tensor, memory._adapter.device):
                return _Kept(tensor)
            identity = StorageWeakRef(tensor.untyped_storage()).cdata, tensor._version
            # By storage: a layer saves its weight as a transposed view, which is no parameter.
            if identity[0] in memory._own:
                return _Kept(tensor)
            known = self._blocks.get(identity)
            saved = known() if known is not None else None
            if saved is not None:
                memory.totals.num_views += 1
            else:
                saved = self._save(tensor, identity)
                self._blocks[identity] = weakref.ref(saved)
            return _Handle(saved, tensor)

    def _save(self, tensor: Tensor, identity: tuple[int, int]) -> "_Saved":
        memory = self.memory
        size_bytes = tensor.untyped_storage().nbytes()
        self._begin(tensor.numel() * tensor.element_size())
        self._reap()
        if identity in self._results:  # of a segment that is computed again: it stays, as what went in
            return _Saved(self, _RESULT, tensor)
        key = (self.segment, self._num_blocks[self.segment])
        self._num_blocks[self.segment] += 1
        memory.totals.saved_bytes += size_bytes
        saved = _Saved(self, key, tensor)
        self._by_key[key] = weakref.ref(saved)
        is_sparse = size_bytes > 2 * tensor.numel() * tensor.element_size()  # much would move for little
        is_movable = size_bytes >= memory._min_bytes and not is_sparse
        if self._known is None:
            self._own_record.saved(key, size_bytes, is_movable)
            if is_movable:
                self._resident.append(weakref.ref(saved))
            self._make_room()
            return saved
        if self.segment in self._known.again:  # what goes into it; what it saves is not seen here
            return saved
        if self._known.sizes.get(key) != size_bytes:
            # Another graph: it moves what it has no room for, and is recorded next time.
            self.is_off_plan = True
        if self.is_off_plan:
            if is_movable:
                self._resident.append(weakref.ref(saved))
            self._make_room()
        elif self._known.decisions[key] is Decision.OFFLOAD and is_movable:
            self._offload(saved)
        return saved

    def _make_room(self) -> None:
        """While nothing is planned yet: move what was saved first as soon as the budget is used up."""
        memory = self.memory
        if memory._policy == "recompute" or not memory._arena.size_bytes:
            return
        while self._resident and (
            memory._policy == "offload"
            or (memory._budget is not None and memory._live_bytes > memory._budget)
        ):
            oldest = self._resident.popleft()()
            if oldest is not None:
                self._offload(oldest)

    def _begin(self, first_bytes: int) -> None:
        """Choose the plan for steps that begin like this one; without one it is recorded."""
        if self._is_begun:
            return
        self._is_begun = True
        self.first_bytes = self._own_record.first_bytes = first_bytes
        if first_bytes in self.memory._infeasible:
            raise Infeasible(*self.memory._infeasible[first_bytes])
        self._known = self.memory._known.get(first_bytes)
        if self._known is None:
            self.record = self._own_record
            return
        self.memory._known.move_to_end(first_bytes)
        self.memory._plan = self._known.plan
        self._coming = deque(self._known.needed_order if self.memory._is_prefetching else ())

    def run_segment(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A part of the model that may be computed again."""
        memory = self.memory
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._begin(tensors[0].numel() * tensors[0].element_size() if tensors else 0)
        index = self._num_segments
        self._num_segments += 1
        self.segment = index
        watch = None if self.record is None else _Watch(self, module, args, kwargs, tensors)
        try:
            if self._known is not None and index in self._known.again and not self.is_off_plan:
                memory.totals.num_recomputed += 1
                found = self._run_to_repeat(module, args, kwargs)
                for leaf in tree_leaves(found):
                    if isinstance(leaf, Tensor):
                        weak = StorageWeakRef(leaf.untyped_storage())
                        self._results[weak.cdata, leaf._version] = weak
                return found
            found = type(module).forward(module, *args, **kwargs)
        finally:
            self.segment = -1
        if watch is not None and self.record is not None:
            watch.end()
            self.record.segment(watch)
        return found

    def _run_to_repeat(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute now, and once more when the backward pass comes here.

        All goes in by position: `checkpoint` has keywords of its own, and looks after no others.
        """
        names, count = tuple(kwargs), len(args)

        def run(*values: Any) -> Any:
            return type(module).forward(
                module, *values[:count], **dict(zip(names, values[count:], strict=True))
            )

        contexts = lambda: (contextlib.nullcontext(), _again(self.memory, module))  # noqa: E731
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    def _offload(self, saved: "_Saved") -> None:
        memory = self.memory
        host = memory._arena.take(saved.size_bytes)
        if host is None and memory._dead:
            memory._bury(is_waiting=True)
            host = memory._arena.take(saved.size_bytes)
        if host is None:
            memory.totals.refused_bytes += saved.size_bytes
            return
        self._reap()
        while self._leaving and self._leaving_bytes + saved.size_bytes > memory._window:
            first = self._leaving[0][0]()
            if first is not None:
                self._wait_for(first)
            del first
            self._reap()
        saved.leave(host)
        memory.totals.moved_bytes += saved.size_bytes
        self._leaving.append((weakref.ref(saved), saved.size_bytes))
        self._leaving_bytes += saved.size_bytes

    def _wait_for(self, saved: "_Saved") -> None:
        began_at = time.perf_counter()
        saved.wait_out()
        self.memory.totals.stall_s += time.perf_counter() - began_at

    def _reap(self) -> None:
        """Let go of what has arrived on the host, in the order in which it left."""
        while self._leaving:
            saved = self._leaving[0][0]()
            if saved is not None and not saved.has_left():
                break
            self._leaving_bytes -= self._leaving.popleft()[1]
            if saved is not None:
                saved.let_go()
                self._lingering.append(weakref.ref(saved))
        self._lingering = [known for known in self._lingering if not _is_gone(known)]

    # --- backward ----------------------------------------------------------------------------------------

    def needed(self, saved: "_Saved") -> None:
        """A block is asked for: begin to bring back those that come after it."""
        if self.record is not None:
            self.record.needed(saved.key)
        self._reap()
        for known in self._lingering:
            lingering = known()
            if lingering is not None:
                lingering.say_held()
        self._lingering.clear()
        if saved.is_waited_for:
            saved.is_waited_for = False
            self._waiting_bytes -= saved.size_bytes
        window = self.memory._window
        while self._coming:
            reference = self._by_key.get(self._coming[0])
            other = reference() if reference is not None else None
            if other is not None and other.is_away():
                if self._waiting_bytes and self._waiting_bytes + other.size_bytes > window:
                    return
                self._waiting_bytes += other.size_bytes
                other.is_waited_for = True
                other.come_back()
            self._coming.popleft()


def _is_gone(known: "weakref.ref[_Saved]") -> bool:
    saved = known()
    return saved is None or saved.is_really_gone()


class _Kept:
    """A saved tensor that stays. It shares its version with the original, so a change in place is seen."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def get(self) -> Tensor:
        _check_version(self._tensor, self._version)
        return self._tensor


class _Handle:
    """What autograd keeps in place of a tensor: a view of a saved storage."""

    def __init__(self, saved: "_Saved", tensor: Tensor) -> None:
        self._saved = saved
        self._dtype = tensor.dtype
        self._place = (int(tensor.storage_offset()), tensor.size(), tensor.stride())
        self._version = tensor._version
        self._witness = _witness(tensor)

    def get(self) -> Tensor:
        _check_version(self._witness, self._version)
        return self._saved.view(self._dtype, *self._place)


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is at version {tensor._version}; expected version {version} instead."
        )


def _unpack(held: "_Kept | _Handle") -> Tensor:
    return held.get()


class _Saved:
    """One storage: on the device, on the host, or on its way."""

    def __init__(self, step: _Step, key: _Key, tensor: Tensor) -> None:
        self._step, self.key = step, key
        self.size_bytes = tensor.untyped_storage().nbytes()
        self._shape = tuple(tensor.shape)
        # All bytes of the storage, whatever the views of it are.
        self._bytes: Tensor | None = _all_bytes(tensor)
        # Keeps the address reserved, so that another storage can't take this one's identity.
        self._identity = StorageWeakRef(tensor.untyped_storage())
        self._host: Tensor | None = None
        self._out: Copy | None = None
        self._in: Copy | None = None
        self.is_waited_for = False
        step.memory._count(self.size_bytes)
        self._is_counted = True

    # --- out ---------------------------------------------------------------------------------------------

    def leave(self, host: Tensor) -> None:
        assert self._bytes is not None
        self._host = host
        self._out = self._step.memory._adapter.copy_out(self._bytes, host)

    def has_left(self) -> bool:
        return self._out is not None and self._out.is_done()

    def wait_out(self) -> None:
        assert self._out is not None
        while not self._out.is_done():
            time.sleep(20e-6)

    def let_go(self) -> None:
        """Drop the device's copy; whether its memory goes depends on who else holds it."""
        self._bytes = None

    def is_really_gone(self) -> bool:
        """Whether the memory went; counted once. A block that is back by now is none that lingers."""
        if not self._identity.expired():
            return self._bytes is not None
        memory = self._step.memory
        if self._is_counted and self._bytes is None:
            self._is_counted = False
            memory.totals.freed_bytes += self.size_bytes
            memory._live_bytes -= self.size_bytes
        return True

    def say_held(self) -> None:
        """Somebody else holds what was brought out: a variable of the forward pass, say."""
        held, name = self._step.memory.totals.held, "x".join(map(str, self._shape))
        held[name] = held.get(name, 0) + self.size_bytes

    # --- back --------------------------------------------------------------------------------------------

    def is_away(self) -> bool:
        return self._bytes is None and self._host is not None

    def come_back(self) -> None:
        memory = self._step.memory
        assert self._host is not None
        target = torch.empty(self.size_bytes, dtype=torch.uint8, device=memory._adapter.device)
        self._in = memory._adapter.copy_in(self._host, target, self._out)
        self._bytes = target
        if not self._is_counted:
            self._is_counted = True
            memory._count(self.size_bytes)

    def view(self, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        memory = self._step.memory
        with memory._lock:
            memory._bury()
            self._step.needed(self)
            if self._bytes is None:
                self.come_back()
            if self._in is not None:
                began_at = time.perf_counter()
                self._in.wait()
                self._in = None
                memory.totals.stall_s += time.perf_counter() - began_at
            assert self._bytes is not None
            whole = torch.empty(0, dtype=dtype, device=self._bytes.device)
            return whole.set_(self._bytes.untyped_storage(), offset, size, stride)

    def __del__(self) -> None:
        step, copies = self._step, (self._out, self._in)
        is_moving = any(copy is not None and not copy.is_done() for copy in copies)
        step.memory._dead.append(
            _Remains(
                self._host,
                copies,
                self.size_bytes,
                self._is_counted,
                self._bytes if is_moving else None,
                step if self.is_waited_for else None,
            )
        )


def _all_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _is_manageable(tensor: Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is one that can move: plain, and on the device."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.numel() == 0:
        return False
    return tensor.device == device
