"""Batch norm over the rows of all ranks (`train.batch_norm: synchronise`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crosel.utils.distributed import World


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with the statistics of all ranks' rows: what one process would compute on the whole batch.

    Written in plain operations, so that it serves gloo as well (torch's own is for CUDA only). One message forwards
    (mean and variance of each rank) and one backwards. It takes over parameters and buffers, names included.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, world: World) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.world = world
        for name, parameter in norm.named_parameters(recurse=False):
            setattr(self, name, parameter)
        for name, buffer in norm.named_buffers(recurse=False):
            setattr(self, name, buffer)
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        if self.training or self.running_mean is None or self.running_var is None:
            mean, var, count = self._statistics(values)
            if self.training and self.track_running_stats:
                self._update_running_statistics(mean.detach(), var.detach() * count / (count - 1).clamp_min(1))
        else:
            mean, var = self.running_mean, self.running_var
        shape = (1, -1, *[1] * (x.ndim - 2))
        scale = torch.rsqrt(var + self.eps)
        scale = scale * self.weight if self.affine else scale
        shift = (self.bias if self.affine else 0) - mean * scale
        return (values * scale.view(shape) + shift.view(shape)).to(x.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and count over all ranks, from those of each."""
        dims = [0, *range(2, x.ndim)]
        var, mean = torch.var_mean(x, dims, correction=0)
        rows = x.numel() // x.shape[1]
        each = torch.stack([mean, var, torch.full_like(mean, rows)]).unsqueeze(0)
        means, variances, counts = self.world.all_gather(each, self.world.size).unbind(1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        return mean, (counts * (variances + (means - mean) ** 2)).sum(0) / count, count

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean += momentum * (mean - self.running_mean)
        self.running_var += momentum * (var - self.running_var)


def convert_sync_batch_norm(module: nn.Module, world: World) -> None:
    """Replace every batch norm inside the module by one over all ranks."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(module, name, SyncBatchNorm(child, world))
        else:
            convert_sync_batch_norm(child, world)
