"""Activations that move on a GPU: against torch's own offloading and against full checkpointing.

Needs a GPU. The largest batch of each way is found under the same cap on the device's memory, which stands
for a smaller device; then each trains at its own.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.bench.harness import Report, interleave, ratios
from labkit.errors import ConfigError
from labkit.memory import HybridMemory, find_max_batch, fits_in_memory

_WIDTH, _HEADS, _LAYERS, _LENGTH = 2048, 16, 12, 1024
_CAP = 20 * 10**9
_HOST = 60 * 10**9
_STEPS = 8
_REPEATS = 5
_MARGIN = 0.9  # of the cap for blocks and parameters: the rest is workspace and fragmentation
_SIDES = ("nothing moves", "ours", "save_on_cpu", "checkpointing")


def measure(say: Callable[[str], None]) -> Report:
    """Measure; about five minutes.

    Raises:
        ConfigError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench memory-cuda must run on a machine with CUDA, got none. Use bench memory.")
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, _CAP / total), device)
    report = Report("memory-cuda")
    largest = {}
    for name in _SIDES:
        largest[name] = _largest(name, device)
        say(f"{name}: largest batch {largest[name]}")
    batch = largest["nothing moves"]
    equal = interleave({name: _timed(name, batch, device, say) for name in _SIDES}, _REPEATS)
    report.add("throughput_kept", ratios(equal["nothing moves"], equal["ours"]), ">= 0.95")
    report.add("vs_save_on_cpu", ratios(equal["save_on_cpu"], equal["ours"]))
    report.add("vs_checkpointing", ratios(equal["checkpointing"], equal["ours"]))
    own = interleave({name: _timed(name, largest[name], device, say) for name in _SIDES}, _REPEATS)
    rates = {name: [largest[name] / seconds for seconds in own[name]] for name in _SIDES}
    best = [max(pair) for pair in zip(*(rates[name] for name in _SIDES if name != "ours"), strict=True)]
    report.add("vs_best_baseline", ratios(rates["ours"], best), ">= 1.2")
    report.add("batch_growth", [largest["ours"] / max(1, batch)], ">= 1.6")
    report.notes.append(
        f"{torch.cuda.get_device_name(device)}; {_LAYERS} transformer blocks of width {_WIDTH}, {_LENGTH} "
        f"tokens, bfloat16, {_CAP / 1e9:g} GB of device memory at the most for every side; batches "
        + ", ".join(f"{size} ({name})" for name, size in largest.items())
    )
    return report


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*part.shape[:2], _HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        found: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class _Network(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self._is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._is_checkpointed else block(x)
        return x


class _Training:
    """One way to train."""

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self._name, self._device = name, device
        self._model = _Network(name == "checkpointing").to(device, torch.bfloat16)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._memory = None
        if name == "ours":
            reserved = sum(4 * p.numel() * p.element_size() for p in self._model.parameters())
            self._memory = HybridMemory(
                self._model, device_budget=int(_MARGIN * _CAP), reserved_bytes=reserved, host_budget=_HOST
            )

    def _hooks(self) -> contextlib.AbstractContextManager[object]:
        if self._memory is not None:
            return self._memory.step()
        if self._name == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return contextlib.nullcontext()

    def step(self, batch: int) -> None:
        x = torch.randn(batch, _LENGTH, _WIDTH, device=self._device, dtype=torch.bfloat16)
        with self._hooks():
            loss = self._model(x).float().square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        del self._model, self._optimizer, self._memory
        torch.cuda.empty_cache()


def _largest(name: str, device: torch.device) -> int:
    with contextlib.closing(_Training(name, device)) as training:

        def attempt(batch: int) -> None:
            for _ in range(3):
                training.step(batch)

        def fits(batch: int) -> bool:
            return fits_in_memory(functools.partial(attempt, batch))

        return find_max_batch(fits, most=4096, resolution=0.05)


def _timed(name: str, batch: int, device: torch.device, say: Callable[[str], None]) -> Callable[[], float]:
    def once() -> float:
        with contextlib.closing(_Training(name, device)) as training:
            times = []
            for _ in range(_STEPS):
                began_at = time.perf_counter()
                training.step(batch)
                times.append(time.perf_counter() - began_at)
        seconds = statistics.median(times[3:])
        say(f"{name}, batch {batch}: {1e3 * seconds:.0f} ms a step")
        return seconds

    return once
