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
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from labkit.errors import ConfigError
from labkit.memory.adapter import Adapter, Copy, CpuAdapter, CudaAdapter
from labkit.memory.arena import HostArena
from labkit.memory.planner import Plan, make_plan
from labkit.memory.profile import Block, Decision, Link, Profile

_WINDOW_SHARE = 8  # of the budget, or of what is saved
_MOST_PLANS = 8


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
        # By the first block's size: the last batch of an epoch is smaller, and has a plan of its own.
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._plan: Plan | None = None
        self._step: _Step | None = None
        self._live_bytes = 0
        self._own = {StorageWeakRef(t.untyped_storage()).cdata: t for t in _states(model)}
        self.totals = Report()
        self._is_prefetching = True  # False: blocks come back when they are asked for, to compare with
        self._active: _Step | None = None
        self._is_recomputing = False
        self._segments = list(find_segments(model) if segments is None else segments)
        if policy in ("auto", "recompute"):
            for module in self._segments:
                module.forward = _wrapped(self, module)

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
        last = self._step
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
        plan = make_plan(
            profile,
            self._link or self._measure_link(),
            budget_bytes=budget,
            host_bytes=self._arena.size_bytes,
            window_bytes=self._window,
            allowed=allowed,
            reserved_bytes=self._reserved_bytes,
        )
        self._remember(profile, plan, record)

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
            module.__dict__.pop("forward", None)
        self._adapter.close()
        self._arena.close()

    # --- for handles -------------------------------------------------------------------------------------

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


def _wrapped(memory: HybridMemory, module: nn.Module) -> Callable[..., Any]:
    """A segment's forward pass: noted while a step is recorded, and computed again where the plan says so."""
    original = module.forward
    known = weakref.ref(memory)

    def forward(*args: Any, **kwargs: Any) -> Any:
        here = known()
        step = here._active if here is not None and not here._is_recomputing else None
        if step is None or step.segment >= 0 or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return step.run_segment(module, original, args, kwargs)

    return forward


@contextlib.contextmanager
def _again(memory: HybridMemory, module: nn.Module) -> Iterator[None]:
    """Compute again without counting batch statistics twice."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0  # (1 - 0) x + 0 y is x to the bit
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.sub_(1)
    memory._is_recomputing = True
    try:
        yield
    finally:
        memory._is_recomputing = False
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


_Key = tuple[int, int]  # segment, or -1, and which block of it


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
        self._segment_s: list[float] = []
        self._boundary_bytes: list[int] = []

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

    def segment(self, seconds: float, boundary_bytes: int) -> None:
        self._segment_s.append(seconds)
        self._boundary_bytes.append(boundary_bytes)

    def profile(self) -> Profile | None:
        if not self._needed_s:
            return None
        last = self._last_s
        blocks = [
            # What the backward pass never asked for is needed at its end: it only ever takes up memory.
            Block(size, saved, self._needed_s.get(key, last), key[0], is_movable)
            for key, size, saved, is_movable in zip(
                self.keys, self._sizes, self._saved_s, self._is_movable, strict=True
            )
        ]
        forward_s = min(self._needed_s.values())
        return Profile(tuple(blocks), forward_s, last, tuple(self._segment_s), tuple(self._boundary_bytes))


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
            memory.totals.num_saved += 1
            if not _is_manageable(tensor, memory):
                return _Kept(tensor)
            storage = tensor.untyped_storage()
            key = (StorageWeakRef(storage).cdata, tensor._version)
            known = self._blocks.get(key)
            saved = known() if known is not None else None
            if saved is not None:
                memory.totals.num_views += 1
            else:
                saved = self._save(tensor)
                self._blocks[key] = weakref.ref(saved)
            return _Handle(saved, tensor)

    def _save(self, tensor: Tensor) -> "_Saved":
        memory = self.memory
        size_bytes = tensor.untyped_storage().nbytes()
        self._begin(size_bytes)
        key = (self.segment, self._num_blocks[self.segment])
        self._num_blocks[self.segment] += 1
        memory.totals.saved_bytes += size_bytes
        saved = _Saved(self, key, tensor)
        self._by_key[key] = weakref.ref(saved)
        is_movable = size_bytes >= memory._min_bytes
        if self._known is None:
            self._own_record.saved(key, size_bytes, is_movable)
            if is_movable:
                self._resident.append(weakref.ref(saved))
            self._make_room()
            return saved
        if self.segment in self._known.again:  # what goes into it; what it saves is not seen here
            return saved
        if self._known.sizes.get(key) != size_bytes:
            self.is_off_plan = True  # another graph: the rest of it stays, and is recorded next time
        if not self.is_off_plan and self._known.decisions[key] is Decision.OFFLOAD and is_movable:
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
        self._known = self.memory._known.get(first_bytes)
        if self._known is None:
            self.record = self._own_record
            return
        self.memory._plan = self._known.plan
        self._coming = deque(self._known.needed_order if self.memory._is_prefetching else ())

    def run_segment(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A part of the model that may be computed again."""
        memory = self.memory
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._begin(tensors[0].untyped_storage().nbytes() if tensors else 0)
        index = self._num_segments
        self._num_segments += 1
        self.segment = index
        began_at = memory._adapter.now() if self.record is not None else 0.0
        try:
            if self._known is not None and index in self._known.again and not self.is_off_plan:
                memory.totals.num_recomputed += 1
                contexts = lambda: (contextlib.nullcontext(), _again(memory, module))  # noqa: E731
                return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
            found = function(*args, **kwargs)
        finally:
            self.segment = -1
        if self.record is not None:
            storages = [tensor.untyped_storage() for tensor in tensors]
            sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
            self.record.segment(memory._adapter.now() - began_at, sum(sizes.values()))
        return found

    def _offload(self, saved: "_Saved") -> None:
        memory = self.memory
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
        self.no_longer_waiting(saved)
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

    def no_longer_waiting(self, saved: "_Saved") -> None:
        """A block that came back early is used now, or never will be."""
        if saved.is_waited_for:
            saved.is_waited_for = False
            self._waiting_bytes -= saved.size_bytes


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
        # Shares the version of the original without its memory.
        self._witness = tensor.detach()
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

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
        step = self._step
        memory = step.memory
        with memory._lock:
            step.no_longer_waiting(self)
            if self._is_counted:
                memory._live_bytes -= self.size_bytes
            if self._host is not None:
                for copy in (self._out, self._in):
                    while copy is not None and not copy.is_done():
                        time.sleep(20e-6)
                memory._arena.give_back(self._host)


def _all_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _is_manageable(tensor: Tensor, memory: HybridMemory) -> bool:
    """Whether a saved tensor may move: a plain one, on the device, and not of the model itself."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.numel() == 0:
        return False
    if tensor.device.type != memory._adapter.device.type:
        return False
    storage = tensor.untyped_storage()
    # By storage: a layer saves its weight as a transposed view, which is no parameter.
    return StorageWeakRef(storage).cdata not in memory._own
