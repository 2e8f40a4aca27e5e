"""The order of the data: a pure function of (seed, epoch, cursor) that no cluster can change."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from labkit.cluster.partition import split_batch
from labkit.errors import ConfigError
from labkit.seeding import stream_seed

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplerState:
    """All that the order depends on, beside the seed.

    Attributes:
        epoch: Passes done, counted from 0.
        cursor: Samples of this epoch that are done.
    """

    epoch: int = 0
    cursor: int = 0

    def to_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)


class Order(Protocol):
    """The order of the samples in each epoch: every one exactly once."""

    num_samples: int

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        """Samples at some positions of an epoch's order; shape (stop - start,)."""
        ...

    def arrange(self, epoch: int, batch: Indices) -> Indices:
        """The same samples, those together that are best read by one worker; shape (n,)."""
        ...


class FullShuffle:
    """Every order is equally likely; for samples that can be read one by one."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._epoch = -1
        self._order: Indices = np.empty(0, np.int64)

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        """Samples at some positions of an epoch's order; shape (stop - start,)."""
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(stream_seed(self._seed, "sampler", epoch)))
            self._order, self._epoch = generator.permutation(self.num_samples), epoch
        return self._order[start:stop]

    def arrange(self, epoch: int, batch: Indices) -> Indices:
        """As it is: no sample is nearer to another one."""
        return batch


class GlobalSampler:
    """Hands out global batches: every sample exactly once per epoch, in an order of the seed alone.

    The state is a position in samples, not in steps or per-worker batches, so a run goes on exactly
    with other workers and other shares (the idea of elastic determinism in StreamingDataset, here
    for unequal batches).
    """

    def __init__(self, order: Order, global_batch_size: int) -> None:
        if order.num_samples < 1:
            raise ConfigError(
                f"training data must have at least 1 sample, got {order.num_samples}. Check the data."
            )
        self.num_samples = order.num_samples
        self.global_batch_size = global_batch_size
        self._order = order

    def part(self, epoch: int, start: int, stop: int) -> Indices:
        """What is trained on together, at some positions of an epoch's order; shape (stop - start,)."""
        return self._order.arrange(epoch, self._order.slice(epoch, start, stop))

    def batch(self, state: SamplerState) -> tuple[Indices, SamplerState]:
        """The global batch at a position, and the position after it."""
        end = min(state.cursor + self.global_batch_size, self.num_samples)
        batch = self.part(state.epoch, state.cursor, end)
        after = SamplerState(state.epoch, end)
        return batch, SamplerState(state.epoch + 1, 0) if end == self.num_samples else after


def own_part(batch: Indices, local_batch_sizes: Sequence[int], rank: int) -> Indices:
    """A worker's contiguous part of a global batch, proportional to its local batch size.

    Args:
        batch: Sample indices; shape (n,), n at most the global batch size.
        local_batch_sizes: Of all workers; shape (W,).
        rank: Whose part.
    """
    sizes = split_batch(len(batch), local_batch_sizes)
    start = sum(sizes[:rank])
    return batch[start : start + sizes[rank]]


def even_extent(num_samples: int, rank: int, world_size: int) -> range:
    """A worker's contiguous part of an evaluation set: balanced, each sample once."""
    return range(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)
