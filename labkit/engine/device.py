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


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Bring a batch to where it is computed; inputs that are numbers with a fraction in the model's type."""
    inputs, targets = batch
    own = dtype if inputs.is_floating_point() else None
    return inputs.to(device, own, non_blocking=True), targets.to(device, non_blocking=True)
