"""Benchmarks: each proves one claim with the peer, our way and the limit in one run."""

import importlib
from collections.abc import Callable

from labkit.bench.harness import Report
from labkit.errors import ConfigError, did_you_mean

BENCHMARKS = {
    "hybrid": "groups and parameter servers on unlike devices: throughput, accuracy, bytes",
    "input": "shards read cold and warm: against a plain read, memory, random reads and other loaders",
    "lars": "the cost of a step of LARS against SGD and another LARS; accuracy at a large batch",
    "ladder": "from the flat parameter server to two levels, one part at a time, on an emulated 4x4 cluster",
    "memory": "activations that move: speed kept, prefetching, four workers on one link, larger batches",
    "memory-cuda": "the same on a GPU, against torch's save_on_cpu and full checkpointing",
    "overhead": "what a run costs beside its training: start, events, tracking, all-reduce against DDP",
    "partition": "a plan for unlike devices against an equal split and against all devices' own speeds",
    "server": "the asynchronous server's transport on an emulated link: against the wire, gloo and plain TCP",
    "shm": "gradients summed inside a node: shared memory against gloo and against the memory itself",
    "sync": "two-level synchronisation on an emulated 4x4 cluster: against the wire, gloo, DDP, a server",
}

__all__ = ["BENCHMARKS", "Report", "run_benchmark"]


def run_benchmark(name: str, say: Callable[[str], None]) -> Report:
    """Run a benchmark.

    Args:
        name: One of `BENCHMARKS`.
        say: Called with a line of progress now and then.

    Raises:
        ConfigError: there is no such benchmark.
    """
    if name not in BENCHMARKS:
        raise ConfigError(
            f"benchmark must be one of {', '.join(BENCHMARKS)}, got {name!r}. "
            f"{did_you_mean(name, BENCHMARKS)}"
        )
    report: Report = importlib.import_module(f"labkit.bench.{name.replace('-', '_')}").measure(say)
    return report
