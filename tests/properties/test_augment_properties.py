"""What holds for every view, whatever the images: any channel count, any size from 1 x 1 on, any seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crosel.augment import AugmentSettings, Draw, Op, OpTable, View, make_views
from crosel.augment.policies import SIGNED, policy_value, strong_value

torch.set_num_threads(1)
NAMES = ("plain", "weak", "strong", "autoaugment", "contrast-weak", "contrast-strong")
BUSY = AugmentSettings(strong_chance=0.9)

shapes = st.one_of(
    st.tuples(st.sampled_from([1, 2, 3, 4, 7]), st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 30)),
)
seeds = st.integers(0, 2**31)
few = settings(max_examples=40)


def batch(shape: tuple[int, ...], n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.randn(n, *shape, generator=generator)
    # Random ranges: noise alone would make autocontrast the identity.
    images = torch.rand(n, *shape, generator=generator)
    low, high = torch.rand(2, n, *[1] * len(shape), generator=generator).sort(0).values
    return ((low + (high - low) * images) * 256).to(torch.uint8)


def drawn(view: View, n: int, seed: int) -> Draw:
    return view.draw(n, torch.Generator().manual_seed(seed))


@few
@given(shape=shapes, n=st.integers(0, 9), seed=seeds, name=st.sampled_from(NAMES))
def test_shape_dtype_and_seed(shape: tuple[int, ...], n: int, seed: int, name: str) -> None:
    view, x = make_views(shape, BUSY)[name], batch(shape, n, seed)
    kept = x.clone()
    out = view(x, torch.Generator().manual_seed(seed))
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert torch.equal(x, kept), "the input was changed in place"
    draw = drawn(view, n, seed)
    assert all(len(t) == n for t in draw.values())
    assert torch.equal(out, view.apply(x, draw))


@few
@given(shape=shapes, n=st.integers(1, 9), seed=seeds, name=st.sampled_from(NAMES), data=st.data())
def test_permutations_and_slices(shape: tuple[int, ...], n: int, seed: int, name: str, data: st.DataObject) -> None:
    view, x = make_views(shape, BUSY)[name], batch(shape, n, seed)
    draw = drawn(view, n, seed)
    out = view.apply(x, draw)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    assert torch.equal(view.apply(x[order], {k: t[order] for k, t in draw.items()}), out[order])
    start = data.draw(st.integers(0, n - 1))
    rows = slice(start, data.draw(st.integers(start + 1, n)))
    assert torch.equal(view.apply(x[rows], {k: t[rows] for k, t in draw.items()}), out[rows])


@pytest.mark.parametrize("name", NAMES[1:])
def test_images_differ_and_seeds_differ(name: str) -> None:
    view = make_views((3, 16, 16), BUSY)[name]
    x = batch((3, 16, 16), 1, 0).expand(64, -1, -1, -1)
    first, second = (view(x, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    # Weak views have only 2 * 5 * 5 outcomes at this size.
    assert len(torch.unique(first.flatten(1), dim=0)) > 25
    assert not torch.equal(first, second)
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(view(x, generator), view(x, generator)), "the generator did not move on"


@few
@given(shape=shapes.filter(lambda s: len(s) == 3), seed=seeds)
def test_identity_is_bit_identical(shape: tuple[int, ...], seed: int) -> None:
    x = batch(shape, 5, seed)
    # Alone, and beside other operations: no stage may touch the images of another.
    others = [(Op.EQUALIZE, 0.0), (Op.SHARPNESS, 1.9), (Op.CONTRAST, 0.1), (Op.ROTATE, 30.0)]
    table = OpTable([(Op.IDENTITY, 0.0), *others], shape, fill=9)
    assert torch.equal(table.apply(x, torch.zeros(5, dtype=torch.int64)).to(torch.uint8), x)
    mixed = table.apply(x, torch.tensor([1, 0, 2, 0, 3])).to(torch.uint8)
    assert torch.equal(mixed[1::2], x[1::2])


@few
@given(shape=shapes.filter(lambda s: len(s) == 3), seed=seeds, data=st.data())
def test_neighbours_do_not_matter(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """An image comes out the same alone and in a batch where everyone has another operation."""
    _, height, width = shape
    magnitude = data.draw(st.integers(1, 9))
    entries = [(op, strong_value(op, magnitude, height, width)) for op in Op]
    entries += [(op, policy_value(op, magnitude, -1, height, width)) for op in Op]
    table = OpTable(entries, shape)
    x = batch(shape, len(entries), seed)
    together = table.apply(x, torch.arange(len(entries)))
    for i in range(len(entries)):
        assert torch.equal(table.apply(x[i : i + 1], torch.tensor([i]))[0], together[i]), entries[i]
        assert together[i].min() >= 0
        assert together[i].max() <= 255
        assert torch.equal(together[i], together[i].round())


@few
@given(shape=shapes.filter(lambda s: len(s) == 3), seed=seeds, op=st.sampled_from(SIGNED), value=st.floats(-9, 9))
def test_geometry_only_moves_pixels(shape: tuple[int, ...], seed: int, op: Op, value: float) -> None:
    """Every pixel of the result is a pixel of the image, all channels together, or the fill."""
    x = batch(shape, 1, seed)
    if op in (Op.TRANSLATE_X, Op.TRANSLATE_Y):
        value = float(int(value))
    out = OpTable([(op, value)], shape, fill=7).apply(x, torch.tensor([0])).to(torch.uint8)
    source = {tuple(p) for p in x[0].flatten(1).T.tolist()} | {(7,) * shape[0]}
    assert {tuple(p) for p in out[0].flatten(1).T.tolist()} <= source


@few
@given(seed=seeds, height=st.integers(2, 40), width=st.integers(2, 40), share=st.floats(0, 1))
def test_cutout_is_one_rectangle(seed: int, height: int, width: int, share: float) -> None:
    options = AugmentSettings(strong_ops=0, cutout=share, cutout_fill=255, padding=0, flip=False)
    view = make_views((2, height, width), options)["strong"]
    draw = drawn(view, 4, seed)
    hit = view.apply(torch.zeros(4, 2, height, width, dtype=torch.uint8), draw) == 255
    assert torch.equal(hit[:, 0], hit[:, 1])
    side = int(share * min(height, width))
    for mask, (y, x) in zip(hit[:, 0], draw["cutout"].tolist(), strict=True):
        expected = torch.zeros(height, width, dtype=torch.bool)
        top, left = y - side // 2, x - side // 2
        expected[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = True
        assert torch.equal(mask, expected)
