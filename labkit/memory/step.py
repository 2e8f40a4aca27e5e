"""One step: what its forward pass saves, and what becomes of each block by the plan."""

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from labkit.memory.planner import Infeasible, Plan
from labkit.memory.profile import Decision, Profile
from labkit.memory.record import Record
from labkit.memory.saved import RESULT, Handle, Kept, Key, Saved, is_manageable, span_of
from labkit.memory.segments import Watch, run_to_repeat
from labkit.memory.simulate import Backward, backward_of

if TYPE_CHECKING:
    from labkit.memory.hybrid import HybridMemory

_LOOKED_AT = 5  # steps that keep everything are followed block by block before only their sum is
_Identity = tuple[int, int, tuple[int, int]]  # storage, version, span


@dataclass(frozen=True)
class Known:
    """A plan, and how a step recognises its blocks.

    Attributes:
        profile: That it was made from.
        keys: Of the profile's blocks; shape (blocks,).
        plan: As it was made.
        sizes: Bytes of each block.
        decisions: For each block.
        next_bytes: Of the block that the forward pass makes after each.
        coming: Blocks that move, in the order in which they are needed.
        places: Of each block in that order.
        backward: What is on the device at each place.
        again: Segments that are computed again.
        own_results: Which results of each segment it saves itself.
        seen_until_s: Seconds of compute until hooks see a block for the last time.
        again_until_s: That were computed again by then.
        seen: How often a step by this plan has saved so many tensors of so many elements.
    """

    profile: Profile
    keys: tuple[Key, ...]
    plan: Plan
    sizes: dict[Key, int]
    decisions: dict[Key, Decision]
    next_bytes: dict[Key, int]
    coming: tuple[Key, ...]
    places: dict[Key, int]
    backward: Backward
    again: frozenset[int]
    own_results: dict[int, tuple[bool, ...]]
    seen_until_s: float
    again_until_s: float
    seen: "Counter[tuple[int, int]]" = field(default_factory=Counter)

    @property
    def is_settled(self) -> bool:
        """Everything stays, and steps have shown long enough that they are what was recorded."""
        what = set(self.decisions.values())
        return what <= {Decision.KEEP} and sum(self.seen.values()) >= _LOOKED_AT and len(self.seen) == 1

    @classmethod
    def of(
        cls,
        profile: Profile,
        keys: tuple[Key, ...],
        plan: Plan,
        own_results: dict[int, tuple[bool, ...]],
    ) -> "Known":
        """What a plan means for a step whose blocks have these keys."""
        backward = backward_of(profile, plan.decisions)
        decisions = dict(zip(keys, plan.decisions, strict=True))
        again = frozenset(key[0] for key, what in decisions.items() if what is Decision.RECOMPUTE)
        arrivals: list[tuple[Key, int]] = []
        seen: set[int] = set()
        for key, block in zip(keys, profile.blocks, strict=True):
            if key[0] not in again:
                arrivals.append((key, block.size_bytes))
            elif key[0] not in seen:
                seen.add(key[0])
                arrivals.append(((key[0], 0), profile.boundary_bytes[key[0]]))
        places = {keys[index]: place for place, index in enumerate(backward.order)}
        for place, index in reversed(list(enumerate(backward.order))):
            if keys[index][0] in again:  # seen when its segment begins to be computed again
                places[keys[index][0], 0] = place
        following = [size for _, size in arrivals[1:]] + [0]
        return cls(
            profile,
            keys,
            plan,
            {key: block.size_bytes for key, block in zip(keys, profile.blocks, strict=True)},
            decisions,
            {key: size for (key, _), size in zip(arrivals, following, strict=True)},
            tuple(keys[i] for i in backward.order if plan.decisions[i] is Decision.OFFLOAD),
            places,
            backward,
            again,
            own_results,
            *_seen_until(profile, plan.decisions, backward),
        )


def _seen_until(profile: Profile, decisions: Sequence[Decision], backward: Backward) -> tuple[float, float]:
    """When hooks see a block for the last time, and what was computed again by then."""
    begun: set[int] = set()
    until_s = again_s = pending_s = 0.0
    for index in backward.order:
        block = profile.blocks[index]
        is_again = decisions[index] is Decision.RECOMPUTE
        if is_again and block.segment in begun:
            continue  # no hook sees it
        again_s += pending_s
        pending_s = 0.0
        until_s = block.needed_s
        if is_again:
            begun.add(block.segment)
            pending_s = profile.recompute_s[block.segment]
    return until_s, again_s


class Step:
    """What one forward pass has saved."""

    def __init__(self, memory: "HybridMemory") -> None:
        """It begins."""
        self.memory = memory
        self.record: Record | None = None
        self.known: Known | None = None
        self._own_record = Record(memory)  # its clock begins now
        if not memory.has_plans:
            self._own_record.look_around()
        self._blocks: dict[_Identity, weakref.ref[Saved]] = {}
        self.first_bytes = 0
        self.segment = -1  # that computes now
        self._num_segments = 0
        self._num_blocks: Counter[int] = Counter()  # of each segment
        self._is_begun = self._is_settled = False
        self.num_saved = self.num_elements = 0
        # Results of segments that are computed again, with what keeps their addresses theirs.
        self._results: dict[tuple[int, int], StorageWeakRef] = {}
        self.is_off_plan = False
        # By weak references: a block belongs to the handles that autograd keeps, and goes with them.
        self._leaving: deque[tuple[weakref.ref[Saved], int]] = deque()
        self._leaving_bytes = 0
        self._lingering: list[weakref.ref[Saved]] = []  # brought out, and still held by somebody
        self._by_key: dict[Key, weakref.ref[Saved]] = {}
        self._coming: deque[Key] = deque()
        self.waiting_bytes = 0
        self._place = 0  # how far the backward pass is, in the plan's order
        self._resident: deque[weakref.ref[Saved]] = deque()  # that a step without a plan has saved
        self.began = memory.adapter.mark()
        self.turned: Any = None  # when the backward pass first asked for something
        self.ended: Any = None
        self.stalled_s = {"forward": 0.0, "backward": 0.0}
        self.trace: list[tuple[Any, int]] = []  # when bytes came and went

    # --- forward -----------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Kept | Handle:
        """Called for every saved tensor."""
        memory = self.memory
        memory.totals.num_saved += 1
        self.num_saved += 1
        self.num_elements += tensor.numel()
        if self._is_settled:
            return Kept(tensor)
        with memory.lock:
            memory.bury()
            if not is_manageable(tensor, memory.adapter.device):
                return Kept(tensor)
            storage = StorageWeakRef(tensor.untyped_storage()).cdata
            # By storage: a layer saves its weight as a transposed view, which is no parameter.
            if memory.is_own(storage):
                return Kept(tensor)
            if not self._is_begun and self._begin(tensor.numel() * tensor.element_size()):
                return Kept(tensor)
            span = span_of(tensor)
            identity = storage, tensor._version, span
            known = self._blocks.get(identity)
            saved = known() if known is not None else None
            if saved is not None:
                memory.totals.num_views += 1
            else:
                saved = self._save(tensor, identity)
                self._blocks[identity] = weakref.ref(saved)
            return Handle(saved, tensor)

    def _save(self, tensor: Tensor, identity: _Identity) -> Saved:
        memory = self.memory
        self._reap()
        if identity[:2] in self._results:  # of a segment that is computed again: it stays, as what went in
            return Saved(self, RESULT, tensor, identity[2])
        key = (self.segment, self._num_blocks[self.segment])
        self._num_blocks[self.segment] += 1
        saved = Saved(self, key, tensor, identity[2])
        memory.totals.saved_bytes += saved.size_bytes
        self._by_key[key] = weakref.ref(saved)
        is_movable = saved.size_bytes >= memory.min_bytes
        if self.known is None:
            self._own_record.saved(saved, is_movable)
            self._stay_or_move(saved, is_movable)
            return saved
        if self.segment not in self.known.again:  # else it is what goes in; what it saves is not seen here
            # Another graph: it moves what it has no room for, and is recorded next time.
            self.is_off_plan = self.is_off_plan or self.known.sizes.get(key) != saved.size_bytes
            if self.is_off_plan:
                self._stay_or_move(saved, is_movable)
                return saved
            if self.known.decisions[key] is Decision.OFFLOAD:
                self._offload(saved)
        self._make_room(self.known.next_bytes.get(key, 0))
        return saved

    def _stay_or_move(self, saved: Saved, is_movable: bool) -> None:
        """While nothing is planned yet: move what was saved first as soon as the budget is used up."""
        memory = self.memory
        if is_movable:
            self._resident.append(weakref.ref(saved))
        if memory.policy == "recompute" or not memory.arena.size_bytes:
            return
        while self._resident and (
            memory.policy == "offload"
            or (memory.budget_bytes is not None and memory.live_bytes > memory.budget_bytes)
        ):
            oldest = self._resident.popleft()()
            if oldest is not None:
                self._offload(oldest)
        self._make_room(saved.size_bytes)  # the next one is about as large

    def _begin(self, first_bytes: int) -> bool:
        """Choose the plan for steps that begin like this one; without one it is recorded.

        Returns:
            Whether it is settled: everything stays.
        """
        self._is_begun = True
        self.first_bytes = self._own_record.first_bytes = first_bytes
        if first_bytes in self.memory.infeasible:
            raise Infeasible(*self.memory.infeasible[first_bytes])
        self.known = self.memory.known_for(first_bytes)
        if self.known is None:
            self.record = self._own_record
            self.record.look_around()
            return False
        self._is_settled = self.known.is_settled
        if self.memory.is_prefetching:
            self._coming = deque(self.known.coming)
        return self._is_settled

    def end(self) -> None:
        """The next step begins: note what this one has saved."""
        if self.known is None or self.is_off_plan:
            return
        if self._is_settled:
            self.memory.totals.saved_bytes += self.known.profile.saved_bytes
        self.known.seen[self.num_saved, self.num_elements] += 1
        # Another graph than those before, which was not followed block by block.
        self.is_off_plan = self._is_settled and len(self.known.seen) > 1

    def compute_s(self) -> tuple[float, float] | None:
        """Seconds of compute of the forward and of the backward pass; None while that isn't known."""
        adapter = self.memory.adapter
        if self.turned is None:
            return None
        forward_s, backward_s = (
            adapter.between(self.began, self.turned),
            adapter.between(self.turned, self.ended),
        )
        if forward_s is None or backward_s is None or self.known is None:
            return None
        backward_s -= self.stalled_s["backward"] + self.known.again_until_s
        return forward_s - self.stalled_s["forward"], backward_s

    def storages_of(self, segment: int) -> set[int]:
        """Storages that a segment has saved; -1: those outside of segments, which stay whatever they do."""
        blocks = (known() for known in self._blocks.values())
        return {saved.storage for saved in blocks if saved is not None and saved.key[0] == segment}

    def run_segment(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A part of the model that may be computed again."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not self._is_begun:
            self._begin(tensors[0].numel() * tensors[0].element_size() if tensors else 0)
        index = self._num_segments
        self._num_segments += 1
        self.segment = index
        watch = None if self.record is None else Watch(self, module, args, kwargs, tensors)
        try:
            if self.known is not None and index in self.known.again and not self.is_off_plan:
                self.memory.totals.num_recomputed += 1
                found = run_to_repeat(self.memory, module, args, kwargs)
                self._note_results(index, _tensors_of(found))
                return found
            found = type(module).forward(module, *args, **kwargs)
        finally:
            self.segment = -1
        if watch is not None and self.record is not None:
            watch.end(_tensors_of(found))
            self.record.segment(watch)
        return found

    def _note_results(self, segment: int, results: Sequence[Tensor]) -> None:
        """What it would have saved itself is now saved by others first, and is none of their blocks."""
        assert self.known is not None
        for is_own, result in zip(self.known.own_results.get(segment, ()), results, strict=False):
            if is_own:
                weak = StorageWeakRef(result.untyped_storage())
                self._results[weak.cdata, result._version] = weak

    def _offload(self, saved: Saved) -> None:
        memory = self.memory
        host = memory.arena.take(saved.size_bytes)
        if host is None and memory.dead:
            memory.bury(is_waiting=True)
            host = memory.arena.take(saved.size_bytes)
        if host is None:
            memory.totals.refused_bytes += saved.size_bytes
            return
        self._reap()
        window = memory.window_bytes if self.known is None else self.known.plan.window_bytes
        while window is not None and self._leaving and self._leaving_bytes + saved.size_bytes > window:
            self._wait_for_the_oldest()
        saved.leave(host)
        memory.totals.moved_bytes += saved.size_bytes
        self._leaving.append((weakref.ref(saved), saved.size_bytes))
        self._leaving_bytes += saved.size_bytes

    def _make_room(self, size_bytes: int) -> None:
        """Have the computing wait for the oldest copies out until so much more fits, as far as that helps."""
        budget = self.memory.budget_bytes
        while budget is not None and self._leaving and self.memory.live_bytes + size_bytes > budget:
            self._wait_for_the_oldest()

    def _wait_for_the_oldest(self) -> None:
        first = self._leaving[0][0]()
        if first is not None and not first.has_left():
            first.wait_out()
        del first
        self._reap()

    def _reap(self) -> None:
        """Let go of what has arrived on the host, in the order in which it left."""
        while self._leaving:
            saved = self._leaving[0][0]()
            if saved is not None and not saved.has_left():
                break
            self._leaving_bytes -= self._leaving.popleft()[1]
            if saved is not None:
                saved.let_go()
                self._lingering.append(weakref.ref(saved))
        self._lingering = [known for known in self._lingering if not _is_gone(known)]

    # --- backward ----------------------------------------------------------------------------------------

    def needed(self, saved: Saved) -> None:
        """A block is asked for: begin to bring back those that come after it, as far as there is room."""
        memory = self.memory
        if self.record is not None:
            self.record.needed(saved.key, lambda: {storage for storage, _, _ in self._blocks})
        else:
            self.ended = memory.adapter.mark()
            self.turned = self.turned or self.ended
        self._reap()
        for known in self._lingering:
            lingering = known()
            if lingering is not None:
                lingering.say_held()
        self._lingering.clear()
        if saved.is_waited_for:
            saved.is_waited_for = False
            self.waiting_bytes -= saved.size_bytes
        if self.known is None or self.is_off_plan:
            return
        self._advance(saved)
        while self._coming:
            reference = self._by_key.get(self._coming[0])
            other = reference() if reference is not None else None
            if other is not None and other is not saved and other.is_leaving():
                return
            if other is not None and other.is_away():
                if other is saved:  # it can't wait
                    self._make_room(other.size_bytes)
                elif not self._has_room(other.size_bytes):
                    return
                else:
                    self.waiting_bytes += other.size_bytes
                    other.is_waited_for = True
                other.come_back()
            self._coming.popleft()

    def _advance(self, saved: Saved) -> None:
        """Note how far the backward pass is; what is computed again now is on the device as well."""
        assert self.known is not None
        key = (saved.segment, 0) if saved.segment in self.known.again else saved.key
        self._place = max(self._place, self.known.places.get(key, 0))
        self.memory.count(self.known.backward.hidden[self._place], is_passing=True)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether a block may come back before it is needed."""
        assert self.known is not None
        budget, window = self.memory.budget_bytes, self.known.plan.window_bytes
        if window is not None and self.waiting_bytes and self.waiting_bytes + size_bytes > window:
            return False
        backward = self.known.backward
        others = backward.hidden[self._place] + backward.bursts[self._place]
        return budget is None or self.memory.live_bytes + size_bytes + others <= budget


def _tensors_of(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _is_gone(known: "weakref.ref[Saved]") -> bool:
    saved = known()
    return saved is None or saved.is_really_gone()
