"""One worker's share of the optimizer: it updates a slice of the flat parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.comm import Communicator
from labkit.config import LarsConfig, OptimizerConfig
from labkit.optim.build import build_optimizer
from labkit.optim.lars import Lars
from labkit.sync.flat import Span, pieces

Share = Callable[[int, int, Tensor], Tensor]
"""From a row's number, the first piece and this worker's sums to the sums of all pieces of the node."""


@dataclass(frozen=True)
class _Part:
    """A parameter of the slice's optimizer, and where it lies in the flat tensor."""

    parameter: nn.Parameter
    start: int
    end: int
    span: int = -1


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
        parameters: Tensor,
        gradient: Tensor,
        bounds: tuple[int, int],
        share: Share,
    ) -> None:
        """Prepare.

        Args:
            config: The optimizer.
            whole: The same optimizer over the model's parameters, for its groups.
            layout: Where parameters lie.
            parameters: The flat parameters of the slice; shape (end - start,).
            gradient: Their gradient; the same shape.
            bounds: First element of the slice and one past its last, in the flat order.
            share: Adds up sums of squares over the workers of the node; all of them call it together.
        """
        self.start, self.end = bounds
        self._layout = layout
        self._all_pieces = pieces(layout)
        self._own = [i for i, piece in enumerate(self._all_pieces) if self.start <= piece.start < self.end]
        self._spans = torch.tensor([piece.span for piece in self._all_pieces], device=parameters.device)
        self._parameters, self._gradient, self._share = parameters, gradient, share
        if isinstance(config, LarsConfig):
            self._optimizer: torch.optim.Optimizer = self._build_lars(whole)
        else:
            self._parts = [self._part(self.start, self.end)]
            self._optimizer = build_optimizer(config, [self._parts[0].parameter])

    def _part(self, start: int, end: int, span: int = -1) -> _Part:
        inside = slice(start - self.start, end - self.start)
        parameter = nn.Parameter(self._parameters[inside], requires_grad=False)
        parameter.grad = self._gradient[inside]
        return _Part(parameter, start, end, span)

    def _build_lars(self, whole: torch.optim.Optimizer) -> Lars:
        """LARS over the parts of tensors inside the slice, in the groups of the whole tensors."""
        spans = {id(span.parameter): index for index, span in enumerate(self._layout)}
        self._parts, groups = [], []
        self._adapted: list[int] = []
        for group in whole.param_groups:
            parts = []
            for index in (spans[id(p)] for p in group["params"] if id(p) in spans):
                span = self._layout[index]
                start, end = max(self.start, span.start), min(self.end, span.end)
                if start < end:
                    parts.append(self._part(start, end, index))
            self._parts += parts
            self._adapted += [part.span for part in parts] if group["is_adapted"] else []
            groups.append({**group, "params": [part.parameter for part in parts]})
        return Lars(groups, squared_norms=self._squared_norms)

    def _squared_norms(self, weights: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        by_tensor = [
            self._by_tensor(values, row) for row, values in enumerate((self._parameters, self._gradient))
        ]
        chosen = torch.tensor(self._adapted, dtype=torch.int64, device=by_tensor[0].device)
        return by_tensor[0][chosen].cpu(), by_tensor[1][chosen].cpu()

    def _by_tensor(self, values: Tensor, row: int) -> Tensor:
        """Sum of squares of every whole tensor; shape (tensors,), float64."""
        sums = torch.zeros(len(self._layout), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self._spans, self._by_piece(values, row))

    def _by_piece(self, values: Tensor, row: int) -> Tensor:
        """Sum of squares of every piece of the flat tensor; shape (pieces,), float64."""
        own = [self._all_pieces[index] for index in self._own]
        views = [values[piece.start - self.start : piece.end - self.start] for piece in own]
        norms = torch._foreach_norm(views) if views else ()
        squares = (
            torch.stack([norm.double().square() for norm in norms]) if norms else values.new_empty(0).double()
        )
        return self._share(row, self._own[0] if self._own else 0, squares)

    def divide_(self, count: float) -> None:
        """Divide the slice's gradient; by 1 costs nothing."""
        if count != 1.0:
            self._gradient.div_(count)

    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        """Clip by the norm of the whole gradient and update the slice."""
        if clip_norm is not None:
            norm = float(self._by_piece(self._gradient, 2).sum()) ** 0.5
            self._gradient.mul_(min(1.0, clip_norm / (norm + 1e-6)))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Elementwise state of the slice by name, and the numbers beside it."""
        parts: dict[str, Tensor] = {}
        scalars: dict[str, Tensor] = {}
        for part in self._parts:
            for name, value in self._optimizer.state.get(part.parameter, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if value.dim() == 0:
                    scalars[name] = value
                    continue
                whole = parts.setdefault(name, torch.zeros_like(self._parameters))
                whole[part.start - self.start : part.end - self.start] = value
        return parts, scalars

    def load(self, parts: dict[str, Tensor], scalars: dict[str, Tensor]) -> None:
        """Continue from a state."""
        if not parts and not scalars:
            return
        for part in self._parts:
            inside = slice(part.start - self.start, part.end - self.start)
            self._optimizer.state[part.parameter] = {
                **{name: value.clone() for name, value in scalars.items()},
                **{
                    name: value[inside].to(self._parameters.device, copy=True)
                    for name, value in parts.items()
                },
            }


def agreed_names(parts: dict[str, Tensor], node: Communicator, device: torch.device) -> list[str]:
    """Names of the elementwise state that any worker of the node holds; an empty slice holds none.

    All workers of the node call it together.
    """
    known = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    has = torch.tensor([float(name in parts) for name in known], device=device)
    node.all_reduce_(has).wait()
    return [name for name, count in zip(known, has.tolist(), strict=True) if count]
