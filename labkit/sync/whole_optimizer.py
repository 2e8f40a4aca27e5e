"""One update of a whole model by its optimizer."""

from collections.abc import Iterable

import torch
from torch import nn


def update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    clip_norm: float | None,
) -> None:
    """Clip the gradients by their common norm, set the learning rate, step.

    Args:
        optimizer: Over the parameters.
        parameters: With averaged gradients.
        learning_rate: Of this step, for every group.
        clip_norm: Largest norm; none: as it is.
    """
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
