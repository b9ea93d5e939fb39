"""Networks. Each maps normalised inputs to logits, and shows its last hidden layer:

    forward(x) = classify(features(x)),   features(x): [B, feature_size]

Any `nn.Module` factory of the user's serves as well; only methods that look at features (PiCO) need the two parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crosel.errors import UserError
from crosel.nn import fused
from crosel.nn.casts import Linear
from crosel.nn.convolution import Conv3x3, Shortcut
from crosel.nn.fused import add_norm_relu, norm_relu
from crosel.utils.distributed import World


class Classifier(nn.Module, ABC):
    """Features and a linear layer on top."""

    def __init__(self, feature_size: int, classes: int) -> None:
        super().__init__()
        self.feature_size = feature_size
        self.head = Linear(feature_size, classes)

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer: [B, feature_size]."""

    def classify(self, features: Tensor) -> Tensor:
        out: Tensor = self.head(features)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class _Block(nn.Module):
    """Pre-activation block. Where the width changes, the activated tensor feeds both branches."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), Conv3x3(inputs, outputs, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), Conv3x3(outputs, outputs)
        self.shortcut = Shortcut(inputs, outputs, stride) if inputs != outputs else None

    def forward(
        self, x: Tensor, residual: Tensor | None, tiles: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Take and return a sum as its two terms: whoever reads it adds them, in one kernel with the batch norm. Or as
        one, with the moments of its tiles."""
        x, activated = add_norm_relu(x, residual, self.norm1, tiles)
        inner, _, tiles = self.conv1.add(activated)
        skip = x if self.shortcut is None else self.shortcut(activated)
        return self.conv2.add(norm_relu(inner, self.norm2, tiles), skip)


class ResidualNetwork(Classifier):
    """Pre-activation blocks in groups, after a stem without an activation of its own. For images of any size."""

    def __init__(self, stem: int, widths: Sequence[int], blocks: int, classes: int, channels: int) -> None:
        """Each group has so many blocks; all but the first halve the image."""
        super().__init__(widths[-1], classes)
        self.stem = Conv3x3(channels, stem)
        made: list[_Block] = []
        inputs = stem
        for group, outputs in enumerate(widths):
            for position in range(blocks):
                # Where the first group changes nothing, its shortcut is the identity.
                made.append(_Block(inputs, outputs, 2 if group > 0 and position == 0 else 1))
                inputs = outputs
        self.blocks = nn.ModuleList(made)
        self.norm = nn.BatchNorm2d(inputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        x, residual, tiles = self.stem.add(x)
        for block in self.blocks:
            x, residual, tiles = block(x, residual, tiles)
        return add_norm_relu(x, residual, self.norm, tiles)[1].mean(dim=(2, 3))


class WideResNet(ResidualNetwork):
    """WRN-d-w (Zagoruyko and Komodakis, 2016)."""

    def __init__(self, depth: int, width: int, classes: int, channels: int = 3) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise UserError(f"the depth of a wide ResNet must be 6n + 4 (10, 16, 22, 28, 34, 40, …), not {depth}")
        if width < 1:
            raise UserError(f"the width of a wide ResNet must be at least 1, not {width}")
        super().__init__(16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6, classes, channels)


class ResNet18(ResidualNetwork):
    """ResNet-18 with pre-activation (He et al., Identity Mappings, 2016) and a stem for small images, as is usual for
    CIFAR: about as many parameters as WRN-16-8 (11.2 million, 11.0), a third of its arithmetic."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__(64, (64, 128, 256, 512), 2, classes, channels)


def wide_resnet(depth: int, width: int, classes: int, channels: int = 3) -> WideResNet:
    """Return a wide ResNet for images of any size: `wide_resnet(34, 10, 10)` has 46.2 million parameters."""
    return WideResNet(depth, width, classes, channels)


class SmallCNN(Classifier):
    """Four convolutions with batch norm: for small images on a CPU. Works from 1x1 pixels on."""

    def __init__(self, classes: int, channels: int = 3, width: int = 32) -> None:
        super().__init__(2 * width, classes)
        self.body = nn.Sequential(
            Conv3x3(channels, width), nn.BatchNorm2d(width), nn.ReLU(),
            Conv3x3(width, width), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            Conv3x3(width, 2 * width), nn.BatchNorm2d(2 * width), nn.ReLU(),
            Conv3x3(2 * width, 2 * width), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )  # fmt: skip

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out.mean(dim=(2, 3))


class MLP(Classifier):
    """Fully connected layers with batch norm, for feature vectors (images are flattened)."""

    def __init__(self, inputs: int, classes: int, hidden: tuple[int, ...] = (512, 256)) -> None:
        super().__init__(hidden[-1] if hidden else inputs, classes)
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [Linear(inputs, size), nn.BatchNorm1d(size), nn.ReLU()]
            inputs = size
        self.body = nn.Sequential(*layers)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x.flatten(1))
        return out


def forward_split_bn(network: nn.Module, *batches: Tensor) -> list[Tensor]:
    """Logits of each batch, as from a pass of its own: batch norm takes its statistics from that batch alone.

    Where the fused kernels run, it is one pass of a network whose batch norms all know of parts, or take no statistics
    of a batch (`independent_rows`): convolutions of 64 examples do not fill a large card.
    """
    several = 2 <= len(batches) <= fused.MAX_PARTS
    one_pass = getattr(network, "independent_rows", False) or _norms_support_parts(network)
    if not (several and fused.available(batches[0]) and one_pass):
        return [network(x) for x in batches]
    sizes = [len(x) for x in batches]
    with fused.batch_norm_parts(sizes):
        return list(network(torch.cat(batches)).split(sizes))


def _norms_support_parts(network: nn.Module) -> bool:
    """Whether all batch norms are asked through `crosel.nn.fused`. Where a user derives a class from one of ours,
    or puts in another head, there may be others, which would take all parts together."""
    if not isinstance(network, ResidualNetwork) or type(network) not in (WideResNet, ResNet18):
        return False
    norms = sum(isinstance(module, _BatchNorm) for module in network.modules())
    return norms == 2 * len(network.blocks) + 1


class EmbeddingNetwork(Protocol):
    """What a method that embeds asks of a network: forward(x) = classify(features(x))."""

    feature_size: int

    def features(self, x: Tensor) -> Tensor: ...

    def classify(self, features: Tensor) -> Tensor: ...


def embedding_network(network: nn.Module, who: str) -> EmbeddingNetwork:
    """The same network, once it is known to have what `who` needs."""
    missing = [name for name in ("features", "classify", "feature_size") if not hasattr(network, name)]
    if missing:
        raise UserError(
            f"{who} embeds what a network sees, and {type(network).__name__} has no {', '.join(missing)}: "
            "give it features(x) -> [B, d], classify(features) -> logits and feature_size = d"
        )
    return cast(EmbeddingNetwork, network)


# --- batch norm over the rows of all ranks (`train.batch_norm: synchronise`) ------------------------------------------


class SyncBatchNorm(_BatchNorm):
    """Batch norm with the statistics of all ranks' rows: what one process would compute on the whole batch.

    Written in plain operations, so that it serves gloo as well (torch's own is for CUDA only). One message forwards
    (mean and variance of each rank) and one backwards. It takes over parameters and buffers, names included.
    """

    def __init__(self, norm: _BatchNorm, world: World) -> None:
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
        if isinstance(child, _BatchNorm):
            setattr(module, name, SyncBatchNorm(child, world))
        else:
            convert_sync_batch_norm(child, world)
