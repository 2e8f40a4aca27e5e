"""Activations in two memories: what a budget costs, what it frees, and what devices on one link do to it."""

from labkit.lab.activations._max_batch import MaxBatch, max_batch
from labkit.lab.activations._recorded import MemoryRun, read_memory
from labkit.lab.activations._study import Contention, Result, Study, record, what_if
from labkit.lab.activations._view import (
    contention,
    contention_table,
    plan_table,
    table,
    timeline,
    trade_off,
    transfers,
)

__all__ = [
    "Contention",
    "MaxBatch",
    "MemoryRun",
    "Result",
    "Study",
    "contention",
    "contention_table",
    "max_batch",
    "plan_table",
    "read_memory",
    "record",
    "table",
    "timeline",
    "trade_off",
    "transfers",
    "what_if",
]
