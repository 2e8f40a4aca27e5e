"""What stands in place of a saved tensor: a handle, and the block of memory that it owns a part of."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.memory.adapter import Copy

if TYPE_CHECKING:
    from labkit.memory.step import Step

Key = tuple[int, int]
"""Segment, or -1, and which block of it."""
RESULT: Key = (-2, 0)
"""What a segment that is computed again has given to the next one."""

_LEAST_SHARE = 0.5  # of a storage: a view that spans less moves alone


@dataclass
class Remains:
    """What a block that is gone has left."""

    host: Tensor | None
    copies: tuple[Copy | None, ...]
    size_bytes: int
    is_counted: bool
    data: Tensor | None  # a copy may still read it
    waiting: "Step | None"  # that waited for it to come back
    step: "Step"
    key: Key

    def is_done(self) -> bool:
        """No copy uses it any more."""
        return all(copy is None or copy.is_done() for copy in self.copies)


class Kept:
    """A saved tensor that stays. It shares its version with the original, so a change in place is seen."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since.
        """
        check_version(self._tensor, self._version)
        return self._tensor


class Handle:
    """What autograd keeps in place of a tensor: a view of a saved block."""

    def __init__(self, saved: "Saved", tensor: Tensor) -> None:
        self._saved = saved
        self._dtype = tensor.dtype
        first = int(tensor.storage_offset()) - saved.span[0] // tensor.element_size()
        self._place = (first, tensor.size(), tensor.stride())
        self._version = tensor._version
        self._witness = witness_of(tensor)

    def get(self) -> Tensor:
        """The tensor, with the strides that it had.

        Raises:
            RuntimeError: it was changed in place since.
        """
        check_version(self._witness, self._version)
        return self._saved.view(self._dtype, *self._place)


def unpack(held: Kept | Handle) -> Tensor:
    """Called when the backward pass asks for a saved tensor."""
    return held.get()


def check_version(tensor: Tensor, version: int) -> None:
    """Refuse a tensor that was changed in place.

    Raises:
        RuntimeError: it is at another version; the words are autograd's own.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is at version {tensor._version}; expected version {version} instead."
        )


def witness_of(tensor: Tensor) -> Tensor:
    """Shares the version of a tensor without its memory."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def is_manageable(tensor: Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is one that can move: plain, and on the device."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.numel() == 0:
        return False
    return tensor.device == device


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Bytes of its storage that are to move with a tensor: all, or what it reaches over if that is little."""
    whole = tensor.untyped_storage().nbytes()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    end = begin + (last + 1) * tensor.element_size()
    return (0, whole) if end - begin >= _LEAST_SHARE * whole else (begin, end)


class Saved:
    """One storage, or a span of it: on the device, on the host, or on its way."""

    def __init__(self, step: "Step", key: Key, tensor: Tensor, span: tuple[int, int]) -> None:
        """Take hold of it.

        Args:
            step: In which it was saved.
            key: Which block of the step it is.
            tensor: A view of it.
            span: First byte and the one behind the last, in the storage.
        """
        self._step, self.key, self.span = step, key, span
        self.segment = step.segment
        self.size_bytes = span[1] - span[0]
        self._shape = tensor.shape
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._bytes: Tensor | None = whole.set_(storage, span[0], (self.size_bytes,), (1,))
        # Keeps the address reserved, so that another storage can't take this one's identity.
        self._identity = StorageWeakRef(storage)
        self._host: Tensor | None = None
        self._out: Copy | None = None
        self._in: Copy | None = None
        self._may_go = self._is_in = False
        self.is_waited_for = False
        step.memory.count(self.size_bytes)
        self._is_counted = True

    @property
    def storage(self) -> int:
        """Address of the storage, its own as long as this lives."""
        address: int = self._identity.cdata
        return address

    @property
    def name(self) -> str:
        """For people: its shape, and the segment that it was computed in."""
        shape = "x".join(map(str, self._shape)) or "scalar"
        return shape if self.segment < 0 else f"{shape} in segment {self.segment}"

    # --- out ---------------------------------------------------------------------------------------------

    def leave(self, host: Tensor) -> None:
        """Begin to bring it out."""
        assert self._bytes is not None
        self._host = host
        self._out = self._step.memory.adapter.copy_out(self._bytes, host)

    def has_left(self) -> bool:
        """Its bytes are on the host, or whatever computes from now on does so after that."""
        return self._may_go or (self._out is not None and self._out.is_done())

    def wait_out(self) -> None:
        """Have the computing wait until its bytes are on the host."""
        assert self._out is not None
        self._step.memory.stalled(self._step, self.name, self._out.wait())
        self._may_go = True

    def let_go(self) -> None:
        """Drop the device's copy; whether its memory goes depends on who else holds it."""
        self._bytes = None

    def is_really_gone(self) -> bool:
        """Whether the memory went; counted once. A block that is back by now is none that lingers."""
        if not self._identity.expired():
            return self._bytes is not None
        memory = self._step.memory
        if self._is_counted and self._bytes is None:
            self._is_counted = False
            memory.totals.freed_bytes += self.size_bytes
            memory.count(-self.size_bytes)
        return True

    def say_held(self) -> None:
        """Somebody else holds what was brought out: a variable of the forward pass, say."""
        held = self._step.memory.totals.held
        held[self.name] = held.get(self.name, 0) + self.size_bytes

    # --- back --------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """It holds memory on the device."""
        return self._bytes is not None

    def is_leaving(self) -> bool:
        """It is still there, and on its way out, or out and held by others."""
        return self._bytes is not None and self._out is not None and self._in is None

    def is_away(self) -> bool:
        """It has to come back before it can be used."""
        return self._bytes is None and self._host is not None

    def come_back(self) -> None:
        """Begin to bring it back."""
        memory = self._step.memory
        assert self._host is not None
        if not self._identity.expired():  # it went for us, and others hold it: there it is
            storage = torch.UntypedStorage._new_with_weak_ptr(self.storage)
            if storage is not None and storage.nbytes() >= self.span[1]:
                whole = torch.empty(0, dtype=torch.uint8, device=memory.adapter.device)
                self._bytes = whole.set_(storage, self.span[0], (self.size_bytes,), (1,))
                return
        target = torch.empty(self.size_bytes, dtype=torch.uint8, device=memory.adapter.device)
        self._in = memory.adapter.copy_in(self._host, target, self._out)
        # The target's storage begins where the span did.
        self._bytes = target
        if not self._is_counted:
            self._is_counted = True
            memory.count(self.size_bytes)

    def view(self, dtype: torch.dtype, first: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """A tensor that was saved; it is there, or comes before anything computes with it."""
        memory = self._step.memory
        with memory.lock:
            memory.bury()
            self._step.needed(self)
            if self._bytes is None:
                self.come_back()
            if self._in is not None and not self._is_in:
                # The copy is kept: on CUDA it may still be under way when the block goes.
                memory.stalled(self._step, self.name, self._in.wait())
                self._is_in = True
            assert self._bytes is not None
            whole = torch.empty(0, dtype=dtype, device=self._bytes.device)
            offset = first + int(self._bytes.storage_offset()) // dtype.itemsize
            return whole.set_(self._bytes.untyped_storage(), offset, size, stride)

    def __del__(self) -> None:
        step, copies = self._step, (self._out, self._in)
        is_moving = any(copy is not None and not copy.is_done() for copy in copies)
        step.memory.dead.append(
            Remains(
                self._host,
                copies,
                self.size_bytes,
                self._is_counted,
                self._bytes if is_moving else None,
                step if self.is_waited_for else None,
                step,
                self.key,
            )
        )
