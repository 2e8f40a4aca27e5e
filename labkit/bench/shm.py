"""Summing gradients inside a node: shared memory against gloo, and against the memory itself."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.bench.harness import Report, interleave, ratios
from labkit.comm import Arena, Communicator, Counters, padded_bytes
from labkit.engine.quota import num_cores
from labkit.launch.forked import run_workers
from labkit.sync.node_reduce import NodeReducer, cut

_NUM_WORKERS = 4
_SIZES = {"1mb": 262_144, "40mb": 10_000_000, "240mb": 60_000_000}
_REPEATS = 7


def measure(say: Callable[[str], None]) -> Report:
    """Measure all sizes; about a minute on two cores."""
    report = Report("shm")
    cores = num_cores()
    for num_workers in sorted({_NUM_WORKERS, min(_NUM_WORKERS, cores)} - {1}, reverse=True):
        suffix = "" if num_workers == _NUM_WORKERS else f"_{num_workers}_workers"
        for name, num in _SIZES.items():
            say(f"{num:,} floats over {num_workers} workers")
            times = run_workers(_times, num_workers, num, timeout_s=300)[0]
            report.add(f"vs_gloo_{name}{suffix}", ratios(times["gloo"], times["ours"]), ">= 5")
            report.add(f"over_memcpy_{name}{suffix}", ratios(times["ours"], times["memory"]), "<= 1.3")
    report.notes.append(
        "over_memcpy: our time over that of the unavoidable traffic (each row read once, the sum written "
        "once) at the bandwidth of a copy by all workers at once, measured in the same round"
    )
    if cores < _NUM_WORKERS:
        report.notes.append(
            f"{_NUM_WORKERS} workers share {cores} cores: their figures include waiting for a core, "
            f"which a copy that waits for nobody does not. With {cores} workers nobody does."
        )
    return report


def _times(comm: Communicator, num: int) -> dict[str, list[float]]:
    """Seconds of each side, in turn, the slowest worker's."""
    num_workers = comm.world_size
    arena = Arena(comm, padded_bytes(num_workers * num, torch.float32) + 2 * Counters.bytes_for(num_workers))
    rows = arena.tensor(num_workers * num, torch.float32).view(num_workers, num)
    names = [f"worker {rank}" for rank in range(num_workers)]
    ready, done = (Counters(arena, comm, names, 60.0) for _ in range(2))
    senders = comm.groups([[rank] for rank in range(num_workers)])
    chunks = cut(num, -(-num // num_workers), num_workers)
    reducer = NodeReducer(rows, chunks, senders, ready, done, wire=torch.float32)
    own, other = torch.ones(num), torch.empty(num // num_workers)
    rows[comm.rank].fill_(1.0)

    def ours() -> None:
        reducer.fill(num)
        reducer.finish()

    def copy() -> None:
        other.copy_(own[: len(other)])

    inner = max(1, 2_000_000 // num)

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            comm.barrier()
            began_at = time.perf_counter()
            for _ in range(inner):
                work()
            took = torch.tensor([time.perf_counter() - began_at])
            return max(float(value) for value in comm.gather(took)) / inner

        return once

    sides = {"ours": timed(ours), "gloo": timed(lambda: dist.all_reduce(own)), "copy": timed(copy)}
    times = interleave(sides, _REPEATS, warmup=2)
    # The copies move 2 * num elements in all; the sum must move (workers + 1) * num.
    times["memory"] = [value * (num_workers + 1) / 2 for value in times["copy"]]
    return times
