"""Activations that move: speed kept, others' rules, sharing a link, larger batches, nothing to do.

Compute is emulated (a layer sleeps), and so is the link (copies take as long as their bytes would on it), so
that two cores tell about scheduling and not about themselves. How far a batch grows under a memory limit is
found with real compute.
"""

import contextlib
import ctypes
import functools
import gc
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.bench.harness import Report, interleave, ratios
from labkit.comm import Communicator
from labkit.launch.forked import run_workers
from labkit.memory import HybridMemory, Link, Uplink, find_max_batch, fits_in_memory
from labkit.memory.adapter import CpuAdapter
from labkit.memory.turns import EmulatedLink, LinkState, make_state

_MIB = 2**20
_KIB = 2**10
_INNER_KIB = (320, 320, 240, 240, 160, 160, 120, 120, 80, 80, 40, 40)  # as of a conv net: large at first
_NUM_INNER = 3  # tensors that a block of layers saves beside what goes into it
_FORWARD_S = 0.02  # of each block at `_BATCH`; twice as much backward
_BATCH = 16
_SYNC_SHARE = 0.5  # of the computing of a step at the largest batch without
_FULL_SPEED = 1.05  # times the time of the computing
_RATE = 400 * _MIB  # bytes a second of the link, each way
_BUDGET_SHARE = 0.6
_STEPS = 8
_REPEATS = 5
_SEARCHES = 3
_CAP_MIB = 64


def measure(say: Callable[[str], None]) -> Report:
    """Measure; about a quarter of an hour on two cores."""
    report = Report("memory")
    last: dict[str, float] = {}
    alone = interleave({side.name: _timed(side, 1, say, last) for side in _ALONE}, _REPEATS, warmup=0)
    report.add("throughput_kept", ratios(alone["nothing moves"], alone["ours"]), ">= 0.95")
    report.add("vs_on_demand", ratios(alone["on demand"], alone["ours"]))
    report.add("vs_one_layer_prefetch", ratios(alone["one layer ahead"], alone["ours"]))
    report.add("stall_share", [last["stall_share"]])
    report.add("predicted_over_measured_time", [last["time"]], "<= 1.1")
    report.add("predicted_over_measured_peak", [last["peak"]], "<= 1.1")
    shared = interleave({side.name: _timed(side, 4, say, last) for side in _SHARED}, 3, warmup=0)
    report.add("vs_on_demand_4", ratios(shared["on demand"], shared["ours"]))
    report.add("vs_one_layer_prefetch_4", ratios(shared["one layer ahead"], shared["ours"]))
    report.add("contention_gain", ratios(shared["ours, solo rate"], shared["ours"]))
    _compare_largest(report, say)
    with tempfile.TemporaryDirectory() as folder:
        found = [_largest(folder, say) for _ in range(_SEARCHES)]
    report.add("batch_growth", [hybrid / plain for plain, hybrid in found], ">= 1.6")
    report.add("overhead_when_not_needed", _overhead(), "<= 1.02")
    report.notes.append(
        f"{len(_INNER_KIB)} blocks of {_FORWARD_S * 1e3:g} ms, {_saved_bytes(_BATCH) / _MIB:.0f} MiB saved, "
        f"a budget of {_BUDGET_SHARE:.0%} of that, an emulated link of {_RATE / _MIB:g} MiB/s each way that "
        "workers share; on demand: every block moves, and comes back when it is asked for; one layer ahead: "
        "every block moves, the next one comes back during each, as vDNN does; neither computes again. "
        "contention_gain: four workers on one link, planning with their share of it over planning as if "
        "alone. vs_best_baseline: samples/s, each at its own largest batch under one budget, over the better "
        f"one of keeping all and checkpointing every block, where a step waits {_SYNC_SHARE:.0%} of the "
        "computing without for the other workers, whatever the batch; vs_best_baseline_alone: where it "
        f"waits for nobody; at_full_speed: ours at its largest batch that adds {_FULL_SPEED - 1:.0%} to the "
        "computing at the most. batch_growth: largest batch of a real network under a memory limit of "
        f"{_CAP_MIB} MiB above its start, with a mapped file as host memory over without"
    )
    return report


@dataclass(frozen=True)
class _Side:
    """One way to train.

    Attributes:
        name: For people.
        policy: Of `HybridMemory`.
        budget_bytes: For blocks; None: no limit.
        batch: Samples.
        is_alone: Plans as if it had the link to itself.
        is_prefetching: Blocks come back before they are asked for.
        window_bytes: Of copies under way.
        can_repeat: Blocks of layers may be computed again.
        can_move: There is host memory.
    """

    name: str
    policy: str = "auto"
    budget_bytes: int | None = None
    batch: int = _BATCH
    is_alone: bool = False
    is_prefetching: bool = True
    window_bytes: int | None = None
    can_repeat: bool = True
    can_move: bool = True


class _Work(torch.autograd.Function):
    """Takes its time, and saves what goes in and some tensors of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, inner_bytes: int) -> Tensor:
        time.sleep(seconds)
        inner = [torch.empty(inner_bytes, dtype=torch.uint8) for _ in range(_NUM_INNER)]
        for tensor in inner:
            tensor[::4096] = 1  # its pages are there
        ctx.save_for_backward(x, *inner)
        ctx.seconds = seconds
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        assert all(int(tensor[0]) == 1 for tensor in ctx.saved_tensors[1:])
        time.sleep(2 * ctx.seconds)
        return gradients[0], None, None


class _Block(nn.Module):
    def __init__(self, inner_kib: int, batch: int) -> None:
        super().__init__()
        self._seconds, self._bytes = _FORWARD_S * batch / _BATCH, inner_kib * _KIB * batch

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Work.apply(x, self._seconds, self._bytes)  # type: ignore[no-untyped-call]
        return found


def _network(batch: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(_Block(inner, batch)) for inner in _INNER_KIB))


def _input(batch: int) -> Tensor:
    return torch.zeros(batch, 40 * _KIB // 4, requires_grad=True)


def _saved_bytes(batch: int) -> int:
    return batch * _KIB * sum(_NUM_INNER * inner + 40 for inner in _INNER_KIB)


class _InstantAdapter(CpuAdapter):
    """Copies cost nothing but the link's time, as they do where another engine does them."""

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target[:: 16 * 4096] = source[:: 16 * 4096]


_BUDGET = int(_BUDGET_SHARE * _saved_bytes(_BATCH))
_OURS = _Side("ours", budget_bytes=_BUDGET)
_ON_DEMAND = _Side("on demand", "offload", _BUDGET, is_prefetching=False, can_repeat=False)
_ONE_AHEAD = _Side("one layer ahead", "offload", _BUDGET, window_bytes=1, can_repeat=False)
_ALONE = (_Side("nothing moves", "keep", can_move=False), _OURS, _ON_DEMAND, _ONE_AHEAD)
_SHARED = (_OURS, _ON_DEMAND, _ONE_AHEAD, replace(_OURS, name="ours, solo rate", is_alone=True))


def _timed(
    side: _Side, num_workers: int, say: Callable[[str], None], last: dict[str, float]
) -> Callable[[], float]:
    def once() -> float:
        fd = make_state()
        found = run_workers(_train, num_workers, side, fd, timeout_s=600)
        os.close(fd)
        if side.name == "ours" and num_workers == 1:
            last.update(found[0])
        seconds = max(one["step_s"] for one in found)
        say(f"{side.name}, {num_workers} workers, batch {side.batch}: {1e3 * seconds:.0f} ms a step")
        return float(seconds)

    return once


def _memory(side: _Side, model: nn.Module, link: Link, adapter: CpuAdapter) -> HybridMemory:
    memory = HybridMemory(
        model,
        policy=side.policy,
        device_budget=side.budget_bytes,
        host_budget=2 * _saved_bytes(side.batch) if side.can_move else 0,
        window_bytes=side.window_bytes,
        segments=None if side.can_repeat else (),
        link=link,
        adapter=adapter,
    )
    memory.is_prefetching = side.is_prefetching
    memory.is_adapting = not side.is_alone and side.is_prefetching
    return memory


def _train(comm: Communicator, side: _Side, fd: int) -> dict[str, float]:
    uplink = Uplink.ideal(_RATE)
    model = _network(side.batch)
    memory = _memory(
        side,
        model,
        uplink.share(1 if side.is_alone else comm.world_size),
        _InstantAdapter(EmulatedLink(uplink, LinkState(os.dup(fd), comm.rank))),
    )
    times, stalls = [], []
    for _ in range(_STEPS):
        comm.barrier()
        stalled = memory.stalled_s()
        began_at = time.perf_counter()
        with memory.step():
            y = model(_input(side.batch)).sum()
        y.backward()
        del y
        times.append(time.perf_counter() - began_at)
        stalls.append(memory.stalled_s() - stalled)
    step_s, report = statistics.median(times[4:]), memory.report()
    found = {"step_s": step_s, "stall_share": statistics.median(stalls[4:]) / step_s}
    if memory.plan is not None:
        found["time"] = _apart(report.predicted_step_s, report.measured_step_s)
        found["peak"] = _apart(report.predicted_peak_bytes, report.measured_peak_bytes)
    gc.collect()
    memory.close()
    return found


def _apart(one: float, other: float) -> float:
    """How many times as large the larger of two numbers is."""
    return max(one, other) / max(1e-12, min(one, other))


# --- samples a second, each at its largest batch -----------------------------------------------------------


def _compare_largest(report: Report, say: Callable[[str], None]) -> None:
    budget = _saved_bytes(_BATCH)
    sides = {
        "plain": _Side("all stays", budget_bytes=budget, can_repeat=False, can_move=False),
        "checkpointed": _Side("all computed again", "recompute", budget, can_move=False),
        "ours": _Side("ours", budget_bytes=budget),
    }
    best = {}
    for name, side in sides.items():
        largest = _run_alone(side, math.inf)
        say(f"{side.name}: largest batch {largest}")
        best[name] = replace(side, batch=largest)
    full = _run_alone(sides["ours"], _FULL_SPEED)
    say(f"ours: largest batch at full speed {full}")
    best["ours, full speed"] = replace(sides["ours"], batch=full)
    fixed_s = _SYNC_SHARE * 3 * _FORWARD_S * len(_INNER_KIB) * best["plain"].batch / _BATCH
    times = interleave({name: _timed(side, 1, say, {}) for name, side in best.items()}, 3, warmup=0)
    for figure, waits_s, aim in (
        ("vs_best_baseline", fixed_s, ">= 1.2"),
        ("vs_best_baseline_alone", 0.0, ""),
    ):
        rates = {name: [best[name].batch / (t + waits_s) for t in times[name]] for name in best}
        others = [max(pair) for pair in zip(rates["plain"], rates["checkpointed"], strict=True)]
        report.add(figure, ratios(rates["ours"], others), aim)
        report.add(f"{figure}_at_full_speed", ratios(rates["ours, full speed"], others))


def _run_alone(side: _Side, slowest: float) -> int:
    found: int = run_workers(_largest_emulated, 1, side, slowest, timeout_s=900)[0]
    return found


def _largest_emulated(comm: Communicator, side: _Side, slowest: float) -> int:
    """The largest batch that one can plan for, in at the most so many times the time of its computing."""
    uplink = Uplink.ideal(_RATE)

    def attempt(batch: int) -> None:
        sized = replace(side, batch=batch)
        model = _network(batch)
        adapter = _InstantAdapter(EmulatedLink(uplink, LinkState(make_state(), 0)))
        memory = _memory(sized, model, uplink.share(1), adapter)
        try:
            for _ in range(2 if slowest == math.inf else 4):  # recorded, planned; and planned again as it ran
                with memory.step():
                    y = model(_input(batch)).sum()
                y.backward()
                del y
        finally:
            gc.collect()
            memory.close()

    return find_max_batch(
        lambda size: fits_in_memory(functools.partial(attempt, size)), most=256, resolution=0.1
    )


# --- the largest batch of a real network -------------------------------------------------------------------


def _largest(folder: str, say: Callable[[str], None]) -> tuple[int, int]:
    plain, hybrid = (run_workers(_search, 1, is_hybrid, folder)[0] for is_hybrid in (False, True))
    say(f"largest batch: {plain} without, {hybrid} with hybrid memory")
    return plain, hybrid


def return_freed_memory() -> None:
    """Have the C library give back at once what is freed (glibc)."""
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(option, 65536)


@contextlib.contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Let this process have no more private memory than it has and some bytes (Linux)."""
    status = Path("/proc/self/status").read_text().splitlines()
    used = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _search(comm: Communicator, is_hybrid: bool, folder: str) -> int:
    return_freed_memory()
    width = 256
    model = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(width, width), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    memory = None
    if is_hybrid:
        memory = HybridMemory(
            model, policy="offload", host_budget=512 * _MIB, tier=f"mmap:{folder}", window_bytes=4 * _MIB
        )

    def attempt(size: int) -> None:
        for _ in range(3):  # recorded, planned, moved
            x = torch.randn(size, width)
            with memory.step() if memory is not None else contextlib.nullcontext():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss

    with memory_limit(_CAP_MIB * _MIB):
        found = find_max_batch(
            lambda size: fits_in_memory(lambda: attempt(size), optimizer.zero_grad),
            most=2**15,
            resolution=0.03,
        )
    if memory is not None:
        gc.collect()
        memory.close()
    return found


# --- nothing to do -----------------------------------------------------------------------------------------


def _overhead() -> list[float]:
    """A step with hooks that move nothing over one without."""
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU())))
    x = torch.randn(256, 512)
    memory = HybridMemory(model, device_budget=2**40, host_budget=0)

    def step(is_hooked: bool) -> float:
        began_at = time.perf_counter()
        for _ in range(10):
            with memory.step() if is_hooked else contextlib.nullcontext():
                loss = model(x).sum()
            loss.backward()
            del loss
        return time.perf_counter() - began_at

    times = interleave({"hooked": lambda: step(True), "plain": lambda: step(False)}, 31)
    memory.close()
    return ratios(times["hooked"], times["plain"])
