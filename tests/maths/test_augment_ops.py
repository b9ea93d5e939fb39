"""Every operation against Pillow, on photographs and digits, over all magnitudes of both policies.

Measured with Pillow 13: the largest error is 0 grey levels for all of them, and no pixel of a geometric
operation comes from another place. The bounds below are these measurements.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from crosel.augment import Op, OpTable
from crosel.augment.ops import shift_hue
from crosel.augment.policies import SIGNED, policy_value, strong_value

torch.set_num_threads(1)

# (channels, height, width): square, long, odd, too small to smooth, one pixel, the size of the digits.
SHAPES = [(3, 32, 32), (3, 33, 47), (3, 48, 20), (1, 24, 31), (1, 8, 8), (3, 2, 5), (3, 1, 1)]
LEVELS_OFF = dict.fromkeys(Op, 0)  # largest measured error in grey levels
PIXELS_OFF = 0.0  # largest measured share of pixels from another place

PILLOW: dict[Op, Callable[[Image.Image, float], Image.Image]] = {
    Op.IDENTITY: lambda image, v: image,
    Op.AUTOCONTRAST: lambda image, v: ImageOps.autocontrast(image),
    Op.EQUALIZE: lambda image, v: ImageOps.equalize(image),
    Op.INVERT: lambda image, v: ImageOps.invert(image),
    Op.POSTERIZE: lambda image, v: ImageOps.posterize(image, int(v)),
    Op.SOLARIZE: lambda image, v: ImageOps.solarize(image, v),
    Op.BRIGHTNESS: lambda image, v: ImageEnhance.Brightness(image).enhance(v),
    Op.COLOUR: lambda image, v: ImageEnhance.Color(image).enhance(v),
    Op.CONTRAST: lambda image, v: ImageEnhance.Contrast(image).enhance(v),
    Op.SHARPNESS: lambda image, v: ImageEnhance.Sharpness(image).enhance(v),
    Op.ROTATE: lambda image, v: image.rotate(v),
    Op.SHEAR_X: lambda image, v: image.transform(image.size, Image.Transform.AFFINE, (1, v, 0, 0, 1, 0)),
    Op.SHEAR_Y: lambda image, v: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, v, 1, 0)),
    Op.TRANSLATE_X: lambda image, v: image.transform(image.size, Image.Transform.AFFINE, (1, 0, v, 0, 1, 0)),
    Op.TRANSLATE_Y: lambda image, v: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, v)),
}
WITHOUT_VALUE = (Op.IDENTITY, Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT)


@cache
def real_images(shape: tuple[int, int, int], n: int = 10) -> Tensor:
    """Crops of scikit-learn's two photographs, half of them thinned out, or digits enlarged to the shape."""
    channels, height, width = shape
    rng = np.random.default_rng(0)
    if channels == 1:
        digits = load_digits().images[:n] * 255 / 16
        return torch.stack(
            [
                torch.from_numpy(np.array(Image.fromarray(d.astype(np.uint8)).resize((width, height))))[None]
                for d in digits
            ]
        )
    photos, crops = load_sample_images().images, []
    for i in range(n):
        step = 1 if i % 4 < 2 else 5
        photo = photos[i % 2][::step, ::step]
        top, left = rng.integers(photo.shape[0] - height), rng.integers(photo.shape[1] - width)
        crops.append(photo[top : top + height, left : left + width].transpose(2, 0, 1))
    return torch.from_numpy(np.stack(crops))


def to_pillow(image: Tensor) -> Image.Image:
    array = image.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def from_pillow(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def values(op: Op, height: int, width: int) -> list[float]:
    """All magnitudes of the strong view and of AutoAugment, with both signs."""
    if op in WITHOUT_VALUE:
        return [0.0]
    strong = [strong_value(op, v, height, width) * s for v in range(11) for s in ((1, -1) if op in SIGNED else (1,))]
    policy = [policy_value(op, v, s, height, width) for v in range(10) for s in (1, -1)]
    return sorted({*strong, *policy})


def applied(op: Op, images: Tensor, value: float, fill: int = 0) -> Tensor:
    """One operation with one value, on all images."""
    table = OpTable([(op, value)], tuple(images.shape[1:]), fill)
    return table.apply(images, torch.zeros(len(images), dtype=torch.int64)).to(torch.uint8)


def both(op: Op, images: Tensor, value: float) -> tuple[Tensor, Tensor]:
    return applied(op, images, value), torch.stack(
        [from_pillow(PILLOW[op](to_pillow(image), value)) for image in images]
    )


@pytest.mark.parametrize("op", Op, ids=lambda op: op.name.lower())
def test_matches_pillow_on_real_images(op: Op) -> None:
    worst = 0
    for shape in SHAPES:
        for value in values(op, *shape[1:]):
            ours, theirs = both(op, real_images(shape), value)
            worst = max(worst, int((ours.int() - theirs.int()).abs().max()))
    assert worst <= LEVELS_OFF[op], f"{op.name}: {worst} grey levels"


@pytest.mark.parametrize("op", [op for op in Op if op not in WITHOUT_VALUE], ids=lambda op: op.name.lower())
def test_operation_does_something(op: Op) -> None:
    images = real_images((3, 32, 32))
    strongest = strong_value(op, 1 if op in (Op.POSTERIZE, Op.BRIGHTNESS) else 9, 32, 32)
    if op in (Op.COLOUR, Op.CONTRAST, Op.SHARPNESS):
        strongest = 0.05
    assert (applied(op, images, strongest) != images).float().mean() > 0.02


@pytest.mark.parametrize("op", SIGNED, ids=lambda op: op.name.lower())
def test_geometry_takes_the_same_pixels(op: Op) -> None:
    """Each pixel carries its own coordinates, so that a wrong one shows how far off it is."""
    for height, width in [(32, 32), (33, 47), (20, 48), (7, 5)]:
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        images = torch.stack([ys + 1, xs + 1, torch.full_like(xs, 255)])[None].to(torch.uint8)
        for value in values(op, height, width):
            ours, theirs = (t.int() for t in both(op, images, value))
            outside = ours[:, 2] != theirs[:, 2]
            distance = (ours[:, :2] - theirs[:, :2]).float().norm(dim=1)[~outside].max()
            share = (ours != theirs).any(1).float().mean()
            assert share <= PIXELS_OFF, f"{op.name} {value}: {share:.2%} of the pixels, up to {distance} px"


@pytest.mark.parametrize("degrees", [0, 17, 45, 90, 180, 270, 359.5, -90, 1000])
def test_rotation_by_any_angle(degrees: float) -> None:
    for shape in [(3, 32, 32), (3, 33, 47), (1, 8, 8)]:
        ours, theirs = both(Op.ROTATE, real_images(shape), degrees)
        assert torch.equal(ours, theirs)


def test_fill() -> None:
    images = real_images((3, 32, 32))
    for op, value in [(Op.ROTATE, 30.0), (Op.SHEAR_X, 0.3), (Op.TRANSLATE_Y, -9.0)]:
        ours = applied(op, images, value, fill=77)
        matrix = {Op.SHEAR_X: (1, value, 0, 0, 1, 0), Op.TRANSLATE_Y: (1, 0, 0, 0, 1, value)}.get(op)
        for image, got in zip(images, ours, strict=True):
            pillow, grey = to_pillow(image), (77, 77, 77)
            if matrix is None:
                expected = pillow.rotate(value, fillcolor=grey)
            else:
                expected = pillow.transform(pillow.size, Image.Transform.AFFINE, matrix, fillcolor=grey)
            assert torch.equal(got, from_pillow(expected))


def test_autocontrast_for_many_ranges() -> None:
    """Pillow's double-precision product sometimes lands just below a whole number; the batch must follow."""
    pairs = [(low, high) for low in range(0, 256, 9) for high in range(low, 256, 4)]
    images = torch.stack([torch.arange(256).clamp(low, high) for low, high in pairs]).to(torch.uint8)
    ours, theirs = both(Op.AUTOCONTRAST, images.view(-1, 1, 16, 16), 0.0)
    assert torch.equal(ours, theirs)
    naive = torch.stack([(torch.arange(256).clamp(a, b) - a) * 255 // max(b - a, 1) for a, b in pairs if b > a])
    kept = torch.tensor([b > a for a, b in pairs])
    assert not torch.equal(naive.view(-1, 1, 16, 16).to(torch.uint8), ours[kept])


def test_equalize_where_the_table_overflows() -> None:
    """A step of 1 makes Pillow's table run past 255, where it is clipped."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 20, 25), generator=generator, dtype=torch.uint8)
    images[:, 1] //= 9
    images[:, 2] = 255 - images[:, 2] // 60
    ours, theirs = both(Op.EQUALIZE, images, 0.0)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("op", [Op.BRIGHTNESS, Op.CONTRAST, Op.COLOUR, Op.SHARPNESS], ids=lambda op: op.name)
def test_blends_on_noise(op: Op) -> None:
    """Noise reaches rounding cases and clipping that photographs do not."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, 3, 31, 30), generator=generator, dtype=torch.uint8)
    for factor in (0.0, 0.05, 1 / 3, 0.7, 1.0, 1.4, 1.9, 3.0):
        ours, theirs = both(op, images, factor)
        assert torch.equal(ours, theirs)


def test_grey_of_other_channel_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    for channels in (2, 4, 7):
        images = torch.randint(0, 256, (5, channels, 6, 9), generator=generator, dtype=torch.uint8)
        mean = (images.double().mean(1, keepdim=True) + 0.5).floor()
        assert torch.equal(applied(Op.COLOUR, images, 0.0), mean.expand_as(images).to(torch.uint8))
    single = real_images((1, 8, 8))
    assert torch.equal(applied(Op.COLOUR, single, 0.3), single)


def test_every_image_has_its_own_operation() -> None:
    """One pass over a table of all operations; no stage may touch the images of another."""
    shape = (3, 32, 32)
    images = real_images(shape)
    entries = [(op, value) for op in Op for value in values(op, 32, 32)]
    table = OpTable(entries, shape)
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(images), (len(entries),), generator=generator)
    mixed = table.apply(images[pick], torch.arange(len(entries))).to(torch.uint8)
    for (op, value), image, got in zip(entries, images[pick], mixed, strict=True):
        assert torch.equal(got, from_pillow(PILLOW[op](to_pillow(image), value))), (op.name, value)


def test_table_refuses_bad_shapes() -> None:
    with pytest.raises(ValueError, match="channels, height, width"):
        OpTable([(Op.IDENTITY, 0.0)], (32, 32))
    with pytest.raises(ValueError, match="too large"):
        OpTable([(Op.IDENTITY, 0.0)], (3, 4096, 4096))


def test_hue_against_colorsys() -> None:
    images = real_images((3, 32, 32))[:, :, ::8, ::8]
    turns = torch.linspace(-0.5, 0.5, len(images))
    ours = shift_hue(images.float(), turns)
    for image, turn, got in zip(images, turns.tolist(), ours, strict=True):
        for y in range(image.shape[1]):
            for x in range(image.shape[2]):
                h, s, v = colorsys.rgb_to_hsv(*(image[:, y, x] / 255).tolist())
                expected = torch.tensor(colorsys.hsv_to_rgb((h + turn) % 1, s, v)) * 255
                assert (got[:, y, x] - expected).abs().max() < 0.51
    assert torch.equal(shift_hue(images.float(), torch.zeros(len(images))), images.float())
