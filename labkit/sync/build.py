"""Build the strategy that a configuration names."""

from collections.abc import Callable, Sequence

from torch import nn

from labkit.cluster.placement import Placement
from labkit.comm import Communicator
from labkit.config import (
    AllReduceConfig,
    ExperimentConfig,
    HierarchicalConfig,
    LocalSgdConfig,
    ParameterServerConfig,
)
from labkit.optim.build import build_optimizer
from labkit.sync.allreduce import AllReduce
from labkit.sync.hierarchical import Hierarchical
from labkit.sync.local_sgd import LocalSgd
from labkit.sync.parameter_server import ParameterServer
from labkit.sync.sharded import ShardedHierarchical
from labkit.sync.strategy import Strategy


def build_strategy(
    config: ExperimentConfig,
    model: nn.Module,
    comm: Communicator,
    places: Sequence[Placement],
    *,
    clock: Callable[[], float],
    say: Callable[[str], None] = lambda text: None,
) -> Strategy:
    """Build the strategy of one worker, and the optimizer that it owns. All workers do so together.

    Args:
        config: The experiment.
        model: Same structure on all workers.
        comm: The workers.
        places: Where every worker runs.
        clock: Seconds at which the device's work so far is done.
        say: Told what was chosen, and why.
    """
    sync, clip_norm = config.sync, config.engine.clip_norm
    is_on_device = any(parameter.is_cuda for parameter in model.parameters())
    if isinstance(sync, HierarchicalConfig) and is_on_device:
        return ShardedHierarchical(
            model, config.optimizer, comm, sync, places, clip_norm=clip_norm, clock=clock
        )
    if isinstance(sync, HierarchicalConfig):
        return Hierarchical(
            model,
            config.optimizer,
            comm,
            sync,
            places,
            timeout_s=config.launch.comm_timeout_s,
            clip_norm=clip_norm,
            clock=clock,
            say=say,
        )
    optimizer = build_optimizer(config.optimizer, model.parameters())
    if isinstance(sync, ParameterServerConfig):
        return ParameterServer(model, optimizer, comm, clip_norm=clip_norm, clock=clock)
    if isinstance(sync, LocalSgdConfig):
        return LocalSgd(model, optimizer, comm, sync, places, clip_norm=clip_norm, clock=clock)
    assert isinstance(sync, AllReduceConfig)  # the asynchronous ones are no lock-step strategies
    return AllReduce(model, optimizer, comm, sync, clip_norm=clip_norm, clock=clock)
