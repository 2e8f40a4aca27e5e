"""Flat gradient buckets that go out while back-propagation still runs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.comm import Communicator, Work
from labkit.errors import ConfigError
from labkit.sync.flat import require_dense


class _Bucket:
    """Some parameters whose gradients travel in one flat tensor, with room for extra numbers at its end."""

    def __init__(self, parameters: list[torch.nn.Parameter], num_extra: int) -> None:
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + num_extra, dtype=first.dtype, device=first.device)
        self.gradients = self.flat[: sum(sizes)]
        self.extra = self.flat[sum(sizes) :]
        pieces = self.gradients.split(sizes)
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.parameters = parameters
        self.missing = len(parameters)
        self.work: Work | None = None


class GradientBuckets:
    """Sums gradients over workers, bucket by bucket, in one fixed order on every worker.

    Autograd leaves each gradient in a tensor of its own; a hook moves it into its bucket at once and
    frees it, which costs one pass over memory instead of the two of zeroing and adding in place.
    Buckets are filled from the last parameter to the first, the order in which gradients appear. The
    last bucket carries `num_extra` numbers more, so that sums and counts need no collective of their own.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        *,
        bucket_bytes: int,
        num_extra: int,
        before_last: Callable[[Tensor], None],
    ) -> None:
        self._comm = comm
        self._before_last = before_last
        groups = _group(parameters, bucket_bytes)
        self._buckets = [
            _Bucket(group, num_extra if index == len(groups) - 1 else 0) for index, group in enumerate(groups)
        ]
        self._place = {
            parameter: (bucket, view)
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._seen: set[torch.nn.Parameter] = set()
        self._next = 0
        self._is_last_micro_step = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._collect) for p in self._place]

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self._seen.clear()
        self._next = 0
        self._is_last_micro_step = False
        for parameter in self._place:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None

    def expect_last_micro_step(self) -> None:
        """From now on a gradient that appears is complete, and full buckets go out."""
        self._is_last_micro_step = True

    def _collect(self, parameter: torch.Tensor) -> None:
        bucket, view = self._place[parameter]  # type: ignore[index]
        gradient = parameter.grad
        if gradient is None:
            return
        require_dense(gradient)
        if parameter in self._seen:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._seen.add(parameter)  # type: ignore[arg-type]
        parameter.grad = None
        if self._is_last_micro_step:
            bucket.missing -= 1
            self._send_full_ones()

    def _send_full_ones(self) -> None:
        # A later bucket may be full first; it waits, so that all workers send in the same order.
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next == len(self._buckets):
            self._before_last(bucket.extra)
        bucket.work = self._comm.all_reduce_(bucket.flat)

    def finish(self) -> Tensor:
        """Send what is left, wait for all, and hang the sums on the parameters as `.grad`.

        Returns:
            The summed extra numbers; shape (num_extra,).
        """
        for parameter, (_, view) in self._place.items():
            if parameter not in self._seen:
                view.zero_()  # no samples here, or a parameter that took no part
        while self._next < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        return self._buckets[-1].extra

    def divide_(self, count: float) -> None:
        """Divide all gradients; by 1 costs nothing."""
        if count == 1.0:
            return
        for bucket in self._buckets:
            bucket.gradients.div_(count)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _group(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Parameters from last to first in groups of one dtype and device, up to `bucket_bytes` each.

    The last group is one that counts exactly (float32 or float64), since it carries the extra numbers.
    """
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group, size_bytes = open_groups.get(kind, ([], 0))
        own_bytes = parameter.numel() * parameter.element_size()
        if not group or size_bytes + own_bytes > bucket_bytes:
            group, size_bytes = [], 0
            groups.append(group)
        group.append(parameter)
        open_groups[kind] = (group, size_bytes + own_bytes)
    exact = [g for g in groups if g[0].dtype in (torch.float32, torch.float64)]
    if not exact:
        found = parameters[0].dtype if parameters else "none"
        raise ConfigError(
            f"model must have float32 or float64 parameters, got {found}. Keep at least one layer in float32."
        )
    last = exact[-1]
    return [group for group in groups if group is not last] + [last]
