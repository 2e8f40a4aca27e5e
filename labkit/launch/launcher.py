"""The contract of everything that starts workers on this machine for a supervisor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Exit:
    """One process that has ended.

    Attributes:
        rank: Its worker; none when the process is the agent of several.
        code: Exit code; negative: the signal that killed it.
        name: What to call it when it is no worker.
    """

    rank: int | None
    code: int
    name: str = ""


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

    # What only launchers of strategies that outlive a loss have to do; others keep these.

    def tend(self) -> None:
        """Start again, or do without, what was lost and the run can spare; called many times a second."""
        return

    def lose(self, rank: int) -> bool:
        """Treat a process that shows no life as lost; whether the run can go on without it."""
        return False

    @property
    def is_server_lost(self) -> bool:
        """A server has ended before its time, or shows no life."""
        return False


class SeveralLaunchers(Launcher):
    """Several launchers as one, for several nodes on this machine."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._launchers = launchers

    def start(self) -> None:
        for launcher in self._launchers:
            launcher.start()

    def sentinels(self) -> list[int]:
        return [sentinel for launcher in self._launchers for sentinel in launcher.sentinels()]

    def exits(self) -> list[Exit]:
        return [end for launcher in self._launchers for end in launcher.exits()]

    def is_over(self) -> bool:
        return all(launcher.is_over() for launcher in self._launchers)

    def pids(self) -> dict[int, int]:
        return {rank: pid for launcher in self._launchers for rank, pid in launcher.pids().items()}

    def terminate(self) -> None:
        for launcher in self._launchers:
            launcher.terminate()

    def kill(self) -> None:
        for launcher in self._launchers:
            launcher.kill()
