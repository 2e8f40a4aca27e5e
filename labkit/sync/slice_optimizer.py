"""One worker's share of the optimizer: it updates a slice of the flat parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Communicator
from labkit.config import LarsConfig, OptimizerConfig
from labkit.optim.build import build_optimizer
from labkit.optim.lars import Lars
from labkit.sync.flat import Span, flat_state, pieces

Share = Callable[[int, Tensor, Tensor], Tensor]
"""From a row's number, this worker's pieces and their sums to the sums of all pieces, over its node."""


@dataclass(frozen=True)
class Part:
    """A contiguous part of the slice.

    Attributes:
        start: Its first element in the flat order.
        parameters: Shape (n,).
        gradient: Shape (n,).
    """

    start: int
    parameters: Tensor
    gradient: Tensor

    @property
    def end(self) -> int:
        """One past the last element in the flat order."""
        return self.start + len(self.parameters)

    def between(self, start: int, end: int) -> "Part":
        """What of it lies there; maybe nothing."""
        low, high = max(start, self.start), min(end, self.end)
        inside = slice(low - self.start, max(low, high) - self.start)
        return Part(low, self.parameters[inside], self.gradient[inside])


class SliceOptimizer:
    """An elementwise optimizer, or LARS, over one slice, with the norms of whole tensors.

    Squares are summed per piece (a part of a tensor within one grain of the flat order), then over the
    pieces in one fixed order in float64: the sum is the same on every node, however many workers it has.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        whole: torch.optim.Optimizer,
        layout: Sequence[Span],
        parts: Sequence[Part],
        share: Share,
    ) -> None:
        """Prepare.

        Args:
            config: The optimizer.
            whole: The same optimizer over the model's parameters, for its groups.
            layout: Where parameters lie.
            parts: The slice, in flat order; parts may be empty, and they end at grains.
            share: Adds up sums of squares over the workers of the node; all of them call it together.
        """
        self._whole, self._layout, self._share = whole, layout, share
        self._gradients = [part.gradient for part in parts]
        self._find_pieces(parts)
        if isinstance(config, LarsConfig):
            self._optimizer: torch.optim.Optimizer = self._build_lars(parts)
        else:
            self._members = [_member(part) for part in parts]
            self._optimizer = build_optimizer(config, [parameter for _, parameter in self._members])

    def _find_pieces(self, parts: Sequence[Part]) -> None:
        everyones = pieces(self._layout)
        own = [
            (index, part.between(piece.start, piece.end))
            for part in parts
            for index, piece in enumerate(everyones)
            if part.start <= piece.start < part.end
        ]
        device = self._gradients[0].device
        self._span_of = torch.tensor([piece.span for piece in everyones])
        self._own = torch.tensor([index for index, _ in own], dtype=torch.int64, device=device)
        self._weight_pieces = [piece.parameters for _, piece in own]
        self._gradient_pieces = [piece.gradient for _, piece in own]

    def _build_lars(self, parts: Sequence[Part]) -> Lars:
        """LARS over the parts of tensors inside the slice, in the groups of the whole tensors."""
        spans = {id(span.parameter): index for index, span in enumerate(self._layout)}
        self._members, groups = [], []
        adapted: list[int] = []
        for group in self._whole.param_groups:
            members = []
            for index in (spans[id(p)] for p in group["params"] if id(p) in spans):
                span = self._layout[index]
                inside = [part.between(span.start, span.end) for part in parts]
                found = [_member(part) for part in inside if len(part.parameters)]
                members += found
                adapted += [index] * len(found) if group["is_adapted"] else []
            self._members += members
            groups.append({**group, "params": [parameter for _, parameter in members]})
        self._adapted = torch.tensor(adapted, dtype=torch.int64)
        return Lars(groups, squared_norms=self._squared_norms)

    def _squared_norms(self, weights: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        of_weights = self._by_tensor(self._weight_pieces, 0)
        of_gradients = self._by_tensor(self._gradient_pieces, 1)
        return of_weights[self._adapted], of_gradients[self._adapted]

    def _by_tensor(self, views: list[Tensor], row: int) -> Tensor:
        """Sum of squares of every whole tensor; shape (tensors,), float64."""
        sums = torch.zeros(len(self._layout), dtype=torch.float64)
        return sums.index_add_(0, self._span_of, self._by_piece(views, row))

    def _by_piece(self, views: list[Tensor], row: int) -> Tensor:
        """Sum of squares of every piece of the flat tensor; shape (pieces,), float64, on the CPU.

        There they are added up in one order; an accelerator would not promise that.
        """
        squares = torch.zeros(0, dtype=torch.float64, device=self._own.device)
        if views:
            squares = torch.stack(torch._foreach_norm(views)).double().square()
        return self._share(row, self._own, squares).cpu()

    def divide_(self, count: float) -> None:
        """Divide the slice's gradient; by 1 costs nothing."""
        if count != 1.0:
            torch._foreach_div_(self._gradients, count)

    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        """Clip by the norm of the whole gradient and update the slice."""
        if clip_norm is not None:
            norm = float(self._by_piece(self._gradient_pieces, 2).sum()) ** 0.5
            torch._foreach_mul_(self._gradients, min(1.0, clip_norm / (norm + 1e-6)))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state(self) -> tuple[set[str], dict[str, Tensor]]:
        """Names of the elementwise state, and the numbers beside it."""
        values = [
            (name, value)
            for state in self._optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]
        names = {name for name, value in values if value.dim()}
        return names, {name: value for name, value in values if not value.dim()}

    def write_state(self, name: str, flat: Tensor) -> None:
        """Put elementwise state into its places in a flat tensor of the whole; zeros where there is none."""
        for start, parameter in self._members:
            value = self._optimizer.state.get(parameter, {}).get(name, 0.0)
            flat[start : start + len(parameter)] = value

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of an optimizer over whole parameters."""
        for start, parameter in self._members:
            end = start + len(parameter)
            values, scalars = flat_state(self._whole, self._layout, state, start, end)
            if values or scalars:
                self._optimizer.state[parameter] = {
                    **{name: value.clone() for name, value in scalars.items()},
                    **{name: value.to(parameter.device) for name, value in values.items()},
                }


def _member(part: Part) -> tuple[int, nn.Parameter]:
    """Where a parameter of the slice's optimizer lies in the flat order, and the parameter."""
    parameter = nn.Parameter(part.parameters, requires_grad=False)
    parameter.grad = part.gradient
    return part.start, parameter


def agreed_names(names: set[str], node: Communicator, device: torch.device) -> list[str]:
    """Names of the elementwise state that any worker of the node holds; an empty slice holds none.

    All workers of the node call it together.
    """
    known = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    has = torch.tensor([float(name in names) for name in known], device=device)
    node.all_reduce_(has).wait()
    return [name for name, count in zip(known, has.tolist(), strict=True) if count]
