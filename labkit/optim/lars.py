"""LARS, layer-wise adaptive rate scaling, by the rule of the paper and of MLPerf.

For each tensor w with gradient g (the unscaled mean over the global batch), velocity v, trust coefficient
eta, weight decay beta, momentum mu and learning rate lr:

    ratio = eta * |w| / (|g| + beta * |w|)      1 if either norm is 0
    v     = mu * v + lr * ratio * (g + beta * w)
    w     = w - v

The learning rate stands inside the momentum: a change of it does not rescale what is already in v.
Biases and the parameters of normalisation get neither ratio nor decay.

You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017, https://arxiv.org/abs/1708.03888,
with the exclusions and the zero-norm rule of MLPerf's reference (mlcommons/training, lars_optimizer.py).
LARC (NVIDIA apex) and timm's Lars put the learning rate outside the momentum: another optimizer as soon as
the rate changes. Our own choice, since the sources say nothing: where only g is 0, decay still applies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from labkit.errors import ConfigError

SquaredNorms = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]
"""From tensors and their gradients to the sums of squares of each; shapes (n,), (n,)."""

_CHUNK = 65_536  # elements; a float32 sum of squares over 25 million in one go is up to 2 % too small
_PORTION = 1_000_000  # elements; norms and update of so many follow each other while they are in the cache
_SMALLEST_FUSED_RATE = 1e-8


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


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, added up in float32 (float64 for float64 tensors) chunk by chunk.

    Returns:
        Shape (n,), float64, on the CPU: one transfer for each other device.
    """
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        owners, chunks = kinds.setdefault((tensor.device, tensor.dtype), ([], []))
        parts = tensor.reshape(-1).split(_CHUNK)
        owners += [index] * len(parts)
        chunks += parts
    for (_, dtype), (owners, chunks) in kinds.items():
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(chunks, dtype=exact))
        sums.index_add_(0, torch.tensor(owners), norms.double().square().cpu())
    return sums


def _of_whole_tensors(weights: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    both = sums_of_squares([*weights, *gradients])
    return both[: len(weights)], both[len(weights) :]


class _Entry(NamedTuple):
    """A tensor that takes part in this step."""

    weight: Tensor
    gradient: Tensor
    group: dict[str, Any]


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

    Pieces of parameters: where each worker updates a slice of every tensor, build `Lars` over 1-D views,
    in groups that state `is_adapted` and `weight_decay` as `param_groups` of an instance over the whole
    parameters does, and give `squared_norms`. It is called exactly once a step, whatever the step is
    (so it may hold a collective), with the pieces that have a gradient and whose group is adapted, in the
    order of the groups, and returns the sums of squares of the *whole* tensors that they belong to.
    A velocity that is in `state[piece]["momentum_buffer"]` before the first step is used in place.
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

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
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
        entries = [
            _Entry(weight, _dense(weight.grad), group)
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        if self._squared_norms is not None:
            self._update(entries, self._squared_norms)
        else:
            for portion in _portions(entries):
                self._update(portion, _of_whole_tensors)
        return loss

    def _update(self, entries: list[_Entry], squared_norms: SquaredNorms) -> None:
        rest: dict[Any, tuple[list[_Entry], list[float]]] = {}
        for entry, rate in zip(entries, _rates(entries, squared_norms), strict=True):
            if _is_fusible(entry, rate):
                _fused_update_(entry, self._velocity(entry), rate)
            else:
                kind = (id(entry.group), entry.weight.device, entry.weight.dtype)
                same, rates = rest.setdefault(kind, ([], []))
                same.append(entry)
                rates.append(rate)
        for same, rates in rest.values():
            _foreach_update_(same, [self._velocity(entry) for entry in same], rates)

    def _velocity(self, entry: _Entry) -> Tensor | None:
        if entry.group["momentum"] == 0:
            return None
        state = self.state[entry.weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(entry.weight)
        velocity: Tensor = state["momentum_buffer"]
        return velocity


# --- one step ------------------------------------------------------------------------------------


def _rates(entries: list[_Entry], squared_norms: SquaredNorms) -> list[float]:
    """Learning rate times trust ratio of each tensor."""
    adapted = [entry for entry in entries if entry.group["is_adapted"]]
    squares = squared_norms([entry.weight for entry in adapted], [entry.gradient for entry in adapted])
    norms = iter(zip(*(square.double().sqrt().tolist() for square in squares), strict=True))
    return [
        _rate(entry.group, *next(norms)) if entry.group["is_adapted"] else float(entry.group["lr"])
        for entry in entries
    ]


def _rate(group: dict[str, Any], weight_norm: float, gradient_norm: float) -> float:
    ratio = trust_ratio(
        weight_norm,
        gradient_norm,
        trust_coefficient=group["trust_coefficient"],
        weight_decay=group["weight_decay"],
    )
    return float(group["lr"]) * ratio


def _foreach_update_(entries: list[_Entry], velocities: list[Tensor | None], rates: list[float]) -> None:
    """The rule in torch's multi-tensor operations, for tensors of one group, device and dtype."""
    group = entries[0].group
    weights = [entry.weight for entry in entries]
    gradients = [entry.gradient for entry in entries]
    if group["weight_decay"]:
        steps = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(steps, rates)
    else:
        steps = torch._foreach_mul(gradients, rates)
    if group["momentum"]:
        moving = [velocity for velocity in velocities if velocity is not None]
        torch._foreach_mul_(moving, group["momentum"])
        torch._foreach_add_(moving, steps)
        steps = moving
    torch._foreach_sub_(weights, steps)


def _is_fusible(entry: _Entry, rate: float) -> bool:
    """On a CPU, where torch's fused kernel reads and writes everything once.

    It takes the rate as 1 - rate, exact enough for float32 unless the rate is tiny, and goes through
    memory from end to end, whatever the strides.
    """
    weight, gradient, _ = entry
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and gradient.is_contiguous()
        and not rate < _SMALLEST_FUSED_RATE
    )


def _fused_update_(entry: _Entry, velocity: Tensor | None, rate: float) -> None:
    """The rule in one pass, by torch's fused SGD: v = mu * v + (1 - dampening) * (g + beta * w); w -= lr * v.

    With lr 1 and dampening 1 - rate that is LARS; without momentum torch leaves out the dampening.
    """
    torch._fused_sgd_(
        [entry.weight],
        [entry.gradient],
        [] if velocity is None else [velocity],
        weight_decay=entry.group["weight_decay"],
        momentum=entry.group["momentum"],
        lr=rate if velocity is None else 1.0,
        dampening=1.0 - rate,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _portions(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Tensors in their order, cut where a CPU's cache is full; other devices take all at once."""
    portion: list[_Entry] = []
    size = 0
    for entry in entries:
        portion.append(entry)
        size += entry.weight.numel() if entry.weight.device.type == "cpu" else 0
        if size >= _PORTION:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


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
