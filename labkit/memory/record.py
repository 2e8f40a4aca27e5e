"""What a step without a plan shows: what is saved and when it is needed, in seconds of compute."""

from typing import TYPE_CHECKING

from labkit.memory.profile import Block, Profile
from labkit.memory.saved import Key, Saved
from labkit.memory.segments import Watch

if TYPE_CHECKING:
    from labkit.memory.hybrid import HybridMemory


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
        self._last_s = 0.0
        self._segments: list[Watch] = []

    def _now(self) -> float:
        """Since the step began, without what it waited for copies."""
        return self._memory.adapter.now() - self._memory.stalled_s() - self._began_at

    def saved(self, saved: Saved, is_movable: bool) -> None:
        """A block was saved."""
        self.keys.append(saved.key)
        self._blocks.append((self._now(), saved.size_bytes, is_movable, saved.name))

    def needed(self, key: Key) -> None:
        """A block was asked for."""
        self._last_s = self._now()
        self._needed_s.setdefault(key, self._last_s)

    def segment(self, watch: Watch) -> None:
        """A segment was computed."""
        self._segments.append(watch)

    def profile(self) -> Profile | None:
        """All of it; None when no backward pass has asked for anything."""
        if not self._needed_s:
            return None
        is_repeatable = [watch.is_still_repeatable() for watch in self._segments]
        blocks = []
        for key, (saved_s, size_bytes, is_movable, name) in zip(self.keys, self._blocks, strict=True):
            can_repeat = 0 <= key[0] < len(is_repeatable) and is_repeatable[key[0]]
            # What the backward pass never asked for is needed at its end: it only ever takes up memory.
            needed_s = self._needed_s.get(key, self._last_s)
            blocks.append(
                Block(size_bytes, saved_s, needed_s, key[0] if can_repeat else -1, is_movable, name)
            )
        seconds = tuple(watch.seconds for watch in self._segments)
        boundary_bytes = tuple(watch.boundary_bytes for watch in self._segments)
        forward_s = min(self._needed_s.values())
        return Profile(tuple(blocks), forward_s, self._last_s, seconds, boundary_bytes)
