"""Pillow's image operations on whole batches of uint8 images, in three stages, and the table that drives them.

An `OpTable` is a list of (operation, value) entries for which everything that does not depend on the pixels
has been worked out on the host, in Pillow's arithmetic. An int64 tensor [B] says which entry each image of a
batch [B, C, H, W] gets, and one pass through three stages does all of them at once: a lookup table per image
and channel, a blend with a degenerate image, and an affine nearest-neighbour gather. An image whose operation
lives in another stage passes with the identity table, factor 1 or the identity matrix: bit-identical.

Largest error against Pillow 13, measured by tests/maths/test_augment_ops.py on photographs and digits, all
magnitudes (grey levels; for the geometric operations the share of pixels taken from another place):

    operation                              stage   error   value
    identity, invert                       lookup  0       -
    autocontrast, equalize                 lookup  0       -
    posterize                              lookup  0       bits that stay, 1..8
    solarize                               lookup  0       threshold; levels from there on are inverted
    brightness, contrast                   blend   0       factor; 0 is black or mean grey, 1 the image
    colour, sharpness                      blend   0       factor; 0 is grey or smoothed, 1 the image
    rotate                                 affine  0       degrees, counter-clockwise
    shear_x, shear_y                       affine  0       pixels per row or column
    translate_x, translate_y               affine  0       whole pixels; positive moves left or up

Channels: three are red, green and blue, whose grey is Pillow's "L"; one is its own grey, so that colour
changes nothing; for any other number grey is the rounded mean of the channels.

Nothing here waits for the device or has a shape that depends on data, so all of it can be captured in a CUDA
graph; the constants move to a device on the first call, which must therefore come before the capture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class PerDevice:
    """Constants: made once on the host, kept on every device they were asked for."""

    def __init__(self, *tensors: Tensor) -> None:
        self._host = tensors
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._on:
            self._on[device] = tuple(_to_device(t, device) for t in self._host)
        return self._on[device]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """First asked for in the middle of an epoch: a copy that nobody waits for needs pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Op(IntEnum):
    """The operations; the first fourteen are the pool of the strong view."""

    IDENTITY = 0
    AUTOCONTRAST = 1
    BRIGHTNESS = 2
    COLOUR = 3
    CONTRAST = 4
    EQUALIZE = 5
    POSTERIZE = 6
    ROTATE = 7
    SHARPNESS = 8
    SHEAR_X = 9
    SHEAR_Y = 10
    SOLARIZE = 11
    TRANSLATE_X = 12
    TRANSLATE_Y = 13
    INVERT = 14


_FLAGGED = (Op.AUTOCONTRAST, Op.EQUALIZE, Op.COLOUR, Op.CONTRAST, Op.SHARPNESS)
_BLENDED = (Op.BRIGHTNESS, Op.COLOUR, Op.CONTRAST, Op.SHARPNESS)


def grey_weights(channels: int) -> Tensor:
    """Weights [C, 1, 1] of the channels: Pillow's ITU-R 601 for three, equal ones for any other number."""
    return torch.tensor([19595.0, 38470.0, 7471.0] if channels == 3 else [1.0] * channels).view(-1, 1, 1)


class _Rows(NamedTuple):
    """A table's E entries on one device, and the constants of its stages."""

    lut: Tensor  # uint8 [E, 256]
    flags: Tensor  # bool [E, 5], one column per `_FLAGGED`
    factor: Tensor  # float32 [E]
    matrix: Tensor  # int64 [E, 2, 3], 16.16 fixed point, output pixel -> input pixel
    levels: Tensor  # float64 [256]
    top: Tensor  # float64 [], 255; a python number over a tensor would be a rounded reciprocal times it
    one: Tensor  # int32 []
    xs: Tensor  # int64 [W]
    ys: Tensor  # int64 [H]
    first: Tensor  # int64 [2, 1, 1], zeros
    last: Tensor  # int64 [2, 1, 1], W + 1 and H + 1
    grey: Tensor  # float32 [C, 1, 1]


class OpTable:
    """Entries (operation, value) ready for images of one shape (C, H, W); geometry uncovers `fill`."""

    def __init__(self, entries: Sequence[tuple[Op, float]], shape: tuple[int, ...], fill: int = 0) -> None:
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"expected an image shape (channels, height, width), got {shape}")
        channels, height, width = shape
        # Pixel counts pass through float32, and floor(a / b) of integers is exact there below 2^23.
        if height * width >= 2**23:
            raise ValueError(f"images of {height} x {width} pixels are too large: the limit is 2^23 pixels")
        self.entries = tuple(entries)
        self.shape = tuple(shape)
        self.fill = float(fill)
        rows = _Rows(
            lut=torch.stack([_levels_of(op, value) for op, value in entries]),
            flags=torch.tensor([[op is flagged for flagged in _FLAGGED] for op, _ in entries]),
            factor=torch.tensor([value if op in _BLENDED else 1.0 for op, value in entries]),
            matrix=torch.tensor([_fixed_point(_affine_matrix(op, value, height, width)) for op, value in entries]),
            levels=torch.arange(256, dtype=torch.float64),
            top=torch.tensor(255.0, dtype=torch.float64),
            one=torch.tensor(1, dtype=torch.int32),
            xs=torch.arange(width),
            ys=torch.arange(height),
            first=torch.zeros(2, 1, 1, dtype=torch.int64),
            last=torch.tensor([width + 1, height + 1]).view(2, 1, 1),
            grey=grey_weights(channels),
        )
        self._rows = PerDevice(*rows)

    def apply(self, x: Tensor, entry: Tensor) -> Tensor:
        """Give image i entry `entry[i]`: whole grey levels in (any dtype), whole levels out (float32)."""
        rows = _Rows(*self._rows.on(x.device))
        flags = rows.flags.index_select(0, entry)[:, :, None, None, None]
        x = _look_up(x, rows, rows.lut.index_select(0, entry), flags)
        x = _enhance(x, rows, rows.factor.index_select(0, entry), flags)
        return _warp(x, rows, rows.matrix.index_select(0, entry), self.fill)


def _levels_of(op: Op, value: float) -> Tensor:
    """What becomes of each grey level, where that does not depend on the image."""
    levels = torch.arange(256)
    if op is Op.POSTERIZE:
        levels = levels & (256 - 2 ** (8 - int(value)))
    elif op is Op.SOLARIZE:
        levels = torch.where(levels < value, levels, 255 - levels)
    elif op is Op.INVERT:
        levels = 255 - levels
    return levels.to(torch.uint8)


def _affine_matrix(op: Op, value: float, height: int, width: int) -> list[list[float]]:
    """The affine map from output to input coordinates, as Pillow's `transform` and `rotate` define it."""
    if op is Op.ROTATE:
        angle = -math.radians(value % 360.0)
        # Fifteen digits, as in Pillow: a quarter turn is then exact.
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        x, y = width / 2, height / 2
        return [[cos, sin, cos * -x + sin * -y + x], [-sin, cos, -sin * -x + cos * -y + y]]
    shear_x, shear_y = (value if op is o else 0.0 for o in (Op.SHEAR_X, Op.SHEAR_Y))
    move_x, move_y = (value if op is o else 0.0 for o in (Op.TRANSLATE_X, Op.TRANSLATE_Y))
    return [[1.0, shear_x, move_x], [shear_y, 1.0, move_y]]


def _fixed_point(matrix: list[list[float]]) -> list[list[int]]:
    """Round to 16.16 as Pillow does, from pixel centres; shifted by the one-pixel frame `_warp` adds."""

    def fixed(v: float) -> int:
        return math.floor(v * 65536.0 + 0.5)

    return [[fixed(a), fixed(b), fixed(c + a * 0.5 + b * 0.5) + 65536] for a, b, c in matrix]


def _look_up(x: Tensor, rows: _Rows, lut: Tensor, flags: Tensor) -> Tensor:
    """Stage 1: one lookup table [B, C, 256]; the histogram gives those of equalize and autocontrast."""
    flat = x.flatten(2)
    index = flat.long()
    low, high = flat.amin(2, keepdim=True), flat.amax(2, keepdim=True)
    # Autocontrast, in double precision as in Pillow: products that land just below a whole number matter.
    scale = rows.top / (high - low).double()
    stretched = (rows.levels * scale - low * scale).clamp_(0, 255).to(torch.uint8)
    table = torch.where(flags[:, 0, 0] & (high > low), stretched, lut[:, None])
    # Equalize: level v becomes (pixels darker than v + step / 2) / step. Whole counts, because CUDA has no
    # deterministic floating-point cumsum; a step / 2 that Pillow would round down makes no difference.
    count = torch.zeros(*index.shape[:2], 256, dtype=torch.int32, device=x.device)
    count.scatter_add_(2, index, rows.one.expand_as(index))
    below = count.cumsum(2, dtype=torch.int32).sub_(count)
    step = (below.gather(2, high.long()) / 255).floor_()
    spread = torch.add(below, step, alpha=0.5).div_(step).clamp_(max=255).to(torch.uint8)
    table = torch.where(flags[:, 1, 0] & (step > 0), spread, table)
    return table.gather(2, index).view(x.shape).float()


def _enhance(x: Tensor, rows: _Rows, factor: Tensor, flags: Tensor) -> Tensor:
    """Stage 2: blend with black, mean grey, the grey image or the smoothed image."""
    grey = to_grey(x, rows.grey)
    degenerate = torch.where(flags[:, 2], grey, mean_level(grey) * flags[:, 3])
    if min(x.shape[2:]) > 2:  # Pillow leaves smaller images and all borders as they are
        degenerate = torch.where(flags[:, 4], smooth(x), degenerate)
    else:
        degenerate = torch.where(flags[:, 4], x, degenerate)
    return blend(degenerate, x, factor[:, None, None, None])


def to_grey(x: Tensor, weights: Tensor) -> Tensor:
    """The grey image [B, 1, H, W]; every term is a whole number below 2^24, so float32 is exact."""
    channels = len(weights)
    if channels == 1:
        return x
    total = 65536 if channels == 3 else channels
    return (x * weights).sum(1, keepdim=True).add_(total // 2).div_(total).floor_()


def mean_level(grey: Tensor) -> Tensor:
    """The mean grey level of each image [B, 1, 1, 1], rounded half up."""
    total = grey.sum((1, 2, 3), keepdim=True, dtype=torch.float64)
    return (total / (grey.shape[2] * grey.shape[3])).add_(0.5).floor_().float()


def smooth(x: Tensor) -> Tensor:
    """Pillow's SMOOTH: a 3 x 3 mean in which the centre counts five times; the border is copied."""
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = x[:, :, 1:-1, 1:-1]
    out = x.clone()
    # A whole number over 13 never ends in one half, so it does not matter how halves are rounded.
    out[:, :, 1:-1, 1:-1] = box.add_(inner, alpha=4).div_(13).round_()
    return out


def blend(degenerate: Tensor | float, x: Tensor, factor: Tensor) -> Tensor:
    """Pillow's blend, truncated and clipped; factor 1 gives `x` back exactly."""
    return ((x - degenerate) * factor).add_(degenerate).clamp_(0, 255).floor_()


def _warp(x: Tensor, rows: _Rows, matrix: Tensor, fill: float) -> Tensor:
    """Stage 3: nearest-neighbour affine gather; a frame of one `fill` pixel stands for all outside."""
    channels, width = x.shape[1], x.shape[3]
    along_x = matrix[:, :, 0, None] * rows.xs
    along_y = matrix[:, :, 1, None] * rows.ys + matrix[:, :, 2, None]
    at = (along_x[:, :, None] + along_y[..., None]).bitwise_right_shift_(16)
    at = at.clamp_(rows.first, rows.last)
    index = torch.add(at[:, 0], at[:, 1], alpha=width + 2).flatten(1)
    framed = F.pad(x, (1, 1, 1, 1), value=fill).flatten(2)
    return framed.gather(2, index[:, None].expand(-1, channels, -1)).view(x.shape)


def shift_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of images [B, 3, H, W] by a share of the circle [B]; value and saturation stay."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    chroma = value - x.amin(1)
    unit = chroma.clamp(min=1)
    sixths = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4),
    )
    sixths = sixths + 6 * turns[:, None, None]
    # A channel falls from the full value by the chroma as the hue leaves the two sixths around it.
    away = torch.stack([(sixths + n).remainder_(6) for n in (5, 3, 1)], 1)
    fall = torch.minimum(away, 4 - away).clamp_(0, 1)
    return (value[:, None] - chroma[:, None] * fall).round_()
