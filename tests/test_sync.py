"""Laws that every strategy keeps. A new member of `sync` adds one line to STRATEGIES."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.comm import Communicator, SoloCommunicator
from labkit.config import AllReduceConfig
from labkit.errors import ConfigError
from labkit.launch.forked import run_workers
from labkit.sync import (
    AllReduce,
    RunningStatistics,
    Strategy,
    SynchronizedBatchNorm,
    synchronize_batch_norm,
)

Build = Callable[[nn.Module, torch.optim.Optimizer, Communicator, float | None], Strategy]


def _allreduce(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, clip: float | None
) -> Strategy:
    # Buckets far smaller than the model: several collectives per step, overlapping back-propagation.
    return AllReduce(model, optimizer, comm, AllReduceConfig(bucket_bytes=300), clip_norm=clip)


STRATEGIES: list[Build] = [_allreduce]

SAMPLES = 12


def _problem(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def _network(dtype: torch.dtype, rank: int = 0) -> nn.Module:
    torch.manual_seed(7 + rank)  # workers start apart; the strategy must make them agree
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def _losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = ((model(inputs) - targets) ** 2).sum(1)
    return losses, (losses < 1).to(losses.dtype)


def _train(
    comm: Communicator, build: Build, split: list[int], micro: int, dtype: torch.dtype, clip: float | None
) -> tuple[list[Tensor], list[float]]:
    torch.set_num_threads(1)
    inputs, targets = _problem(dtype)
    model = _network(dtype, comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    strategy = build(model, optimizer, comm, clip)
    start = sum(split[: comm.rank])
    own = slice(start, start + split[comm.rank])
    logged = []
    for step in range(5):
        size = max(1, min(micro, split[comm.rank]))
        pieces = list(zip(inputs[own].split(size), targets[own].split(size), strict=True))
        pieces = pieces if split[comm.rank] else []
        strategy.begin_step(split[comm.rank], len(pieces))
        for x, y in pieces:
            strategy.backward(*_losses(model, x, y))
        totals = strategy.end_step(0.02 / (1 + step))
        assert totals.num_samples == SAMPLES
        logged.append(totals.loss_sum / totals.num_samples)
    strategy.close()
    return [parameter.detach().clone() for parameter in model.parameters()], logged


def _reference(dtype: torch.dtype, clip: float | None) -> tuple[list[Tensor], list[float]]:
    """Plain PyTorch on the whole batch in one process: the specification."""
    inputs, targets = _problem(dtype)
    model = _network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    logged = []
    for step in range(5):
        optimizer.zero_grad()
        loss = _losses(model, inputs, targets)[0].mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        optimizer.step()
        logged.append(float(loss.detach()))
    return [parameter.detach() for parameter in model.parameters()], logged


SPLITS = [[12], [6, 6], [1, 11], [0, 12], [5, 4, 3], [3, 0, 8, 1]]


@pytest.mark.parametrize("build", STRATEGIES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_any_split_of_the_batch_gives_the_weights_of_one_process(
    build: Build, split: list[int], dtype: torch.dtype, rtol: float
) -> None:
    weights, losses = _reference(dtype, None)
    for found, logged in run_workers(_train, len(split), build, split, 100, dtype, None):
        torch.testing.assert_close(found, weights, rtol=rtol, atol=rtol / 10)
        assert logged == pytest.approx(losses, rel=max(rtol, 1e-6))


@pytest.mark.parametrize("build", STRATEGIES)
def test_unequal_micro_steps_change_nothing(build: Build) -> None:
    weights, _ = _reference(torch.float64, None)
    for found, _ in run_workers(_train, 3, build, [7, 4, 1], 2, torch.float64, None):
        torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", STRATEGIES)
def test_clipping_sees_the_globally_averaged_gradient(build: Build) -> None:
    weights, _ = _reference(torch.float64, 0.1)
    for found, _ in run_workers(_train, 2, build, [11, 1], 100, torch.float64, 0.1):
        torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", STRATEGIES)
def test_all_workers_hold_the_same_bits(build: Build) -> None:
    results = run_workers(_train, 3, build, [5, 4, 3], 100, torch.float32, None)
    for found, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][0], strict=True))


def _gradient_of(comm: Communicator, grads: list[list[float]]) -> float:
    """Back-propagate given per-sample gradients of one weight and return the averaged one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    strategy = _allreduce(model, torch.optim.SGD(model.parameters(), lr=1.0), comm, None)
    own = torch.tensor(grads[comm.rank]).view(-1, 1)
    strategy.begin_step(len(own), 1 if len(own) else 0)
    if len(own):
        losses = model(own).squeeze(1)
        strategy.backward(losses, torch.zeros_like(losses))
    strategy.end_step(1.0)
    return -float(model.weight.detach())


@pytest.mark.parametrize(
    ("grads", "right"),
    [
        ([[1.0, 1.0, 1.0], [5.0]], 2.0),  # not 3, the mean of means (pytorch #67253)
        ([[8.0]] * 4, 8.0),  # not 2 or 32: divided once
        ([[1.0], [1.0], [1.0], []], 1.0),  # not 3/4: a worker without samples does not count
        ([[1.0], [1.0], [1.0], [5.0]], 2.0),
    ],
)
def test_gradient_is_the_mean_over_samples(grads: list[list[float]], right: float) -> None:
    assert run_workers(_gradient_of, len(grads), grads) == [pytest.approx(right)] * len(grads)


def _unused_parameter(comm: Communicator) -> list[float]:
    model = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "idle": nn.Linear(2, 1, bias=False)})
    strategy = _allreduce(model, torch.optim.SGD(model.parameters(), lr=1.0), comm, None)
    before = model["idle"].weight.detach().clone()
    for branch in ("used", "idle" if comm.rank == 0 else "used"):
        strategy.begin_step(1, 1)
        losses = model[branch](torch.ones(1, 2)).squeeze(1)
        strategy.backward(losses, torch.zeros(1))
        strategy.end_step(1.0)
    return (before - model["idle"].weight.detach()).flatten().tolist()


def test_a_parameter_that_only_one_worker_used_moves_on_all() -> None:
    # In step 2 worker 0's gradient is 1 for one of two samples: the mean is 1/2 on both workers.
    assert run_workers(_unused_parameter, 2) == [[0.5, 0.5], [0.5, 0.5]]


def _mixed_types(comm: Communicator) -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    strategy = _allreduce(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, None)
    strategy.begin_step(300, 1)
    losses = model[1](model[0](torch.ones(300, 4)).to(torch.bfloat16)).float().sum(1)
    strategy.backward(losses, torch.ones(300))
    totals = strategy.end_step(0.1)
    # bfloat16 can't count to 601; the counts travel with a float32 bucket.
    return totals.num_samples == 600 and totals.accuracy_sum == 600


def test_counts_stay_exact_beside_bfloat16_parameters() -> None:
    assert run_workers(_mixed_types, 2) == [True, True]


def test_refuses_a_model_that_can_not_count() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="float32 or float64 parameters, got torch.bfloat16"):
        _allreduce(model, torch.optim.SGD(model.parameters(), lr=1.0), SoloCommunicator(), None)


def _sparse(comm: Communicator) -> str:
    model = nn.Embedding(4, 2, sparse=True)
    strategy = _allreduce(model, torch.optim.SGD(model.parameters(), lr=1.0), comm, None)
    strategy.begin_step(1, 1)
    try:
        losses = model(torch.tensor([1])).sum(1)
        strategy.backward(losses, torch.zeros(1))
    except ConfigError as error:
        return str(error)
    return ""


def test_refuses_sparse_gradients() -> None:
    assert "Use sparse=False" in _sparse(SoloCommunicator())


# --- batch norm ------------------------------------------------------------------------------------

FIRST, SECOND = [0.0, 2.0], [6.0, 6.0, 6.0, 6.0]  # reference: mean 4.3333, variances 5.8889 and 7.0667


def _merge(comm: Communicator) -> tuple[float, float, int]:
    layer = nn.BatchNorm1d(1, momentum=1.0)
    statistics = RunningStatistics(layer, comm)
    own = torch.tensor([FIRST, SECOND, []][comm.rank]).view(-1, 1)
    if len(own):
        layer(own)
        # torch keeps the unbiased variance of a batch; the total of six samples needs the biased one.
        layer.running_var.copy_(own.var(0, unbiased=False))  # type: ignore[union-attr]
    statistics.count(len(own))
    with statistics.merged():
        state = {name: value.clone() for name, value in layer.state_dict().items()}
    return float(state["running_mean"]), float(state["running_var"]), int(state["num_batches_tracked"])


def test_running_statistics_merge_to_total_mean_and_variance() -> None:
    for mean, var, batches in run_workers(_merge, 3):
        assert mean == pytest.approx(26 / 6)  # not 3.5, the mean of means
        assert var == pytest.approx(5.8889, abs=1e-4)  # not 0.5, the mean of variances
        assert batches == 1


def _merge_and_go_on(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    layer = nn.BatchNorm1d(1)
    statistics = RunningStatistics(layer, comm)
    layer(torch.tensor([[1.0], [3.0]]) * (comm.rank + 1))
    statistics.count(2)
    before = statistics.local_state()
    with statistics.merged():
        inside = statistics.local_state()
    return before, inside, statistics.local_state()


def test_merging_is_a_view_that_leaves_training_as_it_was() -> None:
    (a_before, a_inside, a_after), (b_before, b_inside, b_after) = run_workers(_merge_and_go_on, 2)
    assert torch.equal(a_inside, b_inside)
    assert not torch.equal(a_before, b_before)
    assert torch.equal(a_before, a_after) and torch.equal(b_before, b_after)


def _synchronized(comm: Communicator, parts: list[list[float]]) -> dict[str, Any]:
    layer = SynchronizedBatchNorm(nn.BatchNorm1d(1, momentum=1.0).double(), comm)
    own = torch.tensor(parts[comm.rank], dtype=torch.float64).view(-1, 1).requires_grad_()
    out = layer(own)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    start = sum(len(part) for part in parts[: comm.rank])
    (out.squeeze(1) ** 3 * weights[start : start + len(own)]).sum().backward()
    assert own.grad is not None
    return {
        "out": out.flatten().tolist(),
        "grad": own.grad.flatten().tolist(),
        "mean": float(layer.state_dict()["running_mean"]),
        "var": float(layer.state_dict()["running_var"]),
    }


@pytest.mark.parametrize("parts", [[FIRST, SECOND], [FIRST + SECOND[:3], SECOND[:1]], [[], FIRST + SECOND]])
def test_synchronized_batch_norm_is_batch_norm_of_the_whole_batch(parts: list[list[float]]) -> None:
    whole = torch.tensor(FIRST + SECOND, dtype=torch.float64).view(-1, 1).requires_grad_()
    layer = nn.BatchNorm1d(1, momentum=1.0).double()
    out = layer(whole)
    (out.squeeze(1) ** 3 * torch.arange(1.0, 7.0, dtype=torch.float64)).sum().backward()
    assert whole.grad is not None
    results = run_workers(_synchronized, len(parts), parts)
    assert sum((r["out"] for r in results), []) == pytest.approx(out.flatten().tolist(), rel=1e-9)
    assert sum((r["grad"] for r in results), []) == pytest.approx(
        whole.grad.flatten().tolist(), rel=1e-9, abs=1e-12
    )
    for result in results:
        assert result["mean"] == pytest.approx(4.3333, abs=1e-4)
        assert result["var"] == pytest.approx(7.0667, abs=1e-4)


def test_synchronize_replaces_every_batch_norm_and_keeps_its_numbers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    synchronize_batch_norm(model, SoloCommunicator())
    assert isinstance(model[1][0], SynchronizedBatchNorm)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
