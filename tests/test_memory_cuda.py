"""Hybrid memory on a GPU: streams, events, page-locked memory, several processes on one link."""

import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_memory import MODELS, _assert_same, _deep
from torch import Tensor, nn

from labkit.launch.forked import run_workers
from labkit.memory import HybridMemory, Link
from labkit.memory.adapter import CudaAdapter, TurnsCudaAdapter
from labkit.memory.arena import HostArena
from labkit.memory.turns import LinkState, make_state

pytestmark = pytest.mark.gpu
MIB = 2**20
FAST = Link(1e10, 1e10)


def _device() -> torch.device:
    return torch.device("cuda", 0)


class PoisonCudaAdapter(CudaAdapter):
    """Copies late: each waits on its stream, and what it writes is NaN until then."""

    def _copy(self, direction: str, source: Tensor, target: Tensor, after: Any) -> Any:
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.fill_(255)
            torch.cuda._sleep(2_000_000)
        return super()._copy(direction, source, target, after)


def _train(
    model: nn.Module, make: Callable[[], Tensor], memory: HybridMemory | None, steps: int = 5
) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    found = []
    for _ in range(steps):
        x = make().to(_device())
        optimizer.zero_grad()
        if memory is None:
            y = model(x)
        else:
            with memory.step():
                y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        del y, loss
    return found


@pytest.mark.parametrize("adapter", [CudaAdapter, PoisonCudaAdapter])
@pytest.mark.parametrize("name", ["mlp", "conv net", "gpt", "blocks", "custom"])
def test_every_number_is_the_same_as_without(name: str, adapter: type[CudaAdapter]) -> None:
    torch.backends.cudnn.deterministic = True
    build, make = MODELS[name]
    torch.manual_seed(0)
    plain = build().to(_device())
    moved = copy.deepcopy(plain)
    wanted = _train(plain, make, None)
    memory = HybridMemory(
        moved, host_budget=64 * MIB, policy="offload", min_bytes=64, link=FAST, adapter=adapter(_device())
    )
    _assert_same(_train(moved, make, memory), wanted)
    assert memory.totals.moved_bytes > 0 and memory.totals.num_replans == 0
    gc.collect()
    memory.close()


def test_memory_really_goes_while_the_forward_pass_goes_on() -> None:
    model = _deep(1024).to(_device())
    x = torch.randn(8192, 1024, device=_device())
    peaks = {}
    for policy in ("keep", "offload"):
        memory = HybridMemory(model, host_budget=1024 * MIB, policy=policy, window_bytes=64 * MIB, link=FAST)
        for _ in range(4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with memory.step():
                y = model(x).sum()
            y.backward()
            del y
            peaks[policy] = torch.cuda.max_memory_allocated() - before
        gc.collect()
        memory.close()
    assert peaks["offload"] < 0.75 * peaks["keep"]


def test_page_locked_memory_takes_what_was_asked_for() -> None:
    # pytorch #95823: 2.0832 GiB became 4 GiB.
    import psutil

    size = int(2.0832 * 2**30)
    before = psutil.Process().memory_info().rss
    arena = HostArena(size, "pinned")
    part = arena.take(MIB)
    assert part is not None and part.is_pinned()
    assert psutil.Process().memory_info().rss - before < 1.01 * size + 64 * MIB
    arena.give_back(part)
    arena.close()


def test_the_stream_that_computes_is_asked_for_each_time() -> None:
    # torchtitan #2581, TRL #7195: a stream that was kept made the wait one for nothing.
    model = _deep(512).to(_device())
    x = torch.randn(2048, 512, device=_device())
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    memory = HybridMemory(
        model, host_budget=256 * MIB, policy="offload", link=FAST, adapter=PoisonCudaAdapter(_device())
    )
    for step in range(4):
        model.zero_grad()
        stream = torch.cuda.Stream() if step % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with memory.step():
                y = model(x).sum()
            y.backward()
            del y
        torch.cuda.current_stream().wait_stream(stream)
        _assert_same([p.grad for p in model.parameters() if p.grad is not None], wanted)
    torch.cuda.synchronize()
    gc.collect()
    memory.close()


def test_copies_do_not_hold_the_host_up() -> None:
    adapter = CudaAdapter(_device())
    arena = HostArena(512 * MIB, "pinned")
    host = arena.take(256 * MIB)
    assert host is not None
    source = torch.zeros(256 * MIB, dtype=torch.uint8, device=_device())
    torch.cuda.synchronize()
    began_at = time.perf_counter()
    copy_out = adapter.copy_out(source, host)
    asked_s = time.perf_counter() - began_at
    while not copy_out.is_done():
        pass
    done_s = time.perf_counter() - began_at
    assert asked_s < 0.3 * done_s and adapter.rates()["out"] > 1e9
    arena.give_back(host)
    adapter.close()
    arena.close()


def _copy_on_one_gpu(comm: Any, fd: int, is_in_turns: bool) -> float:
    """Bytes a second of one process's copies out, beside those of others."""
    torch.cuda.init()
    state = LinkState(os.dup(fd), comm.rank)
    adapter = TurnsCudaAdapter(_device(), state, ("out", "in") if is_in_turns else ())
    arena = HostArena(256 * MIB, "pinned")
    host = arena.take(128 * MIB)
    assert host is not None
    source = torch.full((128 * MIB,), comm.rank + 1, dtype=torch.uint8, device=_device())
    comm.barrier()
    began_at = time.perf_counter()
    for _ in range(8):
        adapter.copy_out(source, host).wait()
    rate = 8 * source.numel() / (time.perf_counter() - began_at)
    assert bool((host == comm.rank + 1).all())
    arena.give_back(host)
    adapter.close()
    arena.close()
    return rate


@pytest.mark.parametrize("is_in_turns", [False, True])
def test_processes_on_one_gpu_share_its_link(is_in_turns: bool) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA does not survive a fork: run this test alone (pytest -k share_its_link)")
    fd = make_state()
    rates = run_workers(_copy_on_one_gpu, 2, fd, is_in_turns)
    os.close(fd)
    assert max(rates) < 2 * min(rates)
