"""A pretrained image backbone that goes on learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from crosel.errors import UserError
from crosel.nn import fused
from crosel.nn.backbones import picture_settings
from crosel.nn.frozen_norm import use_kernels
from crosel.nn.networks import MLP
from crosel.utils.text import did_you_mean, one_line

if TYPE_CHECKING:
    from crosel.nn.factory import NetworkSettings


class FineTuned(nn.Module):
    """A pretrained backbone that goes on learning, and a head: one linear layer, or an MLP.

    Images of another size than its own are brought to it here, on the device: the middle square of each.
    """

    def __init__(self, body: nn.Module, settings: NetworkSettings, classes: int) -> None:
        super().__init__()
        pictures = picture_settings(settings.name)
        self.size = settings.size or int(pictures["input_size"][1])
        self.mean, self.std = tuple(pictures["mean"]), tuple(pictures["std"])
        self.body, self._kernels = body, use_kernels(body)
        with torch.no_grad():
            self.head = MLP(_body_width(body, self.size, settings.name), classes, settings.hidden)
        self.feature_size = self.head.feature_size
        self.independent_rows = not settings.hidden  # hidden layers of the head have a batch norm that learns
        if settings.checkpointing:
            keep_less: Any = getattr(body, "set_grad_checkpointing", None)
            if keep_less is None:
                raise UserError(f"setting 'network.checkpointing': '{settings.name}' has none; leave it out")
            keep_less(True)
        # Statistics of batch norm stay those of pretraining: the batches of a method are a mixture of views.
        still = _frozen_layers(body, settings)
        for layer in still:
            layer.requires_grad_(False)
        self._in_evaluation = [*still, *(module for module in body.modules() if isinstance(module, _BatchNorm))]

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        for module in self._in_evaluation:
            module.eval()
        return self

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer: [B, feature_size]."""
        self._kernels.on = fused.available(x)
        return self.head.features(self.body(_middle_square(x, self.size)))

    def classify(self, features: Tensor) -> Tensor:
        return self.head.classify(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def _body_width(body: nn.Module, size: int, name: str) -> int:
    """Features that a backbone gives for an image of this size."""
    try:
        out = body.eval()(torch.zeros(1, 3, size, size))
    except Exception as error:
        raise UserError(
            f"network '{name}' cannot take images of {size} x {size} ({one_line(error)}); leave network.size out"
        ) from None
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise UserError(f"network '{name}' gives no row of numbers for an image; choose another backbone")
    return int(out.shape[1])


def _frozen_layers(body: nn.Module, settings: NetworkSettings) -> list[nn.Module]:
    """The layers that `network.freeze` names, or the first so many."""
    layers: dict[str, nn.Module] = {}
    for name, child in body.named_children():
        parts = child.named_children() if isinstance(child, nn.Sequential | nn.ModuleList) else ()
        layers |= {f"{name}.{part}": module for part, module in parts} or {name: child}
    layers = {name: layer for name, layer in layers.items() if next(layer.parameters(), None) is not None}
    known, freeze = f"it has {', '.join(layers)}", settings.freeze
    if isinstance(freeze, tuple):
        modules = dict(body.named_modules())
        if missing := [name for name in freeze if not name or name not in modules]:
            near = did_you_mean(missing[0], modules)
            raise UserError(f"setting 'network.freeze': '{settings.name}' has no layer '{missing[0]}'{near}; {known}")
        return [modules[name] for name in freeze]
    if freeze > len(layers):
        raise UserError(f"setting 'network.freeze': '{settings.name}' has {len(layers)} layers, not {freeze}; {known}")
    if freeze:  # what comes before all layers, such as a class token
        for parameter in body.parameters(recurse=False):
            parameter.requires_grad_(False)
    return list(layers.values())[: int(freeze)]


def _middle_square(x: Tensor, size: int) -> Tensor:
    """The middle of each image [n, c, h, w] in this size, in three channels."""
    height, width = x.shape[2:]
    x = x.expand(-1, 3, -1, -1)  # grey ones have one
    if height != width:
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        x = x[:, :, top : top + side, left : left + side]
    if x.shape[3] == size:
        return x
    if x.shape[3] > size:
        return F.interpolate(x, (size, size), mode="bilinear", antialias=True)
    return _enlarged(x, size) if fused.available(x) else F.interpolate(x, (size, size), mode="bicubic")


def _enlarged(x: Tensor, size: int) -> Tensor:
    """Squares by bicubic interpolation, as two products of matrices in float32: the same numbers up to rounding.
    PyTorch's kernel gives each thread one pixel of all images, one after the other: too few threads for a GPU."""
    count, channels, side, _ = x.shape
    with torch.autocast(x.device.type, enabled=False):
        eye = torch.eye(side, device=x.device)[None, None]
        weights = F.interpolate(eye, (size, side), mode="bicubic")[0, 0]  # of the unit vectors: [size, side]
        rows = x.float().permute(0, 2, 3, 1).reshape(count * side, side * channels)
        wide = rows @ torch.kron(weights.T.contiguous(), torch.eye(channels, device=x.device))
        out = torch.bmm(weights.expand(count, -1, -1), wide.view(count, side, size * channels))
        return out.view(count, size, size, channels).permute(0, 3, 1, 2)
