"""What a training step saves for its backward pass, as it was recorded once. No torch here."""

from dataclasses import dataclass, replace
from enum import StrEnum

NEVER_S = 1e9
"""After everything."""


class Decision(StrEnum):
    """What becomes of a block between its forward and its backward use."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Block:
    """One storage that the forward pass saves; views of it count once.

    Attributes:
        size_bytes: Of the storage.
        saved_s: When it was saved, in seconds of compute since the step began.
        needed_s: When the backward pass first asked for it, likewise.
        segment: Which part of the model computed it, in the order of the forward pass; -1: none that can be
            computed again.
        is_movable: It may be offloaded.
        name: For people.
        released_s: When the forward pass itself let go of it, likewise: only then does offloading free it.
        gone_s: When the backward pass had let go of it, likewise; 0: as soon as the next block is needed.
    """

    size_bytes: int
    saved_s: float
    needed_s: float
    segment: int = -1
    is_movable: bool = True
    name: str = ""
    released_s: float = 0.0
    gone_s: float = 0.0


@dataclass(frozen=True)
class Profile:
    """A recorded step.

    Attributes:
        blocks: In the order in which they were saved.
        forward_s: Seconds of compute until the backward pass began.
        step_s: Seconds of compute of forward and backward.
        recompute_s: Seconds that computing each segment takes; shape (segments,).
        boundary_bytes: Bytes of what goes into each segment, which stay when it is computed again.
        gradient_bytes: That go over the same link in each direction during the backward pass; 0: none do.
    """

    blocks: tuple[Block, ...]
    forward_s: float
    step_s: float
    recompute_s: tuple[float, ...] = ()
    boundary_bytes: tuple[int, ...] = ()
    gradient_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Of all blocks."""
        return sum(block.size_bytes for block in self.blocks)

    def scaled(self, forward: float, backward: float) -> "Profile":
        """The same computed in so many times the time."""
        turn = self.forward_s

        def at(seconds: float) -> float:
            return forward * min(seconds, turn) + backward * max(0.0, seconds - turn)

        blocks = tuple(
            replace(
                block,
                saved_s=at(block.saved_s),
                needed_s=at(block.needed_s),
                released_s=at(block.released_s),
                gone_s=at(block.gone_s) if block.gone_s < NEVER_S else NEVER_S,
            )
            for block in self.blocks
        )
        return replace(
            self,
            blocks=blocks,
            forward_s=at(turn),
            step_s=at(self.step_s),
            recompute_s=tuple(forward * seconds for seconds in self.recompute_s),
        )


@dataclass(frozen=True)
class Link:
    """Rates between device and host as one worker has them.

    Attributes:
        out_bytes_per_s: From the device.
        in_bytes_per_s: To the device.
        latency_s: Of one copy.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def out_s(self, size_bytes: int) -> float:
        """Seconds to bring a block to the host."""
        return self.latency_s + size_bytes / self.out_bytes_per_s

    def in_s(self, size_bytes: int) -> float:
        """Seconds to bring it back."""
        return self.latency_s + size_bytes / self.in_bytes_per_s

    def is_like(self, other: "Link", factor: float) -> bool:
        """Both rates are less than so many times apart."""
        pairs = (
            (self.out_bytes_per_s, other.out_bytes_per_s),
            (self.in_bytes_per_s, other.in_bytes_per_s),
        )
        return all(max(pair) < factor * min(pair) for pair in pairs)
