"""Pillow's image operations on whole batches of uint8 images [B, C, H, W], on any device.

Each function takes one value for the whole batch or a sequence with one for each image, and runs the same
three stages (`stages`) as the views, where every image of a batch has its own operation.

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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crosel.augment.stages import Op, OpTable

Value = float | Sequence[float]


def apply_op(images: Tensor, op: Op, value: Value = 0.0, fill: int = 0) -> Tensor:
    """One operation on uint8 images [B, C, H, W], with one value for all or one for each."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"expected uint8 images [B, C, H, W], got {images.dtype} {list(images.shape)}")
    values = list(value) if isinstance(value, Sequence) else [value] * len(images)
    if len(values) != len(images):
        raise ValueError(f"{len(values)} values for {len(images)} images")
    if not values:
        return images.clone()
    table = OpTable([(op, v) for v in values], tuple(images.shape[1:]), fill)
    return table.apply(images, torch.arange(len(images), device=images.device)).to(torch.uint8)


def identity(images: Tensor) -> Tensor:
    """Change nothing."""
    return apply_op(images, Op.IDENTITY)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel so that its darkest pixel becomes 0 and its brightest 255."""
    return apply_op(images, Op.AUTOCONTRAST)


def equalize(images: Tensor) -> Tensor:
    """Spread the levels of each channel so that all are about equally frequent."""
    return apply_op(images, Op.EQUALIZE)


def invert(images: Tensor) -> Tensor:
    """Turn every level v into 255 - v."""
    return apply_op(images, Op.INVERT)


def posterize(images: Tensor, bits: Value) -> Tensor:
    """Keep the upper 1 to 8 bits of every level."""
    return apply_op(images, Op.POSTERIZE, bits)


def solarize(images: Tensor, threshold: Value) -> Tensor:
    """Invert the levels from the threshold on."""
    return apply_op(images, Op.SOLARIZE, threshold)


def brightness(images: Tensor, factor: Value) -> Tensor:
    """Blend with black."""
    return apply_op(images, Op.BRIGHTNESS, factor)


def contrast(images: Tensor, factor: Value) -> Tensor:
    """Blend with the mean grey level."""
    return apply_op(images, Op.CONTRAST, factor)


def colour(images: Tensor, factor: Value) -> Tensor:
    """Blend with the grey image."""
    return apply_op(images, Op.COLOUR, factor)


def sharpness(images: Tensor, factor: Value) -> Tensor:
    """Blend with the smoothed image."""
    return apply_op(images, Op.SHARPNESS, factor)


def rotate(images: Tensor, degrees: Value, fill: int = 0) -> Tensor:
    """Turn counter-clockwise about the centre."""
    return apply_op(images, Op.ROTATE, degrees, fill)


def shear_x(images: Tensor, slope: Value, fill: int = 0) -> Tensor:
    """Take row y from `slope * y` pixels further right."""
    return apply_op(images, Op.SHEAR_X, slope, fill)


def shear_y(images: Tensor, slope: Value, fill: int = 0) -> Tensor:
    """Take column x from `slope * x` pixels further down."""
    return apply_op(images, Op.SHEAR_Y, slope, fill)


def translate_x(images: Tensor, pixels: Value, fill: int = 0) -> Tensor:
    """Move left by whole pixels (right when negative)."""
    return apply_op(images, Op.TRANSLATE_X, pixels, fill)


def translate_y(images: Tensor, pixels: Value, fill: int = 0) -> Tensor:
    """Move up by whole pixels (down when negative)."""
    return apply_op(images, Op.TRANSLATE_Y, pixels, fill)
