"""Two-level synchronisation on four emulated nodes of four workers, joined by links of 1 Gbit/s."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.emulated import check_links, measured, run_emulated
from labkit.bench.harness import Report, interleave, ratios
from labkit.cluster.cost import PAYLOAD_SHARE
from labkit.cluster.placement import Placement, placements
from labkit.comm import Communicator, resident_bytes
from labkit.config import ClusterConfig, ExperimentConfig, from_overrides
from labkit.launch.emulation import build
from labkit.sync import Hierarchical, Strategy, build_strategy

_MBIT = 1000.0
_NUM_LAYERS = 10
_WIDTH = 1000  # ten layers of a million parameters each
_FORWARD_S, _BACKWARD_S = 0.1, 0.3
_REPEATS = 5


def measure(say: Callable[[str], None]) -> Report:
    """Measure all figures; about eight minutes on two cores.

    Raises:
        ConfigError: nodes can't be emulated here.
        LabkitError: a link is not what it is said to be.
    """
    report = Report("sync")
    config = from_overrides({"cluster": "4x4", "cluster.link_mbit": _MBIT, "sync": "hierarchical"})
    with build(config.cluster) as network:
        check_links(network, say)
        run = partial(run_emulated, emulation=network, timeout_s=900)
        say("synchronisation alone")
        _add_synchronisation(report, run(_synchronisation, config.cluster, config, os.getpid())[0])
        say("whole steps against DistributedDataParallel")
        _add_steps(report, run(_steps, config.cluster, config)[0])
        say("against the flat parameter server")
        _add_server(report, run(_server, config.cluster, config)[0])
        say("memory per node")
        _add_memory(report, run, config.cluster)
    report.notes.append(
        "bound: 2 (N-1)/N of the gradient over 0.956 of the link's rate; compute is padded to 100 ms forward "
        "and 300 ms backward; DistributedDataParallel is timed without its optimizer's update, ours with it; "
        "step_over_max can't reach 1 in float32, whose wire time is longer than the back-propagation that "
        "it can hide behind: step_over_hideable is against forward + max(backward, wire)"
    )
    return report


def _wire_s(num_bytes: float, num_nodes: int = 4) -> float:
    return 2 * (num_nodes - 1) / num_nodes * num_bytes * 8 / (PAYLOAD_SHARE * _MBIT * 1e6)


# --- models -----------------------------------------------------------------


class _Pace:
    """Stretches real compute to the time an accelerator would take, while the processor is free."""

    def __init__(self) -> None:
        self.began_at = 0.0

    def forward(self, done: int) -> None:
        if done == 0:
            self.began_at = time.perf_counter()
        self._sleep(self.began_at + _FORWARD_S * done / _NUM_LAYERS)

    def backward(self, done: int) -> None:
        self._sleep(self.began_at + _FORWARD_S + _BACKWARD_S * done / _NUM_LAYERS)

    @staticmethod
    def _sleep(until: float) -> None:
        time.sleep(max(0.0, until - time.perf_counter()))


class _Layer(nn.Module):
    """A linear layer whose forward and backward pass end at their emulated times."""

    def __init__(self, index: int, pace: _Pace) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self._index, self._pace = index, pace

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (b, width) to the same."""
        self._pace.forward(self._index)
        x = self.linear(x)
        if x.requires_grad:
            # Called before the layer's own gradient: the layers above are done by then.
            x.register_hook(lambda grad: self._pace.backward(_NUM_LAYERS - self._index))
        return x


def _model() -> nn.Module:
    torch.manual_seed(0)
    pace = _Pace()
    return nn.Sequential(*(_Layer(index, pace) for index in range(_NUM_LAYERS)))


def _strategy(comm: Communicator, config: ExperimentConfig, model: nn.Module) -> Strategy:
    return build_strategy(config, model, comm, placements(config.cluster), clock=time.perf_counter)


def _timed(comm: Communicator, work: Callable[[], object], inner: int = 1) -> Callable[[], float]:
    """Seconds of one call, from barrier to barrier."""

    def once() -> float:
        comm.barrier()
        began_at = time.perf_counter()
        for _ in range(inner):
            work()
        comm.barrier()
        return (time.perf_counter() - began_at) / inner

    return once


def _our_step(strategy: Strategy, model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        strategy.begin_step(len(inputs), 1, expected_samples=16 * len(inputs))
        losses = model(inputs).square().mean(1)
        strategy.backward(losses, losses.detach())
        strategy.end_step(1e-6)

    return step


# --- synchronisation alone -----------------------------------------------------------------


def _synchronisation(
    comm: Communicator, placement: Placement, config: ExperimentConfig, benchmark_pid: int
) -> dict[str, Any]:
    """Sum real gradients over all workers: ours, and one flat all-reduce by gloo."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)]
    sizes: dict[str, nn.Module] = {
        "10m": nn.Sequential(*layers),
        "1mib": nn.Linear(512, 512, bias=False),
        "64kib": nn.Linear(128, 128, bias=False),
    }
    for name, model in sizes.items():
        strategy = _strategy(comm, config, model)
        assert isinstance(strategy, Hierarchical)
        reducer = strategy.reducer
        width = next(model.parameters()).shape[1]
        losses = model(torch.randn(2, width)).square().mean(1)
        strategy.begin_step(2, 1)
        strategy.backward(losses, losses.detach())
        strategy.end_step(1e-6)
        flat = torch.ones(sum(parameter.numel() for parameter in model.parameters()))

        def ours(reducer: Any = reducer) -> None:
            reducer.fill(reducer.num_elements)
            reducer.finish()

        def theirs(flat: Tensor = flat) -> None:
            flat.fill_(1.0)
            dist.all_reduce(flat)

        is_large = name == "10m"
        inner = 1 if is_large else 20
        sides = {"ours": _timed(comm, ours, inner), "flat": _timed(comm, theirs, inner)}
        found[name] = interleave(sides, _REPEATS + 2, warmup=2)
        if is_large:
            with measured(comm, benchmark_pid) as seen:
                for _ in range(4):
                    ours()
            found["doubts"] = seen.doubts(4 * 2 * 3 / 4 * flat.nbytes)
        strategy.close()
    return found


def _add_synchronisation(report: Report, found: dict[str, Any]) -> None:
    bound_s = _wire_s(4 * _NUM_LAYERS * _WIDTH**2)
    large = found["10m"]
    report.add("over_bound", [value / bound_s for value in large["ours"]], "<= 1.04")
    report.add("vs_allreduce", ratios(large["flat"], large["ours"]), ">= 1.2")
    for name in ("64kib", "1mib"):
        report.add(f"vs_allreduce_{name}", ratios(found[name]["flat"], found[name]["ours"]), ">= 2.5")
    if found["doubts"]:
        report.notes.append(f"doubts: {'; '.join(found['doubts'])}")


# --- whole steps -----------------------------------------------------------------


def _steps(comm: Communicator, placement: Placement, config: ExperimentConfig) -> dict[str, list[float]]:
    inputs = torch.randn(2, _WIDTH)
    sides: dict[str, Callable[[], float]] = {}
    for name, wire in (("ours", "float32"), ("ours_bf16", "bfloat16")):
        model = _model()
        strategy = _strategy(comm, from_overrides({"sync.wire": wire}, base=config), model)
        sides[name] = _timed(comm, _our_step(strategy, model, inputs))
    theirs = nn.parallel.DistributedDataParallel(_model())

    def ddp_step() -> None:
        theirs.zero_grad(set_to_none=True)
        theirs(inputs).square().mean().backward()

    sides["ddp"] = _timed(comm, ddp_step)
    return interleave(sides, _REPEATS, warmup=2)


def _add_steps(report: Report, times: dict[str, list[float]]) -> None:
    compute_s = _FORWARD_S + _BACKWARD_S
    num_bytes = 4 * _NUM_LAYERS * _WIDTH**2
    report.add("vs_ddp_step", ratios(times["ddp"], times["ours"]), ">= 1.3")
    report.add("step_over_max", [t / max(compute_s, _wire_s(num_bytes)) for t in times["ours"]], "<= 1.15")
    hideable_s = _FORWARD_S + max(_BACKWARD_S, _wire_s(num_bytes))
    report.add("step_over_hideable", [t / hideable_s for t in times["ours"]])
    bf16_s = max(compute_s, _wire_s(num_bytes / 2))
    report.add("step_over_max_bf16", [t / bf16_s for t in times["ours_bf16"]], "<= 1.15")


# --- parameter server -----------------------------------------------------------------


def _server(comm: Communicator, placement: Placement, config: ExperimentConfig) -> dict[str, list[float]]:
    """Unpadded steps: what the native strategy of 2016-2020 and ours need beside the compute."""
    inputs = torch.randn(2, _WIDTH)
    sides: dict[str, Callable[[], float]] = {}
    kinds: dict[str, dict[str, Any]] = {
        "server": {"sync.name": "parameter_server"},
        "ours": {"sync.wire": "float32"},
        "ours_bf16": {"sync.wire": "bfloat16"},
    }
    for name, overrides in kinds.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)))
        strategy = _strategy(comm, from_overrides(overrides, base=config), model)
        sides[name] = _timed(comm, _our_step(strategy, model, inputs))
    return interleave(sides, _REPEATS, warmup=1)


def _add_server(report: Report, times: dict[str, list[float]]) -> None:
    report.add("vs_parameter_server", ratios(times["server"], times["ours"]), ">= 10")
    report.add("vs_parameter_server_bf16", ratios(times["server"], times["ours_bf16"]), ">= 20")


# --- memory -----------------------------------------------------------------


def _memory(comm: Communicator, placement: Placement, config: ExperimentConfig) -> int:
    """Resident bytes of this worker's parameters, gradients and momentum; shared pages by their share."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # imports 100 MB of torch, which is nobody's model
    before = resident_bytes() or 0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)))
    strategy = _strategy(comm, config, model)
    step = _our_step(strategy, model, torch.randn(2, _WIDTH))
    step()
    step()
    comm.barrier()
    held = (resident_bytes() or 0) - before
    comm.barrier()
    return held


def _add_memory(report: Report, run: Callable[..., list[Any]], cluster: ClusterConfig) -> None:
    held = {}
    for name in ("hierarchical", "allreduce"):
        config = from_overrides(
            {"sync.name": name}, base=from_overrides({"cluster": cluster.model_dump(mode="json")})
        )
        by_worker = run(_memory, cluster, config)
        held[name] = [sum(by_worker[4 * node : 4 * node + 4]) for node in range(4)]
    report.add("memory_per_node_vs_allreduce", ratios(held["hierarchical"], held["allreduce"]), "<= 0.55")
