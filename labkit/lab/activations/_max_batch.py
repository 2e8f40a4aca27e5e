"""The largest batch that all workers of an experiment have room for."""

from collections.abc import Callable
from dataclasses import dataclass

from labkit.config import ExperimentConfig
from labkit.lab.heterogeneity import run_probe
from labkit.lab.progress import wait_with_lines
from labkit.launch import Run


@dataclass(frozen=True)
class MaxBatch:
    """What a search found.

    Attributes:
        plain: Largest global batch when everything stays on the device; 0: none fits.
        hybrid: With hybrid memory.
        plain_parts: Each worker's part of it, by rank.
        hybrid_parts: Likewise.
    """

    plain: int
    hybrid: int
    plain_parts: tuple[int, ...]
    hybrid_parts: tuple[int, ...]

    @property
    def growth(self) -> float:
        """How many times as large; infinite where nothing fits without."""
        return self.hybrid / self.plain if self.plain else float("inf") if self.hybrid else 1.0


def max_batch(
    config: ExperimentConfig,
    *,
    is_repeat: bool = True,
    wait: Callable[[Run], object] = wait_with_lines,
    rendezvous: str | None = None,
    node: str | None = None,
) -> MaxBatch:
    """Find the largest global batch with and without hybrid memory, by trying whole steps on all workers.

    Each tries its own part alone; then they vote, so none hangs when another runs out of memory.

    Args:
        config: What will be trained, with its `memory.device_budget`; on CUDA the device itself may be the
            limit.
        is_repeat: Search again although an equal search has finished before.
        wait: Waits for the run that searches, and shows how far it is.
        rendezvous: As for `start`, on several machines.
        node: As for `start`.

    Raises:
        RunFailed: a worker died, or nothing bounds its memory.
    """
    folder = run_probe(config, "max_batch", is_repeat, wait, rendezvous, node)
    by_rank = [folder.history(rank, ("max_batch",)) for rank in folder.ranks()]
    found = {}
    for is_hybrid in (False, True):
        mine = [next(e for e in events if e["is_hybrid"] is is_hybrid) for events in by_rank]
        found[is_hybrid] = (mine[0]["global_batch_size"], tuple(e["local_batch_size"] for e in mine))
    return MaxBatch(found[False][0], found[True][0], found[False][1], found[True][1])
