"""Build the optimizer that a configuration names."""

from collections.abc import Iterable

import torch

from labkit.config import OptimizerConfig, SgdConfig


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """torch's own optimizer with the configuration's settings."""
    if isinstance(config, SgdConfig):
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.is_nesterov,
        )
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
