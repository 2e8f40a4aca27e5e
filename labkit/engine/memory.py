"""Hybrid memory of a run, as its configuration asks for it, on the link that its cluster has."""

import torch
from torch import nn

from labkit.cluster.placement import Placement
from labkit.config import AdamWConfig, ExperimentConfig
from labkit.engine.uplinks import OwnUplink, make_adapter, uplink_of
from labkit.memory import HybridMemory, Link
from labkit.runfolder import RunFolder


def build_memory(
    config: ExperimentConfig,
    model: nn.Module,
    placement: Placement,
    device: torch.device,
    folder: RunFolder,
) -> HybridMemory | None:
    """Hooks for the forward passes of a run; None where nothing is to move.

    Raises:
        ConfigError: the budget is below what parameters and optimizer need, or the tier is no folder.
    """
    memory = config.memory
    is_wanted = memory.device_budget is not None or memory.policy in ("offload", "recompute")
    if not is_wanted or memory.policy == "keep":
        return None
    host_budget = memory.host_budget if memory.host_budget is not None else memory.device_budget
    if memory.policy == "recompute":
        host_budget = 0
    uplink = uplink_of(config.cluster, placement, device)
    return HybridMemory(
        model,
        device_budget=memory.device_budget,
        reserved_bytes=reserved_bytes(config, model),
        host_budget=host_budget or 0,
        num_sharing=placement.local_world_size,
        tier=memory.tier,
        policy=memory.policy,
        window_bytes=memory.window,
        link=_link(config, uplink),
        gradient_bytes=_gradient_bytes(config, model) if uplink.carries_gradients else 0,
        adapter=make_adapter(uplink, placement, device, folder, uplink.ways_in_turns),
    )


def _link(config: ExperimentConfig, uplink: OwnUplink) -> Link | None:
    """Rates to plan with: as asked for, else this worker's share of a known uplink, else none yet."""
    share = None
    if uplink.known is not None:
        share = uplink.known.in_turns().share(len(uplink.local_ranks))
    out, back = config.memory.link_out, config.memory.link_in
    if out is None and back is None:
        return share
    if share is None:
        share = Link(float(out or back or 1), float(back or out or 1))
    return Link(float(out or share.out_bytes_per_s), float(back or share.in_bytes_per_s), share.latency_s)


def _gradient_bytes(config: ExperimentConfig, model: nn.Module) -> int:
    """Each way, for an all-reduce in a ring."""
    num_workers = config.cluster.num_workers
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return round(2 * (num_workers - 1) / num_workers * trained)


def reserved_bytes(config: ExperimentConfig, model: nn.Module) -> int:
    """Bytes of parameters, gradients, optimizer state and buffers of one worker with all of them."""
    optimizer = config.optimizer
    num_states = 2 if isinstance(optimizer, AdamWConfig) else int(optimizer.momentum > 0)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    whole = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return whole + trained * (1 + num_states)
