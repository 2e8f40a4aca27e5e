"""Summing gradients inside a node: shared memory against gloo, and against the memory itself."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.bench.harness import Report, interleave, ratios
from labkit.comm import Arena, Communicator, Counters, padded_bytes
from labkit.launch.forked import run_workers
from labkit.sync.node_reduce import NodeReducer, cut

_NUM_WORKERS = 4
_SIZES = {"1mb": 262_144, "40mb": 10_000_000, "240mb": 60_000_000}
_REPEATS = 7


def measure(say: Callable[[str], None]) -> Report:
    """Measure all sizes; about a minute on two cores."""
    report = Report("shm")
    for name, num in _SIZES.items():
        say(f"{num:,} floats over {_NUM_WORKERS} workers")
        times = run_workers(_times, _NUM_WORKERS, num, timeout_s=300)[0]
        report.add(f"vs_gloo_{name}", ratios(times["gloo"], times["ours"]), ">= 5")
        report.add(f"over_memcpy_{name}", ratios(times["ours"], times["memory"]), "<= 1.3")
    report.notes.append(
        "over_memcpy: our time over that of the unavoidable traffic (each row read once, the sum written "
        "once) at the bandwidth of a copy by all workers at once, measured in the same round"
    )
    return report


def _times(comm: Communicator, num: int) -> dict[str, list[float]]:
    """Seconds of each side, in turn, the slowest worker's."""
    arena = Arena(
        comm, padded_bytes(_NUM_WORKERS * num, torch.float32) + 2 * Counters.bytes_for(_NUM_WORKERS)
    )
    rows = arena.tensor(_NUM_WORKERS * num, torch.float32).view(_NUM_WORKERS, num)
    names = [f"worker {rank}" for rank in range(_NUM_WORKERS)]
    ready, done = (Counters(arena, comm, names, 60.0) for _ in range(2))
    senders = comm.groups([[rank] for rank in range(_NUM_WORKERS)])
    chunks = cut(num, -(-num // _NUM_WORKERS), _NUM_WORKERS)
    reducer = NodeReducer(rows, chunks, senders, ready, done, wire=torch.float32)
    own, other = torch.ones(num), torch.empty(num // _NUM_WORKERS)
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
    times["memory"] = [value * (_NUM_WORKERS + 1) / 2 for value in times["copy"]]
    return times
