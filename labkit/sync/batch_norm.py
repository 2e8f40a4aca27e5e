"""Batch norm across workers: running statistics that agree, and batch statistics of the global batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.comm import Communicator


class RunningStatistics:
    """The running mean and variance of all workers as one, weighted by the samples each has seen lately.

    The merged variance is the total one: within the workers plus between their means, so that two
    workers with [0, 2] and [6, 6, 6, 6] agree on what one worker with all six would know.

    Merged statistics are for evaluation and checkpoints only: each worker then goes on with its own, so
    neither how often one evaluates nor where a run was interrupted changes anything.
    """

    _DECAY = 0.9  # of a sample's weight per step: as torch's running statistics forget by default

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            and module.running_mean is not None
            and not isinstance(module, SynchronizedBatchNorm)
        ]
        self._samples = 0.0

    def count(self, num_samples: int) -> None:
        """This worker has trained on so many samples in this step."""
        self._samples = self._DECAY * self._samples + num_samples

    def local_state(self) -> Tensor:
        """This worker's own statistics, to go on with after a resume; shape (n,), float64."""
        parts = [torch.tensor([self._samples], dtype=torch.float64)]
        for layer in self._layers:
            tensors = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
            parts += [tensor.double().cpu().flatten() for tensor in tensors if tensor is not None]
        return torch.cat(parts)

    @torch.no_grad()
    def load_local_state(self, state: Tensor) -> None:
        """Set this worker's own statistics."""
        values = state.cpu().double()
        self._samples, offset = float(values[0]), 1
        for layer in self._layers:
            for tensor in (layer.running_mean, layer.running_var, layer.num_batches_tracked):
                if tensor is not None:
                    part = values[offset : offset + tensor.numel()].view_as(tensor)
                    tensor.copy_(part)
                    offset += tensor.numel()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Have the merged statistics in the model for a while. All workers enter together."""
        if not self._layers or self._comm.world_size == 1:
            yield
            return
        own = self.local_state()
        self._merge()
        try:
            yield
        finally:
            self.load_local_state(own)

    @torch.no_grad()
    def _merge(self) -> None:
        device = self._layers[0].running_mean.device  # type: ignore[union-attr]
        parts = [torch.tensor([self._samples], dtype=torch.float64, device=device)]
        counts = torch.zeros(self._comm.world_size, len(self._layers), dtype=torch.float64, device=device)
        for index, layer in enumerate(self._layers):
            mean, var = layer.running_mean.double(), layer.running_var.double()  # type: ignore[union-attr]
            parts += [self._samples * mean, self._samples * (var + mean * mean)]
            counts[self._comm.rank, index] = float(layer.num_batches_tracked or 0)
        packed = torch.cat([*parts, counts.flatten()])
        self._comm.all_reduce_(packed).wait()
        total = float(packed[0])
        if total == 0:
            return  # before the first step all workers hold the same ones
        offset = 1
        batches = packed[-counts.numel() :].view_as(counts).amax(0)
        for index, layer in enumerate(self._layers):
            width = layer.num_features
            mean, square = packed[offset : offset + 2 * width].view(2, width) / total
            offset += 2 * width
            layer.running_mean.copy_(mean)  # type: ignore[union-attr]
            layer.running_var.copy_((square - mean * mean).clamp_(min=0))  # type: ignore[union-attr]
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(int(batches[index]))


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all workers' samples; both passes reduce sums and the count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, comm: Communicator, seen: dict[str, Tensor]) -> Tensor:
        channels = x.shape[1]
        rows = x.transpose(0, 1).reshape(channels, -1).double()
        packed = torch.cat([rows.sum(1), (rows * rows).sum(1), rows.new_full((1,), rows.shape[1])])
        comm.all_reduce_(packed).wait()
        count = packed[-1]
        mean = packed[:channels] / count
        var = (packed[channels:-1] / count - mean * mean).clamp_(min=0)
        seen.update(mean=mean, var=var, count=count)
        inverse = (var + eps).rsqrt().to(x.dtype)
        shape = [1, channels, *[1] * (x.dim() - 2)]
        normal = (x - mean.to(x.dtype).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, count)
        ctx.comm = comm
        return normal

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grad_outputs
        normal, inverse, count = ctx.saved_tensors
        channels = normal.shape[1]
        rows = grad.transpose(0, 1).reshape(channels, -1).double()
        normal_rows = normal.transpose(0, 1).reshape(channels, -1).double()
        packed = torch.cat([rows.sum(1), (rows * normal_rows).sum(1)])
        ctx.comm.all_reduce_(packed).wait()
        shape = [1, channels, *[1] * (grad.dim() - 2)]
        mean_grad, mean_dot = ((part / count).to(grad.dtype).view(shape) for part in packed.split(channels))
        return (grad - mean_grad - normal * mean_dot) * inverse.view(shape), None, None, None


class SynchronizedBatchNorm(_BatchNorm):
    """Batch norm over the global batch, on any device (torch's SyncBatchNorm is CUDA only).

    Workers may have different numbers of samples, or none: sums and counts are reduced in float64. Every
    worker must call it equally often in a step.
    """

    is_collective = True  # hybrid memory must not compute it again: other workers would have to as well

    def __init__(self, like: _BatchNorm, comm: Communicator) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        for tensor in like.state_dict().values():
            if tensor.is_floating_point():
                self.to(tensor.device, tensor.dtype)
        self.load_state_dict(like.state_dict())
        self._comm = comm

    def _check_input_dim(self, input: Tensor) -> None:
        return None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; shapes (b, c, ...) to the same. Statistics of the global batch while training."""
        if not self.training:
            return super().forward(input)
        seen: dict[str, Tensor] = {}
        normal: Tensor = _Normalise.apply(input, self.eps, self._comm, seen)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._track(seen)
        if not self.affine:
            return normal
        shape = [1, self.num_features, *[1] * (input.dim() - 2)]
        return normal * self.weight.view(shape) + self.bias.view(shape)

    @torch.no_grad()
    def _track(self, seen: dict[str, Tensor]) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = seen["var"] * (seen["count"] / (seen["count"] - 1).clamp_(min=1))
        self.running_mean.lerp_(seen["mean"].to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


def synchronize_batch_norm(model: nn.Module, comm: Communicator) -> nn.Module:
    """Replace every batch-norm layer of a model by a synchronised one, in place, and return the model."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            setattr(model, name, SynchronizedBatchNorm(child, comm))
        else:
            synchronize_batch_norm(child, comm)
    return SynchronizedBatchNorm(model, comm) if isinstance(model, _BatchNorm) else model
