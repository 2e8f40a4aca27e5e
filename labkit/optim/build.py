"""Build the optimizer that a configuration names."""

from collections.abc import Iterable

import torch

from labkit.config import LarsConfig, OptimizerConfig, SgdConfig
from labkit.optim.lars import Lars


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """torch's own optimizer, or `Lars`, with the configuration's settings."""
    if isinstance(config, SgdConfig):
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.is_nesterov,
        )
    if isinstance(config, LarsConfig):
        return Lars(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            trust_coefficient=config.trust_coefficient,
            is_small_decayed=config.is_small_decayed,
            is_small_adapted=config.is_small_adapted,
        )
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
