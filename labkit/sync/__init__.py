"""Strategies: how workers agree on one update per global batch. One strategy, one file."""

from labkit.sync.allreduce import AllReduce
from labkit.sync.batch_norm import RunningStatistics, SynchronizedBatchNorm, synchronize_batch_norm
from labkit.sync.build import build_strategy
from labkit.sync.hierarchical import Hierarchical
from labkit.sync.local_sgd import LocalSgd
from labkit.sync.parameter_server import ParameterServer
from labkit.sync.sharded import ShardedHierarchical
from labkit.sync.strategy import StepTotals, Strategy

__all__ = [
    "AllReduce",
    "Hierarchical",
    "LocalSgd",
    "ParameterServer",
    "RunningStatistics",
    "ShardedHierarchical",
    "StepTotals",
    "Strategy",
    "SynchronizedBatchNorm",
    "build_strategy",
    "synchronize_batch_norm",
]
