"""Parts of a model that are computed again in the backward pass, and whether they come to the same then."""

import contextlib
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from labkit.memory.saved import witness_of

if TYPE_CHECKING:
    from labkit.memory.hybrid import HybridMemory
    from labkit.memory.step import Step

OWNERS: "weakref.WeakKeyDictionary[nn.Module, HybridMemory]" = weakref.WeakKeyDictionary()
"""Who decides about a module."""


def find_segments(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are best computed again as a whole: what its lists of modules hold.

    Entries of a `ModuleList`, and those of a `Sequential` that have modules inside. None that computes
    together with other workers, who might not compute again.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            is_part = isinstance(module, nn.ModuleList) or (
                isinstance(module, nn.Sequential) and next(child.children(), None) is not None
            )
            if is_part and not any(getattr(part, "is_collective", False) for part in child.modules()):
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def segment_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A segment's forward pass: noted while a step is recorded, computed again where the plan says so.

    Bound to its module, so that a copy of the model computes with the copy's parameters.
    """
    memory = OWNERS.get(self)
    step = memory.active if memory is not None and not memory.is_recomputing else None
    if step is None or step.segment >= 0 or not torch.is_grad_enabled():
        return type(self).forward(self, *args, **kwargs)
    return step.run_segment(self, args, kwargs)


def run_to_repeat(
    memory: "HybridMemory", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute now, and once more when the backward pass comes here.

    All goes in by position: `checkpoint` has keywords of its own, and looks after no others.
    """
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        return type(module).forward(module, *values[:count], **dict(zip(names, values[count:], strict=True)))

    contexts = lambda: (contextlib.nullcontext(), _again(memory, module))  # noqa: E731
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _again(memory: "HybridMemory", module: nn.Module) -> Iterator[None]:
    """Compute again without counting batch statistics twice."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    momenta = [norm.momentum for norm in norms]
    counts = [None if n.num_batches_tracked is None else n.num_batches_tracked.clone() for n in norms]
    for norm in norms:
        norm.momentum = 0.0  # (1 - 0) x + 0 y is x to the bit
    memory.is_recomputing = True
    try:
        yield
    finally:
        memory.is_recomputing = False
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


class Watch:
    """Whether a segment would come to the same, computed again: nothing that it depends on may change."""

    def __init__(
        self,
        step: "Step",
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """The segment is about to be computed."""
        self._module, self._adapter = module, step.memory.adapter
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.is_repeatable = len(leaves) == len(tensors)  # those inside of lists are not looked after
        self._inputs = [(witness_of(tensor), tensor._version) for tensor in tensors]
        self._states = self._state()
        kept = step.storages_of(-1)
        storages = {StorageWeakRef(t.untyped_storage()).cdata: t.untyped_storage().nbytes() for t in tensors}
        self.boundary_bytes = sum(size for cdata, size in storages.items() if cdata not in kept)
        self._step, self._index = step, step.segment
        self.own_results: tuple[bool, ...] = ()
        self._began_at = self._adapter.now()
        self.seconds = 0.0

    def _state(self) -> list[Any]:
        """Versions of buffers, but for batch statistics, and random streams that are not torch's."""
        norms = {
            id(buffer)
            for norm in self._module.modules()
            if isinstance(norm, nn.modules.batchnorm._NormBase)
            for buffer in norm.buffers()
        }
        versions = [buffer._version for buffer in self._module.buffers() if id(buffer) not in norms]
        numpy_state = np.random.get_state(legacy=False)
        return [versions, random.getstate(), str(numpy_state)]

    def end(self, results: Sequence[Tensor]) -> None:
        """The segment has been computed."""
        self.seconds = self._adapter.now() - self._began_at
        own = self._step.storages_of(self._index)
        self.own_results = tuple(StorageWeakRef(t.untyped_storage()).cdata in own for t in results)
        self.is_repeatable = self.is_repeatable and self._states == self._state()

    def is_still_repeatable(self) -> bool:
        """After the backward pass: what went in is still as it was."""
        return self.is_repeatable and all(witness._version == version for witness, version in self._inputs)
