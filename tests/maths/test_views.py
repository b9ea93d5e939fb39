"""The views against independent chains of numpy and Pillow, and the statistics of what they draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from pydantic import ValidationError
from sklearn.datasets import load_sample_images
from torch import Tensor

from crosel.augment import AugmentSettings, ImageView, Op, make_views
from crosel.augment.policies import POLICIES, policy_entries, policy_value, strong_entries, strong_value
from crosel.augment.views import ColourJitter, Cutout, FlipCrop, PolicyOps, RandomOps, ResizedCrop
from crosel.config import build_config

torch.set_num_threads(1)
NAMES = {"plain", "weak", "strong", "autoaugment", "contrast-weak", "contrast-strong"}


def photos(n: int, height: int = 32, width: int = 32) -> Tensor:
    rng = np.random.default_rng(0)
    china, flower = load_sample_images().images
    crops = []
    for i in range(n):
        photo = (china, flower)[i % 2]
        top, left = rng.integers(photo.shape[0] - height), rng.integers(photo.shape[1] - width)
        crops.append(photo[top : top + height, left : left + width].transpose(2, 0, 1))
    return torch.from_numpy(np.stack(crops))


def pillow(array: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def part(name: str, kind: type, shape: tuple[int, ...] = (3, 32, 32), **settings: object) -> object:
    view = make_views(shape, AugmentSettings(**settings))[name]
    assert isinstance(view, ImageView)
    return next(p for p in view.transforms if isinstance(p, kind))


def weak_reference(image: np.ndarray, flip: int, offset: tuple[int, int], pad: tuple[int, int]) -> np.ndarray:
    padded = np.pad(image, ((0, 0), (pad[0],) * 2, (pad[1],) * 2), mode="reflect")
    _, height, width = image.shape
    crop = padded[:, offset[0] : offset[0] + height, offset[1] : offset[1] + width]
    return crop[:, :, ::-1] if flip else crop


SIZES = [(32, 32, None), (20, 33, None), (9, 12, 5), (8, 8, 0), (3, 4, 7), (1, 2, 5)]


@pytest.mark.parametrize(("height", "width", "padding"), SIZES)
def test_weak_is_flip_and_crop(height: int, width: int, padding: int | None) -> None:
    view = make_views((3, height, width), AugmentSettings(padding=padding))["weak"]
    images = photos(40, height, width)
    draw = view.draw(40, generator())
    pad = (height // 8, width // 8) if padding is None else (padding, padding)
    for image, flip, offset, got in zip(
        images.numpy(),
        draw["flip"].tolist(),
        draw["offset"].tolist(),
        view.apply(images, draw).numpy(),
        strict=True,
    ):
        assert np.array_equal(got, weak_reference(image, flip, offset, pad))


def run_op(image: Image.Image, op: Op, value: float) -> Image.Image:
    """An independent reading of the operations, written for this test."""
    affine = Image.Transform.AFFINE
    enhance = {
        Op.BRIGHTNESS: ImageEnhance.Brightness,
        Op.COLOUR: ImageEnhance.Color,
        Op.CONTRAST: ImageEnhance.Contrast,
        Op.SHARPNESS: ImageEnhance.Sharpness,
    }
    if op in enhance:
        return enhance[op](image).enhance(value)
    return {
        Op.IDENTITY: lambda: image,
        Op.AUTOCONTRAST: lambda: ImageOps.autocontrast(image),
        Op.EQUALIZE: lambda: ImageOps.equalize(image),
        Op.INVERT: lambda: ImageOps.invert(image),
        Op.POSTERIZE: lambda: ImageOps.posterize(image, int(value)),
        Op.SOLARIZE: lambda: ImageOps.solarize(image, value),
        Op.ROTATE: lambda: image.rotate(value),
        Op.SHEAR_X: lambda: image.transform(image.size, affine, (1, value, 0, 0, 1, 0)),
        Op.SHEAR_Y: lambda: image.transform(image.size, affine, (1, 0, 0, value, 1, 0)),
        Op.TRANSLATE_X: lambda: image.transform(image.size, affine, (1, 0, value, 0, 1, 0)),
        Op.TRANSLATE_Y: lambda: image.transform(image.size, affine, (1, 0, 0, 0, 1, value)),
    }[op]()


def cut(image: np.ndarray, centre: tuple[int, int], side: int, fill: int) -> np.ndarray:
    image = image.copy()
    top, left = centre[0] - side // 2, centre[1] - side // 2
    image[:, max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = fill
    return image


def test_strong_is_a_chain_of_pillow_operations() -> None:
    images = photos(150)
    view = make_views((3, 32, 32), AugmentSettings(strong_chance=0.8))["strong"]
    table = part("strong", RandomOps).table
    draw = view.draw(150, generator())
    out = view.apply(images, draw).numpy()
    for i, image in enumerate(images.numpy()):
        chained = pillow(weak_reference(image, int(draw["flip"][i]), draw["offset"][i].tolist(), (4, 4)))
        for entry in draw["ops"][i].tolist():
            chained = run_op(chained, *table.entries[entry])
        expected = cut(np.array(chained).transpose(2, 0, 1), draw["cutout"][i].tolist(), 16, 127)
        assert np.array_equal(out[i], expected), [table.entries[e] for e in draw["ops"][i].tolist()]


@pytest.mark.parametrize("policy", ["cifar10", "svhn"])
def test_autoaugment_is_weak_cutout_and_a_sub_policy(policy: str) -> None:
    images = photos(150)
    view = make_views((3, 32, 32), AugmentSettings(policy=policy))["autoaugment"]
    table = part("autoaugment", PolicyOps, policy=policy).table
    draw = view.draw(150, generator())
    out = view.apply(images, draw).numpy()
    for i, image in enumerate(images.numpy()):
        weak = weak_reference(image, int(draw["flip"][i]), draw["offset"][i].tolist(), (4, 4))
        chained = pillow(cut(weak, draw["cutout"][i].tolist(), 16, 127))
        for entry in draw["ops"][i].tolist():
            chained = run_op(chained, *table.entries[entry])
        assert np.array_equal(out[i], np.array(chained).transpose(2, 0, 1))


def test_one_sub_policy_by_hand() -> None:
    """CIFAR-10's second: rotate by 20/3 degrees (chance .7), move by int(150/331 * 32) = 14 pixels (.3)."""
    ops = part("autoaugment", PolicyOps)
    u = torch.tensor(
        [[1.5 / 25, 0.1, 0.9, 0.69, 0.29], [1.5 / 25, 0.1, 0.9, 0.71, 0.29], [1.5 / 25, 0.9, 0.1, 0.69, 0.31]]
    )
    k = (u * torch.tensor(ops.counts)).long()
    images = photos(3)
    out = ops.apply(images, ops.plan(u, k)).numpy()
    steps = [[(Op.ROTATE, 20 / 3), (Op.TRANSLATE_X, -14)], [(Op.TRANSLATE_X, -14)], [(Op.ROTATE, -20 / 3)]]
    for image, got, chain in zip(images.numpy(), out, steps, strict=True):
        expected = pillow(image)
        for step in chain:
            expected = run_op(expected, *step)
        assert np.array_equal(got, np.array(expected).transpose(2, 0, 1))


# AutoAugment's tables of sub-policies, transcribed once more: operation, probability, magnitude, twice a line. Where an
# operation has no magnitude, the number does not matter.
PUBLISHED = {
    "cifar10": """
        invert .1 - contrast .2 6
        rotate .7 2 translate_x .3 9
        sharpness .8 1 sharpness .9 3
        shear_y .5 8 translate_y .7 9
        autocontrast .5 - equalize .9 -
        shear_y .2 7 posterize .3 7
        colour .4 3 brightness .6 7
        sharpness .3 9 brightness .7 9
        equalize .6 - equalize .5 -
        contrast .6 7 sharpness .6 5
        colour .7 7 translate_x .5 8
        equalize .3 - autocontrast .4 -
        translate_y .4 3 sharpness .2 6
        brightness .9 6 colour .2 8
        solarize .5 2 invert 0 -
        equalize .2 - autocontrast .6 -
        equalize .2 - equalize .6 -
        colour .9 9 equalize .6 -
        autocontrast .8 - solarize .2 8
        brightness .1 3 colour .7 0
        solarize .4 5 autocontrast .9 -
        translate_y .9 9 translate_y .7 9
        autocontrast .9 - solarize .8 3
        equalize .8 - invert .1 -
        translate_y .7 9 autocontrast .9 -""",
    "svhn": """
        shear_x .9 4 invert .2 -
        shear_y .9 8 invert .7 -
        equalize .6 - solarize .6 6
        invert .9 - equalize .6 -
        equalize .6 - rotate .9 3
        shear_x .9 4 autocontrast .8 -
        shear_y .9 8 invert .4 -
        shear_y .9 5 solarize .2 6
        invert .9 - autocontrast .8 -
        equalize .6 - rotate .9 3
        shear_x .9 4 solarize .3 3
        shear_y .8 8 invert .7 -
        equalize .9 - translate_y .6 6
        invert .9 - equalize .6 -
        contrast .3 3 rotate .8 4
        invert .8 - translate_y 0 2
        shear_y .7 6 solarize .4 8
        invert .6 - rotate .8 4
        shear_y .3 7 translate_x .9 3
        shear_x .1 6 invert .6 -
        solarize .7 2 translate_y .6 7
        shear_y .8 4 invert .8 -
        shear_x .7 9 translate_y .8 3
        shear_y .8 5 autocontrast .7 -
        shear_x .7 2 invert .1 -""",
}


def test_policies_are_those_published() -> None:
    assert set(POLICIES) == set(PUBLISHED)
    for name, text in PUBLISHED.items():
        rows = [row.split() for row in text.split("\n") if row]
        assert len(rows) == 25
        for pair, row in zip(POLICIES[name], rows, strict=True):
            for (op, chance, magnitude), (its_name, its_chance, its_magnitude) in zip(
                pair, (row[:3], row[3:]), strict=True
            ):
                assert (op.name.lower(), chance) == (its_name, float(its_chance))
                assert str(magnitude) == its_magnitude or its_magnitude == "-"


def test_magnitudes_of_the_policies() -> None:
    """Ten steps over the ranges of AutoAugment's table of operations; positions are shares of 331 pixels."""
    ends = {op: [policy_value(op, v, 1, 40, 32) for v in (0, 3, 9)] for op in Op}
    for op in (Op.BRIGHTNESS, Op.COLOUR, Op.CONTRAST, Op.SHARPNESS):
        assert ends[op] == pytest.approx([1, 1.3, 1.9])
        assert policy_value(op, 9, -1, 40, 32) == pytest.approx(0.1)
    assert ends[Op.POSTERIZE] == [8, 7, 4]
    assert ends[Op.SOLARIZE] == pytest.approx([256, 256 * 2 / 3, 0])
    assert ends[Op.ROTATE] == pytest.approx([0, 10, 30])
    assert ends[Op.SHEAR_X] == ends[Op.SHEAR_Y] == pytest.approx([0, 0.1, 0.3])
    assert (ends[Op.TRANSLATE_X], ends[Op.TRANSLATE_Y]) == ([0, 4, 14], [0, 6, 18])
    for op in (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y):
        assert policy_value(op, 9, -1, 40, 32) == -ends[op][2]


def test_parts_of_the_views() -> None:
    """As the table at the head of `augment/views.py` has it; the contrastive ones are PiCO's."""
    views = make_views((3, 32, 32), AugmentSettings())
    assert {name: [type(t) for t in view.transforms] for name, view in views.items()} == {
        "plain": [],
        "weak": [FlipCrop],
        "strong": [FlipCrop, RandomOps, Cutout],
        "autoaugment": [FlipCrop, Cutout, PolicyOps],
        "contrast-weak": [ResizedCrop, ColourJitter],
        "contrast-strong": [ResizedCrop, RandomOps, Cutout],
    }


def test_defaults() -> None:
    """CroSel's released code: two operations with chance ½, magnitudes 1 to 9, then a grey square of half the side."""
    s = AugmentSettings()
    assert (s.strong_ops, s.strong_chance, s.strong_magnitudes) == (2, 0.5, (1, 9))
    assert (s.cutout, s.cutout_fill, s.fill, s.flip, s.padding) == (0.5, 127, 0, True, None)


def test_magnitudes_of_the_strong_view() -> None:
    low, high = ({op: strong_value(op, v, 40, 32) for op in Op} for v in (1, 9))
    for op in (Op.BRIGHTNESS, Op.COLOUR, Op.CONTRAST, Op.SHARPNESS):
        assert (low[op], high[op]) == (pytest.approx(0.14), pytest.approx(0.86))
    assert (low[Op.POSTERIZE], high[Op.POSTERIZE]) == (4, 7)
    assert (low[Op.SOLARIZE], high[Op.SOLARIZE]) == (231, 26)
    assert (low[Op.ROTATE], high[Op.ROTATE]) == (3, 27)
    assert (low[Op.SHEAR_X], high[Op.SHEAR_Y]) == (pytest.approx(0.03), pytest.approx(0.27))
    assert (low[Op.TRANSLATE_X], high[Op.TRANSLATE_X], high[Op.TRANSLATE_Y]) == (0, 8, 10)


def test_statistics_of_the_draws() -> None:
    n = 40_000
    view = make_views((3, 32, 32), AugmentSettings())["strong"]
    draw = view.draw(n, generator())
    assert draw["flip"].float().mean().item() == pytest.approx(0.5, abs=0.01)
    for column, top in ((draw["offset"][:, 0], 9), (draw["offset"][:, 1], 9), (draw["cutout"][:, 1], 32)):
        shares = torch.bincount(column, minlength=top) / n
        assert len(shares) == top
        assert (shares - 1 / top).abs().max() < 0.01
    table = part("strong", RandomOps).table
    op_of = torch.tensor([op for op, _ in table.entries])
    positive = torch.tensor([value > 0 for _, value in table.entries])
    for drawn in draw["ops"].unbind(1):
        shares = torch.bincount(op_of[drawn], minlength=14) / n
        assert len(shares) == 14  # never the fifteenth, invert
        # Half of the draws are switched off and count as identity.
        assert (shares[1:] - 0.5 / 14).abs().max() < 0.006
        assert shares[0].item() == pytest.approx(0.5 + 0.5 / 14, abs=0.01)
        rotated = drawn[op_of[drawn] == Op.ROTATE]
        assert positive[rotated].float().mean().item() == pytest.approx(0.5, abs=0.05)
    first, second = op_of[draw["ops"]].unbind(1)
    assert (first == second).float().mean().item() < 0.35  # two draws, not one used twice


def test_policy_chances() -> None:
    ops = part("autoaugment", PolicyOps)
    n = 200_000
    u = torch.rand(n, 5, generator=generator())
    k = (u * torch.tensor(ops.counts)).long()
    entries = ops.plan(u, k)["ops"]
    for step in (0, 1):
        applied = entries[:, step] != ops.identity
        kept = entries[:, step][applied]
        assert torch.equal(kept // 2, k[applied, 0] + 25 * step)
        rate = torch.zeros(25).scatter_reduce(0, k[:, 0], applied.float(), "mean", include_self=False)
        expected = torch.tensor([pair[step][1] for pair in POLICIES["cifar10"]])
        assert (rate - expected).abs().max() < 0.03


def test_cutout_area() -> None:
    view = make_views((1, 32, 32), AugmentSettings(strong_ops=0, cutout_fill=200))["strong"]
    images = torch.zeros(2000, 1, 32, 32, dtype=torch.uint8)
    draw = view.draw(2000, generator())
    area = (view.apply(images, draw) == 200).sum((1, 2, 3))
    inside = ((draw["cutout"] >= 8) & (draw["cutout"] <= 24)).all(1)
    assert (area[inside] == 256).all()
    assert (area[~inside] < 256).all()
    assert area.min() >= 64
    # Along one axis the square keeps 8..16 of its 16 pixels: 14.03 on average over the 32 centres.
    assert area.float().mean().item() == pytest.approx((sum(_covered(c) for c in range(32)) / 32) ** 2, rel=0.03)


@pytest.mark.parametrize("preset", ["own/crdpll", "own/pop"])
def test_colours_of_the_authors_own_schemes(preset: str) -> None:
    """A black square, and grey where the image was moved away: the other way round than by default."""
    settings = build_config(preset=preset, values={"source": "digits"}).augment
    view = make_views((3, 32, 32), settings)["autoaugment"]
    images = torch.full((2, 3, 32, 32), 200, dtype=torch.uint8)
    draw = view.draw(2, generator())
    entries = policy_entries(settings.policy, 32, 32)
    still = entries.index((Op.IDENTITY, 0.0))
    moved = next(i for i, (op, value) in enumerate(entries) if op == Op.TRANSLATE_Y and value)
    draw |= {"cutout": torch.full((2, 2), 16), "ops": torch.tensor([[still, still], [still, moved]])}
    plain, shifted = view.apply(images, draw)
    assert plain.unique().tolist() == [0, 200]
    assert (plain[:, 8:24, 8:24] == 0).all()
    assert shifted.unique().tolist() == [0, 128, 200]
    uncovered = (shifted == 128).all(2).all(0)  # whole rows, at the top or at the bottom
    assert 0 < uncovered.sum() == (shifted == 128).sum() / 96
    assert uncovered[0] != uncovered[-1]


def _covered(centre: int) -> int:
    return sum(0 <= p < 32 for p in range(centre - 8, centre + 8))


def test_cutout_and_flip_can_be_switched_off() -> None:
    settings = AugmentSettings(strong_ops=0, cutout=0.0, flip=False, padding=0)
    images = photos(20)
    for name in ("plain", "weak", "strong"):
        assert torch.equal(make_views((3, 32, 32), settings)[name](images, generator()), images)
    assert isinstance(part("strong", Cutout), Cutout)
    assert part("weak", FlipCrop, flip=False).counts[0] == 1


def test_resized_crop_against_pillow() -> None:
    """Largest measured error: 1 grey level (Pillow's weights are 8-bit fixed point)."""
    images = photos(60, 33, 40)
    view = make_views((3, 33, 40), AugmentSettings(strong_ops=0, cutout=0.0))["contrast-strong"]
    draw = view.draw(60, generator())
    out = view.apply(images, draw)
    worst = 0
    for image, (left, top, wide, high), flip, got in zip(
        images.numpy(), draw["box"].tolist(), draw["flip"].tolist(), out.numpy(), strict=True
    ):
        box = (left * 40, top * 33, min(40.0, (left + wide) * 40), min(33.0, (top + high) * 33))
        resized = np.array(pillow(image).resize((40, 33), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)
        expected = resized[:, :, ::-1] if flip else resized
        worst = max(worst, int(np.abs(expected.astype(int) - got.astype(int)).max()))
    assert worst <= 1
    area = draw["box"][:, 2] * draw["box"][:, 3]
    assert 0.15 < area.min() < 0.45
    assert area.max() <= 1


def test_statistics_of_the_resized_crop() -> None:
    box = make_views((3, 32, 32), AugmentSettings())["contrast-weak"].draw(20_000, generator())["box"]
    left, top, wide, high = box.unbind(1)
    whole = (wide < 1) & (high < 1)  # not clipped at the image
    area, ratio = (wide * high)[whole], (wide / high)[whole]
    assert 0.2 <= area.min() < 0.21
    assert 0.74 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.34
    assert ratio.log().mean().item() == pytest.approx(0, abs=0.01)
    assert area[area < 0.7].mean().item() == pytest.approx(0.45, abs=0.01)  # uniform from .2 on
    assert box.min() >= 0
    assert max((left + wide).max(), (top + high).max()) <= 1 + 1e-6
    assert (left / (1 - wide))[wide < 0.9].mean().item() == pytest.approx(0.5, abs=0.02)


def test_resized_crop_of_the_whole_image_changes_nothing() -> None:
    images = photos(4)
    view = make_views((3, 32, 32), AugmentSettings(strong_ops=0, cutout=0.0))["contrast-strong"]
    draw = view.draw(4, generator())
    draw["box"] = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(4, 1)
    draw["flip"] = torch.tensor([0, 1, 0, 1])
    expected = torch.where(draw["flip"].view(-1, 1, 1, 1) > 0, images.flip(3), images)
    assert torch.equal(view.apply(images, draw), expected)


def test_colour_jitter_against_pillow() -> None:
    """Brightness, contrast and saturation are exact; the hue is left out here (it has its own test)."""
    images = photos(60)
    view = make_views((3, 32, 32), AugmentSettings())["contrast-weak"]
    draw = view.draw(60, generator())
    draw["box"] = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(60, 1)
    draw["flip"] = torch.zeros_like(draw["flip"])
    draw["hue"] = torch.zeros_like(draw["hue"])
    out = view.apply(images, draw).numpy()
    for image, factors, grey, got in zip(
        images.numpy(), draw["factors"].tolist(), draw["grey"].tolist(), out, strict=True
    ):
        expected = pillow(image)
        for op, factor in zip((Op.BRIGHTNESS, Op.CONTRAST, Op.COLOUR), factors, strict=True):
            expected = run_op(expected, op, factor)
        if grey:
            expected = expected.convert("L").convert("RGB")
        assert np.array_equal(got, np.array(expected).transpose(2, 0, 1))


def test_statistics_of_the_colour_jitter() -> None:
    draw = make_views((3, 32, 32), AugmentSettings())["contrast-weak"].draw(20_000, generator())
    jittered = (draw["factors"] != 1).any(1)
    assert jittered.float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert draw["grey"].float().mean().item() == pytest.approx(0.2, abs=0.01)
    factors, hue = draw["factors"][jittered], draw["hue"][jittered]
    assert 0.6 <= factors.min() < 0.61
    assert 1.39 < factors.max() <= 1.4
    assert 0.099 < hue.abs().max() <= 0.1
    assert (draw["hue"][~jittered] == 0).all()
    assert draw["grey"][jittered].float().mean().item() == pytest.approx(0.2, abs=0.015)  # independent


def test_jitter_without_colour_keeps_to_brightness_and_contrast() -> None:
    view = make_views((1, 8, 8), AugmentSettings())["contrast-weak"]
    images = photos(30, 8, 8)[:, :1].contiguous()
    draw = view.draw(30, generator())
    draw["grey"] = torch.ones_like(draw["grey"])
    first = view.apply(images, draw)
    draw["hue"] = draw["hue"] + 0.3
    assert torch.equal(first, view.apply(images, draw))


def test_feature_views() -> None:
    views = make_views((50,), AugmentSettings(feature_noise=0.2, feature_drop=0.3))
    assert set(views) == NAMES
    x = torch.randn(2000, 50, generator=generator(1))
    assert torch.equal(views["plain"](x, generator()), x)
    assert torch.equal(views["weak"](x, generator()), x)
    for name in ("strong", "autoaugment", "contrast-strong"):
        out = views[name](x, generator())
        dropped = out == 0
        assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.01)
        assert (out - x)[~dropped].std().item() == pytest.approx(0.2, abs=0.005)
    noisy = make_views((50,), AugmentSettings(weak_feature_noise=0.5))["contrast-weak"](x, generator())
    assert (noisy - x).std().item() == pytest.approx(0.5, abs=0.01)


def test_names_and_refusals() -> None:
    views = make_views((3, 32, 32), AugmentSettings())
    assert set(views) == NAMES
    with pytest.raises(ValueError, match=r"uint8 images \[B, 3, 32, 32\]"):
        views["weak"](torch.zeros(2, 3, 32, 31, dtype=torch.uint8), generator())
    with pytest.raises(ValueError, match="float32"):
        views["strong"](torch.zeros(2, 3, 32, 32), generator())
    with pytest.raises(ValueError, match="float features"):
        make_views((4,), AugmentSettings())["weak"](torch.zeros(2, 5), generator())
    for shape in [(3, 32), (0, 4, 4), ()]:
        with pytest.raises(ValueError, match="expected a shape"):
            make_views(shape, AugmentSettings())


@pytest.mark.parametrize(
    "bad",
    [
        {"strong_chance": 1.5},
        {"strong_magnitudes": (9, 1)},
        {"strong_magnitudes": (1, 11)},
        {"cutout_fill": 256},
        {"policy": "imagenet"},
        {"padding": -1},
        {"unknown": 1},
    ],
)
def test_settings_refuse(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AugmentSettings(**bad)


def test_settings_describe_themselves() -> None:
    assert all(field.description for field in AugmentSettings.model_fields.values())
    with pytest.raises(ValidationError):
        AugmentSettings().flip = False


def test_strong_entries_have_both_ends_of_the_magnitudes() -> None:
    turns = {value for op, value in strong_entries((1, 9), 32, 32) if op is Op.ROTATE}
    assert turns == {sign * 3.0 * v for v in range(1, 10) for sign in (1, -1)}


def test_boxes_of_wide_images_by_hand() -> None:
    """In pixels: area and ratio as drawn, and left and top anywhere that the box fits."""
    u = torch.rand(2000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, top, wide, high = ResizedCrop((3, 30, 40), flip=True).plan(u, u.long())["box"].unbind(1)
    area, ratio = (0.2 + 0.8 * u[:, 1]) * 30 * 40, (4 / 3) ** (2 * u[:, 2] - 1)
    torch.testing.assert_close(wide * 40, (area * ratio).sqrt().clamp(max=40))
    torch.testing.assert_close(high * 30, (area / ratio).sqrt().clamp(max=30))
    torch.testing.assert_close(left, u[:, 3] * (1 - wide))
    torch.testing.assert_close(top, u[:, 4] * (1 - high))
