"""What a step of LARS costs, and what it wins at a large batch."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from labkit.bench.harness import Report, interleave, ratios
from labkit.lab import large_batch
from labkit.optim.lars import Lars

_REPEATS = 31
_STEPS = 2  # of each measurement
_RATE, _MOMENTUM, _DECAY = 0.1, 0.9, 1e-4

# The 04_large_batch notebook, small: minutes instead of a quarter of an hour.
_STUDY = {
    "name": "bench-lars",
    "batch_sizes": [64, 1200],
    "num_epochs": 20,
    "warmup_epochs": 4.0,
    "sgd_rates": [0.1, 0.2, 0.5],
    "lars_rates": [1.0, 2.0, 5.0],
    "trust_coefficient": 0.02,
    "num_tuning_seeds": 2,
    "num_seeds": 5,
    "num_at_once": 1,
    "overrides": {"data.num_val": 597, "optimizer.weight_decay": 1e-4, "launch.is_tracked": False},
}


def measure(say: Callable[[str], None]) -> Report:
    """Measure all figures; about three minutes on two cores."""
    report = Report("lars")
    say("steps of several optimizers, in turn")
    _steps(report)
    say("accuracy at a large batch: a small 04_large_batch")
    _accuracy(report)
    return report


# --- step ------------------------------------------------------------------------------------------


def _steps(report: Report) -> None:
    """Each side has a network of its own; one thread, as of a worker that shares its node."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sides: dict[str, Callable[[], object]] = {
        "lars": Lars(_network(), _RATE, momentum=_MOMENTUM, weight_decay=_DECAY).step,
        "sgd": _sgd(0.0).step,
        "sgd_decay": _sgd(_DECAY).step,
        "memory": _in_place_addition(_network()),
    }
    peer = _peer(_network())
    if peer is not None:
        sides["peer"] = peer.step
    times = interleave({name: _timed(step) for name, step in sides.items()}, _REPEATS, warmup=3)
    torch.set_num_threads(num_threads)
    report.add("step_vs_sgd", ratios(times["lars"], times["sgd"]), "<= 1.6")
    report.add("step_vs_sgd_decay", ratios(times["lars"], times["sgd_decay"]))
    if peer is not None:
        report.add("vs_peer", ratios(times["peer"], times["lars"]), ">= 2")
    report.add("over_memory_bound", [value * 3 / 7 for value in ratios(times["lars"], times["memory"])])
    report.add("step_ms", [1e3 * seconds for seconds in times["lars"]])
    report.notes += [
        "one thread, 25.6 million parameters in the 161 tensors of ResNet-50; sgd: torch's with foreach and "
        "momentum, without weight decay (LARS has it); step_vs_sgd_decay: the same with it",
        "over_memory_bound: our time over that of seven passes over memory (two read for the norms; three "
        "read and two written for the update) at the bandwidth of an in-place addition over the same tensors",
    ]
    if peer is None:
        report.notes.append("vs_peer: not measured, pytorch-optimizer is missing; pip install -e '.[bench]'")


def _network() -> list[nn.Parameter]:
    """Parameters of the shapes of ResNet-50 (He et al., 2016), with gradients."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            kernels = [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            kernels += [(4 * width, width_in, 1, 1)] if block == 0 else []
            for kernel in kernels:
                shapes += [kernel, kernel[:1], kernel[:1]]
            width_in = 4 * width
    shapes += [(1000, 2048), (1000,)]
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)
    return parameters


def _sgd(weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(_network(), _RATE, momentum=_MOMENTUM, weight_decay=weight_decay, foreach=True)


def _peer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The LARS of pytorch-optimizer, with the same settings; None when it is not installed."""
    try:
        from pytorch_optimizer import LARS
    except ImportError:
        return None
    optimizer: torch.optim.Optimizer = LARS(parameters, lr=_RATE, momentum=_MOMENTUM, weight_decay=_DECAY)
    return optimizer


def _in_place_addition(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Reads two tensors and writes one: three passes, as cheap as memory allows."""
    weights = [parameter.detach() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return lambda: torch._foreach_add_(weights, gradients, alpha=0.0)


def _timed(step: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        began_at = time.perf_counter()
        for _ in range(_STEPS):
            step()
        return (time.perf_counter() - began_at) / _STEPS

    return once


# --- accuracy --------------------------------------------------------------------------------------------


def _accuracy(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        os.environ["LABKIT_RUNS"] = str(Path(folder) / "runs")
        study = large_batch.Study.from_parameters(_STUDY)
        result = study.compare(study.tune(say=lambda line: None), say=lambda line: None)
    report.add("accuracy_gap_large_batch", result.gaps("tuned"))
    report.add("accuracy_gap_large_batch_scaled", result.gaps("scaled"))
    report.notes.append(
        f"accuracy_gap_large_batch: accuracy of LARS minus SGD's at {result.batch_sizes[-1]} samples per "
        f"update and {result.num_epochs} epochs of digits, by seed, each rate tuned there; _scaled: the best "
        f"rate at {result.batch_sizes[0]}, scaled linearly"
    )
