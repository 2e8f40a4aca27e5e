"""The order of the data: a pure function of (seed, epoch, cursor) that no cluster can change."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

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


class GlobalSampler:
    """Hands out global batches: every sample exactly once per epoch, in an order of the seed alone.

    The state is a position in samples, not in steps or per-worker batches, so a run goes on exactly
    with other workers and other shares (the idea of elastic determinism in StreamingDataset, here
    for unequal batches).
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        if num_samples < 1:
            raise ConfigError(
                f"training data must have at least 1 sample, got {num_samples}. Check the data."
            )
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self._seed = seed
        self._epoch = -1
        self._order: Indices = np.empty(0, np.int64)

    def order(self, epoch: int) -> Indices:
        """The whole order of an epoch; shape (num_samples,)."""
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(stream_seed(self._seed, "sampler", epoch)))
            self._order, self._epoch = generator.permutation(self.num_samples), epoch
        return self._order

    def batch(self, state: SamplerState) -> tuple[Indices, SamplerState]:
        """The global batch at a position, and the position after it."""
        order = self.order(state.epoch)
        end = min(state.cursor + self.global_batch_size, self.num_samples)
        batch = order[state.cursor : end]
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
