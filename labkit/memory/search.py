"""The largest batch that fits, on which all workers agree."""

import gc
from collections.abc import Callable

import torch

from labkit.errors import ConfigError
from labkit.memory.planner import Infeasible


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had too little memory, of all faults that look alike."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, Infeasible)):
        return True
    text = str(error).lower()
    return any(words in text for words in ("out of memory", "not enough memory", "can't allocate memory"))


def fits_in_memory(attempt: Callable[[], object], clear: Callable[[], object] = lambda: None) -> bool:
    """Whether something runs in the memory that there is; other faults pass through.

    Args:
        attempt: A whole step, with its backward pass and its update: the first update makes the optimizer's
            state.
        clear: Lets go of gradients and the like after a failure.
    """
    try:
        attempt()
    except (RuntimeError, MemoryError, Infeasible) as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold what filled the memory
        is_there = False
    else:
        is_there = True
    if not is_there:
        clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return is_there


def find_max_batch(
    fits: Callable[[int], bool],
    *,
    most: int,
    vote: Callable[[bool], bool] = lambda is_good: is_good,
    resolution: float = 0.0,
) -> int:
    """Double until it fails, then halve the gap.

    Every worker calls it together and comes to the same answer: a size counts as good when it is for all. No
    worker fails alone inside a collective, since none takes place in an attempt.

    Args:
        fits: Tries a batch size on this worker, outside any collective.
        most: No larger size is tried.
        vote: Whether all workers say yes, known to all of them; it raises where one of them is gone.
        resolution: The search ends when the gap is this part of the answer.

    Returns:
        The largest size that fits everywhere; 0 when none does.

    Raises:
        ConfigError: `most` is below 1.
    """
    if most < 1:
        raise ConfigError(f"most must be at least 1, got {most}.")
    good, size = 0, 1
    while vote(fits(size)):
        good = size
        if size == most:
            return good
        size = min(2 * size, most)
    bad = size
    while bad - good > max(1, resolution * good):
        middle = (good + bad) // 2
        if vote(fits(middle)):
            good = middle
        else:
            bad = middle
    return good
