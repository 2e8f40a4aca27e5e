"""Pictures made of noise and a pattern for each class: data of any size, to measure input with."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Pictures:
    """Colours (uint8) and classes; rows stand by class, as files in a folder for each class do."""

    def __init__(self, num_rows: int, shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> None:
        """Draw the patterns.

        Args:
            num_rows: How many.
            shape: Of one; channels, height, width.
            num_classes: Of the targets.
        """
        generator = np.random.default_rng(0)
        self._num_rows, self._num_classes = num_rows, num_classes
        self._patterns = generator.integers(64, 192, (num_classes, *shape))
        self._noise = generator.integers(-64, 64, (509, *shape))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> tuple[npt.NDArray[np.uint8], int]:
        label = row * self._num_classes // self._num_rows
        return (self._patterns[label] + self._noise[row % len(self._noise)]).astype(np.uint8), label


def build(num_rows: int = 20_000, shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> Pictures:
    """For `labkit shards write labkit.tasks.pictures:build DIR`."""
    return Pictures(num_rows, tuple(shape), num_classes)
