"""What a step without a plan shows: what is saved and when it is needed, in seconds of compute."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.memory.profile import NEVER_S, Block, Profile
from labkit.memory.saved import Key, Saved
from labkit.memory.segments import Watch

if TYPE_CHECKING:
    from labkit.memory.hybrid import HybridMemory


def _num_holders(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage))


def _num_bytes(storage: int) -> int:
    return int(torch.UntypedStorage._new_with_weak_ptr(storage).nbytes())


def _count_when_alone() -> int:
    """What is counted for a storage that one tensor holds: that depends on the version of torch."""
    tensor = torch.empty(1)
    return _num_holders(StorageWeakRef(tensor.untyped_storage()).cdata)


_ALONE = _count_when_alone()


def _is_released(saved: Saved | None) -> bool:
    """Nobody but the block itself, if it is there, holds its memory."""
    return saved is None or _num_holders(saved.storage) <= _ALONE - (not saved.is_there())


def _tensors_there(device: torch.device) -> dict[int, StorageWeakRef]:
    """The storages of all tensors that Python knows, by address; the references keep addresses theirs."""
    found = {}
    for thing in gc.get_objects():
        # By its type: asking some things for their class makes them import or warn.
        if not issubclass(type(thing), Tensor) or thing.device != device or thing.layout is not torch.strided:
            continue
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of a kind without a storage
            weak = StorageWeakRef(thing.untyped_storage())
            found[weak.cdata] = weak
    return found


class Record:
    """Of one step."""

    def __init__(self, memory: "HybridMemory") -> None:
        """The step begins."""
        self._memory = memory
        self._began_at = memory.adapter.now() - memory.stalled_s()
        self.first_bytes = 0
        self.keys: list[Key] = []
        self._blocks: list[tuple[float, int, bool, str]] = []
        self._needed_s: dict[Key, float] = {}
        self._gone_s: dict[Key, float] = {}
        self._held: dict[Key, weakref.ref[Saved]] = {}  # that the forward pass itself still holds
        self._released_s: dict[Key, float] = {}
        self._last_s = 0.0
        self._segments: list[Watch] = []
        self._there_before: dict[int, StorageWeakRef] | None = None
        self.unmanaged_bytes = 0

    def look_around(self) -> None:
        """Note which tensors there are before the forward pass makes more."""
        if self._there_before is None:
            with self._thinking():
                self._there_before = _tensors_there(self._memory.adapter.device)

    @contextlib.contextmanager
    def _thinking(self) -> Iterator[None]:
        """What is done meanwhile is no compute."""
        before = self._memory.adapter.now()
        yield
        seconds = self._memory.adapter.now() - before
        self._began_at += seconds
        self._memory.thinking_s += seconds

    def _look_for_unmanaged(self, managed: set[int]) -> None:
        if self._there_before is None:
            return
        found = _tensors_there(self._memory.adapter.device)
        new = [address for address in found if address not in self._there_before and address not in managed]
        self.unmanaged_bytes = sum(_num_bytes(address) for address in new)
        self._there_before = None

    @property
    def own_results(self) -> dict[int, tuple[bool, ...]]:
        """Which results of each segment it has saved itself."""
        return {index: watch.own_results for index, watch in enumerate(self._segments)}

    def _now(self) -> float:
        """Since the step began, without what it waited for copies."""
        return self._memory.adapter.now() - self._memory.stalled_s() - self._began_at

    def saved(self, saved: Saved, is_movable: bool) -> None:
        """A block was saved."""
        now = self._now()
        self._look_what_is_held(now)
        self.keys.append(saved.key)
        self._blocks.append((now, saved.size_bytes, is_movable, saved.name))
        if is_movable:
            self._held[saved.key] = weakref.ref(saved)

    def _look_what_is_held(self, now: float) -> None:
        """A storage that nobody but its block holds any more could go."""
        for key in [key for key, known in self._held.items() if _is_released(known())]:
            del self._held[key]
            self._released_s[key] = now

    def needed(self, key: Key, managed: Callable[[], set[int]]) -> None:
        """A block was asked for.

        Args:
            key: Which one.
            managed: Gives the storages that hooks have seen; looked at the first time alone.
        """
        self._last_s = self._now()
        if not self._needed_s:
            with self._thinking():
                self._look_for_unmanaged(managed())
        if self._held:
            self._look_what_is_held(self._last_s)
            self._held.pop(key, None)
        self._needed_s.setdefault(key, self._last_s)

    def gone(self, key: Key) -> None:
        """A block was let go of, before now."""
        if key in self._needed_s:
            self._gone_s.setdefault(key, self._now())

    def segment(self, watch: Watch) -> None:
        """A segment was computed."""
        self._segments.append(watch)

    def profile(self, gradient_bytes: int) -> Profile | None:
        """All of it; None when no backward pass has asked for anything.

        Args:
            gradient_bytes: That go over the same link during the backward pass.
        """
        if not self._needed_s:
            return None
        is_repeatable = [watch.is_still_repeatable() for watch in self._segments]
        blocks = []
        for key, (saved_s, size_bytes, is_movable, name) in zip(self.keys, self._blocks, strict=True):
            can_repeat = 0 <= key[0] < len(is_repeatable) and is_repeatable[key[0]]
            # What the backward pass never asked for is needed at its end: it only ever takes up memory.
            needed_s = self._needed_s.get(key, self._last_s)
            released_s = self._released_s.get(key, needed_s if is_movable else saved_s)
            segment = key[0] if can_repeat else -1
            # What is still there after the last block was needed goes at the end.
            gone_s = self._gone_s.get(key, NEVER_S if key in self._needed_s else 0.0)
            blocks.append(Block(size_bytes, saved_s, needed_s, segment, is_movable, name, released_s, gone_s))
        seconds = tuple(watch.seconds for watch in self._segments)
        boundary_bytes = tuple(watch.boundary_bytes for watch in self._segments)
        forward_s = min(self._needed_s.values())
        return Profile(tuple(blocks), forward_s, self._last_s, seconds, boundary_bytes, gradient_bytes)
