"""What a plan costs: step time, stalls and peak, from a profile and the rates of a link. No torch here.

The model is the engine's. Copies of one direction are done one after the other, in the order in which they
were asked for. In the forward pass compute goes on while blocks leave, until the next block would not fit the
budget: then it waits for the oldest copy. In the backward pass blocks come back in the order of their need,
each as soon as there is room for it and for whatever is computed again before its turn. A window, where one
is given, bounds the bytes under way besides.

One worker is described once, as a generator that says what it waits for, and driven in two ways: over a link
of constant rate (fast: the planner asks thousands of times), and together with others over an uplink whose
rate depends on how many copy at the moment.
"""

import math
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from labkit.memory.profile import Decision, Link, Profile
from labkit.memory.uplink import Uplink

Direction = Literal["out", "in"]


@dataclass(eq=False)
class Transfer:
    """A copy.

    Attributes:
        block: Which block of the profile; -1: gradients, on their way to other workers.
        direction: `out`: from the device.
        size_bytes: Of it.
        begin_s: When it began.
        end_s: When it was done.
    """

    block: int
    direction: Direction
    size_bytes: int
    begin_s: float = math.inf
    end_s: float = math.inf


@dataclass(frozen=True)
class Outcome:
    """A simulated step.

    Attributes:
        step_s: Seconds, with stalls and computing again.
        stall_s: Of them, waiting for copies.
        recompute_s: Of them, computing again.
        peak_bytes: Most bytes of blocks on the device at once.
        moved_bytes: Brought out, and back again.
        seen_until_s: When a block is asked for that was not computed again, or a segment begins to be, for
            the last time: what hooks see of a step.
        stalls_s: Waiting for each block, or for room for it; shape (blocks,).
        transfers: Copies in the order in which they were asked for.
        live: Seconds and bytes on the device from then on.
    """

    step_s: float
    stall_s: float
    recompute_s: float
    peak_bytes: int
    moved_bytes: int
    seen_until_s: float
    stalls_s: tuple[float, ...]
    transfers: tuple[Transfer, ...] = field(repr=False, default=())
    live: tuple[tuple[float, int], ...] = field(repr=False, default=())


@dataclass(frozen=True)
class Limits:
    """What a step may have.

    Attributes:
        budget_bytes: Of blocks on the device; None: no limit.
        window_bytes: Of copies under way in each direction; None: no limit beside the budget.
    """

    budget_bytes: int | None = None
    window_bytes: int | None = None


@dataclass(frozen=True)
class Backward:
    """The backward pass as it is planned.

    Attributes:
        order: Blocks in the order in which they are needed; shape (blocks,).
        held: Bytes that are on the device when each of them is needed, but for those that come back; shape
            (blocks,).
        bursts: Bytes by which `held` rises after a place, at most; shape (blocks,).
        hidden: Of `held`, what was computed again, which no hook sees; shape (blocks,).
    """

    order: tuple[int, ...]
    held: tuple[int, ...]
    bursts: tuple[int, ...]
    hidden: tuple[int, ...]


def backward_of(profile: Profile, plan: Sequence[Decision]) -> Backward:
    """What a plan means for the backward pass."""
    blocks = profile.blocks
    order = sorted(range(len(blocks)), key=lambda index: blocks[index].needed_s)
    again = {b.segment for b, what in zip(blocks, plan, strict=True) if what is Decision.RECOMPUTE}
    held_now = sum(b.size_bytes for b, what in zip(blocks, plan, strict=True) if what is Decision.KEEP)
    held_now += sum(profile.boundary_bytes[segment] for segment in again)
    left = Counter(block.segment for block in blocks)
    segment_bytes = _segment_bytes(profile)
    begun: set[int] = set()
    used: list[int] = []
    held, hidden, hidden_now = [], [], 0
    for index in order:
        block, what = blocks[index], plan[index]
        for gone in [i for i in used if blocks[i].gone_s <= block.needed_s]:
            used.remove(gone)
            if plan[gone] is not Decision.OFFLOAD:
                held_now -= blocks[gone].size_bytes
            if plan[gone] is Decision.RECOMPUTE:
                hidden_now -= blocks[gone].size_bytes
                left[blocks[gone].segment] -= 1
                if not left[blocks[gone].segment]:
                    held_now -= profile.boundary_bytes[blocks[gone].segment]
        if what is Decision.RECOMPUTE and block.segment not in begun:
            begun.add(block.segment)
            held_now += segment_bytes[block.segment]
            hidden_now += segment_bytes[block.segment]
        held.append(held_now)
        hidden.append(hidden_now)
        used.append(index)
    bursts = [0] * len(order)
    most = 0
    for place in range(len(order) - 1, -1, -1):
        most = max(most, held[place])
        bursts[place] = most - held[place]
    return Backward(tuple(order), tuple(held), tuple(bursts), tuple(hidden))


def _segment_bytes(profile: Profile) -> "Counter[int]":
    found: Counter[int] = Counter()
    for block in profile.blocks:
        found[block.segment] += block.size_bytes
    return found


@dataclass(frozen=True)
class _Wait:
    """Wait for a copy."""

    transfer: Transfer


_Request = float | Transfer | _Wait  # seconds of compute, a copy to begin, a wait
_Script = Generator[_Request, float, Outcome]


class _Worker:
    """One worker's step; `script` yields what it does and is sent the time by then."""

    def __init__(self, profile: Profile, plan: Sequence[Decision], limits: Limits) -> None:
        self._profile, self._plan = profile, plan
        self._budget = math.inf if limits.budget_bytes is None else limits.budget_bytes
        self._window = math.inf if limits.window_bytes is None else limits.window_bytes
        self._changes: list[tuple[float, int]] = []
        self._live = 0
        self._leaving: deque[Transfer] = deque()
        self._leaving_bytes = 0
        self._stayed: set[int] = set()  # needed before they had left
        self._lingering: list[int] = []  # left, and still held by the forward pass
        self._at = 0.0  # seconds of compute
        self._seen_until_s = 0.0
        self._stalls = [0.0] * len(profile.blocks)
        self._transfers: list[Transfer] = []

    def _change(self, at_s: float, size_bytes: int) -> None:
        self._changes.append((at_s, size_bytes))
        self._live += size_bytes

    def _reap(self, now: float) -> None:
        while self._leaving and self._leaving[0].end_s <= now:
            gone = self._leaving.popleft()
            self._leaving_bytes -= gone.size_bytes
            if gone.block in self._stayed:
                continue
            if self._profile.blocks[gone.block].released_s > self._at:
                self._lingering.append(gone.block)
            else:
                self._change(gone.end_s, -gone.size_bytes)

    def _advance(self, at: float, now: float) -> None:
        """Compute has come so far: what the forward pass held on to goes."""
        self._at = max(self._at, at)
        for block in [b for b in self._lingering if self._profile.blocks[b].released_s <= self._at]:
            self._lingering.remove(block)
            self._change(now, -self._profile.blocks[block].size_bytes)
        self._reap(now)

    def _stay(self, block: int) -> None:
        """It is needed before it has gone."""
        self._stayed.add(block)
        if block in self._lingering:
            self._lingering.remove(block)

    def _copy(self, transfer: Transfer) -> Transfer:
        self._transfers.append(transfer)
        return transfer

    def _make_room(self, now: float, size_bytes: int, block: int) -> Generator[_Request, float, float]:
        """Wait for the oldest copies out until so much more fits, as far as that helps."""
        self._reap(now)
        while self._leaving and self._live + size_bytes > self._budget:
            began_at = now
            now = yield _Wait(self._leaving[0])
            self._stalls[block] += now - began_at
            self._reap(now)
        return now

    def script(self) -> _Script:
        now, out = yield from self._forward()
        return (yield from self._backward(now, out))

    def _forward(self) -> Generator[_Request, float, tuple[float, dict[int, Transfer]]]:
        profile, plan, blocks = self._profile, self._plan, self._profile.blocks
        out: dict[int, Transfer] = {}
        now = 0.0
        begun: set[int] = set()
        for index, block in enumerate(blocks):
            is_again = plan[index] is Decision.RECOMPUTE
            if is_again and block.segment in begun:
                continue
            size_bytes = profile.boundary_bytes[block.segment] if is_again else block.size_bytes
            now = yield from self._make_room(now, size_bytes, index)
            now = yield max(0.0, block.saved_s - self._at)
            self._advance(block.saved_s, now)
            self._change(now, size_bytes)
            if is_again:
                begun.add(block.segment)
            if plan[index] is not Decision.OFFLOAD:
                continue
            while self._leaving and self._leaving_bytes + size_bytes > self._window:
                began_at = now
                now = yield _Wait(self._leaving[0])
                self._stalls[index] += now - began_at
                self._reap(now)
            transfer = self._copy(Transfer(index, "out", size_bytes))
            out[index] = transfer
            now = yield transfer
            self._leaving.append(transfer)
            self._leaving_bytes += size_bytes
        now = yield max(0.0, profile.forward_s - self._at)
        self._advance(profile.forward_s, now)
        return now, out

    def _backward(self, now: float, out: dict[int, Transfer]) -> _Script:
        profile, plan, blocks = self._profile, self._plan, self._profile.blocks
        backward = backward_of(profile, plan)
        coming = deque(index for index in backward.order if plan[index] is Decision.OFFLOAD)
        back: dict[int, Transfer] = {}
        waiting_bytes = 0
        gradients: list[Transfer] = []
        if profile.gradient_bytes:
            for direction in ("out", "in"):
                gradients.append(Transfer(-1, direction, profile.gradient_bytes))
                now = yield gradients[-1]
        recompute_s = 0.0
        begun: set[int] = set()
        left, segment_bytes = Counter(block.segment for block in blocks), _segment_bytes(profile)
        used: list[int] = []
        for place, index in enumerate(backward.order):
            block = blocks[index]
            now = yield max(0.0, block.needed_s - self._at)
            self._advance(block.needed_s, now)
            if plan[index] is not Decision.RECOMPUTE or block.segment not in begun:
                self._seen_until_s = now
            for gone in [i for i in used if blocks[i].gone_s <= self._at]:
                used.remove(gone)
                self._release(now, gone, left)
            while coming:
                other = coming[0]
                size_bytes = blocks[other].size_bytes
                if out[other].end_s > now or other in self._lingering:  # it is still there
                    if other != index:
                        break
                    self._stay(coming.popleft())
                    continue
                if other == index:  # it can't wait
                    now = yield from self._make_room(now, size_bytes, index)
                elif waiting_bytes + size_bytes > self._window and waiting_bytes:
                    break
                elif self._live + size_bytes + backward.bursts[place] > self._budget:
                    break
                coming.popleft()
                waiting_bytes += size_bytes
                self._change(now, size_bytes)
                back[other] = self._copy(Transfer(other, "in", size_bytes))
                now = yield back[other]
            if plan[index] is Decision.RECOMPUTE and block.segment not in begun:
                begun.add(block.segment)
                now = yield from self._make_room(now, segment_bytes[block.segment], index)
                self._change(now, segment_bytes[block.segment])
                now = yield profile.recompute_s[block.segment]
                recompute_s += profile.recompute_s[block.segment]
            if index in back:
                began_at = now
                if back[index].end_s > now:
                    now = yield _Wait(back[index])
                self._stalls[index] += now - began_at
                waiting_bytes -= block.size_bytes
            used.append(index)
        now = yield max(0.0, profile.step_s - self._at)
        self._advance(math.inf, now)
        for gone in used:
            self._release(now, gone, left)
        stall_s = sum(self._stalls)
        for transfer in gradients:
            began_at = now
            if transfer.end_s > now:
                now = yield _Wait(transfer)
            stall_s += now - began_at
        return self._outcome(now, stall_s, recompute_s)

    def _release(self, now: float, index: int, left: "Counter[int]") -> None:
        """A block has been used, and with the last one of a segment what went into it."""
        block = self._profile.blocks[index]
        self._change(now, -block.size_bytes)
        if self._plan[index] is Decision.RECOMPUTE:
            left[block.segment] -= 1
            if not left[block.segment]:
                self._change(now, -self._profile.boundary_bytes[block.segment])

    def _outcome(self, step_s: float, stall_s: float, recompute_s: float) -> Outcome:
        live, now, peak = [], 0, 0
        # What goes, goes first.
        for at_s, change in sorted(self._changes, key=lambda one: (one[0], one[1] > 0)):
            now += change
            peak = max(peak, now)
            live.append((at_s, now))
        moved = sum(t.size_bytes for t in self._transfers if t.direction == "out")
        return Outcome(
            step_s,
            stall_s,
            recompute_s,
            peak,
            moved,
            self._seen_until_s,
            tuple(self._stalls),
            tuple(self._transfers),
            tuple(live),
        )


def simulate(
    profile: Profile,
    plan: Sequence[Decision],
    link: Link,
    *,
    budget_bytes: int | None = None,
    window_bytes: int | None = None,
) -> Outcome:
    """Run one step of one worker.

    Args:
        profile: What was recorded.
        plan: Decision for each block; shape (blocks,). All blocks of a segment are computed again or none.
        link: This worker's share of it.
        budget_bytes: Of blocks on the device, which compute waits for; None: no limit. A plan that can't
            keep to it comes out with a higher peak.
        window_bytes: Of copies under way, in each direction; one block at least is always let through. None:
            no limit beside the budget.
    """
    if profile.gradient_bytes:  # they take turns with blocks, which a constant rate can't tell
        uplink = Uplink((link.out_bytes_per_s,), (link.in_bytes_per_s,), latency_s=link.latency_s)
        limits = Limits(budget_bytes, window_bytes)
        return simulate_shared([profile], [plan], uplink, limits=limits)[0]
    script = _Worker(profile, plan, Limits(budget_bytes, window_bytes)).script()
    now = out_free_at = in_free_at = 0.0
    request = next(script)
    try:
        while True:
            if isinstance(request, _Wait):
                now = max(now, request.transfer.end_s)
            elif not isinstance(request, Transfer):
                now += request
            elif request.direction == "out":
                request.begin_s = max(out_free_at, now)
                request.end_s = out_free_at = request.begin_s + link.out_s(request.size_bytes)
            else:
                request.begin_s = max(in_free_at, now)
                request.end_s = in_free_at = request.begin_s + link.in_s(request.size_bytes)
            request = script.send(now)
    except StopIteration as end:
        return _outcome_of(end)


def _outcome_of(end: StopIteration) -> Outcome:
    outcome: Outcome = end.value
    return outcome


class _Queue:
    """Copies of one worker in one direction, one after the other."""

    def __init__(self, direction: Direction) -> None:
        self.direction: Direction = direction
        self.waiting: deque[Transfer] = deque()
        self.latency_left_s = self.bytes_left = 0.0

    def begin(self, now: float, latency_s: float) -> bool:
        """Whether a copy is under way."""
        if not self.waiting:
            return False
        first = self.waiting[0]
        if first.begin_s == math.inf:
            first.begin_s = now
            self.latency_left_s, self.bytes_left = latency_s, float(first.size_bytes)
        return True


class _Shared:
    """Several workers on one uplink, in time."""

    def __init__(self, scripts: Sequence[_Script], uplink: Uplink) -> None:
        self._uplink, self._scripts = uplink, scripts
        self._now = 0.0
        # Gradients have queues of their own: they are another stream, with a share of its own.
        self._queues = [
            [_Queue(direction) for direction in ("out", "in") for _ in ("blocks", "gradients")]
            for _ in scripts
        ]
        self._wake: list[float | Transfer] = [0.0] * len(scripts)
        self._outcomes: list[Outcome | None] = [None] * len(scripts)

    def run(self) -> list[Outcome]:
        for index in range(len(self._scripts)):
            self._resume(index, is_first=True)
        while any(outcome is None for outcome in self._outcomes):
            self._advance()
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _resume(self, index: int, *, is_first: bool = False) -> None:
        script = self._scripts[index]
        try:
            request = next(script) if is_first else script.send(self._now)
            while True:
                if isinstance(request, Transfer):
                    place = 2 * (request.direction == "in") + (request.block < 0)
                    self._queues[index][place].waiting.append(request)
                elif isinstance(request, _Wait):
                    if request.transfer.end_s > self._now:
                        self._wake[index] = request.transfer
                        return
                elif request > 0:
                    self._wake[index] = self._now + request
                    return
                request = script.send(self._now)
        except StopIteration as end:
            self._outcomes[index] = _outcome_of(end)
            self._wake[index] = math.inf

    def _advance(self) -> None:
        """To the next moment at which something ends."""
        running = [q for own in self._queues for q in own if q.begin(self._now, self._uplink.latency_s)]
        flowing = [queue for queue in running if queue.latency_left_s <= 0]
        counts = {way: sum(queue.direction == way for queue in flowing) for way in ("out", "in")}
        devices = {
            way: sum(any(q in flowing and q.direction == way for q in own) for own in self._queues)
            for way in ("out", "in")
        }
        rates = {}
        for way, other in (("out", "in"), ("in", "out")):
            if counts[way]:
                rates[way] = self._uplink.rate(way, devices[way], devices[other]) / counts[way]
        steps = [wake - self._now for wake in self._wake if not isinstance(wake, Transfer)]
        for queue in running:
            is_flowing = queue.latency_left_s <= 0
            steps.append(queue.bytes_left / rates[queue.direction] if is_flowing else queue.latency_left_s)
        step_s = min(steps)
        self._now += step_s
        for queue in running:
            if queue.latency_left_s > 0:
                queue.latency_left_s -= step_s
                if queue.latency_left_s < 1e-12:
                    queue.latency_left_s = 0.0
                continue
            queue.bytes_left -= rates[queue.direction] * step_s
            if queue.bytes_left <= 1e-6 * queue.waiting[0].size_bytes:
                queue.waiting.popleft().end_s = self._now
        for index, wake in enumerate(self._wake):
            at_s = wake.end_s if isinstance(wake, Transfer) else wake
            if self._outcomes[index] is None and at_s <= self._now + 1e-12:
                self._resume(index)


def simulate_shared(
    profiles: Sequence[Profile],
    plans: Sequence[Sequence[Decision]],
    uplink: Uplink,
    *,
    limits: Limits = Limits(),
) -> list[Outcome]:
    """Run one step of several workers that begin together, on devices behind one uplink.

    Whoever copies at a moment has an equal part of what the uplink brings through for so many.

    Args:
        profiles: Of each worker; shape (workers,).
        plans: Of each worker; shape (workers, blocks).
        uplink: Rates by the number of devices that copy at once.
        limits: Of each worker.

    References:
        Martinasso et al., A PCIe congestion-aware performance model for densely populated accelerator
        servers, SC 2016: rates depend on who else copies.
    """
    scripts = [_Worker(profile, plan, limits).script() for profile, plan in zip(profiles, plans, strict=True)]
    return _Shared(scripts, uplink).run()
