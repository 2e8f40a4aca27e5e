"""How a message looks on the wire: a small JSON head, then the bytes of its tensors in chunks.

Every chunk is a message of its own to the transport, so that encrypting it, sending it and copying it out
at the other end overlap, and so that the receiver sees the size of what comes before it has it all. The
bytes are copied once at each end: it hides behind encryption and wire, and a sender may change its tensor
at once.

    b"B" request              | {"kind", "header", "tensors": [[dtype, shape], ...]}
    b"D" request offset       | bytes, in one frame or several
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_BYTES = 512 * 1024
MAX_JSON_BYTES = 64 * 1024
MAX_FRAMES = 4096  # of one chunk
_ALIGN_BYTES = 64
_MAX_DIMENSIONS = 16
_BEGIN, _DATA = struct.Struct("<cQ"), struct.Struct("<cQQ")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}

Bytes = bytes | memoryview
_Spec = tuple[torch.dtype, tuple[int, ...]]


class Malformed(Exception):
    """What came can't be read; `reason` is a word to count by, `request` 0 when even that is not known."""

    def __init__(self, reason: str, text: str, request: int = 0) -> None:
        super().__init__(text)
        self.reason = reason
        self.request = request


def pack(
    request: int, kind: str, header: dict[str, Any] | None, tensors: Sequence[Tensor]
) -> tuple[int, Iterator[list[Bytes]]]:
    """Cut a message into chunks.

    Returns:
        Bytes of the tensors, and the chunks, each a list of frames. The tensors are read as these are
        taken.

    Raises:
        ValueError: the header is no JSON, or too long, or a tensor's dtype can't be sent.
    """
    for tensor in tensors:
        if _name(tensor.dtype) not in _DTYPES:
            raise ValueError(f"tensor's dtype must be one of {', '.join(_DTYPES)}, got {_name(tensor.dtype)}")
    specs = [[_name(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    content = {"kind": kind, "header": header or {}, "tensors": specs}
    head = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    if len(head) > MAX_JSON_BYTES:
        raise ValueError(
            f"header and shapes must fit in {MAX_JSON_BYTES} bytes of JSON, got {len(head)}. Send what is "
            "large as a tensor, and many tensors as one."
        )
    _, size_bytes = _layout([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])

    def chunks() -> Iterator[list[Bytes]]:
        yield [_BEGIN.pack(b"B", request), head]
        offset = 0
        for frames, num_bytes in _cut(_parts(tensors)):
            yield [_DATA.pack(b"D", request, offset), *frames]
            offset += num_bytes

    return size_bytes, chunks()


class Incoming:
    """A message that is coming in, chunk by chunk, straight into the memory of its tensors."""

    def __init__(self, frames: Sequence[Bytes], max_bytes: int) -> None:
        """Take the first frames.

        Raises:
            Malformed: they are no beginning, or announce what must not come.
        """
        self.request = read_request(frames)
        try:
            self.kind, self.header, specs = _read_head(frames)
            offsets, self.size_bytes = _layout(specs)
            if self.size_bytes > max_bytes:
                raise Malformed("too large", f"message must have at most {max_bytes} bytes of tensors, got "
                                f"{self.size_bytes}")  # fmt: skip
        except Malformed as error:
            error.request = self.request
            raise
        memory = torch.empty(self.size_bytes, dtype=torch.uint8)
        self._memory: npt.NDArray[np.uint8] = memory.numpy()
        self._num_bytes = 0
        self.tensors = tuple(
            memory[offset : offset + _num_bytes(spec)].view(spec[0]).view(spec[1])
            for offset, spec in zip(offsets, specs, strict=True)
        )

    @property
    def is_complete(self) -> bool:
        """All of its bytes are here."""
        return self._num_bytes == self.size_bytes

    def add(self, frames: Sequence[Bytes]) -> None:
        """Take a chunk.

        Raises:
            Malformed: it is not the next one of this message.
        """
        size_bytes = sum(len(frame) for frame in frames[1:])
        if len(frames) < 2 or len(frames) > MAX_FRAMES:
            raise Malformed("frames", f"a chunk can't have {len(frames)} frames", self.request)
        if len(frames[0]) != _DATA.size or _DATA.unpack(frames[0])[1:] != (self.request, self._num_bytes):
            raise Malformed("out of order", "a chunk is missing or not the next one", self.request)
        if not 0 < size_bytes <= self.size_bytes - self._num_bytes:
            raise Malformed(
                "wrong size",
                f"tensors must have {self.size_bytes} bytes, got {self._num_bytes + size_bytes}",
                self.request,
            )
        for frame in frames[1:]:
            end = self._num_bytes + len(frame)
            if len(frame):
                self._memory[self._num_bytes : end] = np.frombuffer(frame, dtype=np.uint8)
            self._num_bytes = end


def is_beginning(frames: Sequence[Bytes]) -> bool:
    """Whether these frames say that they begin a message."""
    return len(frames) > 0 and bytes(frames[0][:1]) == b"B"


def read_request(frames: Sequence[Bytes]) -> int:
    """The request that frames belong to.

    Raises:
        Malformed: they don't say.
    """
    if frames and len(frames[0]) == _BEGIN.size and frames[0][:1] == b"B":
        return int(_BEGIN.unpack(frames[0])[1])
    if frames and len(frames[0]) == _DATA.size and frames[0][:1] == b"D":
        return int(_DATA.unpack(frames[0])[1])
    raise Malformed("garbage", "the first frame is neither a beginning nor a chunk")


# --- tensors as bytes -----------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _num_bytes(spec: _Spec) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _layout(specs: Sequence[_Spec]) -> tuple[list[int], int]:
    """Where each tensor begins, on whole cache lines, and the bytes of all."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-_num_bytes(spec) // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, end


def _parts(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of the tensors, one after the other, filled up to cache lines."""
    filling = memoryview(bytes(_ALIGN_BYTES))
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content: memoryview = plain.reshape(-1).view(torch.uint8).numpy().data
        yield content
        yield filling[: -len(content) % _ALIGN_BYTES]


def _cut(parts: Iterator[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Group parts into chunks: their frames and bytes."""
    frames: list[memoryview] = []
    size_bytes = 0
    for part in parts:
        while len(part):
            piece = part[: CHUNK_BYTES - size_bytes]
            frames.append(piece)
            size_bytes += len(piece)
            part = part[len(piece) :]
            if size_bytes == CHUNK_BYTES or len(frames) == MAX_FRAMES - 1:
                yield frames, size_bytes
                frames, size_bytes = [], 0
    if frames:
        yield frames, size_bytes


# --- the head -----------------------------------------------------------------


def _read_head(frames: Sequence[Bytes]) -> tuple[str, dict[str, Any], list[_Spec]]:
    if len(frames) != 2 or not is_beginning(frames):
        raise Malformed("frames", f"a beginning must have two frames, got {len(frames)}")
    if len(frames[1]) > MAX_JSON_BYTES:
        raise Malformed("too large", f"header must have at most {MAX_JSON_BYTES} bytes of JSON")
    try:
        content = json.loads(bytes(frames[1]), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise Malformed("bad JSON", "header must be JSON") from None
    match content:
        case {"kind": str(kind), "header": dict(header), "tensors": list(tensors)} if len(content) == 3:
            return kind, header, [_read_spec(spec) for spec in tensors]
    raise Malformed("bad JSON", "header must have kind, header and tensors, and nothing else")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _read_spec(spec: Any) -> _Spec:
    match spec:
        case [str(name), list(shape)]:
            pass
        case _:
            raise Malformed("bad JSON", "tensors must be a list of [dtype, shape]")
    if name not in _DTYPES:
        raise Malformed("wrong type", f"dtype must be one of {', '.join(_DTYPES)}, got {name[:40]!r}")
    is_good = len(shape) <= _MAX_DIMENSIONS and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**48 for size in shape
    )
    # torch refuses a zero-size tensor whose other sizes overflow.
    if not is_good or math.prod(max(size, 1) for size in shape) >= 2**56:
        raise Malformed("wrong shape", "shape must be a list of sizes, none negative, none immense")
    return _DTYPES[name], tuple(shape)
