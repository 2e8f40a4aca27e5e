"""Models and data sets."""

from labkit.tasks.data import (
    Batch,
    Data,
    DataInfo,
    DatasetSamples,
    Losses,
    Samples,
    TensorSamples,
    cross_entropy_per_sample,
    load_data,
)
from labkit.tasks.entry_point import load_entry_point
from labkit.tasks.models import Gpt, build_model

__all__ = [
    "Batch",
    "Data",
    "DataInfo",
    "DatasetSamples",
    "Gpt",
    "Losses",
    "Samples",
    "TensorSamples",
    "build_model",
    "cross_entropy_per_sample",
    "load_data",
    "load_entry_point",
]
