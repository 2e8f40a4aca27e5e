"""LARS, layer-wise adaptive rate scaling, by the rule of the paper and of MLPerf.

For each tensor w with gradient g (the unscaled mean over the global batch), velocity v, trust coefficient
eta, weight decay beta, momentum mu and learning rate lr:

    ratio = eta * |w| / (|g| + beta * |w|)      1 if either norm is 0
    v     = mu * v + lr * ratio * (g + beta * w)
    w     = w - v

The learning rate stands inside the momentum: a change of it does not rescale what is already in v.
Biases and the parameters of normalisation get neither ratio nor decay.

You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017, https://arxiv.org/abs/1708.03888,
with the exclusions and the zero-norm rule of MLPerf's reference (mlcommons/training, lars_optimizer.py):
where only g is 0, decay still applies. LARC (NVIDIA apex) and timm's Lars put the learning rate outside the
momentum: another optimizer as soon as the rate changes. Caffe's later versions decouple the decay.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.errors import ConfigError

SquaredNorms = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]
"""From tensors and their gradients to the sums of squares of each; shapes (n,), (n,)."""

_CHUNK = 1_048_576  # elements; a float32 sum of 25 million squares may be 2 % off, one of so many 0.2 %
_PORTION = 1_000_000  # elements that are updated at once, while their norms have left them in the cache
_SMALLEST_FUSED = 32_768  # elements; for fewer, the fused kernel wakes its threads in vain
_SMALLEST_FUSED_RATE = 1e-8
_LANES = 64  # elements; a multiple of what any CPU handles in one instruction


def trust_ratio(
    weight_norm: float, gradient_norm: float, *, trust_coefficient: float, weight_decay: float
) -> float:
    """How much of the learning rate one tensor gets: eta * |w| / (|g| + beta * |w|), 1 if either norm is 0.

    Args:
        weight_norm: Euclidean norm of the whole tensor.
        gradient_norm: Euclidean norm of its whole gradient.
        trust_coefficient: eta, above 0.
        weight_decay: beta, at least 0.
    """
    if weight_norm == 0 or gradient_norm == 0:
        return 1.0
    return trust_coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)


def is_small(parameter: Tensor) -> bool:
    """A bias or a parameter of normalisation: one that has at most one dimension."""
    return parameter.ndim <= 1


def sums_of_squares(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each tensor, from norms of its chunks in float32 (float64 for float64).

    Norms of each other device than the CPU come over in one transfer.
    """
    sums = [0.0] * len(tensors)
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        owners, chunks = kinds.setdefault((tensor.device, tensor.dtype), ([], []))
        parts = tensor.reshape(-1).split(_CHUNK) if tensor.numel() > _CHUNK else (tensor,)
        owners += [index] * len(parts)
        chunks += parts
    for (_, dtype), (owners, chunks) in kinds.items():
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(chunks, dtype=exact)).tolist()
        for owner, norm in zip(owners, norms, strict=True):
            sums[owner] += norm * norm
    return sums


class Lars(torch.optim.Optimizer):
    """LARS as a `torch.optim.Optimizer`: schedulers, closures, `state_dict` and parameter groups work.

    Each group has `lr`, `momentum`, `weight_decay`, `trust_coefficient` and `is_adapted` (with the trust
    ratio or without). A group that does not state `is_adapted` is split by dimension when it is added:
    tensors of at most one dimension form a group of their own, behind the others, without ratio and decay
    unless the two switches say otherwise. So a model gives two groups, and a list of rates for a
    scheduler has two entries.

    Gradients must be unscaled and averaged over the global batch before `step` (as `GradScaler.step`
    does), and are not changed. One that is not finite makes its own tensor not finite (NaN norm: all of
    it; infinite norm: the elements concerned); other tensors are not touched. Skip such a step.

    Pieces of parameters, where each worker updates a part of every tensor: take the `param_groups` of an
    instance over the whole parameters, replace each parameter by the worker's 1-D view of a part of it
    (or leave it out), and build `Lars` over these groups with `squared_norms`. Since they state
    `is_adapted` and `weight_decay`, the dimension of the whole tensor still decides. `squared_norms` is
    called exactly once in every step, so it may hold a collective, with the pieces that have a gradient and
    an adapted group, in their order; it returns the sums of squares of the whole tensors they belong to.
    A velocity that lies in `state[piece]["momentum_buffer"]` before the first step is used in place.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
        is_small_adapted: bool = False,
        is_small_decayed: bool = False,
        squared_norms: SquaredNorms | None = None,
    ) -> None:
        """Check the settings and form the groups.

        Args:
            params: Parameters, or groups of them with settings of their own.
            lr: Learning rate; the trust ratio multiplies it, so it is far larger than that of SGD.
            momentum: mu, at least 0 and below 1.
            weight_decay: beta, an L2 penalty, inside ratio and momentum.
            trust_coefficient: eta, above 0.
            is_small_adapted: Trust ratio for biases and normalisation too.
            is_small_decayed: Weight decay for biases and normalisation too.
            squared_norms: Norms of the whole tensors, where the parameters are pieces of them.

        Raises:
            ConfigError: a setting is out of range.
        """
        self._squared_norms = squared_norms
        self._is_small_adapted = is_small_adapted
        self._is_small_decayed = is_small_decayed
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "is_adapted": True,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_squared_norms", "_is_small_adapted", "_is_small_decayed")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, split by dimension unless the group states `is_adapted`.

        Raises:
            ConfigError: a setting is out of range.
        """
        _check({**self.defaults, **param_group})
        for part in self._split(param_group):
            super().add_param_group(part)

    def _split(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "is_adapted" in group:
            yield group
            return
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        small = [member for member in members if is_small(_tensor_of(member))]
        large = [member for member in members if not is_small(_tensor_of(member))]
        decay = group.get("weight_decay", self.defaults["weight_decay"]) if self._is_small_decayed else 0.0
        if large or not small:
            yield {**group, "params": large, "is_adapted": True}
        if small:
            yield {
                **group,
                "params": small,
                "is_adapted": self._is_small_adapted,
                "weight_decay": decay,
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            What the closure gave.

        Raises:
            ConfigError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [_Work.of(group, self.state) for group in self.param_groups]
        if self._squared_norms is None:
            for part in (few for whole in work for few in whole.portions()):
                part.update_(part.rates(part.own_norms()))
            return loss
        adapted = [part for part in work if part.is_adapted]
        squares = self._squared_norms(
            [weight for part in adapted for weight in part.weights],
            [gradient for part in adapted for gradient in part.gradients],
        )
        norms = iter(zip(*(square.double().sqrt().tolist() for square in squares), strict=True))
        for part in work:
            part.update_(part.rates(norms))
        return loss


# --- one step ------------------------------------------------------------------------------------


class _Item(NamedTuple):
    """One tensor in one step, or a part of one."""

    weight: Tensor
    gradient: Tensor
    velocity: Tensor | None
    rate: float

    def part(self, which: slice) -> "_Item":
        """Some of its elements; it is contiguous."""
        velocity = None if self.velocity is None else self.velocity.view(-1)[which]
        return _Item(self.weight.view(-1)[which], self.gradient.view(-1)[which], velocity, self.rate)


@dataclass(frozen=True)
class _Work:
    """What one group has to do in one step: its settings, and its tensors that have a gradient."""

    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float
    is_adapted: bool
    weights: list[Tensor]
    gradients: list[Tensor]
    velocities: list[Tensor | None]

    @classmethod
    def of(cls, group: dict[str, Any], state: dict[Tensor, Any]) -> "_Work":
        pairs = [(weight, gradient) for weight in group["params"] if (gradient := weight.grad) is not None]
        return cls(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            weight_decay=float(group["weight_decay"]),
            trust_coefficient=float(group["trust_coefficient"]),
            is_adapted=bool(group["is_adapted"]),
            weights=[weight for weight, _ in pairs],
            gradients=[_dense(gradient) for _, gradient in pairs],
            velocities=[_velocity(weight, state) if group["momentum"] else None for weight, _ in pairs],
        )

    def portions(self) -> Iterator["_Work"]:
        """Cut where a CPU's cache is full; other devices take all at once."""
        start = size = 0
        for end, weight in enumerate(self.weights, start=1):
            size += weight.numel() if weight.is_cpu and self.is_adapted else 0
            if size >= _PORTION or end == len(self.weights):
                yield self._between(start, end)
                start, size = end, 0

    def _between(self, start: int, end: int) -> "_Work":
        return replace(
            self,
            weights=self.weights[start:end],
            gradients=self.gradients[start:end],
            velocities=self.velocities[start:end],
        )

    def own_norms(self) -> Iterator[tuple[float, float]]:
        """Norms of weight and gradient of each tensor that is adapted, where all tensors are whole."""
        if not self.is_adapted:
            return iter(())
        roots = list(map(math.sqrt, sums_of_squares([*self.weights, *self.gradients])))
        return zip(roots[: len(self.weights)], roots[len(self.weights) :], strict=True)

    def rates(self, norms: Iterator[tuple[float, float]]) -> list[float]:
        """Learning rate times trust ratio of each tensor; takes as many norms as it needs."""
        if not self.is_adapted:
            return [self.lr] * len(self.weights)
        eta, decay = self.trust_coefficient, self.weight_decay
        return [
            self.lr * trust_ratio(*next(norms), trust_coefficient=eta, weight_decay=decay)
            for _ in self.weights
        ]

    def update_(self, rates: list[float]) -> None:
        """Update each tensor in the way that is cheapest for it; all ways give the same bits."""
        fused: dict[float, list[_Item]] = {}
        rest: dict[tuple[torch.device, torch.dtype], list[_Item]] = {}
        smallest = _LANES if torch.get_num_threads() == 1 else _SMALLEST_FUSED
        for item in map(_Item, self.weights, self.gradients, self.velocities, rates):
            bulk, tail = _cut(item, smallest)
            if bulk is not None:
                fused.setdefault(bulk.rate, []).append(bulk)
            if tail is not None:
                rest.setdefault((tail.weight.device, tail.weight.dtype), []).append(tail)
        for rate, items in fused.items():
            self.fused_(items, rate)
        for items in rest.values():
            self.foreach_(items)

    def foreach_(self, items: list[_Item]) -> None:
        """The rule in torch's multi-tensor operations, for tensors of one device and dtype."""
        weights = [item.weight for item in items]
        rates = [item.rate for item in items]
        steps = [item.gradient for item in items]
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, weights, alpha=self.weight_decay))
        if not self.momentum:
            _add_scaled_(weights, steps, [-rate for rate in rates])
            return
        velocities = [item.velocity for item in items if item.velocity is not None]
        torch._foreach_mul_(velocities, self.momentum)
        _add_scaled_(velocities, steps, rates)
        torch._foreach_sub_(weights, velocities)

    def fused_(self, items: list[_Item], rate: float) -> None:
        """The rule in one pass over memory, by torch's fused SGD, to the same bits.

        That is v = mu * v + (1 - dampening) * (g + beta * w) and w -= lr * v: with lr 1 and dampening
        1 - rate it is LARS.
        """
        torch._fused_sgd_(
            [item.weight for item in items],
            [item.gradient for item in items],
            [item.velocity for item in items if item.velocity is not None],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=1.0,
            dampening=1.0 - rate,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


def _velocity(weight: Tensor, state: dict[Tensor, Any]) -> Tensor:
    own = state[weight]
    if "momentum_buffer" not in own:
        own["momentum_buffer"] = torch.zeros_like(weight)
    velocity: Tensor = own["momentum_buffer"]
    return velocity


def _add_scaled_(targets: list[Tensor], tensors: list[Tensor], rates: list[float]) -> None:
    """Add rate * tensor to each target, rounded in the same way whatever else is in the lists."""
    if targets[0].device.type != "cpu":
        torch._foreach_add_(targets, torch._foreach_mul(tensors, rates))
    elif len(set(rates)) == 1:
        torch._foreach_add_(targets, tensors, alpha=rates[0])
    else:
        for target, tensor, rate in zip(targets, tensors, rates, strict=True):
            target.add_(tensor, alpha=rate)


def _cut(item: _Item, smallest: int) -> tuple[_Item | None, _Item | None]:
    """What of a tensor torch's fused kernel shall update, and what is left.

    On a CPU it saves half the passes over memory. It works on whole vectors of numbers and rounds the last
    few in another way, so these are left: the bits do not depend on where a tensor is cut into pieces.
    """
    size = item.weight.numel()
    if size < smallest or not _is_fusible(item):
        return None, item
    bulk = size // _LANES * _LANES
    if bulk == size:
        return item, None
    return item.part(slice(None, bulk)), item.part(slice(bulk, None))


def _is_fusible(item: _Item) -> bool:
    """The kernel goes through memory from end to end, and needs 1 - (1 - rate) to be exact enough."""
    weight, gradient, velocity, rate = item
    return (
        velocity is not None
        and weight.is_cpu
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and gradient.is_contiguous()
        and velocity.is_contiguous()
        and rate >= _SMALLEST_FUSED_RATE
    )


# --- checks --------------------------------------------------------------------------------------


def _tensor_of(member: Any) -> Tensor:
    """A parameter, also where it was given with its name."""
    tensor: Tensor = member[1] if isinstance(member, tuple) else member
    return tensor


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout != torch.strided:
        raise ConfigError(
            f"gradients must be dense, got layout {gradient.layout}. Use sparse=False in the embedding."
        )
    return gradient


_RANGES: dict[str, tuple[str, Callable[[float], bool], str]] = {
    "lr": ("a finite number of at least 0", lambda x: x >= 0, "1.0"),
    "momentum": ("at least 0 and less than 1", lambda x: 0 <= x < 1, "0.9"),
    "weight_decay": ("a finite number of at least 0", lambda x: x >= 0, "0.0001"),
    "trust_coefficient": ("a finite number greater than 0", lambda x: x > 0, "0.001"),
}


def _check(settings: dict[str, Any]) -> None:
    for name, (condition, is_good, usual) in _RANGES.items():
        value = float(settings[name])
        if not (math.isfinite(value) and is_good(value)):
            raise ConfigError(f"{name} must be {condition}, got {settings[name]!r}. Usual is {usual}.")
