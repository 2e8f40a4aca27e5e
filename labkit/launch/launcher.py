"""The contract of everything that starts workers on this machine for a supervisor."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Exit:
    """One process that has ended.

    Attributes:
        rank: Its worker; none when the process is the agent of several.
        code: Exit code; negative: the signal that killed it.
    """

    rank: int | None
    code: int


class Launcher(Protocol):
    """Starts workers, sees how they end, and stops them. Nothing of them outlives the supervisor."""

    def start(self) -> None:
        """Start all workers of this node."""
        ...

    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a process ends."""
        ...

    def exits(self) -> list[Exit]:
        """Processes that have ended so far, in no order."""
        ...

    def is_over(self) -> bool:
        """All processes have ended."""
        ...

    def pids(self) -> dict[int, int]:
        """Process numbers of the workers, by rank."""
        ...

    def terminate(self) -> None:
        """Ask all workers to save and stop (SIGTERM)."""
        ...

    def kill(self) -> None:
        """End all workers at once (SIGKILL) and reap them."""
        ...
