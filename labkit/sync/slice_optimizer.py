"""One worker's share of the optimizer: it updates a slice of the flat parameters."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from labkit.config import OptimizerConfig
from labkit.optim.build import build_optimizer
from labkit.sync.flat import Piece, Span, pieces


class SliceOptimizer:
    """An elementwise optimizer over one slice, whose norms are those of whole tensors.

    Squares are summed per piece (a part of a tensor within one grain of the flat order), then over the
    pieces in one fixed order in float64: the sum is the same on every node, however many workers it has.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        layout: Sequence[Span],
        parameters: Tensor,
        gradients: Tensor,
        bounds: tuple[int, int],
        norms: Tensor,
        add_up: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            config: The optimizer.
            layout: Where parameters lie.
            parameters: The node's flat parameters, shared; shape (n,).
            gradients: The node's flat gradient, shared; shape (n or more,).
            bounds: First element of the slice and one past its last.
            norms: Shared place for sums of squares; shape (2, pieces), float64.
            add_up: Waits until all workers of the node have written theirs.
        """
        self.start, self.end = bounds
        self._all_pieces = pieces(layout)
        self._own = [i for i, piece in enumerate(self._all_pieces) if self.start <= piece.start < self.end]
        self._norms = norms
        self._add_up = add_up
        self._gradient = gradients[self.start : self.end]
        self._parameter = nn.Parameter(parameters[self.start : self.end], requires_grad=False)
        self._parameter.grad = self._gradient
        self._optimizer = build_optimizer(config, [self._parameter])

    def divide_(self, count: float) -> None:
        """Turn the slice's sums into means."""
        self._gradient.div_(count)

    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        """Clip by the norm of the whole gradient and update the slice."""
        if clip_norm is not None:
            norm = float(self._sum_squares(self._gradient, 0).sum()) ** 0.5
            self._add_up()  # nobody may write the next norms before all have read these
            self._gradient.mul_(min(1.0, clip_norm / (norm + 1e-6)))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _sum_squares(self, values: Tensor, row: int) -> Tensor:
        """Sums of squares of every piece of the whole tensor; shape (pieces,), float64."""
        if self._own:
            views = [self._view(values, self._all_pieces[index]) for index in self._own]
            squares = torch.stack([norm.double().square() for norm in torch._foreach_norm(views)])
            self._norms[row, self._own[0] : self._own[-1] + 1] = squares
        self._add_up()
        return self._norms[row]

    def _view(self, values: Tensor, piece: Piece) -> Tensor:
        return values[piece.start - self.start : piece.end - self.start]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Elementwise state of the slice by name, and the numbers beside it."""
        state = self._optimizer.state.get(self._parameter, {})
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        parts = {name: value for name, value in tensors.items() if value.dim() > 0}
        return parts, {name: value for name, value in tensors.items() if value.dim() == 0}

    def load(self, parts: dict[str, Tensor], scalars: dict[str, Tensor]) -> None:
        """Continue from a state."""
        if parts or scalars:
            self._optimizer.state[self._parameter] = {
                **{name: value.clone() for name, value in scalars.items()},
                **{name: value.clone() for name, value in parts.items()},
            }
