"""One server's part of a sharded parameter server: whole parameters, their optimizer, and staged gradients.

Momentum lives here and nowhere else, so a worker that comes and goes takes none with it. Parameters are never
cut, so that LARS finds the norms of whole tensors on one server.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import OptimizerConfig
from labkit.optim.build import build_optimizer
from labkit.sync import flat

Key = tuple[int, int]
"""A group and the number of what it computed."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters in the order in which they lie in flat tensors: that of `flat.spans`."""
    return [span.parameter for span in flat.spans(model)]


def flat_parameters(model: nn.Module) -> Tensor:
    """A copy of the trained parameters; shape (n,)."""
    return torch.cat([parameter.detach().flatten() for parameter in trained(model)])


def shard_borders(sizes: Sequence[int], num_shards: int) -> list[int]:
    """Cut a list of parameters into runs of about equal size, each border next to where it should be.

    Args:
        sizes: Elements of each parameter; shape (P,).
        num_shards: Servers; there may be more of them than parameters.

    Returns:
        Positions in the list, rising from 0 to P; shape (num_shards + 1,).
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    borders = [0]
    for shard in range(1, num_shards):
        wanted = ends[-1] * shard / num_shards
        nearest = min(range(len(ends)), key=lambda index: (abs(ends[index] - wanted), index))
        borders.append(max(nearest, borders[-1]))
    return [*borders, len(sizes)]


class ServerShard:
    """Whole parameters of a model, and the state of their optimizer."""

    def __init__(self, model: nn.Module, optimizer_config: OptimizerConfig, first: int, last: int) -> None:
        """Take parameters `first` to `last` of the model's trained ones, with the values that they have.

        Args:
            model: Of its parameters outside the shard nothing is kept.
            optimizer_config: The optimizer of the whole model.
            first: First parameter of the shard.
            last: One past the last.
        """
        everything = trained(model)
        self._own = everything[first:last]
        self.start = sum(parameter.numel() for parameter in everything[:first])
        self.stop = self.start + sum(parameter.numel() for parameter in self._own)
        self.dtype = everything[0].dtype
        self._flat = flat_parameters(model)[self.start : self.stop].clone()
        self._gradient = torch.zeros_like(self._flat)
        offset = 0
        for parameter in self._own:
            inside = slice(offset, offset + parameter.numel())
            parameter.data = self._flat[inside].view_as(parameter)  # so the model holds the newest values
            parameter.grad = self._gradient[inside].view_as(parameter)
            offset += parameter.numel()
        self._optimizer, self._index_of = _optimizer_of(model, optimizer_config, self._own)
        groups = self._optimizer.param_groups if self._optimizer else []
        self._decays = [float(group["weight_decay"]) for group in groups]
        self._staged: dict[Key, Tensor] = {}

    def __len__(self) -> int:
        """Elements."""
        return self.stop - self.start

    def stage(self, key: Key, gradient: Tensor) -> None:
        """Keep a mean gradient until it is applied or dropped; the first of a key stays; shape (n,)."""
        self._staged.setdefault(key, gradient)

    def drop(self, group: int) -> None:
        """Forget what a group has staged."""
        for key in [key for key in self._staged if key[0] == group]:
            del self._staged[key]

    def apply(self, pushes: Iterable[tuple[Key, float]], learning_rate: float) -> None:
        """One update from staged gradients; they are forgotten.

        Pushes that weigh W together make W of a step, decay included, so that the G pushes of a global batch
        are as long as one step on it. SGD takes the weighted sum and W of its decay. The steps of LARS and
        AdamW are as long for a small gradient as for a large one: they take the weighted mean, and W of the
        learning rate. With W = 1 both are the plain step.

        Args:
            pushes: Which, and how much each weighs.
            learning_rate: Of a whole step.
        """
        pushes = list(pushes)
        total = sum(weight for _, weight in pushes)
        is_sgd = isinstance(self._optimizer, torch.optim.SGD)
        self._gradient.zero_()
        for key, weight in pushes:
            self._gradient.add_(self._staged.pop(key), alpha=weight if is_sgd else weight / total)
        if self._optimizer is None:
            return
        for group, decay in zip(self._optimizer.param_groups, self._decays, strict=True):
            group["lr"] = learning_rate if is_sgd else learning_rate * total
            group["weight_decay"] = decay * total if is_sgd else decay
        self._optimizer.step()

    def read(self) -> Tensor:
        """The parameters as they are now; shape (n,)."""
        return self._flat.clone()

    # --- state -----------------------------------------------------------------------------------------

    def state(self) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """The optimizer's state: of each tensor the parameter's index in the whole optimizer and its name."""
        header, tensors = [], []
        for parameter in self._own:
            values = self._optimizer.state.get(parameter, {}) if self._optimizer else {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    header.append({"index": self._index_of[id(parameter)], "name": name})
                    tensors.append(value.detach().clone())
        return header, tensors

    def load(self, parameters: Tensor, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on from a checkpoint.

        Args:
            parameters: Of the whole model, flat.
            state: Of the whole optimizer, by parameter index.
        """
        self._flat.copy_(parameters[self.start : self.stop])
        for parameter in self._own:
            values = state.get(self._index_of[id(parameter)])
            if values and self._optimizer is not None:
                self._optimizer.state[parameter] = {name: value.clone() for name, value in values.items()}


def _optimizer_of(
    model: nn.Module, config: OptimizerConfig, own: Sequence[nn.Parameter]
) -> tuple[torch.optim.Optimizer | None, dict[int, int]]:
    """The optimizer over a shard, in the groups of the whole one; and each parameter's index in that."""
    whole = build_optimizer(config, model.parameters())
    everything = [parameter for group in whole.param_groups for parameter in group["params"]]
    index_of = {id(parameter): index for index, parameter in enumerate(everything)}
    wanted = {id(parameter) for parameter in own}
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]}
        for group in whole.param_groups
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None, index_of
    optimizer = build_optimizer(config, own)
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group(group)
    return optimizer, index_of
