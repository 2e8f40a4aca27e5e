"""What a data set gives: samples by position, a batch at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from labkit.data.sampler import Indices, Order
from labkit.data.shards import ReadCounts

Batch = tuple[Tensor, Tensor]


class Samples(Protocol):
    """Random access to samples by position."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Inputs and targets of some samples; shapes (b, ...), (b, ...)."""
        ...


@dataclass(frozen=True)
class TensorSamples:
    """Samples that lie in memory; inputs (n, ...), targets (n, ...)."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        return self.inputs[chosen], self.targets[chosen]


class DatasetSamples:
    """Any map-style data set, `dataset[i] -> (input, target)`, stacked into batches."""

    def __init__(self, dataset: "torch.utils.data.Dataset[tuple[Tensor, Tensor]]") -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batch(self, indices: Sequence[int]) -> Batch:
        pairs = [self._dataset[int(index)] for index in indices] or [self._dataset[0]]
        inputs, targets = (
            torch.stack([torch.as_tensor(part) for part in side]) for side in zip(*pairs, strict=True)
        )
        return inputs[: len(indices)], targets[: len(indices)]


@dataclass(frozen=True)
class DataInfo:
    """What a model must know of its data.

    Attributes:
        input_shape: Shape of one input, without the batch dimension.
        num_classes: Values of a target.
    """

    input_shape: tuple[int, ...]
    num_classes: int


@runtime_checkable
class StreamedSamples(Protocol):
    """Samples that are best read in an order of their own and ahead of time."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """As in validation."""
        ...

    def batch_at(self, epoch: int | None, rows: Indices) -> Batch:
        """As in an epoch of training; fewer than asked for where bad ones are skipped."""
        ...

    def order(self, seed: int) -> Order:
        """The order of training."""
        ...

    def extents_of(self, rows: Indices) -> list[int]:
        """What must be read for some rows, in order."""
        ...

    def ahead(self, extents: Iterable[int]) -> None:
        """What will be needed next; returns at once."""
        ...

    @property
    def num_ahead(self) -> int:
        """Extents that may be asked for ahead."""
        ...

    @property
    def num_together(self) -> int:
        """Rows that are best asked for at once: several small batches."""
        ...

    @property
    def counts(self) -> ReadCounts:
        """What was read so far."""
        ...

    def close(self) -> None:
        """End threads and processes."""
        ...
