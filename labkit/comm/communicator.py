"""The seam through which strategies exchange tensors, with a twin for one process."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from labkit.errors import LabkitError


class PeerError(LabkitError):
    """A collective failed: another worker died, stalled or left. The root cause is elsewhere."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the tensor holds the result.

        Raises:
            PeerError: another worker is gone or too late.
        """
        ...

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Communicator(Protocol):
    """Collectives among a fixed set of workers. All of them call the same ones in the same order."""

    rank: int
    world_size: int

    def all_reduce_(self, tensor: torch.Tensor) -> Work:
        """Start to replace `tensor` by its sum over the workers, in place."""
        ...

    def reduce_scatter_(self, shard: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Start to put into `shard` this worker's equal part of the sum of `tensor` over the workers.

        Shapes (n,), (world_size * n,).
        """
        ...

    def all_gather_(self, tensor: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start to put every worker's `shard`, by rank, into `tensor`; shapes (world_size * n,), (n,).

        `shard` may be this worker's part of `tensor` itself.
        """
        ...

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replace `tensor` by the one of `source`, in place."""
        ...

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's tensor of one common shape, by rank, on every worker."""
        ...

    def barrier(self) -> None:
        """Wait until every worker is here."""
        ...

    def duplicate(self) -> "Communicator":
        """The same workers with an order of collectives of their own."""
        ...

    def groups(self, ranks: Sequence[Sequence[int]]) -> "list[Communicator | None]":
        """Make several groups of workers; all workers call it with the same lists.

        Args:
            ranks: Members of each group, ascending; a worker may be in several.

        Returns:
            For each group its communicator, None where this worker is no member.
        """
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to one worker, which receives it."""
        ...

    def receive_(self, tensor: torch.Tensor, source: int) -> None:
        """Replace `tensor` by what one worker sends."""
        ...

    def close(self) -> None:
        """Leave. Call it last."""
        ...


class _Done:
    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


class SoloCommunicator:
    """One worker: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce_(self, tensor: torch.Tensor) -> Work:
        return _Done()

    def reduce_scatter_(self, shard: torch.Tensor, tensor: torch.Tensor) -> Work:
        shard.copy_(tensor)
        return _Done()

    def all_gather_(self, tensor: torch.Tensor, shard: torch.Tensor) -> Work:
        tensor.copy_(shard)
        return _Done()

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        return None

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone()]

    def barrier(self) -> None:
        return None

    def duplicate(self) -> Communicator:
        return self

    def groups(self, ranks: Sequence[Sequence[int]]) -> list[Communicator | None]:
        return [self if 0 in members else None for members in ranks]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise ValueError(f"one worker alone can't send to worker {to}")

    def receive_(self, tensor: torch.Tensor, source: int) -> None:
        raise ValueError(f"one worker alone can't receive from worker {source}")

    def close(self) -> None:
        return None


class _GroupWork:
    def __init__(self, work: dist.Work, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _peer_error(self._what, error) from error

    def is_done(self) -> bool:
        return self._work.is_completed()


def _peer_error(what: str, error: RuntimeError) -> PeerError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
    return PeerError(f"{what} failed because another worker is gone or too late: {first_line}")


class GroupCommunicator:
    """Several workers, over a torch.distributed process group (gloo, NCCL)."""

    def __init__(self, group: dist.ProcessGroup, *, is_owner: bool) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._is_owner = is_owner

    def all_reduce_(self, tensor: torch.Tensor) -> Work:
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise _peer_error("all-reduce", error) from error
        assert work is not None
        return _GroupWork(work, "all-reduce")

    def reduce_scatter_(self, shard: torch.Tensor, tensor: torch.Tensor) -> Work:
        try:
            work = dist.reduce_scatter_single(shard, tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise _peer_error("reduce-scatter", error) from error
        assert work is not None
        return _GroupWork(work, "reduce-scatter")

    def all_gather_(self, tensor: torch.Tensor, shard: torch.Tensor) -> Work:
        try:
            work = dist.all_gather_single(tensor, shard, group=self._group, async_op=True)
        except RuntimeError as error:
            raise _peer_error("all-gather", error) from error
        assert work is not None
        return _GroupWork(work, "all-gather")

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        try:
            dist.broadcast(tensor, group=self._group, group_src=source)
        except RuntimeError as error:
            raise _peer_error("broadcast", error) from error

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            dist.all_gather(found, tensor, group=self._group)
        except RuntimeError as error:
            raise _peer_error("gather", error) from error
        return found

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1)).wait()

    def duplicate(self) -> "GroupCommunicator":
        return GroupCommunicator(dist.new_group(), is_owner=False)

    def groups(self, ranks: Sequence[Sequence[int]]) -> list[Communicator | None]:
        found: list[Communicator | None] = []
        for members in ranks:
            if len(members) == 1:
                found.append(SoloCommunicator() if members[0] == self.rank else None)
                continue
            group = dist.new_group(list(members))  # all workers call it, members or not
            is_member = self.rank in members
            found.append(GroupCommunicator(group, is_owner=False) if is_member else None)
        return found

    def send(self, tensor: torch.Tensor, to: int) -> None:
        try:
            dist.send(tensor, group=self._group, group_dst=to)
        except RuntimeError as error:
            raise _peer_error(f"sending to worker {to}", error) from error

    def receive_(self, tensor: torch.Tensor, source: int) -> None:
        try:
            dist.recv(tensor, group=self._group, group_src=source)
        except RuntimeError as error:
            raise _peer_error(f"receiving from worker {source}", error) from error

    def close(self) -> None:
        if self._is_owner and dist.is_initialized():
            dist.destroy_process_group()
