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

An image view is a row of transforms. A transform names, for each random column it wants, how many whole values the
column can take (1 where it wants the uniform number itself). Nothing here waits for the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from crosel.augment.ops import Op, OpTable, PerDevice, blend, grey_weights, mean_level, shift_hue, to_grey
from crosel.augment.policies import POLICIES, AugmentSettings, Entry, policy_entries, strong_entries

Draw = dict[str, Tensor]


# --- transforms ---------------------------------------------------------------------------------------------------


class Transform(ABC):
    """One step of an image view."""

    counts: tuple[int, ...]

    @abstractmethod
    def plan(self, u: Tensor, k: Tensor) -> Draw:
        """Turn uniform numbers u [n, columns] in [0, 1) and whole ones k = floor(u * counts) into a draw."""

    @abstractmethod
    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        """Change whole grey levels of any dtype into whole grey levels."""


class FlipCrop(Transform):
    """Mirror with chance .5, then a random crop of the same size after reflect padding."""

    def __init__(self, shape: Sequence[int], padding: int | None, flip: bool) -> None:
        _, height, width = shape
        pad_y, pad_x = (max(1, side // 8) if padding is None else padding for side in (height, width))
        self.counts = (2 if flip else 1, 2 * pad_y + 1, 2 * pad_x + 1)
        self._constants = PerDevice(
            _reflected(height, pad_y) * width,
            _reflected(width, pad_x),
            torch.arange(height),
            torch.arange(width),
        )

    def plan(self, u: Tensor, k: Tensor) -> Draw:
        return {"flip": k[:, 0], "offset": k[:, 1:]}

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        row_at, column_at, ys, xs = self._constants.on(x.device)
        flip, offset = draw["flip"][:, None], draw["offset"]
        rows = row_at[offset[:, :1] + ys]
        columns = column_at[torch.where(flip > 0, xs.flip(0), xs) + offset[:, 1:]]
        index = (rows[:, :, None] + columns[:, None]).flatten(1)
        return x.flatten(2).gather(2, index[:, None].expand(-1, x.shape[1], -1)).view(x.shape)


def _reflected(side: int, padding: int) -> Tensor:
    """Source position of each padded position: mirrored at both borders, as often as the padding needs."""
    period = max(1, 2 * (side - 1))
    at = torch.arange(-padding, side + padding) % period
    return torch.minimum(at, period - at).clamp(max=side - 1)


class TableOps(Transform):
    """Operations drawn from one table, one after the other."""

    def __init__(self, entries: list[Entry], shape: tuple[int, ...], fill: int) -> None:
        self.table = OpTable(entries, shape, fill)
        self.identity = entries.index((Op.IDENTITY, 0.0))  # where a round does nothing

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        for entry in draw["ops"].unbind(1):
            x = self.table.apply(x, entry)
        return x


class RandomOps(TableOps):
    """The strong view's operations: some draws from one table, each applied with some chance."""

    def __init__(self, shape: tuple[int, ...], settings: AugmentSettings) -> None:
        entries = strong_entries(settings.strong_magnitudes, shape[1], shape[2])
        super().__init__(entries, shape, settings.fill)
        self.rounds, self.chance = settings.strong_ops, settings.strong_chance
        self.counts = (len(entries),) * self.rounds + (1,) * self.rounds

    def plan(self, u: Tensor, k: Tensor) -> Draw:
        entry = k[:, : self.rounds]
        return {"ops": torch.where(u[:, self.rounds :] < self.chance, entry, self.identity)}


class PolicyOps(TableOps):
    """One sub-policy of AutoAugment: two steps, each with its own probability, magnitude and random sign."""

    def __init__(self, shape: tuple[int, ...], settings: AugmentSettings) -> None:
        super().__init__(policy_entries(settings.policy, shape[1], shape[2]), shape, settings.fill)
        self.counts = (25, 2, 2, 1, 1)
        chances = [[step[1] for step in pair] for pair in POLICIES[settings.policy]]
        self._constants = PerDevice(torch.tensor(chances), torch.tensor([0, 50]))

    def plan(self, u: Tensor, k: Tensor) -> Draw:
        chances, offset = self._constants.on(k.device)
        entry = torch.add(k[:, 1:3], k[:, :1], alpha=2) + offset
        return {"ops": torch.where(u[:, 3:] < chances.index_select(0, k[:, 0]), entry, self.identity)}


class Cutout(Transform):
    """A filled square around a uniformly drawn pixel, clipped at the borders."""

    def __init__(self, shape: Sequence[int], share: float, fill: int) -> None:
        _, height, width = shape
        self.side, self.fill = int(share * min(height, width)), fill
        self.counts = (height, width)
        self._constants = PerDevice(torch.arange(height), torch.arange(width))

    def plan(self, u: Tensor, k: Tensor) -> Draw:
        return {"cutout": k}

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        if self.side == 0:
            return x
        ys, xs = self._constants.on(x.device)
        # The middle of `side` pixels from centre - side // 2 on; between two pixels when `side` is even.
        middle = draw["cutout"] + ((self.side - 1) / 2 - self.side // 2)
        rows = (ys - middle[:, :1]).abs_() < self.side / 2
        columns = (xs - middle[:, 1:]).abs_() < self.side / 2
        return torch.where(rows[:, None, :, None] & columns[:, None, None], self.fill, x)


class ResizedCrop(Transform):
    """A random box of .2 to 1 of the area and ratio 3/4 to 4/3, bilinearly back to full size, and the flip.

    Boxes that do not fit are clipped to the image instead of drawn again, which would wait for the device.
    """

    def __init__(self, shape: Sequence[int], flip: bool) -> None:
        _, self.height, self.width = shape
        self.counts = (2 if flip else 1, 1, 1, 1, 1)
        self._constants = PerDevice(
            (torch.arange(self.height) + 0.5) / self.height, (torch.arange(self.width) + 0.5) / self.width
        )

    def plan(self, u: Tensor, k: Tensor) -> Draw:
        side = (u[:, 1] * 0.8 + 0.2).sqrt_()
        # Log-uniform; the square root of the ratio goes to the width, its inverse to the height.
        stretch = ((u[:, 2] - 0.5) * math.log(4 / 3)).exp_()
        wide = (side * stretch * math.sqrt(self.height / self.width)).clamp_(max=1)
        high = (side / stretch * math.sqrt(self.width / self.height)).clamp_(max=1)
        left, top = u[:, 3] * (1 - wide), u[:, 4] * (1 - high)
        return {"flip": k[:, 0], "box": torch.stack((left, top, wide, high), 1)}

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        ys, xs = self._constants.on(x.device)
        left, top, wide, high = draw["box"][:, :, None].unbind(1)
        xs = torch.where(draw["flip"][:, None] > 0, xs.flip(0), xs)
        across, down = (left + wide * xs) * 2 - 1, (top + high * ys) * 2 - 1
        shape = (-1, self.height, self.width)
        grid = torch.stack((across[:, None].expand(shape), down[:, :, None].expand(shape)), 3)
        out = F.grid_sample(x.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
        return out.round_()


class ColourJitter(Transform):
    """Brightness, contrast, saturation (factors .6 to 1.4) and hue (up to .1 turn), then sometimes grey.

    Always in this order; the first four together with chance .8, grey with chance .2. Images that are not
    red-green-blue get brightness and contrast only.
    """

    counts = (1,) * 6

    def __init__(self, shape: Sequence[int]) -> None:
        self._constants = PerDevice(grey_weights(shape[0]))

    def plan(self, u: Tensor, k: Tensor) -> Draw:
        swing = torch.where(u[:, 4:5] < 0.8, u[:, :4] * 2 - 1, 0.0)
        return {"factors": swing[:, :3] * 0.4 + 1, "hue": swing[:, 3] * 0.1, "grey": u[:, 5] < 0.2}

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        (weights,) = self._constants.on(x.device)
        brightness, contrast, saturation = draw["factors"][:, :, None, None, None].unbind(1)
        x = blend(0.0, x.float(), brightness)
        x = blend(mean_level(to_grey(x, weights)), x, contrast)
        if x.shape[1] != 3:
            return x
        x = shift_hue(blend(to_grey(x, weights), x, saturation), draw["hue"])
        return torch.where(draw["grey"][:, None, None, None], to_grey(x, weights), x)


# --- views ----------------------------------------------------------------------------------------------------------


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
