"""Models and data sets."""

from labkit.tasks.data import (
    Data,
    Losses,
    cross_entropy_per_sample,
    load_data,
)
from labkit.tasks.entry_point import load_entry_point
from labkit.tasks.models import Gpt, build_model
from labkit.tasks.samples import (
    Batch,
    DataInfo,
    DatasetSamples,
    Samples,
    StreamedSamples,
    TensorSamples,
)
from labkit.tasks.shards import ShardSamples

__all__ = [
    "Batch",
    "Data",
    "DataInfo",
    "DatasetSamples",
    "Gpt",
    "Losses",
    "Samples",
    "ShardSamples",
    "StreamedSamples",
    "TensorSamples",
    "build_model",
    "cross_entropy_per_sample",
    "load_data",
    "load_entry_point",
]
