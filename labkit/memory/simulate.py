"""What a plan costs: step time, stalls and peak, from a profile and the rates of a link. No torch here.

The model is the engine's: one copy at a time in each direction, in the order in which they were asked for; a
window bounds the bytes that are on their way out, and those that came back before they are needed; compute
waits only for those two.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.memory.profile import Decision, Link, Profile


@dataclass(frozen=True)
class Outcome:
    """A simulated step.

    Attributes:
        step_s: Seconds, with stalls and computing again.
        stall_s: Of them, waiting for copies.
        recompute_s: Of them, computing again.
        peak_bytes: Most bytes of blocks on the device at once.
        moved_bytes: Brought out, and back again.
        stalls_s: Waiting for each block; shape (blocks,).
    """

    step_s: float
    stall_s: float
    recompute_s: float
    peak_bytes: int
    moved_bytes: int
    stalls_s: tuple[float, ...]


class _Ledger:
    """Bytes on the device over time, whatever the order in which changes become known."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, int, int]] = []

    def add(self, at_s: float, size_bytes: int) -> None:
        self._changes.append((at_s, 0 if size_bytes < 0 else 1, size_bytes))  # what goes, goes first

    def peak(self) -> int:
        now = peak = 0
        for _, _, change in sorted(self._changes):
            now += change
            peak = max(peak, now)
        return peak


def simulate(profile: Profile, plan: Sequence[Decision], link: Link, window_bytes: int) -> Outcome:
    """Run one step.

    Args:
        profile: What was recorded.
        plan: Decision for each block; shape (blocks,). All blocks of a segment are computed again or none.
        link: This worker's share of it.
        window_bytes: Of copies under way, in each direction; one block at least is always let through.
    """
    blocks, ledger = profile.blocks, _Ledger()
    stalls = [0.0] * len(blocks)
    late = 0.0  # how far the clock is behind compute time
    out_free_at = in_free_at = 0.0
    leaving: deque[tuple[float, int]] = deque()  # end and bytes of copies out
    left_at = [0.0] * len(blocks)

    again = {block.segment for block, what in zip(blocks, plan, strict=True) if what is Decision.RECOMPUTE}
    for segment in sorted(again):
        size_bytes = profile.boundary_bytes[segment]
        first = min(block.saved_s for block in blocks if block.segment == segment)
        last = max(block.needed_s for block in blocks if block.segment == segment)
        ledger.add(first, size_bytes)
        ledger.add(last, -size_bytes)

    # Forward: what leaves takes its place until it has left.
    for index, block in enumerate(blocks):
        now = block.saved_s + late
        if plan[index] is Decision.RECOMPUTE:
            continue
        ledger.add(now, block.size_bytes)
        if plan[index] is Decision.KEEP:
            continue
        while leaving and leaving[0][0] <= now:
            leaving.popleft()
        while leaving and sum(size for _, size in leaving) + block.size_bytes > window_bytes:
            end, _ = leaving.popleft()
            stalls[index] += max(0.0, end - now)
            late += max(0.0, end - now)
            now = max(now, end)
        out_free_at = max(out_free_at, now) + link.out_s(block.size_bytes)
        leaving.append((out_free_at, block.size_bytes))
        left_at[index] = out_free_at
        ledger.add(out_free_at, -block.size_bytes)

    # Backward: what is needed first comes back first, as far ahead as the window lets it.
    order = sorted(range(len(blocks)), key=lambda index: blocks[index].needed_s)
    coming = deque(index for index in order if plan[index] is Decision.OFFLOAD)
    there_at = [0.0] * len(blocks)
    waiting_bytes = 0
    backward_at = profile.forward_s + late

    def fetch(now: float) -> None:
        nonlocal waiting_bytes, in_free_at
        while coming:
            index = coming[0]
            size_bytes = blocks[index].size_bytes
            if waiting_bytes and waiting_bytes + size_bytes > window_bytes:
                return
            coming.popleft()
            waiting_bytes += size_bytes
            begins_at = max(in_free_at, now, left_at[index])
            ledger.add(begins_at, size_bytes)
            in_free_at = begins_at + link.in_s(size_bytes)
            there_at[index] = in_free_at

    fetch(backward_at)
    done: set[int] = set()
    recompute_s = 0.0
    for place, index in enumerate(order):
        block = blocks[index]
        now = block.needed_s + late
        if plan[index] is Decision.RECOMPUTE and block.segment not in done:
            done.add(block.segment)
            for other, what in zip(blocks, plan, strict=True):  # all of it is there before any is used
                if what is Decision.RECOMPUTE and other.segment == block.segment:
                    ledger.add(now, other.size_bytes)
            recompute_s += profile.recompute_s[block.segment]
            late += profile.recompute_s[block.segment]
            now = block.needed_s + late
        if plan[index] is Decision.OFFLOAD:
            stall = max(0.0, there_at[index] - now)
            stalls[index] += stall
            late += stall
            now += stall
            waiting_bytes -= block.size_bytes
            fetch(now)
        end = profile.step_s + late
        if place + 1 < len(order):
            end = max(now, blocks[order[place + 1]].needed_s + late)
        ledger.add(end, -block.size_bytes)
    moved = sum(b.size_bytes for b, what in zip(blocks, plan, strict=True) if what is Decision.OFFLOAD)
    return Outcome(profile.step_s + late, sum(stalls), recompute_s, ledger.peak(), moved, tuple(stalls))
