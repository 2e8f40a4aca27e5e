"""Build the strategy that a configuration names."""

from collections.abc import Callable

import torch
from torch import nn

from labkit.cluster.placement import Placement
from labkit.comm import Communicator
from labkit.config import AllReduceConfig, HierarchicalConfig, LocalSgdConfig, ParameterServerConfig
from labkit.errors import ConfigError
from labkit.sync.allreduce import AllReduce
from labkit.sync.strategy import Strategy


def build_strategy(
    config: AllReduceConfig | HierarchicalConfig | ParameterServerConfig | LocalSgdConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    placement: Placement,
    *,
    clip_norm: float | None,
    clock: Callable[[], float],
) -> Strategy:
    """Build the strategy of one worker. All workers do so together.

    Args:
        config: Which strategy.
        model: Same structure on all workers.
        optimizer: Over the model's parameters.
        comm: The workers.
        placement: Where this worker runs.
        clip_norm: Largest norm of the globally averaged gradient.
        clock: Seconds at which the device's work so far is done.
    """
    if isinstance(config, AllReduceConfig):
        return AllReduce(model, optimizer, comm, config, clip_norm=clip_norm, clock=clock)
    raise ConfigError(f"sync.name must be a strategy that is built, got {config.name!r}. Use allreduce.")
