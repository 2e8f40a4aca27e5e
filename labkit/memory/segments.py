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

from labkit.memory.saved import check_version, witness_of

if TYPE_CHECKING:
    from labkit.memory.hybrid import HybridMemory
    from labkit.memory.step import Step

OWNERS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[HybridMemory]]" = weakref.WeakKeyDictionary()
"""Who decides about a module: the latest memory made for it."""


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


class SegmentForward:
    """A segment's forward pass: noted while a step is recorded, computed again where the plan says so.

    It holds its module, so that a copy of the model, or one from a file, computes with its own parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        """Stand in place of the module's own."""
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute."""
        module = self._module
        owner = OWNERS.get(module)
        memory = owner() if owner is not None else None
        step = memory.active if memory is not None and not memory.is_recomputing else None
        if step is None or step.segment >= 0 or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        return step.run_segment(module, args, kwargs)


def run_to_repeat(
    memory: "HybridMemory", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute now, and once more when the backward pass comes here.

    All goes in by position: `checkpoint` has keywords of its own, and looks after no others.
    """
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        return type(module).forward(module, *values[:count], **dict(zip(names, values[count:], strict=True)))

    states = [(tensor, tensor._version) for tensor in _states_of(module)]
    contexts = lambda: (contextlib.nullcontext(), _again(memory, module, states))  # noqa: E731
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)


def _states_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, and buffers but for batch statistics, which are counted in every forward pass."""
    yield from module.parameters()
    statistics = {id(buffer) for norm in _norms_of(module) for buffer in norm.buffers()}
    yield from (buffer for buffer in module.buffers() if id(buffer) not in statistics)


def _norms_of(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]


@contextlib.contextmanager
def _again(memory: "HybridMemory", module: nn.Module, states: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
    """Compute again with what was there before, and without counting batch statistics twice."""
    for tensor, version in states:
        check_version(tensor, version)
    norms = _norms_of(module)
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


def _value_of(value: Any) -> Any:
    """What tells an attribute from what it was."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, (int, float, str, bool, tuple, type(None))) else id(value)


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
        """All that the module holds, but for batch statistics, and random streams that are not torch's."""
        tensors = [(id(tensor), tensor._version) for tensor in _states_of(self._module)]
        norms = {id(norm) for norm in _norms_of(self._module)}
        attributes = [
            {name: _value_of(value) for name, value in vars(part).items() if not name.startswith("_")}
            for part in self._module.modules()
            if id(part) not in norms
        ]
        numpy_state = np.random.get_state(legacy=False)
        return [tensors, attributes, random.getstate(), str(numpy_state)]

    def end(self, results: Sequence[Tensor]) -> None:
        """The segment has been computed."""
        self.seconds = self._adapter.now() - self._began_at
        own = self._step.storages_of(self._index)
        self.own_results = tuple(StorageWeakRef(t.untyped_storage()).cdata in own for t in results)
        self.is_repeatable = self.is_repeatable and self._states == self._state()

    def is_still_repeatable(self) -> bool:
        """After the backward pass: what went in is still as it was."""
        return self.is_repeatable and all(witness._version == version for witness, version in self._inputs)
