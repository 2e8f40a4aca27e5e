"""Laws that every strategy keeps. A new member of `sync` adds one line to STRATEGIES."""

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from labkit.cluster.placement import placements
from labkit.cluster.plan import make_plan
from labkit.comm import Communicator, SoloCommunicator
from labkit.config import ExperimentConfig, HierarchicalConfig, from_overrides
from labkit.errors import ConfigError
from labkit.launch.forked import run_workers
from labkit.optim.build import build_optimizer
from labkit.sync import (
    RunningStatistics,
    ShardedHierarchical,
    Strategy,
    SynchronizedBatchNorm,
    build_strategy,
    flat,
    synchronize_batch_norm,
)

STRATEGIES = [
    ["sync.name=allreduce", "sync.bucket_bytes=300"],
    ["sync.name=hierarchical", "sync.chunk_bytes=300", "sync.num_senders=1"],
    ["sync.name=hierarchical", "sync.chunk_bytes=500", "sync.num_senders=2"],
    ["sync.name=hierarchical", "sync.is_overlapped=false"],
    ["sync.name=parameter_server"],
    ["sync.name=hierarchical", "name=sharded", "sync.chunk_bytes=300"],
]
# Period 1 is synchronous SGD, momentum included; clipping and Adam see each worker's own gradient.
PERIOD_ONE = ["sync.name=local_sgd", "sync.period_steps=1"]
LINEAR = [*STRATEGIES, PERIOD_ONE]
# Nodes and the local batches of their workers; 12 samples in all.
CLUSTERS = [
    [[12]],
    [[6, 0, 5, 1]],
    [[6], [6]],
    [[1], [11], [0], [0]],
    [[3, 4], [0, 5]],
    [[5], [4, 0, 1], [2]],
]
SAMPLES = 12


def _config(strategy: list[str], cluster: list[list[int]], *more: str) -> ExperimentConfig:
    nodes = [
        {"name": f"n{index}", "workers": [{"local_batch_size": size} for size in sizes]}
        for index, sizes in enumerate(cluster)
    ]
    settings = [*strategy, "engine.global_batch_size=12", "optimizer.weight_decay=0.01", *more]
    base = from_overrides({"cluster": {"nodes": nodes}, "engine.global_batch_size": SAMPLES})
    return from_overrides(settings, base=base)


def _build(config: ExperimentConfig, model: nn.Module, comm: Communicator) -> Strategy:
    if config.name == "sharded":  # what `hierarchical` is on GPUs; gloo has the collectives too
        assert isinstance(config.sync, HierarchicalConfig)
        places = placements(config.cluster)
        clip = config.engine.clip_norm
        with mock.patch.object(flat, "GRAIN", 16):  # several buckets, whose borders cut through tensors
            return ShardedHierarchical(model, config.optimizer, comm, config.sync, places, clip_norm=clip)
    return build_strategy(config, model, comm, placements(config.cluster), clock=time.perf_counter)


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


Outcome = tuple[list[Tensor], list[float]]


def _train(comm: Communicator, config: ExperimentConfig) -> Outcome:
    dtype = getattr(torch, config.engine.dtype)
    inputs, targets = _problem(dtype)
    model = _network(dtype, comm.rank)
    strategy = _build(config, model, comm)
    sizes = make_plan(config).local_batch_sizes
    start, count = sum(sizes[: comm.rank]), sizes[comm.rank]
    own = slice(start, start + count)
    logged = []
    for step in range(5):
        size = config.engine.micro_batch_size or max(1, count)
        pieces = list(zip(inputs[own].split(size), targets[own].split(size), strict=True)) if count else []
        # Whatever is expected, what came counts: right, wrong, and not given.
        strategy.begin_step(count, len(pieces), expected_samples=(SAMPLES, 5, 1)[step % 3])
        for x, y in pieces:
            strategy.backward(*_losses(model, x, y))
        totals = strategy.end_step(0.02 / (1 + step))
        assert totals.num_samples == SAMPLES
        assert len(totals.busy_s) == comm.world_size and min(totals.busy_s) >= 0
        logged.append(totals.loss_sum / totals.num_samples)
    strategy.close()
    return [parameter.detach().clone() for parameter in model.parameters()], logged


def _reference(config: ExperimentConfig) -> Outcome:
    """Plain PyTorch on the whole batch in one process: the specification."""
    dtype = getattr(torch, config.engine.dtype)
    inputs, targets = _problem(dtype)
    model = _network(dtype)
    optimizer = build_optimizer(config.optimizer, model.parameters())
    logged = []
    for step in range(5):
        optimizer.zero_grad()
        loss = _losses(model, inputs, targets)[0].mean()
        loss.backward()
        if config.engine.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.engine.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        optimizer.step()
        logged.append(float(loss.detach()))
    return [parameter.detach() for parameter in model.parameters()], logged


def _assert_equals_one_process(config: ExperimentConfig, rtol: float) -> None:
    if config.name == "sharded" and len({len(node.workers) for node in config.cluster.nodes}) > 1:
        pytest.skip("slices between nodes need equally many GPUs; refused, see below")
    weights, losses = _reference(config)
    results = run_workers(_train, config.cluster.num_workers, config)
    for found, logged in results:
        torch.testing.assert_close(found, weights, rtol=rtol, atol=rtol / 10)
        assert logged == pytest.approx(losses, rel=max(rtol, 1e-6))
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][0], strict=True)), "bits differ"


@pytest.mark.parametrize("strategy", LINEAR, ids=str)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float64", 1e-12)])
def test_any_split_on_any_cluster_gives_the_weights_of_one_process(
    strategy: list[str], cluster: list[list[int]], dtype: str, rtol: float
) -> None:
    _assert_equals_one_process(_config(strategy, cluster, f"engine.dtype={dtype}"), rtol)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    "more",
    [
        ["engine.micro_batch_size=2"],
        ["engine.clip_norm=0.1"],
        ["optimizer=adamw"],
        ["optimizer={name: lars, weight_decay: 0.01, trust_coefficient: 0.1}"],
        ["optimizer={name: lars, is_small_adapted: true, is_small_decayed: true, trust_coefficient: 0.1}"],
    ],
    ids=["unequal micro-steps", "clipping sees the global mean", "adamw", "lars", "lars everywhere"],
)
def test_the_law_holds_with(strategy: list[str], more: list[str]) -> None:
    _assert_equals_one_process(_config(strategy, [[7, 2], [0, 3]], "engine.dtype=float64", *more), 1e-11)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_slices_that_cut_through_tensors_change_nothing(
    strategy: list[str], optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "GRAIN", 16)  # slices of a real model end inside its tensors
    more = [f"optimizer.name={optimizer}", "engine.dtype=float64", "engine.clip_norm=0.5"]
    _assert_equals_one_process(_config(strategy, [[4, 2, 0], [1, 3, 2]], *more), 1e-11)


def test_gpus_in_unequal_nodes_are_refused() -> None:
    config = _config(["sync.name=hierarchical", "name=sharded"], [[6, 2], [4]])
    with pytest.raises(ConfigError, match="equally many GPUs on every node under hierarchical, got 2, 1"):
        _build(config, _network(torch.float32), SoloCommunicator())


def _gradient_of(comm: Communicator, config: ExperimentConfig, grads: list[list[float]]) -> float:
    """Back-propagate given per-sample gradients of one weight and return the averaged one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    strategy = _build(config, model, comm)
    own = torch.tensor(grads[comm.rank]).view(-1, 1)
    strategy.begin_step(len(own), 1 if len(own) else 0)
    if len(own):
        losses = model(own).squeeze(1)
        strategy.backward(losses, torch.zeros_like(losses))
    strategy.end_step(1.0)
    return -float(model.weight.detach())


def _plain(strategy: list[str], num_nodes: int, per_node: int = 1) -> ExperimentConfig:
    plain = ["optimizer.momentum=0.0", "optimizer.learning_rate=1.0"]
    return from_overrides([*strategy, *plain, f"cluster={num_nodes}x{per_node}"])


@pytest.mark.parametrize("strategy", [*(STRATEGIES[i] for i in (0, 1, 4, 5)), PERIOD_ONE], ids=str)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize(
    ("grads", "right"),
    [
        ([[1.0, 1.0, 1.0], [5.0], [], []], 2.0),  # not 3, the mean of means (pytorch #67253)
        ([[8.0]] * 4, 8.0),  # not 2 or 32: divided once
        ([[1.0], [1.0], [1.0], []], 1.0),  # not 3/4: a worker without samples does not count
        ([[1.0], [1.0], [1.0], [5.0]], 2.0),  # not 3, also where nodes have 3 workers and 1
    ],
)
def test_gradient_is_the_mean_over_samples(
    strategy: list[str], shape: tuple[int, int], grads: list[list[float]], right: float
) -> None:
    found = run_workers(_gradient_of, 4, _plain(strategy, *shape), grads)
    assert found == [pytest.approx(right)] * 4


def _unused_parameter(comm: Communicator, config: ExperimentConfig) -> list[float]:
    model = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "idle": nn.Linear(2, 1, bias=False)})
    strategy = _build(config, model, comm)
    before = model["idle"].weight.detach().clone()
    for branch in ("used", "idle" if comm.rank == 0 else "used"):
        strategy.begin_step(1, 1)
        losses = model[branch](torch.ones(1, 2)).squeeze(1)
        strategy.backward(losses, torch.zeros(1))
        strategy.end_step(1.0)
    return (before - model["idle"].weight.detach()).flatten().tolist()


@pytest.mark.parametrize("strategy", [STRATEGIES[i] for i in (0, 1, 4, 5)], ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_parameter_that_only_one_worker_used_moves_on_all(
    strategy: list[str], shape: tuple[int, int]
) -> None:
    # In step 2 worker 0's gradient is 1 for one of two samples: the mean is 1/2 on both workers.
    assert run_workers(_unused_parameter, 2, _plain(strategy, *shape)) == [[0.5, 0.5], [0.5, 0.5]]


def _frozen_and_shared(comm: Communicator, config: ExperimentConfig) -> tuple[bool, list[float]]:
    torch.manual_seed(comm.rank)
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    )
    model[2].weight = model[1].weight  # one parameter in two places
    model[0].weight.requires_grad_(False)
    strategy = _build(config, model, comm)
    frozen = model[0].weight.detach().clone()
    strategy.begin_step(1, 1)
    losses = model(torch.ones(1, 2)).sum(1)
    strategy.backward(losses, torch.zeros(1))
    strategy.end_step(0.1)
    is_kept = torch.equal(frozen, model[0].weight) and model[2].weight is model[1].weight
    return is_kept, [*frozen.flatten().tolist(), *model[1].weight.detach().flatten().tolist()]


@pytest.mark.parametrize("strategy", [STRATEGIES[i] for i in (0, 1, 4, 5)], ids=str)
def test_frozen_and_shared_parameters_stay_so_and_agree(strategy: list[str]) -> None:
    results = run_workers(_frozen_and_shared, 4, _plain(strategy, 2, 2))
    assert all(result == (True, results[0][1]) for result in results)


def _state_crosses(comm: Communicator, one: ExperimentConfig, other: ExperimentConfig) -> bool:
    """The state after two steps of one strategy, loaded into another, gives the same third step."""
    inputs, targets = _problem(torch.float64)
    models = [_network(torch.float64), _network(torch.float64)]
    first, second = _build(one, models[0], comm), _build(other, models[1], comm)

    def step(strategy: Strategy, model: nn.Module) -> None:
        strategy.begin_step(SAMPLES, 1)
        strategy.backward(*_losses(model, inputs, targets))
        strategy.end_step(0.05)

    for _ in range(2):
        step(first, models[0])
    state = first.state_dict()
    if comm.rank == 0:
        with open(f"/proc/{os.getpid()}/fd/{os.memfd_create('state')}", "wb") as file:
            torch.save(state, file)  # what a strategy gives can be saved
    states = [state]
    if comm.world_size > 1:
        torch.distributed.broadcast_object_list(states)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(states[0])
    for strategy, model in ((first, models[0]), (second, models[1])):
        step(strategy, model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
@pytest.mark.parametrize("shape", ["1x1", "2x2", "1x3"])
@pytest.mark.parametrize("second", [STRATEGIES[1], STRATEGIES[5]], ids=["arena", "sharded"])
def test_a_checkpoint_of_one_strategy_can_be_resumed_under_another(
    optimizer: str, shape: str, second: list[str]
) -> None:
    extra = [f"optimizer={optimizer}", f"cluster={shape}", "engine.dtype=float64"]
    one, other = (from_overrides([*strategy, *extra]) for strategy in (STRATEGIES[0], second))
    workers = one.cluster.num_workers
    assert run_workers(_state_crosses, workers, one, other) == [True] * workers
    assert run_workers(_state_crosses, workers, other, one) == [True] * workers


def _mixed_types(comm: Communicator) -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    strategy = _build(_plain(STRATEGIES[0], 2), model, comm)
    strategy.begin_step(300, 1)
    losses = model[1](model[0](torch.ones(300, 4)).to(torch.bfloat16)).float().sum(1)
    strategy.backward(losses, torch.ones(300))
    totals = strategy.end_step(0.1)
    # bfloat16 can't count to 601; the counts travel with a float32 bucket.
    return totals.num_samples == 600 and totals.accuracy_sum == 600


def test_counts_stay_exact_beside_bfloat16_parameters() -> None:
    assert run_workers(_mixed_types, 2) == [True, True]


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_refuses_a_model_that_can_not_count(strategy: list[str]) -> None:
    with pytest.raises(ConfigError, match="float32 or float64 parameters.*, got torch.bfloat16"):
        _build(_plain(strategy, 1), nn.Linear(2, 2).to(torch.bfloat16), SoloCommunicator())


def test_refuses_sparse_gradients() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    strategy = _build(_plain(STRATEGIES[0], 1), model, SoloCommunicator())
    strategy.begin_step(1, 1)
    losses = model(torch.tensor([1])).sum(1)
    with pytest.raises(ConfigError, match="Use sparse=False"):
        strategy.backward(losses, torch.zeros(1))


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
