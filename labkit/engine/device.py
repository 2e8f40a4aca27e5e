"""What training and probing both do with a device."""

import time
from collections.abc import Callable

import torch

from labkit.tasks import Batch


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds from some point on, read when all work given to the device so far is done."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return clock


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """Bring a batch to where it is computed, inputs in the model's type.

    Colours (uint8) travel as they are and become numbers from 0 to 1 there; other whole numbers stay. Without
    a type all stay as they are.
    """
    inputs, targets = batch
    own = dtype if inputs.is_floating_point() else None
    there = inputs.to(device, own, non_blocking=True)
    if dtype is not None and inputs.dtype == torch.uint8:
        there = there.to(dtype).div_(255)
    return there, targets.to(device, non_blocking=True)
