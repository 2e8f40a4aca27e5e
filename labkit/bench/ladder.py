"""From the native strategy to ours, one part at a time, on four emulated nodes of four workers."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from labkit.bench.emulated import check_links
from labkit.bench.harness import Report
from labkit.bench.points import measured_point
from labkit.lab.scaling import (
    PARTS,
    Climb,
    Ladder,
    ladder_remarks,
    record_climb,
)
from labkit.launch import warm_up
from labkit.launch.emulation import build

_MIB = 2**20


def measure(say: Callable[[str], None]) -> Report:
    """Measure all rungs, and write them down for the notebook; about five minutes on two cores.

    Raises:
        ConfigError: nodes can't be emulated here.
        LabkitError: a link is not what it is said to be.
    """
    warm_up()
    plan = Ladder.default()
    with build(plan.base.cluster) as network:
        check_links(network, say)
    growth = [_compute_growth(plan) for _ in range(5)]
    plan = replace(plan, compute_growth=max(1.0, sorted(growth)[len(growth) // 2]))
    climb = plan.climb(say, lambda config: measured_point(config, say))
    say(f"written to {record_climb(climb, plan.base.name)}")
    report = _report(climb)
    report.add("compute_growth", growth)
    return report


def _compute_growth(plan: Ladder, repeats: int = 40) -> float:
    """How much longer a worker's forward and backward pass takes with the large batch, on one core."""
    sizes = [size // plan.base.cluster.num_workers for size in (plan.batch_size, plan.large_batch_size)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        widths = [64, *plan.base.model.hidden_sizes, 10]  # type: ignore[union-attr]
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
        model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        inputs = [torch.randn(size, 64) for size in sizes]
        times: list[list[float]] = [[], []]
        for _ in range(repeats):
            for index, batch in enumerate(inputs):
                began_at = time.perf_counter()
                model(batch).square().mean().backward()
                times[index].append(time.perf_counter() - began_at)
    finally:
        torch.set_num_threads(num_threads)
    return min(times[1]) / min(times[0])  # the rest of the machine only ever adds


def _report(climb: Climb) -> Report:
    report = Report("ladder")
    native = climb.rungs["native"]
    for name, point in climb.rungs.items():
        per_s = [point.batch_size / seconds for seconds in point.block_step_s]
        report.add(f"samples_per_s_{name}", per_s)
        if name != "native":
            aim = ">= 20" if name == "large_batch" else ""
            report.add(f"throughput_vs_native_{name}", [rate / native.samples_per_s for rate in per_s], aim)
        report.add(f"wire_bytes_per_sample_{name}", [climb.bytes_per_sample(name)])
        report.add(f"memory_per_node_mib_{name}", [climb.memory_bytes(name) / _MIB])
        report.add(f"accuracy_{name}", [point.accuracy or 0.0])
        report.notes.append(f"{name} ({PARTS[name]}) gives: {climb.gives(name)}")
        if point.doubts:
            report.notes.append(f"{name} is doubtful: {'; '.join(point.doubts)}")
    report.notes += ladder_remarks(climb)
    report.notes.append(
        "samples_per_s: medians of five blocks of one run's steps; memory: middle node, beyond what the same "
        "strategy holds with next to no model; wire bytes: as counted on all links"
    )
    return report
