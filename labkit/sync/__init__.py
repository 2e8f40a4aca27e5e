"""Strategies: how workers agree on one update per global batch. One strategy, one file."""

from labkit.sync.allreduce import AllReduce
from labkit.sync.batch_norm import RunningStatistics, SynchronizedBatchNorm, synchronize_batch_norm
from labkit.sync.build import build_strategy
from labkit.sync.strategy import StepTotals, Strategy

__all__ = [
    "AllReduce",
    "RunningStatistics",
    "StepTotals",
    "Strategy",
    "build_strategy",
    "SynchronizedBatchNorm",
    "synchronize_batch_norm",
]
