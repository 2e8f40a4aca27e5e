"""A model whose parameters are views of one flat tensor, in the order in which gradients appear."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import ConfigError

GRAIN = 65536  # slices end at multiples of this, so that sums over pieces are the same for any slicing


@dataclass(frozen=True)
class Span:
    """Where a parameter lies in the flat tensor."""

    parameter: nn.Parameter
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """A part of one parameter inside one grain of the flat tensor.

    Attributes:
        span: Which parameter, by its position in the flat tensor.
        start: First element in the flat tensor.
        end: One past the last.
    """

    span: int
    start: int
    end: int


def spans(model: nn.Module) -> list[Span]:
    """Lay out the trainable parameters from the last to the first.

    Raises:
        ConfigError: they are not all of one exact type.
    """
    found: list[Span] = []
    offset = 0
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        found.append(Span(parameter, offset, offset + parameter.numel()))
        offset += parameter.numel()
    kinds = {span.parameter.dtype for span in found}
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(kind) for kind in kinds)) or "no trainable parameter"
        raise ConfigError(
            f"model must have float32 or float64 parameters only, got {names}. Use sync.name=allreduce."
        )
    return found


def pieces(layout: Sequence[Span]) -> list[Piece]:
    """Cut every parameter at the grains' borders; in flat order."""
    found: list[Piece] = []
    for index, span in enumerate(layout):
        start = span.start
        while start < span.end:
            end = min(span.end, (start // GRAIN + 1) * GRAIN)
            found.append(Piece(index, start, end))
            start = end
    return found


def slices(num_elements: int, num_workers: int) -> list[tuple[int, int]]:
    """Split the flat tensor into one slice per worker, whole grains each, as even as can be."""
    num_grains = -(-num_elements // GRAIN)
    borders = [min(num_elements, num_grains * i // num_workers * GRAIN) for i in range(num_workers + 1)]
    return list(zip(borders[:-1], borders[1:], strict=True))


def buckets(num_elements: int, num_workers: int, bucket_elements: int) -> list[tuple[int, int]]:
    """Cut the flat tensor into buckets that each split into one equal part of whole grains per worker.

    A bucket has at most `bucket_elements`, unless that is less than a grain per worker. The last one may
    reach beyond the flat tensor's end, by less than a grain per worker.
    """
    smallest = num_workers * GRAIN
    size = max(1, bucket_elements // smallest) * smallest
    end = -(-num_elements // smallest) * smallest
    return [(start, min(start + size, end)) for start in range(0, end, size)]


def move_into(flat: Tensor, layout: Sequence[Span], *, is_first: bool) -> None:
    """Make every parameter a view of `flat`; the first worker brings the values along."""
    for span in layout:
        view = flat[span.start : span.end].view_as(span.parameter)
        if is_first:
            view.copy_(span.parameter.data)
        span.parameter.data = view


def full_state(
    optimizer: torch.optim.Optimizer,
    layout: Sequence[Span],
    flat_states: dict[str, Tensor],
    scalars: dict[str, Tensor],
) -> dict[str, Any]:
    """The state of an optimizer over the whole model, from flat tensors of its parts.

    It is the same as of an optimizer that updated whole parameters, so a checkpoint can be resumed under
    any strategy and on any cluster.

    Args:
        optimizer: Over the model's parameters; only its groups are read.
        layout: Where parameters lie in the flat tensors.
        flat_states: Elementwise state by name, each of shape (n,).
        scalars: State that is one number, the same for all parameters.
    """
    state = optimizer.state_dict()
    index_of = _indices(optimizer)
    if flat_states or scalars:
        state["state"] = {
            index_of[id(span.parameter)]: {
                **{name: value.clone() for name, value in scalars.items()},
                **{
                    name: flat[span.start : span.end].view_as(span.parameter).clone()
                    for name, flat in flat_states.items()
                },
            }
            for span in layout
        }
    return state


def flat_state(
    optimizer: torch.optim.Optimizer, layout: Sequence[Span], state: dict[str, Any], start: int, end: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reverse: elementwise state of a slice and the common numbers, from a whole model's state."""
    flat: dict[str, Tensor] = {}
    scalars: dict[str, Tensor] = {}
    index_of = _indices(optimizer)
    for span in layout:
        for name, value in state["state"].get(index_of[id(span.parameter)], {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.numel() != span.parameter.numel() or value.dim() == 0 != span.parameter.dim():
                scalars[name] = value
                continue
            if name not in flat:
                flat[name] = torch.zeros(end - start, dtype=value.dtype)
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                flat[name][low - start : high - start] = value.flatten()[low - span.start : high - span.start]
    return flat, scalars


def _indices(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): index for index, parameter in enumerate(parameters)}


class GradientRow:
    """Collects the gradients of a model in one flat row as they appear.

    Autograd leaves each gradient in a tensor of its own; a hook moves it into the row and frees it.
    """

    def __init__(
        self, layout: Sequence[Span], row: Tensor, on_progress: Callable[[int], None] = lambda end: None
    ) -> None:
        """Register the hooks.

        Args:
            layout: Where parameters lie.
            row: Where the gradients go; shape (n or more,).
            on_progress: Told, in the last micro-step, up to where the row is complete without a gap.
        """
        self._layout = layout
        self._on_progress = on_progress
        self._place_of = {span.parameter: index for index, span in enumerate(layout)}
        self._views = [row[span.start : span.end].view_as(span.parameter) for span in layout]
        self._hooks = [span.parameter.register_post_accumulate_grad_hook(self._collect) for span in layout]
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self._is_last_micro_step = False
        self._seen = [False] * len(self._layout)
        self._is_complete = [False] * len(self._layout)
        self._next = 0
        for span in self._layout:
            span.parameter.grad = None

    def expect_last_micro_step(self) -> None:
        """From now on a gradient that appears is complete."""
        self._is_last_micro_step = True

    def _collect(self, parameter: Tensor) -> None:
        index = self._place_of[parameter]  # type: ignore[index]
        gradient = parameter.grad
        if gradient is None:
            return
        require_dense(gradient)
        if self._seen[index]:
            self._views[index].add_(gradient)
        else:
            self._views[index].copy_(gradient)
            self._seen[index] = True
        parameter.grad = None
        if self._is_last_micro_step:
            self._is_complete[index] = True
            self._report()

    def _report(self) -> None:
        before = self._next
        while self._next < len(self._layout) and self._is_complete[self._next]:
            self._next += 1
        if self._next > before:
            self._on_progress(self._layout[self._next - 1].end)

    def finish(self) -> None:
        """Put zeros where no gradient came: no samples here, or a parameter that took no part."""
        for is_seen, view in zip(self._seen, self._views, strict=True):
            if not is_seen:
                view.zero_()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def require_dense(gradient: Tensor) -> None:
    """Refuse a sparse gradient.

    Raises:
        ConfigError: it is sparse.
    """
    if gradient.layout != torch.strided:
        raise ConfigError(
            f"gradients must be dense, got layout {gradient.layout}. Use sparse=False in the embedding."
        )
