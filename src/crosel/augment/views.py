"""Weak, strong and contrastive views of whole batches, drawn from a generator.

A view has two halves, so that the draw can be made for a global batch and applied to one rank's slice of it:
`draw` gives tensors with leading dimension n on the generator's device, `apply` uses them. Images are uint8
[B, C, H, W] in and out; features are standardised floats [B, d].

    name             images                                                     features
    plain            unchanged                                                  unchanged
    weak             flip, crop after reflect padding                           a little noise
    strong           weak, random operations, cutout                            noise, some set to 0
    autoaugment      weak, cutout, a sub-policy of AutoAugment                  as strong
    contrast-weak    resized crop, flip, colour jitter, sometimes grey          as weak
    contrast-strong  resized crop, flip, random operations, cutout              as strong
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from crosel.augment.ops import PerDevice
from crosel.augment.policies import AugmentSettings
from crosel.augment.transforms import (
    ColourJitter,
    Cutout,
    Draw,
    FlipCrop,
    PolicyOps,
    RandomOps,
    ResizedCrop,
    Transform,
)


class View(ABC):
    """A random change of a batch, in two halves."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Draw:
        """Draw for n examples; every tensor has leading dimension n and lies on the generator's device."""

    @abstractmethod
    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        """Change each example as drawn; shape and dtype stay."""

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.apply(x, self.draw(len(x), generator))


class ImageView(View):
    """Transforms applied one after the other to uint8 images of one shape; one `torch.rand` feeds them all."""

    def __init__(self, shape: tuple[int, ...], transforms: Sequence[Transform]) -> None:
        self.shape, self.transforms = tuple(shape), tuple(transforms)
        self._counts = PerDevice(torch.tensor([float(c) for transform in transforms for c in transform.counts]))

    def draw(self, n: int, generator: torch.Generator) -> Draw:
        draw: Draw = {}
        if not self.transforms:
            return draw
        (counts,) = self._counts.on(torch.device(generator.device))
        u = torch.rand(n, len(counts), generator=generator, device=generator.device)
        # Rounded to float32, u * count stays below the count for every u < 1.
        k = (u * counts).long()
        start = 0
        for transform in self.transforms:
            columns = slice(start, start := start + len(transform.counts))
            draw |= transform.plan(u[:, columns], k[:, columns])
        return draw

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        if x.dtype != torch.uint8 or tuple(x.shape[1:]) != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise ValueError(f"expected uint8 images [B, {expected}], got {x.dtype} {list(x.shape)}")
        for transform in self.transforms:
            x = transform.apply(x, draw)
        return x.to(torch.uint8)


class FeatureView(View):
    """Gaussian noise, then each feature set to 0 (the mean of standardised features) with some chance."""

    def __init__(self, d: int, noise: float = 0.0, drop: float = 0.0) -> None:
        self.d, self.noise, self.drop = d, noise, drop

    def draw(self, n: int, generator: torch.Generator) -> Draw:
        draw: Draw = {}
        if self.noise:
            draw["noise"] = torch.randn(n, self.d, generator=generator, device=generator.device)
        if self.drop:
            draw["drop"] = torch.rand(n, self.d, generator=generator, device=generator.device) < self.drop
        return draw

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        if not x.is_floating_point() or x.shape[1:] != (self.d,):
            raise ValueError(f"expected float features [B, {self.d}], got {x.dtype} {list(x.shape)}")
        if self.noise:
            x = torch.add(x, draw["noise"].to(x.dtype), alpha=self.noise)
        return x.masked_fill(draw["drop"], 0.0) if self.drop else x


def make_views(shape: tuple[int, ...], settings: AugmentSettings) -> dict[str, View]:
    """All views by name, for images (C, H, W) or features (d,)."""
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise ValueError(f"expected a shape (channels, height, width) or (features,), got {tuple(shape)}")
    if len(shape) == 1:
        weak = FeatureView(shape[0], settings.weak_feature_noise)
        strong = FeatureView(shape[0], settings.feature_noise, settings.feature_drop)
        names = {"weak": weak, "contrast-weak": weak}
        names |= dict.fromkeys(("strong", "autoaugment", "contrast-strong"), strong)
        return {"plain": FeatureView(shape[0]), **names}
    crop = FlipCrop(shape, settings.padding, settings.flip)
    box = ResizedCrop(shape, settings.flip)
    ops = RandomOps(shape, settings)
    cut = Cutout(shape, settings.cutout, settings.cutout_fill)
    transforms: dict[str, list[Transform]] = {
        "plain": [],
        "weak": [crop],
        "strong": [crop, ops, cut],
        "autoaugment": [crop, cut, PolicyOps(shape, settings)],
        "contrast-weak": [box, ColourJitter(shape)],
        "contrast-strong": [box, ops, cut],
    }
    return {name: ImageView(shape, row) for name, row in transforms.items()}
