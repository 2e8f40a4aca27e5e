"""A profile and the plan made from it as plain values, for an event file. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.memory.profile import Block, Decision, Link, Profile
from labkit.memory.simulate import Outcome, simulate


@dataclass(frozen=True)
class Recorded:
    """What a step was found to save, and what was decided about it.

    Attributes:
        profile: Of the step.
        decisions: For each block; shape (blocks,).
        link: Planned with.
        budget_bytes: Of blocks; None: no limit.
        window_bytes: Of copies under way; None: as the budget leaves room.
        reserved_bytes: On the device beside the blocks.
        host_bytes: Most bytes that may be offloaded.
        allowed: Decisions that may be made.
    """

    profile: Profile
    decisions: tuple[Decision, ...]
    link: Link
    budget_bytes: int | None
    window_bytes: int | None
    reserved_bytes: int
    host_bytes: int | None = None
    allowed: tuple[Decision, ...] = tuple(Decision)

    def predicted(self) -> Outcome:
        """The plan, simulated."""
        return simulate(
            self.profile,
            self.decisions,
            self.link,
            budget_bytes=self.budget_bytes,
            window_bytes=self.window_bytes,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, to read with `from_mapping`."""
        profile, link = self.profile, self.link
        return {
            "blocks": [
                [
                    b.size_bytes,
                    round(b.saved_s, 7),
                    round(b.needed_s, 7),
                    b.segment,
                    b.is_movable,
                    b.name,
                    round(b.released_s, 7),
                    round(b.gone_s, 7),
                    str(what),
                ]
                for b, what in zip(profile.blocks, self.decisions, strict=True)
            ],
            "forward_s": profile.forward_s,
            "step_s": profile.step_s,
            "recompute_s": list(profile.recompute_s),
            "boundary_bytes": list(profile.boundary_bytes),
            "gradient_bytes": profile.gradient_bytes,
            "link": [link.out_bytes_per_s, link.in_bytes_per_s, link.latency_s],
            "budget_bytes": self.budget_bytes,
            "window_bytes": self.window_bytes,
            "reserved_bytes": self.reserved_bytes,
            "host_bytes": self.host_bytes,
            "allowed": [str(what) for what in self.allowed],
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Recorded":
        """What `to_mapping` gave."""
        blocks = tuple(Block(*block[:8]) for block in values["blocks"])
        profile = Profile(
            blocks,
            values["forward_s"],
            values["step_s"],
            tuple(values["recompute_s"]),
            tuple(values["boundary_bytes"]),
            values["gradient_bytes"],
        )
        return cls(
            profile,
            tuple(Decision(block[8]) for block in values["blocks"]),
            Link(*values["link"]),
            values["budget_bytes"],
            values["window_bytes"],
            values["reserved_bytes"],
            values["host_bytes"],
            tuple(Decision(what) for what in values["allowed"]),
        )
