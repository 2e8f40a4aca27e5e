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
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.config import parse_bytes
from labkit.errors import ConfigError
from labkit.memory.adapter import Adapter, CpuAdapter, CudaAdapter, Mark
from labkit.memory.arena import HostArena, NoRoom
from labkit.memory.planner import Infeasible, Plan, make_plan
from labkit.memory.profile import Decision, Link, Profile
from labkit.memory.record import Record
from labkit.memory.recorded import Recorded
from labkit.memory.saved import Remains, unpack
from labkit.memory.segments import OWNERS, SegmentForward, find_segments
from labkit.memory.step import Known, Step

_WINDOW_SHARE = 8  # of what is saved, where no budget bounds what is under way
_MOST_PLANS = 32
_MOST_ADAPTED = 3  # new plans for one batch because copies run at another rate
_SAME_RATE = 1.25  # times apart
_SAME_SPEED = 1.1  # times apart
_ODD_STEPS = 2  # in a row before it is no hiccup


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
        num_adapted: Plans that were made again since copies or computing went at another rate than planned.
        peak_bytes: Most bytes of saved storages on the device at once.
        held: Bytes that were brought out and stayed, since somebody else holds them, by shape.
        stalls: Seconds that computing waited for each block, by shape and segment.
        unmanaged_bytes: That the forward pass made, that no hook saw, and that are there when the backward
            pass begins: kept by selective checkpointing, by closures or by variables.
        predicted_step_s: Of the last step that went by a plan, until a hook saw a block for the last time.
        measured_step_s: Of the same step.
        predicted_peak_bytes: Of the same step.
        measured_peak_bytes: Of the same step.
        remark: What readers must know, such as a tier that was not there; "" for nothing.
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
    num_adapted: int = 0
    peak_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    unmanaged_bytes: int = 0
    predicted_step_s: float = 0.0
    measured_step_s: float = 0.0
    predicted_peak_bytes: int = 0
    measured_peak_bytes: int = 0
    remark: str = ""


class HybridMemory:
    """Lets a training step save more than its device holds."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device_budget: int | str | None = None,
        reserved_bytes: int | None = None,
        host_budget: int | str = 0,
        num_sharing: int = 1,
        tier: str = "auto",
        policy: str = "auto",
        segments: Sequence[nn.Module] | None = None,
        window_bytes: int | str | None = None,
        min_bytes: int = 64 * 1024,
        link: Link | None = None,
        gradient_bytes: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: Whose parameters and buffers are never moved.
            device_budget: Most bytes on the device, as a number or as `20GB` or `20 GiB`; None: no limit.
            reserved_bytes: Of them, for parameters, gradients, optimizer state and what else is not saved;
                None: as many as parameters, buffers and gradients take.
            host_budget: Bytes of host memory, likewise; 0: nothing is offloaded.
            num_sharing: Processes that take as much of this machine's memory.
            tier: `pinned`, `ram` or `mmap:FOLDER`; auto: pinned on CUDA, else ram. One that has no room is
                not used, and the report says so.
            policy: auto (as the budget needs), keep, offload or recompute (everything that can be).
            segments: Modules that may be computed again in the backward pass; None: `find_segments`.
            window_bytes: Most bytes of copies under way in each direction; None: as the budget leaves room,
                and an eighth of what is saved where there is no budget.
            min_bytes: Smaller storages stay.
            link: Rates between device and host, as this worker has them beside others; None: measured when
                the first plan is made. In either case plans are made again when copies run otherwise.
            gradient_bytes: That go over the same link during the backward pass, each way.
            adapter: Does the copies; None: that of the model's device.

        Raises:
            ConfigError: a value makes no sense, the model is compiled, or the tier is no folder.
        """
        device_budget = _bytes("memory.device_budget", device_budget)
        host_budget = _bytes("memory.host_budget", host_budget) or 0
        window_bytes = _bytes("memory.window", window_bytes)
        if reserved_bytes is None:
            trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            reserved_bytes = trained + sum(tensor.nbytes for tensor in _states(model))
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
        _check_tier(tier, device)
        if tier == "auto":
            tier = "pinned" if device.type == "cuda" else "ram"
        self.totals = Report()
        try:
            self.arena = HostArena(host_budget, tier, num_sharing)
        except NoRoom as error:  # training goes on with what the device holds
            self.arena = HostArena(0)
            self.totals.remark = f"nothing is offloaded: {error}"
        self.adapter = adapter or (CudaAdapter(device) if device.type == "cuda" else CpuAdapter())
        self.policy, self.min_bytes = policy, min_bytes
        self.budget_bytes = None if device_budget is None else device_budget - reserved_bytes
        self.window_bytes = window_bytes if window_bytes is not None or self.budget_bytes is not None else 0
        self._model, self._asked_window = model, window_bytes
        self._reserved_bytes = reserved_bytes
        self._link, self._gradient_bytes = link, gradient_bytes
        self.lock = threading.RLock()
        # What blocks leave behind: their end may come at any moment, on any thread, in the middle of
        # anything, so they only say so, and whoever comes next clears up.
        self.dead: deque[Remains] = deque()
        self.infeasible: dict[int, tuple[int, int]] = {}
        # By the size of the first tensor: the last batch of an epoch is smaller, and has a plan of its own.
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._num_adapted: dict[int, int] = {}
        self._num_odd = 0  # steps in a row that were not as planned
        self._plan: Plan | None = None
        self._step: Step | None = None
        self.live_bytes = self._step_peak_bytes = 0
        self._own: dict[int, Tensor] | None = None  # parameters and buffers by storages, in this step
        self._stalls: deque[tuple[Step, str, str, Mark, Mark]] = deque()  # whose length is not known yet
        self.thinking_s = 0.0  # that planning and looking around took
        self.is_prefetching = True  # False: blocks come back when they are asked for, to compare with
        self.is_adapting = True  # False: rates stay as they were given, to compare with
        self.is_tracing = False  # keep when bytes came and went, for `trace`
        self._traced: Step | None = None
        self.active: Step | None = None
        self.is_recomputing = False
        self._segments = list(find_segments(model) if segments is None else segments)
        if policy in ("auto", "recompute"):
            # One that has a forward of its own beside its class's is left alone.
            self._segments = [
                module
                for module in self._segments
                if isinstance(module.__dict__.get("forward"), (SegmentForward, type(None)))
            ]
            for module in self._segments:
                OWNERS[module] = weakref.ref(self)
                module.forward = SegmentForward(module)

    @property
    def plan(self) -> Plan | None:
        """What was chosen, from the second step on."""
        return self._plan

    @property
    def has_plans(self) -> bool:
        """A step like those before it will find its plan."""
        return bool(self._known)

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from."""
        for known in self._known.values():
            if known.plan is self._plan:
                return known.profile
        return None

    def report(self) -> Report:
        """What happened so far."""
        self.stalled_s()
        self._look_back(self._step)
        return self.totals

    def recorded(self) -> Recorded | None:
        """The current plan and what it was made from."""
        profile = self.profile
        if profile is None or self._plan is None:
            return None
        return Recorded(
            profile,
            self._plan.decisions,
            self._plan.link,
            self.budget_bytes,
            self._plan.window_bytes,
            self._reserved_bytes,
            self.arena.size_bytes,
            tuple(self._allowed()),
        )

    def trace(self) -> tuple[list[tuple[float, int]], list[tuple[str, int, float, float]]]:
        """When bytes came and went in the last step that went by a plan, if `is_tracing` was set.

        Returns:
            Seconds since the step began with the bytes on the device from then on; and copies as direction,
            bytes, begin and end.
        """
        step, between = self._traced, self.adapter.between
        if step is None:
            return [], []
        length = between(step.began, step.ended) or 0.0
        live = [(between(step.began, at), size) for at, size in step.trace]
        copies = [
            (way, size, between(step.began, begin), between(step.began, end))
            for way, size, begin, end in self.adapter.recent()
        ]
        return (
            [(at, size) for at, size in live if at is not None and at <= length],
            [
                (way, size, begin, end)
                for way, size, begin, end in copies
                if begin is not None and end is not None and 0 <= begin <= length
            ],
        )

    def __enter__(self) -> "HybridMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A forward pass, and the backward pass too if it comes inside.

        A step without gradients is passed by: it is no step.
        """
        if not torch.is_grad_enabled() or self.policy == "keep":
            yield
            return
        self._begin()
        step = self._step
        assert step is not None
        self.active = step
        try:
            with torch.autograd.graph.saved_tensors_hooks(step.pack, unpack):
                yield
        finally:
            self.active = None

    def _begin(self) -> None:
        """What the last step showed decides about this one."""
        began_at = time.perf_counter()
        last, self._step = self._step, None
        self.stalled_s()
        if last is not None:
            last.end()
        self._look_back(last)
        if last is not None and last.record is not None:
            self._take_record(last.record)
        elif last is not None and last.is_off_plan:
            self.totals.num_replans += 1
            self._known.pop(last.first_bytes, None)
        elif last is not None and last.known is not None:
            self._adapt(last)
        # Parameters may have moved to other storages since: under a strategy that shares them, say.
        self._own = None
        self.totals.num_steps += 1
        with self.lock:
            self.bury()
        self._step_peak_bytes = self.live_bytes
        self.thinking_s += time.perf_counter() - began_at
        self._step = Step(self)

    def _look_back(self, step: Step | None) -> None:
        """Keep what a step by a plan took beside what was predicted."""
        if step is None or step.known is None or step.ended is None or step.is_off_plan:
            return
        seconds = self.adapter.between(step.began, step.ended)
        if seconds is not None:
            outcome = step.known.plan.outcome
            self.totals.predicted_step_s, self.totals.measured_step_s = outcome.seen_until_s, seconds
            self.totals.predicted_peak_bytes = outcome.peak_bytes
            self.totals.measured_peak_bytes = self._step_peak_bytes
            self._traced = step if step.trace else None

    def _take_record(self, record: Record) -> None:
        profile = record.profile(self._gradient_bytes)
        self.totals.unmanaged_bytes = record.unmanaged_bytes
        if profile is None:  # its backward pass has not run: nothing is known
            return
        try:
            plan = self._make_plan(profile, self._link or self._measure_link())
        except Infeasible as error:
            # Said when such a step comes again; the error itself would keep its frames alive.
            self.infeasible[record.first_bytes] = (error.budget_bytes, error.peak_bytes)
        else:
            known = Known.of(profile, tuple(record.keys), plan, record.own_results)
            self._remember(record.first_bytes, known)

    def _make_plan(self, profile: Profile, link: Link) -> Plan:
        window = self._asked_window
        if window is None and self.budget_bytes is None:
            window = max(1, profile.saved_bytes // _WINDOW_SHARE)
        return make_plan(
            profile,
            link,
            budget_bytes=self.budget_bytes,
            host_bytes=self.arena.size_bytes,
            window_bytes=window,
            allowed=self._allowed(),
            reserved_bytes=self._reserved_bytes,
        )

    def _allowed(self) -> list[Decision]:
        wanted = {"offload": [Decision.OFFLOAD], "recompute": [Decision.RECOMPUTE]}
        allowed = wanted.get(self.policy, list(Decision))
        if self.arena.size_bytes:
            return allowed
        return [what for what in allowed if what is not Decision.OFFLOAD] or [Decision.KEEP]

    def _remember(self, first_bytes: int, known: Known) -> None:
        self._known[first_bytes] = known
        self._known.move_to_end(first_bytes)
        self._plan = known.plan
        while len(self._known) > _MOST_PLANS:
            self._known.popitem(last=False)

    def known_for(self, first_bytes: int) -> Known | None:
        """The plan for steps that begin like this one; it is the current one from now on."""
        known = self._known.get(first_bytes)
        if known is not None:
            self._known.move_to_end(first_bytes)
            self._plan = known.plan
        return known

    def _adapt(self, step: Step) -> None:
        """Plan again when steps are not what the plan counts on.

        Copies may run at another rate, since others use the link; and the step that was recorded was the
        first one, which computes more slowly than those after it.
        """
        known, count = step.known, self._num_adapted.get(step.first_bytes, 0)
        if known is None or not self.is_adapting or count >= _MOST_ADAPTED:
            return
        rates, link, profile = self.adapter.rates(), known.plan.link, known.profile
        found = Link(
            rates.get("out", link.out_bytes_per_s), rates.get("in", link.in_bytes_per_s), link.latency_s
        )
        compute_s = step.compute_s()
        factors = (1.0, 1.0)
        if compute_s is not None:
            planned_s = (profile.forward_s, known.seen_until_s - profile.forward_s)
            factors = (_ratio(compute_s[0], planned_s[0]), _ratio(compute_s[1], planned_s[1]))
        is_as_planned = all(1 / _SAME_SPEED < factor < _SAME_SPEED for factor in factors)
        if is_as_planned and found.is_like(link, _SAME_RATE):
            self._num_odd = 0
            return
        self._num_odd += 1
        if self._num_odd < _ODD_STEPS:
            return
        self._num_odd = 0
        self._num_adapted[step.first_bytes] = count + 1
        profile = profile if is_as_planned else profile.scaled(*factors)
        with contextlib.suppress(Infeasible):  # then the plan that there is goes on
            plan = self._make_plan(profile, found)
            again = Known.of(profile, known.keys, plan, known.own_results)
            # The same graph: what was seen of it stays seen.
            self._remember(step.first_bytes, replace(again, seen=known.seen))
            self.totals.num_adapted += 1

    def _measure_link(self) -> Link:
        """Rates of this worker's copies, one direction at a time."""
        size_bytes = min(16 * 2**20, self.arena.size_bytes)
        host = self.arena.take(size_bytes) if size_bytes else None
        if host is None:
            return Link(1e9, 1e9)
        device = torch.empty(size_bytes, dtype=torch.uint8, device=self.adapter.device)
        rates = []
        for out in (True, False, True, False):
            began_at = time.perf_counter()
            copy = self.adapter.copy_out(device, host) if out else self.adapter.copy_in(host, device, None)
            while not copy.is_done():
                time.sleep(0)
            rates.append(size_bytes / (time.perf_counter() - began_at))
        self.arena.give_back(host)
        self._link = Link(rates[2], rates[3])
        return self._link

    def close(self) -> None:
        """End the copying threads and let go of host memory; graphs of earlier steps must be gone."""
        self._step = None
        for module in self._segments:
            owner = OWNERS.get(module)
            if owner is not None and owner() is self:
                del OWNERS[module]
                module.__dict__.pop("forward", None)
        self.settle()
        self.adapter.close()
        self.arena.close()

    # --- for steps and handles -----------------------------------------------------------------------------

    def bury(self, *, is_waiting: bool = False) -> None:
        """Take back what blocks that are gone have left, as soon as its copies are done."""
        for _ in range(len(self.dead)):
            remains = self.dead.popleft()
            if remains.is_counted:
                self.count(-remains.size_bytes)
                remains.is_counted = False
                if remains.step.record is not None and remains.step is self._step:
                    remains.step.record.gone(remains.key)
            if remains.waiting is not None:
                remains.waiting.waiting_bytes -= remains.size_bytes
                remains.waiting = None
            while is_waiting and not remains.is_done():
                time.sleep(20e-6)
            if not remains.is_done():
                self.dead.append(remains)
            elif remains.host is not None:
                self.arena.give_back(remains.host)

    def is_own(self, storage: int) -> bool:
        """It is that of a parameter or a buffer."""
        if self._own is None:
            self._own = {StorageWeakRef(t.untyped_storage()).cdata: t for t in _states(self._model)}
        return storage in self._own

    def settle(self) -> None:
        """Take back the host memory of all graphs that are gone."""
        with self.lock:
            self.bury(is_waiting=True)

    def count(self, size_bytes: int, *, is_passing: bool = False) -> None:
        """Bytes more, or fewer, are on the device; in passing: they are counted elsewhere at once."""
        live_bytes = self.live_bytes + size_bytes
        self._step_peak_bytes = max(self._step_peak_bytes, live_bytes)
        self.totals.peak_bytes = max(self.totals.peak_bytes, live_bytes)
        if not is_passing:
            self.live_bytes = live_bytes
            if self.is_tracing and self._step is not None:
                self._step.trace.append((self.adapter.mark(), live_bytes))

    def stalled(self, step: Step, name: str, marks: tuple[Mark, Mark] | None) -> None:
        """Computing has waited, or will have, for a block."""
        if marks is not None:
            phase = "forward" if step.turned is None else "backward"
            self._stalls.append((step, phase, name, *marks))

    def stalled_s(self) -> float:
        """Seconds that computing has waited so far, as far as they are known."""
        while self._stalls:
            step, phase, name, begin, end = self._stalls[0]
            seconds = self.adapter.between(begin, end)
            if seconds is None:
                break
            self._stalls.popleft()
            self.totals.stall_s += seconds
            step.stalled_s[phase] += seconds
            self.totals.stalls[name] = self.totals.stalls.get(name, 0.0) + seconds
        return self.totals.stall_s

    def not_computing_s(self) -> float:
        """Seconds so far that the host waited for copies, planned, or looked around."""
        return self.stalled_s() + self.thinking_s


def _bytes(name: str, value: int | str | None) -> int | None:
    try:
        size_bytes = parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if size_bytes is not None and (not isinstance(size_bytes, int) or size_bytes < 0):
        raise ConfigError(f"{name} must be a number of bytes from 0, got {value!r}. For example 20GB.")
    return size_bytes


def _check_tier(tier: str, device: torch.device) -> None:
    if tier not in ("auto", "ram", "pinned") and not tier.startswith("mmap:"):
        raise ConfigError(f"memory.tier must be auto, ram, pinned or mmap:FOLDER, got {tier!r}.")
    if tier == "pinned" and device.type != "cuda":
        raise ConfigError(f"memory.tier must be ram or mmap:FOLDER for a model on {device}, got 'pinned'.")


def _ratio(one: float, other: float) -> float:
    return max(one, 1e-6) / max(other, 1e-6)


def _states(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
