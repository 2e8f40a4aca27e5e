"""Batch norm across workers: running statistics that agree, and batch statistics of the global batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.comm import Communicator


class RunningStatistics:
    """Merges the running mean and variance of all workers, weighted by the samples each has seen.

    The merged variance is the total one: within the workers plus between their means, so that two
    workers with [0, 2] and [6, 6, 6, 6] agree on what one worker with all six would know.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            and module.running_mean is not None
            and not isinstance(module, SynchronizedBatchNorm)
        ]
        self._samples = 0

    def count(self, num_samples: int) -> None:
        """This worker has trained on so many samples more since the last merge."""
        self._samples += num_samples

    @torch.no_grad()
    def merge(self) -> None:
        """Replace every worker's running statistics by the merged ones. All workers call it together."""
        if not self._layers or self._comm.world_size == 1:
            return
        device = self._layers[0].running_mean.device  # type: ignore[union-attr]
        parts = [torch.tensor([float(self._samples)], dtype=torch.float64, device=device)]
        counts = torch.zeros(self._comm.world_size, len(self._layers), dtype=torch.float64, device=device)
        for index, layer in enumerate(self._layers):
            mean, var = layer.running_mean.double(), layer.running_var.double()  # type: ignore[union-attr]
            parts += [self._samples * mean, self._samples * (var + mean * mean)]
            counts[self._comm.rank, index] = float(layer.num_batches_tracked or 0)
        packed = torch.cat([*parts, counts.flatten()])
        self._comm.all_reduce_(packed).wait()
        total = float(packed[0])
        self._samples = 0
        if total == 0:
            return
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

    def __init__(self, like: _BatchNorm, comm: Communicator) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.load_state_dict(like.state_dict())
        self.to(like.weight.device if like.affine else torch.device("cpu"))
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
