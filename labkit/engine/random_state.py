"""The state of every random stream of a worker as one tensor of bytes."""

import random
import struct

import numpy as np
import torch
from torch import Tensor

from labkit.seeding import stream_seed

_NUMPY = struct.Struct("<624I q q d")
_PYTHON = struct.Struct("<625I ? d")
_TORCH_BYTES = 5056
_CUDA_BYTES = 16


def seed_everything(seed: int, *names: str | int) -> None:
    """Seed torch (all devices), numpy and Python from one named stream."""
    value = stream_seed(seed, *names)
    torch.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


def capture() -> Tensor:
    """The state of torch's CPU and CUDA, numpy's and Python's global streams; shape (n,) uint8."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = _NUMPY.pack(*keys, position, has_gauss, gauss)
    _, words, next_gauss = random.getstate()
    python_state = _PYTHON.pack(*words, next_gauss is not None, next_gauss or 0.0)
    cuda = (
        torch.cuda.get_rng_state()
        if torch.cuda.is_initialized()
        else torch.zeros(_CUDA_BYTES, dtype=torch.uint8)
    )
    plain = torch.frombuffer(bytearray(numpy_state + python_state), dtype=torch.uint8)
    return torch.cat([torch.get_rng_state(), cuda, plain])


def restore(state: Tensor) -> None:
    """Set every stream to a captured state."""
    sizes = [_TORCH_BYTES, _CUDA_BYTES, _NUMPY.size, _PYTHON.size]
    torch_state, cuda, numpy_state, python_state = state.cpu().split(sizes)
    torch.set_rng_state(torch_state.clone())
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(cuda.clone())
    *keys, position, has_gauss, gauss = _NUMPY.unpack(numpy_state.numpy().tobytes())
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, gauss))
    *words, is_set, next_gauss = _PYTHON.unpack(python_state.numpy().tobytes())
    random.setstate((3, tuple(words), next_gauss if is_set else None))
