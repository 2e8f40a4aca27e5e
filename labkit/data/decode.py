"""From what a file holds to what a model takes in: beside the computing, in threads or processes."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from io import BytesIO
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from labkit.errors import ConfigError, LabkitError
from labkit.processes import die_with_parent
from labkit.seeding import stream_seed

Pair = tuple[Any, Any]
Transform = Callable[[Any, Any, np.random.Generator | None], Pair]


def decode_image(data: bytes, size: tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    """An encoded image as colours; shape (3, height, width).

    Args:
        data: As the file holds it.
        size: Height and width: the image is scaled until it covers them, then cut at its edges evenly.

    Raises:
        ConfigError: it is no image.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data)) as image:
            colours = image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(f"image must be one that Pillow reads, got: {error}. Leave it out.") from None
    if size is not None and colours.size != (size[1], size[0]):
        colours = ImageOps.fit(colours, (size[1], size[0]))
    return np.ascontiguousarray(np.asarray(colours).transpose(2, 0, 1))


class Decoders:
    """Turns rows into inputs and targets.

    What is random depends on seed, epoch and row, not on who does it.
    """

    def __init__(
        self,
        seed: int,
        *,
        is_image: bool,
        image_size: tuple[int, int] | None = None,
        transform: Transform | None = None,
        count: int = 0,
        kind: Literal["threads", "processes"] = "threads",
        is_bad_skipped: bool = False,
    ) -> None:
        """Start them; `close` ends them.

        Args:
            seed: The experiment's.
            is_image: Inputs are encoded images.
            image_size: Height and width that they are brought to.
            transform: The user's own, after that.
            count: How many at once; 0: the calling thread.
            kind: Of them.
            is_bad_skipped: Leave images out that can't be decoded, instead of raising.
        """
        self._is_bad_skipped = is_bad_skipped
        self._seed, self._is_image, self._size, self._transform = seed, is_image, image_size, transform
        self._count = count
        self._pool: Executor | None = None
        if count and kind == "threads":
            self._pool = ThreadPoolExecutor(count, "labkit-decoder")
        elif count:
            context = get_context("fork")  # the transform may not be picklable
            self._pool = ProcessPoolExecutor(
                count, mp_context=context, initializer=_begin_process, initargs=(os.getpid(), self)
            )

    def __call__(self, epoch: int | None, rows: Sequence[int], inputs: Any, targets: Any) -> Pair:
        """Inputs and targets of a batch; each an array with the batch first.

        Args:
            epoch: Of the training; None in validation.
            rows: Where each stands in the shards; shape (n,).
            inputs: Encoded images or an array; shape (n, ...).
            targets: Shape (n, ...).

        Raises:
            ConfigError: an image can't be read, or transformed inputs have different shapes.
            LabkitError: the user's transform failed.
        """
        if not self._is_image and self._transform is None:
            return inputs, targets
        size = -(-len(rows) // self._count) if self._pool is not None else max(1, len(rows))
        cuts = range(0, len(rows), size)
        parts = [(epoch, rows[a : a + size], inputs[a : a + size], targets[a : a + size]) for a in cuts]
        if self._pool is None:
            done = [self.decode(*part) for part in parts]
        else:
            run = _decode_here if isinstance(self._pool, ProcessPoolExecutor) else self.decode
            done = [future.result() for future in [self._pool.submit(run, *part) for part in parts]]
        pairs = [pair for part in done for pair in part if pair is not None]
        if not pairs:
            return inputs[:0], targets[:0]
        try:
            return np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])
        except ValueError:
            shapes = sorted({np.shape(x) for x, _ in pairs})
            raise ConfigError(
                f"inputs of a batch must have one shape, got {shapes[0]} and {shapes[-1]}. Set "
                "data.image_size, or bring them to one shape in data.transform."
            ) from None

    def decode(self, epoch: int | None, rows: Sequence[int], inputs: Any, targets: Any) -> list[Pair | None]:
        """Some rows, one by one; None for what is left out."""
        return [self._one(epoch, int(row), x, y) for row, x, y in zip(rows, inputs, targets, strict=True)]

    def _one(self, epoch: int | None, row: int, value: Any, target: Any) -> Pair | None:
        if self._is_image:
            try:
                value = decode_image(value, self._size)
            except ConfigError as error:
                if self._is_bad_skipped:
                    return None
                raise ConfigError(f"row {row}: {error}") from None
        if self._transform is None:
            return value, target
        generator = None
        if epoch is not None:
            generator = np.random.Generator(np.random.Philox(stream_seed(self._seed, "augment", epoch, row)))
        try:
            changed, target = self._transform(value, target, generator)
        except Exception as error:
            raise LabkitError(
                f"data.transform failed at row {row}: {type(error).__name__}: {error}"
            ) from error
        return np.asarray(changed), np.asarray(target)

    def close(self) -> None:
        """End threads and processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


_own: Decoders | None = None


def _begin_process(parent_pid: int, decoders: Decoders) -> None:
    global _own
    die_with_parent(parent_pid)
    if "torch" in sys.modules:  # OpenMP's threads do not survive a fork: a transform must not ask for any
        sys.modules["torch"].set_num_threads(1)
    _own = decoders


def _decode_here(epoch: int | None, rows: Sequence[int], inputs: Any, targets: Any) -> list[Pair | None]:
    assert _own is not None
    return _own.decode(epoch, rows, inputs, targets)
