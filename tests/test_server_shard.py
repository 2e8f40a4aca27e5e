"""Laws of the servers' arithmetic: shards together are the plain optimizer on the whole model, push by push."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.config import OptimizerConfig, from_overrides
from labkit.optim.build import build_optimizer
from labkit.sync.server_shard import Key, ServerShard, flat_parameters, shard_borders, trained

SGD = ["optimizer.learning_rate=0.1"]
OPTIMIZERS = {
    "sgd": [*SGD, "optimizer.weight_decay=0.01"],
    "nesterov": [*SGD, "optimizer.is_nesterov=true"],
    "lars": ["optimizer.name=lars", "optimizer.learning_rate=1", "optimizer.weight_decay=0.001"],
    "adamw": ["optimizer.name=adamw", "optimizer.learning_rate=0.01", "optimizer.weight_decay=0.01"],
}

# Who pushes, in the order in which it is applied: pushes of one version, each with its group and weight.
ARRIVALS: list[list[tuple[int, float]]] = [
    [(0, 0.75)], [(1, 0.25)], [(0, 0.375)], [(0, 0.75)], [(1, 0.25 / 3), (0, 0.375)], [(1, 0.25)],
]  # fmt: skip


def _config(overrides: Sequence[str]) -> OptimizerConfig:
    return from_overrides(list(overrides)).optimizer


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


def _shards(config: OptimizerConfig, num_shards: int) -> list[ServerShard]:
    """Each from a model of its own, as in a process of its own."""
    borders = shard_borders([parameter.numel() for parameter in trained(_model())], num_shards)
    return [ServerShard(_model(), config, first, last) for first, last in itertools.pairwise(borders)]


def _read(shards: Sequence[ServerShard]) -> Tensor:
    return torch.cat([shard.read() for shard in shards])


def _gradients() -> list[dict[Key, Tensor]]:
    """One for every push, of each version."""
    size = len(flat_parameters(_model()))
    generator = torch.Generator().manual_seed(7)
    numbers = itertools.count(1)
    return [
        {(group, next(numbers)): torch.randn(size, generator=generator, dtype=torch.float64) for group, _ in pushes}
        for pushes in ARRIVALS
    ]  # fmt: skip


def _push(
    shards: Sequence[ServerShard], gradients: dict[Key, Tensor], weights: Sequence[float], rate: float
) -> None:
    for key, gradient in gradients.items():
        for shard in shards:
            shard.stage(key, gradient[shard.start : shard.stop].clone())
    for shard in shards:
        shard.apply(zip(gradients, weights, strict=True), rate)


def _reference(config: OptimizerConfig) -> list[Tensor]:
    """The whole model after each version, by the plain optimizer: W of a step for pushes that weigh W."""
    model = _model()
    parameters = trained(model)
    optimizer = build_optimizer(config, model.parameters())
    found = []
    for version, (gradients, pushes) in enumerate(zip(_gradients(), ARRIVALS, strict=True)):
        total = sum(weight for _, weight in pushes)
        mean = (
            sum(weight * gradient for gradient, (_, weight) in zip(gradients.values(), pushes, strict=True))
            / total
        )
        scale = total if config.name == "sgd" else 1.0
        offset = 0
        for parameter in parameters:
            part = mean[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad = scale * part.clone()
            offset += parameter.numel()
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, version) * (1.0 if config.name == "sgd" else total)
            if config.name == "sgd":
                group["weight_decay"] = config.weight_decay * total
        optimizer.step()
        found.append(flat_parameters(model))
    return found


def _rate(config: OptimizerConfig, version: int) -> float:
    return config.learning_rate * (1 - 0.1 * version)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 9])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_version_is_that_of_the_plain_optimizer_on_the_whole_model(name: str, num_shards: int) -> None:
    config = _config(OPTIMIZERS[name])
    shards = _shards(config, num_shards)
    steps = zip(_gradients(), ARRIVALS, _reference(config), strict=True)
    for version, (gradients, pushes, expected) in enumerate(steps):
        _push(shards, gradients, [weight for _, weight in pushes], _rate(config, version))
        torch.testing.assert_close(_read(shards), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pushes_that_make_a_global_batch_are_as_long_as_one_step(name: str) -> None:
    """Four equal pushes of a quarter go about as far as one whole step; without momentum that is plain to see."""
    config = _config([*OPTIMIZERS[name], *(["optimizer.is_nesterov=false"] if name == "nesterov" else [])])
    start = flat_parameters(_model())
    gradient = torch.sign(torch.linspace(-1, 1, len(start), dtype=torch.float64)) * 1e-3
    one, four = _shards(config, 1), _shards(config, 1)
    if config.name == "sgd":
        one, four = ([ServerShard(_model(), config.model_copy(update={"momentum": 0.0}), 0, 6)] for _ in "ab")
    _push(one, {(0, 1): gradient}, [1.0], config.learning_rate)
    for number in range(4):
        _push(four, {(0, number): gradient}, [0.25], config.learning_rate)
    ways = [(_read(shards) - start).norm() for shards in (one, four)]
    if config.name == "lars":  # momentum adds up over the four: 1/4 (1 + 1.9 + 2.71 + 3.439)
        ways[1] /= (1 + 1.9 + 2.71 + 3.439) / 4
    assert float(ways[1] / ways[0]) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("order", [[1.0, 2.0], [2.0, 1.0]])
def test_two_concurrent_pushes_of_1_and_2_make_minus_3_in_either_order(order: list[float]) -> None:
    """elasticdl PR 1313, byteps #142: neither is lost, neither is averaged away, the version is 2."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    config = _config(["optimizer.learning_rate=1", "optimizer.momentum=0"])
    shard = ServerShard(model, config, 0, 1)
    for group, value in enumerate(order):  # both computed on version 0
        shard.stage((group, 1), torch.full((1,), value, dtype=torch.float64))
    for group in range(2):
        shard.apply([((group, 1), 1.0)], 1.0)
    assert shard.read().tolist() == [-3.0]


def test_a_gradient_that_is_staged_twice_is_applied_once_as_it_came_first() -> None:
    shards = _shards(_config([*SGD, "optimizer.momentum=0"]), 1)
    before = _read(shards)
    for value in (1.0, 5.0):
        shards[0].stage((0, 1), torch.full_like(before, value))
    shards[0].apply([((0, 1), 1.0)], 0.5)
    assert torch.equal(_read(shards), before - 0.5)


def test_what_a_lost_group_has_staged_is_forgotten() -> None:
    shard = _shards(_config(SGD), 1)[0]
    shard.stage((0, 1), torch.zeros_like(shard.read()))
    shard.stage((1, 2), torch.zeros_like(shard.read()))
    shard.drop(0)
    shard.apply([((1, 2), 1.0)], 0.1)
    with pytest.raises(KeyError):
        shard.apply([((0, 1), 1.0)], 0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_out_and_in_again_goes_on_as_if_nothing_had_been_also_with_other_shards(name: str) -> None:
    config = _config(OPTIMIZERS[name])
    shards = _shards(config, 2)
    versions = list(enumerate(zip(_gradients(), ARRIVALS, _reference(config), strict=True)))
    for version, (gradients, pushes, _) in versions[:3]:
        _push(shards, gradients, [weight for _, weight in pushes], _rate(config, version))
    state: dict[int, dict[str, Tensor]] = {}
    for shard in shards:
        for place, tensor in zip(*shard.state(), strict=True):
            state.setdefault(place["index"], {})[place["name"]] = tensor
    whole = _read(shards)
    again = _shards(config, 3)
    for shard in again:
        shard.load(whole, state)
    assert torch.equal(_read(again), whole)
    for version, (gradients, pushes, expected) in versions[3:]:
        _push(again, gradients, [weight for _, weight in pushes], _rate(config, version))
        torch.testing.assert_close(_read(again), expected, rtol=1e-12, atol=1e-14)


def test_the_state_is_that_of_the_plain_optimizer_so_another_strategy_can_go_on_with_it() -> None:
    config = _config(OPTIMIZERS["adamw"])
    model = _model()
    optimizer = build_optimizer(config, model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shards = _shards(config, 2)
    _push(shards, {(0, 1): torch.ones_like(_read(shards))}, [1.0], config.learning_rate)
    expected = optimizer.state_dict()["state"]
    found = [(place, tensor) for shard in shards for place, tensor in zip(*shard.state(), strict=True)]
    assert {(place["index"], place["name"]) for place, _ in found} == {
        (index, name) for index, values in expected.items() for name in values
    }
    for place, tensor in found:
        torch.testing.assert_close(tensor, expected[place["index"]][place["name"]], rtol=1e-12, atol=0)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 12))
def test_borders_give_every_parameter_to_one_server(sizes: list[int], num_shards: int) -> None:
    borders = shard_borders(sizes, num_shards)
    assert len(borders) == num_shards + 1
    assert borders[0] == 0 and borders[-1] == len(sizes) and borders == sorted(borders)


def test_borders_by_hand() -> None:
    assert shard_borders([10, 10, 10, 10], 2) == [0, 2, 4]
    assert shard_borders([100, 1, 1], 2) == [0, 1, 3]
    assert shard_borders([5], 3) == [0, 0, 1, 1]  # two servers have nothing
