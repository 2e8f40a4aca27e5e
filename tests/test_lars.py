"""LARS: the rule by hand and against numpy, what it leaves out, its limits, and that pieces make a whole."""

import copy
import io
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from labkit.comm import Communicator
from labkit.config import AllReduceConfig, LarsConfig, from_overrides
from labkit.errors import ConfigError
from labkit.launch.forked import run_workers
from labkit.optim import lars
from labkit.optim.build import build_optimizer
from labkit.optim.lars import Lars, sums_of_squares, trust_ratio
from labkit.sync import AllReduce

Array = NDArray[np.float64]


def _parameter(values: Any, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def _step(optimizer: torch.optim.Optimizer, gradients: Iterable[Any], lr: float | None = None) -> None:
    """One step with given gradients, in the order of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.as_tensor(gradient, dtype=parameter.dtype).clone()
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    optimizer.step()


# --- by hand ---------------------------------------------------------------------------------------

G1, G2 = [[0.6, 0.8]], [[0.8, -0.6]]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((10, 10), [2.9034049, 3.95366571]), ((10, 5), [2.92320245, 3.93883286])],
    ids=["rate kept", "rate halved: inside the momentum"],
)
def test_two_steps_of_the_rule_of_paper_and_mlperf(rates: tuple[float, float], expected: list[float]) -> None:
    weight = _parameter([[3.0, 4.0]])
    optimizer = Lars([weight], lr=10)
    _step(optimizer, [G1], rates[0])
    assert weight.tolist()[0] == pytest.approx([2.97, 3.96], rel=1e-4)
    _step(optimizer, [G2], rates[1])
    assert weight.tolist()[0] == pytest.approx(expected, rel=1e-8)


def test_ratios_by_hand() -> None:
    paper = trust_ratio(5.0, 1.0, trust_coefficient=0.001, weight_decay=1e-4)
    assert paper == pytest.approx(0.0049975012, rel=1e-8)
    # Nine ones with gradients of one, as in TensorFlow's test (it adds an epsilon, hence 0.0909088).
    assert trust_ratio(3.0, 3.0, trust_coefficient=0.1, weight_decay=0.1) == pytest.approx(1 / 11)


def test_nine_ones_by_hand() -> None:
    weight = _parameter(np.ones((3, 3)))
    _step(Lars([weight], lr=0.1, trust_coefficient=0.1, weight_decay=0.1), [np.ones((3, 3))])
    assert weight.flatten().tolist() == pytest.approx([0.99] * 9)


@pytest.mark.parametrize(
    ("norms", "decay"), [((0.0, 5.0), 0.1), ((5.0, 0.0), 0.1), ((0.0, 0.0), 0.1), ((5.0, 0.0), 0.0)]
)
def test_the_ratio_is_1_if_either_norm_is_0(norms: tuple[float, float], decay: float) -> None:
    assert trust_ratio(*norms, trust_coefficient=0.001, weight_decay=decay) == 1.0


def test_a_weight_that_starts_at_zero_moves() -> None:
    weight = _parameter([[0.0, 0.0]])
    _step(Lars([weight], lr=0.1), [[[3.0, 4.0]]])
    assert weight.tolist()[0] == pytest.approx([-0.3, -0.4])


def test_where_only_the_gradient_is_zero_decay_still_applies() -> None:
    weight = _parameter([[3.0, 4.0]])
    _step(Lars([weight], lr=0.1, weight_decay=0.1), [[[0.0, 0.0]]])
    assert weight.tolist()[0] == pytest.approx([2.97, 3.96])


def test_without_weight_decay_the_ratio_applies_all_the_same() -> None:
    weight = _parameter([[3.0, 4.0]])
    _step(Lars([weight], lr=0.1, weight_decay=0.0), [G1])
    assert weight.tolist()[0] == pytest.approx([3 - 0.0005 * 0.6, 4 - 0.0005 * 0.8], rel=1e-12)


def test_a_smaller_rate_does_not_shrink_what_is_in_the_momentum() -> None:
    # Rates 0.1, then 0.01, gradient 1: inside the momentum 0.1 + (0.09 + 0.01); outside it would be 0.119.
    bias = _parameter([0.0])
    optimizer = Lars([bias], lr=0.1, momentum=0.9)
    for rate in (0.1, 0.01):
        _step(optimizer, [[1.0]], rate)
    assert bias.item() == pytest.approx(-0.2)


# --- against numpy -----------------------------------------------------------------------------------


class _Numpy:
    """The rule as the paper writes it, tensor by tensor: the specification."""

    def __init__(self, weights: Sequence[Array], **settings: float) -> None:
        self.weights = [weight.copy() for weight in weights]
        self.velocities = [np.zeros_like(weight) for weight in weights]
        self.mu, self.beta, self.eta = (
            settings[k] for k in ("momentum", "weight_decay", "trust_coefficient")
        )

    def step(self, gradients: Sequence[Array], lr: float) -> None:
        for index, (w, g) in enumerate(zip(self.weights, gradients, strict=True)):
            beta, ratio = self.beta, 1.0
            if w.ndim <= 1:
                beta = 0.0
            elif np.linalg.norm(w) > 0 and np.linalg.norm(g) > 0:
                ratio = self.eta * np.linalg.norm(w) / (np.linalg.norm(g) + beta * np.linalg.norm(w))
            self.velocities[index] = self.mu * self.velocities[index] + lr * ratio * (g + beta * w)
            self.weights[index] = w - self.velocities[index]


SHAPES = st.lists(st.sampled_from([(), (3,), (2, 3), (4, 1, 2), (300, 120)]), min_size=1, max_size=5)


@given(
    shapes=SHAPES,
    rates=st.lists(st.sampled_from([0.0, 0.03, 1.0, 25.0]), min_size=1, max_size=4),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
    trust_coefficient=st.sampled_from([0.001, 0.02, 1.0]),
    kind=st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_network_and_any_rates_agree_with_numpy(
    shapes: list[tuple[int, ...]],
    rates: list[float],
    kind: tuple[torch.dtype, float],
    seed: int,
    **chosen: float,
) -> None:
    shapes = sorted(shapes, key=lambda shape: len(shape) <= 1)  # the order of the groups
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape) for shape in shapes]
    reference = _Numpy(weights, **chosen)
    parameters = [_parameter(weight, kind[0]) for weight in weights]
    optimizer = Lars(parameters, **chosen)
    for rate in rates:
        gradients = [random.normal(size=shape) * 0.1 for shape in shapes]
        reference.step(gradients, rate)
        _step(optimizer, gradients, rate)
    scale = max(1.0, *(float(np.abs(weight).max()) for weight in reference.weights))
    for parameter, weight in zip(parameters, reference.weights, strict=True):
        found = parameter.detach().double().numpy()
        np.testing.assert_allclose(found, weight, rtol=10 * kind[1], atol=kind[1] * scale)


@pytest.mark.parametrize("portion", [1, 200_000])
def test_the_bits_do_not_depend_on_what_is_updated_together(
    portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [_network(), _network()]
    for model, size in zip(models, (lars._PORTION, portion), strict=True):
        monkeypatch.setattr(lars, "_PORTION", size)
        _train(model, Lars(model.parameters()), range(3))
    alone, together = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_rate_too_small_for_the_fused_kernel_is_exact_as_well() -> None:
    weight = nn.Parameter(torch.zeros(200, 200))
    optimizer = Lars([weight], lr=1e-12, weight_decay=0.0)
    _step(optimizer, [torch.full((200, 200), 3.0)])
    torch.testing.assert_close(weight.detach(), torch.full((200, 200), -3e-12), rtol=1e-6, atol=0)


# --- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_ratio_1_it_is_sgd(momentum: float) -> None:
    ours, theirs = _network(), _network()
    groups = [{"params": list(ours.parameters()), "is_adapted": False}]
    ours_sgd = Lars(groups, lr=0.05, momentum=momentum, weight_decay=0.01)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)
    for _ in range(5):
        for model, optimizer in ((ours, ours_sgd), (theirs, sgd)):
            _backward(model)
            optimizer.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


def test_the_scale_of_the_loss_does_not_matter_without_decay() -> None:
    small, large = _parameter([[3.0, 4.0]]), _parameter([[3.0, 4.0]])
    _step(Lars([small], weight_decay=0.0), [G1])
    _step(Lars([large], weight_decay=0.0), [1000 * np.array(G1)])
    torch.testing.assert_close(small, large)


def test_a_rate_of_zero_changes_nothing() -> None:
    weight = _parameter([[3.0, 4.0]])
    _step(Lars([weight], lr=0.0), [G1])
    assert weight.tolist() == [[3.0, 4.0]]


# --- what is left out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_decayed", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_two_switches_decide_for_biases_and_normalisation(is_adapted: bool, is_decayed: bool) -> None:
    bias = _parameter([3.0, 4.0])
    optimizer = Lars(
        [bias],
        lr=1.0,
        weight_decay=0.1,
        trust_coefficient=0.02,
        is_small_adapted=is_adapted,
        is_small_decayed=is_decayed,
    )
    _step(optimizer, [[0.6, 0.8]])
    decay = 0.1 if is_decayed else 0.0
    ratio = 0.02 * 5 / (1 + decay * 5) if is_adapted else 1.0
    expected = [3 - ratio * (0.6 + decay * 3), 4 - ratio * (0.8 + decay * 4)]
    assert bias.tolist() == pytest.approx(expected)


def test_dimension_decides_and_no_name() -> None:
    model = nn.ModuleDict(
        {
            "bias_like_name": nn.Linear(3, 2),
            "norm": nn.BatchNorm2d(4),
            "scale": nn.LayerNorm(5),
            "batch_normalization": nn.Conv2d(1, 2, 3),
            "words": nn.Embedding(7, 3),
        }
    )
    large, small = Lars(model.parameters()).param_groups
    assert [tuple(p.shape) for p in large["params"]] == [(2, 3), (2, 1, 3, 3), (7, 3)]
    assert {p.ndim for p in small["params"]} == {1} and len(small["params"]) == 6
    assert (large["is_adapted"], large["weight_decay"]) == (True, 1e-4)
    assert (small["is_adapted"], small["weight_decay"]) == (False, 0.0)


def test_a_group_that_states_it_is_taken_as_it_is() -> None:
    weight, bias = _parameter([[1.0]]), _parameter([1.0])
    group = {"params": [weight, bias], "is_adapted": False, "weight_decay": 0.5, "lr": 3.0}
    optimizer = Lars([group])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    _step(optimizer, [[[1.0]], [1.0]])
    assert (weight.item(), bias.item()) == (1 - 3 * 1.5, 1 - 3 * 1.5)


def test_a_group_keeps_its_own_settings_when_it_is_split() -> None:
    groups = [
        {"params": _parameter([[1.0]])},
        {"params": [_parameter([[1.0]]), _parameter([1.0])], "lr": 3.0},
    ]
    optimizer = Lars(groups, lr=2.0, is_small_decayed=True)
    assert [(g["lr"], g["is_adapted"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (2.0, True, 1e-4), (3.0, True, 1e-4), (3.0, False, 1e-4),
    ]  # fmt: skip


def test_named_parameters_work_too() -> None:
    model = nn.Linear(3, 2)
    large, small = Lars(model.named_parameters()).param_groups
    assert (large["params"], small["params"]) == ([model.weight], [model.bias])


def test_frozen_parameters_and_those_without_gradient_stay() -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    idle, moved = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lars([frozen, idle, moved])
    moved.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2, 2)) and torch.equal(idle, torch.ones(2, 2))
    assert not torch.equal(moved, torch.ones(2, 2))


def test_gradients_are_left_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(200, 200))
    _step(Lars([weight], weight_decay=0.1), [torch.full((200, 200), 0.5)])
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((200, 200), 0.5))


# --- norms, precision, layout ---------------------------------------------------------------------------------


def test_norms_of_large_tensors_do_not_drift() -> None:
    # One float32 sum over all of it would miss two parts in a hundred.
    many = torch.full((25_000_000,), 0.1)
    assert sums_of_squares([many]) == pytest.approx([25e6 * float(many[0]) ** 2], rel=3e-3)


def test_norms_of_half_precision_are_taken_in_float32() -> None:
    # The norm, 1e5, is beyond what float16 holds.
    squares = sums_of_squares([torch.full((1000, 1000), 100.0, dtype=torch.float16), torch.ones(0, 3)])
    assert squares == pytest.approx([1e10, 0.0], rel=3e-3)


def test_norms_of_float64_are_taken_in_float64() -> None:
    tiny = torch.tensor([1e-200, 1.0], dtype=torch.float64)
    assert sums_of_squares([tiny[:1] * 1e60, tiny]) == pytest.approx([1e-280, 1.0], rel=1e-14)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float16, 1e-2), (torch.bfloat16, 3e-2), (torch.float64, 1e-6)], ids=str
)
def test_one_optimizer_serves_parameters_of_several_types(dtype: torch.dtype, rtol: float) -> None:
    plain, other = nn.Parameter(torch.ones(200, 200)), nn.Parameter(torch.ones(200, 200, dtype=dtype))
    optimizer = Lars([plain, other], lr=50.0)
    gradient = torch.linspace(-1, 1, 40_000).view(200, 200)
    for _ in range(3):
        _step(optimizer, [gradient, gradient])
    moves = [(1 - p.detach().double()) for p in (plain, other)]
    assert moves[0].abs().max() > 0.1 and moves[1].dtype == torch.float64 and other.dtype == dtype
    torch.testing.assert_close(moves[1], moves[0], rtol=rtol, atol=rtol * float(moves[0].abs().max()))


def test_a_loss_scale_is_taken_out_before_the_norms() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = Lars([weight], lr=1.0, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * torch.tensor(G1)).sum()).backward()
    scaler.step(optimizer)
    ratio = 0.001 * 5 / (1 + 0.5)
    assert ratio == pytest.approx(0.003333, rel=1e-3)
    assert weight.tolist()[0] == pytest.approx([3 - ratio * 0.9, 4 - ratio * 1.2], rel=1e-6)


def test_strides_do_not_matter() -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(64, 32, 5, 5, generator=random)
    gradient = torch.randn(64, 32, 5, 5, generator=random)
    plain, strided = nn.Parameter(values.clone()), nn.Parameter(values.to(memory_format=torch.channels_last))
    for weight, own in ((plain, gradient.to(memory_format=torch.channels_last)), (strided, gradient)):
        weight.grad = own
        optimizer = Lars([weight], lr=10.0)
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(64, 32, 5, 5)
        optimizer.step()
    torch.testing.assert_close(plain, strided)
    assert strided.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spoils_its_own_tensor_and_no_other(bad: float) -> None:
    spoilt, other = nn.Parameter(torch.ones(300, 200)), nn.Parameter(torch.ones(3, 2))
    gradient = torch.ones(300, 200)
    gradient[7, 5] = bad
    _step(Lars([spoilt, other]), [gradient, torch.ones(3, 2)])
    assert not torch.isfinite(spoilt[7, 5]) and torch.isfinite(other).all()
    assert torch.isfinite(spoilt).sum() == (0 if bad != bad else 300 * 200 - 1)


# --- a torch optimizer -------------------------------------------------------------------------------------


def _network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 200)
    )


def _backward(model: nn.Module) -> None:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = torch.linspace(-1, 1, 4 * 64, dtype=dtype).view(4, 1, 8, 8)
    (model(inputs) ** 2).mean().backward()


def _train(model: nn.Module, optimizer: Lars, steps: range) -> None:
    for step in steps:
        _backward(model)
        for group in optimizer.param_groups:
            group["lr"] = 20.0 / (1 + step)
        optimizer.step()


def test_ten_steps_are_five_and_a_saved_state_and_five_more_bit_for_bit() -> None:
    model = _network()
    optimizer = Lars(model.parameters())
    _train(model, optimizer, range(10))
    first = _network()
    before = Lars(first.parameters())
    _train(first, before, range(5))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = _network()
    second.load_state_dict(saved["model"])
    after = Lars(second.parameters(), lr=0.5, momentum=0.1)
    after.load_state_dict(saved["optimizer"])
    _train(second, after, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))
    ours, theirs = optimizer.state_dict(), after.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert all(
        torch.equal(ours["state"][k]["momentum_buffer"], theirs["state"][k]["momentum_buffer"])
        for k in ours["state"]
    )


def test_a_deep_copy_goes_on_alike() -> None:
    model = _network()
    optimizer = Lars(model.parameters(), is_small_adapted=True)
    _train(model, optimizer, range(2))
    twin, other = copy.deepcopy((model, optimizer))
    for each, own in ((model, optimizer), (twin, other)):
        _train(each, own, range(2, 4))
        own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert other.param_groups[-1]["is_adapted"] is True


def test_torchs_schedulers_drive_every_group() -> None:
    model = _network()
    optimizer = Lars(model.parameters(), lr=8.0)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4, power=2)
    rates = []
    for _ in range(4):
        _backward(model)
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[1] == pytest.approx([2.0, 2.0]) and rates[3] == [0.0, 0.0]


def test_a_closure_gives_the_loss_and_the_gradients() -> None:
    weight = _parameter([[3.0, 4.0]])
    optimizer = Lars([weight])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 25.0
    assert float((weight.detach() ** 2).sum()) < 25.0


def test_the_configuration_builds_it() -> None:
    config = LarsConfig(
        learning_rate=2.0, momentum=0.5, weight_decay=0.1, trust_coefficient=0.02, is_small_decayed=True
    )
    optimizer = build_optimizer(config, nn.Linear(2, 2).parameters())
    assert isinstance(optimizer, Lars)
    names = ("lr", "momentum", "weight_decay", "trust_coefficient", "is_adapted")
    assert [tuple(group[name] for name in names) for group in optimizer.param_groups] == [
        (2.0, 0.5, 0.1, 0.02, True), (2.0, 0.5, 0.1, 0.02, False),
    ]  # fmt: skip


# --- pieces --------------------------------------------------------------------------------------------------


def _given_norms(weights: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.full((len(weights),), 9.0), torch.full((len(gradients),), 2.0)


def _updated(values: Tensor, gradient: Tensor, sizes: list[int], momentum: float) -> tuple[Tensor, Tensor]:
    """Weights and velocities after two steps over pieces of given sizes, with the same norms."""
    flat, velocity = values.clone(), torch.zeros_like(values)
    pieces = [nn.Parameter(piece) for piece in flat.split(sizes)]
    optimizer = Lars(
        [{"params": pieces, "is_adapted": True}], lr=0.7, momentum=momentum, trust_coefficient=0.1,
        weight_decay=0.01, squared_norms=_given_norms,
    )  # fmt: skip
    for piece, own in zip(pieces, velocity.split(sizes), strict=True):
        if momentum:
            optimizer.state[piece]["momentum_buffer"] = own
    for _ in range(2):
        _step(optimizer, gradient.split(sizes))
    return flat, velocity


@given(
    size=st.sampled_from([1, 17, 1000, 33_000, 100_003]),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    momentum=st.sampled_from([0.0, 0.9]),
    num_threads=st.sampled_from([1, 4]),
)
@settings(max_examples=60, deadline=None)
def test_with_equal_norms_two_pieces_make_the_whole_bit_for_bit(
    size: int, share: float, dtype: torch.dtype, momentum: float, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    values, gradient = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(2))
    cut = round(size * share)
    whole = _updated(values, gradient, [size], momentum)
    with mock.patch.object(torch, "get_num_threads", return_value=num_threads):  # chooses another kernel
        parts = _updated(values, gradient, [cut, size - cut], momentum)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
    assert not torch.equal(whole[0], values)


def test_workers_with_half_of_every_tensor_update_as_one_with_the_whole() -> None:
    model, split = _network().double(), _network().double()
    whole, template = (Lars(each.parameters(), lr=2.0, trust_coefficient=0.02) for each in (model, split))
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    workers = [_worker_with_half(template, half, totals) for half in range(2)]
    for _ in range(3):
        for each in (model, split):
            _backward(each)
        whole.step()
        for half, worker in enumerate(workers):
            for piece, parameter in zip(_members(worker), _members(template), strict=True):
                assert parameter.grad is not None
                piece.grad = parameter.grad.view(-1).tensor_split(2)[half]
        # What the workers of a node add up in shared memory before any of them updates.
        squares = [[_squares(worker, of_gradients=flag) for flag in (False, True)] for worker in workers]
        totals["now"] = (squares[0][0] + squares[1][0], squares[0][1] + squares[1][1])
        for worker in workers:
            worker.step()
    torch.testing.assert_close(list(split.parameters()), list(model.parameters()), rtol=1e-9, atol=1e-12)


def _worker_with_half(template: Lars, half: int, totals: dict[str, tuple[Tensor, Tensor]]) -> Lars:
    groups = [
        {**group, "params": [nn.Parameter(p.data.view(-1).tensor_split(2)[half]) for p in group["params"]]}
        for group in template.param_groups
    ]
    return Lars(groups, squared_norms=lambda weights, gradients: totals["now"])


def _members(optimizer: Lars) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _squares(optimizer: Lars, *, of_gradients: bool) -> Tensor:
    pieces = [p for group in optimizer.param_groups if group["is_adapted"] for p in group["params"]]
    sums = sums_of_squares([piece.grad if of_gradients else piece for piece in pieces])
    return torch.tensor(sums, dtype=torch.float64)


def test_norms_are_asked_for_once_a_step_whatever_there_is_to_do() -> None:
    asked: list[int] = []

    def squared_norms(weights: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        asked.append(len(weights))
        return torch.tensor(sums_of_squares(weights)), torch.tensor(sums_of_squares(gradients))

    groups = [
        {"params": [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))], "is_adapted": True},
        {"params": [nn.Parameter(torch.ones(3))], "is_adapted": False, "weight_decay": 0.0},
        {"params": [], "is_adapted": True},
    ]
    optimizer = Lars(groups, squared_norms=squared_norms)
    _step(optimizer, [torch.ones(4), torch.ones(2), torch.ones(3)])
    optimizer.zero_grad()
    optimizer.step()
    assert asked == [2, 0]


# --- under synchronisation --------------------------------------------------------------------------------------


def _strategy_weights(comm: Communicator, split: list[int]) -> list[Tensor]:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    for index, parameter in enumerate(model.parameters()):
        parameter.data = torch.linspace(-0.5, 0.6, parameter.numel()).sin().view_as(parameter) + 0.01 * index
    inputs, targets = torch.linspace(-2, 2, 72).view(12, 6).cos(), torch.linspace(-1, 1, 24).view(12, 2)
    strategy = AllReduce(
        model,
        build_optimizer(LarsConfig(trust_coefficient=0.02), model.parameters()),
        comm,
        AllReduceConfig(bucket_bytes=300),
    )
    own = slice(sum(split[: comm.rank]), sum(split[: comm.rank + 1]))
    for step in range(6):
        strategy.begin_step(split[comm.rank], 1 if split[comm.rank] else 0)
        if split[comm.rank]:
            losses = ((model(inputs[own]) - targets[own]) ** 2).sum(1)
            strategy.backward(losses, losses.detach())
        strategy.end_step(2.0 / (1 + step))
    strategy.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_two_workers_train_as_one_process() -> None:
    (alone,) = run_workers(_strategy_weights, 1, [12])
    for weights in run_workers(_strategy_weights, 2, [9, 3]):
        torch.testing.assert_close(weights, alone, rtol=1e-5, atol=1e-6)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr must be a finite number of at least 0, got -0.1. Usual is 1.0."),
        ({"lr": float("nan")}, "lr must be a finite number of at least 0, got nan"),
        ({"momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"weight_decay": -1e-4}, "weight_decay must be a finite number of at least 0, got -0.0001"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be a finite number greater than 0, got 0.0"),
        ({"trust_coefficient": -1.0}, "trust_coefficient must be a finite number greater than 0, got -1.0"),
        ({"trust_coefficient": float("inf")}, "trust_coefficient must be a finite number greater than 0, got inf"),
    ],
)  # fmt: skip
def test_refuses_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lars([nn.Parameter(torch.ones(2, 2))], **settings)
    with pytest.raises(ConfigError, match=message):
        Lars([{"params": [nn.Parameter(torch.ones(2, 2))], **settings}])


@pytest.mark.parametrize("value", ["-0.001", "0"])
def test_a_configuration_refuses_a_trust_coefficient_that_is_not_positive(value: str) -> None:
    with pytest.raises(ConfigError, match="optimizer.trust_coefficient must be greater than 0.0, got"):
        from_overrides(["optimizer=lars", f"optimizer.trust_coefficient={value}"])


def test_refuses_sparse_gradients_before_it_changes_anything() -> None:
    words, weight = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2, 2))
    words(torch.tensor([1])).sum().backward()
    weight.grad = torch.ones(2, 2)
    optimizer = Lars([weight, words.weight])
    with pytest.raises(
        ConfigError, match=r"gradients must be dense, got layout torch.sparse_coo. Use sparse=False"
    ):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2, 2))


@pytest.mark.gpu
def test_on_a_gpu_it_does_the_same() -> None:
    weights = [torch.randn(300, 200), torch.randn(7, 3), torch.randn(5)]
    results = []
    for device in ("cpu", "cuda"):
        parameters = [nn.Parameter(weight.to(device)) for weight in weights]
        optimizer = Lars(parameters, lr=5.0)
        for _ in range(3):
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.grad = weight.to(device).cos()
            optimizer.step()
        results.append([parameter.detach().cpu() for parameter in parameters])
    torch.testing.assert_close(results[1], results[0])
