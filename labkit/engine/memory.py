"""Hybrid memory of a run, as its configuration asks for it."""

from torch import nn

from labkit.config import AdamWConfig, ExperimentConfig
from labkit.memory import HybridMemory


def build_memory(config: ExperimentConfig, model: nn.Module) -> HybridMemory | None:
    """Hooks for the forward passes of a run; None where nothing is to move.

    Raises:
        ConfigError: the budget is below what parameters and optimizer need, or host memory is not there.
    """
    memory = config.memory
    is_wanted = memory.device_budget is not None or memory.policy in ("offload", "recompute")
    if not is_wanted or memory.policy == "keep":
        return None
    host_budget = memory.host_budget if memory.host_budget is not None else memory.device_budget
    if memory.policy == "recompute":
        host_budget = 0
    return HybridMemory(
        model,
        device_budget=memory.device_budget,
        reserved_bytes=reserved_bytes(config, model),
        host_budget=host_budget or 0,
        tier=memory.tier,
        policy=memory.policy,
        window_bytes=memory.window,
    )


def reserved_bytes(config: ExperimentConfig, model: nn.Module) -> int:
    """Bytes of parameters, gradients, optimizer state and buffers of one worker with all of them."""
    optimizer = config.optimizer
    num_states = 2 if isinstance(optimizer, AdamWConfig) else int(optimizer.momentum > 0)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    whole = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return whole + trained * (1 + num_states)
