"""Activations that move: speed kept, prefetching against others' rules, sharing a link, larger batches.

Compute is emulated (a layer sleeps), and so is the link (copies take as long as their bytes would on it), so
that two cores tell about scheduling and not about themselves. The largest batch is found with real compute.
"""

import contextlib
import ctypes
import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.bench.harness import Report, interleave, ratios
from labkit.comm import Communicator
from labkit.launch.forked import run_workers
from labkit.memory import HybridMemory, Link, find_max_batch, fits_in_memory
from labkit.memory.adapter import CpuAdapter
from labkit.memory.turns import EmulatedLink, LinkState, make_state
from labkit.memory.uplink import Uplink

_MIB = 2**20
_SIZES_MIB = (16, 16, 12, 12, 8, 8, 6, 6, 4, 4, 2, 2)  # as of a convolutional network: large at first
_FORWARD_S = 0.02  # of each layer; twice as much backward
_RATE = 400 * _MIB  # bytes a second of the link, each way
_BUDGET_SHARE = 0.6
_STEPS = 6
_REPEATS = 5
_SEARCHES = 3
_CAP_MIB = 64


def measure(say: Callable[[str], None]) -> Report:
    """Measure; about four minutes on two cores."""
    report = Report("memory")
    alone = interleave({name: _side(name, 1, say) for name in _SIDES}, _REPEATS, warmup=0)
    report.add("throughput_kept", ratios(alone["nothing moves"], alone["ours"]), ">= 0.95")
    report.add("vs_on_demand", ratios(alone["on demand"], alone["ours"]))
    report.add("vs_one_layer_prefetch", ratios(alone["one layer ahead"], alone["ours"]))
    report.add("stall_share", [_last["stall_share"]])
    report.add("predicted_over_measured_time", [_last["time"]], "<= 1.1")
    report.add("predicted_over_measured_peak", [_last["peak"]], "<= 1.1")
    four = {name: _side(name, 4, say) for name in ("ours", "on demand", "one layer ahead", "ours, solo rate")}
    shared = interleave(four, 3, warmup=0)
    report.add("vs_on_demand_4", ratios(shared["on demand"], shared["ours"]))
    report.add("vs_one_layer_prefetch_4", ratios(shared["one layer ahead"], shared["ours"]))
    report.add("contention_gain", ratios(shared["ours, solo rate"], shared["ours"]))
    with tempfile.TemporaryDirectory() as folder:
        found = [_largest(folder, say) for _ in range(_SEARCHES)]
    report.add("batch_growth", [hybrid / plain for plain, hybrid in found], ">= 1.6")
    report.add("overhead_when_not_needed", _overhead(), "<= 1.02")
    report.notes.append(
        f"{len(_SIZES_MIB)} layers of {_FORWARD_S * 1e3:g} ms that save {sum(_SIZES_MIB)} MiB, a budget of "
        f"{_BUDGET_SHARE:.0%} of that, an emulated link of {_RATE / _MIB:g} MiB/s each way that workers "
        "share; on demand: blocks come back when they are asked for; one layer ahead: as vDNN does; "
        "contention_gain: four workers on one link, planning with their share of it over planning as if "
        f"alone; batch_growth: largest batch of a real network under a memory limit of {_CAP_MIB} MiB above "
        "its start, with a mapped file as host memory over without"
    )
    return report


class _Layer(torch.autograd.Function):
    """Takes its time and saves what it makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size_bytes: int) -> Tensor:
        time.sleep(_FORWARD_S)
        saved = torch.empty(size_bytes, dtype=torch.uint8)
        saved[::4096] = 1  # its pages are there
        ctx.save_for_backward(saved)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        assert int(saved[0]) == 1
        time.sleep(2 * _FORWARD_S)
        return gradients[0], None


def _forward(x: Tensor) -> Tensor:
    for size in _SIZES_MIB:
        x = _Layer.apply(x, size * _MIB)  # type: ignore[no-untyped-call]
    return x.sum()


class _InstantAdapter(CpuAdapter):
    """Copies cost nothing but the link's time, as they do where another engine does them."""

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target[:: 16 * 4096] = source[:: 16 * 4096]


_SIDES = ("nothing moves", "ours", "on demand", "one layer ahead")
_last: dict[str, float] = {}


def _side(name: str, num_workers: int, say: Callable[[str], None]) -> Callable[[], float]:
    def once() -> float:
        fd = make_state()
        found = run_workers(_train, num_workers, name, fd)
        os.close(fd)
        if name == "ours" and num_workers == 1:
            _last.update(found[0])
        seconds = max(one["step_s"] for one in found)
        say(f"{name}, {num_workers} workers: {1e3 * seconds:.0f} ms a step")
        return float(seconds)

    return once


def _train(comm: Communicator, name: str, fd: int) -> dict[str, float]:
    pace = EmulatedLink(Uplink.ideal(_RATE), LinkState(os.dup(fd), comm.rank))
    share = 1 if name.endswith("solo rate") else comm.world_size
    total = sum(_SIZES_MIB) * _MIB
    memory = HybridMemory(
        nn.Linear(1, 1),
        policy="keep" if name == "nothing moves" else "auto",
        device_budget=int(_BUDGET_SHARE * total),
        host_budget=0 if name == "nothing moves" else total,
        window_bytes=1 if name == "one layer ahead" else 24 * _MIB,
        link=Link(_RATE / share, _RATE / share),
        adapter=_InstantAdapter(pace),
    )
    if name == "on demand":
        memory.is_prefetching = False
    times, stalls, peaks = [], [], []
    for _ in range(_STEPS):
        comm.barrier()
        memory.totals.peak_bytes, stalled = 0, memory.totals.stall_s
        began_at = time.perf_counter()
        x = torch.zeros(1, requires_grad=True)
        with memory.step():
            y = _forward(x)
        y.backward()
        del y
        times.append(time.perf_counter() - began_at)
        stalls.append(memory.totals.stall_s - stalled)
        peaks.append(memory.totals.peak_bytes)
    step_s = statistics.median(times[2:])
    found = {
        "step_s": step_s,
        "stall_share": statistics.median(stalls[2:]) / step_s,
        "time": 1.0,
        "peak": 1.0,
    }
    if memory.plan is not None:
        outcome = memory.plan.outcome
        found["time"] = _apart(outcome.step_s, step_s)
        found["peak"] = _apart(outcome.peak_bytes, statistics.median(peaks[2:]))
    gc.collect()
    memory.close()
    return found


def _apart(one: float, other: float) -> float:
    """How many times as large the larger of two numbers is."""
    return max(one, other) / max(1e-12, min(one, other))


# --- the largest batch -----------------------------------------------------------------------------------


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


def _overhead() -> list[float]:
    """A step with hooks that move nothing over one without."""
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU())))
    x = torch.randn(256, 512)
    memory = HybridMemory(model, device_budget=2**40, host_budget=0)

    def step(is_hooked: bool) -> float:
        began_at = time.perf_counter()
        for _ in range(5):
            with memory.step() if is_hooked else contextlib.nullcontext():
                loss = model(x).sum()
            loss.backward()
            del loss
        return time.perf_counter() - began_at

    times = interleave({"hooked": lambda: step(True), "plain": lambda: step(False)}, 15)
    memory.close()
    return ratios(times["hooked"], times["plain"])
