"""Data on the way in: checks and their lines, normalisation, index streams, digits, npz, and the CIFAR files."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _files import put, read
from _published import as_published
from _support import real_data

from crosel.augment import AugmentSettings, make_views
from crosel.data import draw_candidates, load
from crosel.data.dataset import Dataset, as_candidates, as_inputs, as_labels, make_dataset
from crosel.data.formats.cifar import read_cifar10, read_cifar100, read_pickle
from crosel.data.formats.digits import read_digits
from crosel.errors import UserError
from crosel.methods.base import Stream
from crosel.training.batches import Normaliser, TrainingTensors, draw_indices, soft_clip, stream_batch
from crosel.utils.system import peak_memory

torch.set_num_threads(1)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- inputs -------------------------------------------------------------------------------------------------------

BAD_INPUTS = {
    "words": (np.array([["a", "b"]]), "expected numbers, found <U1"),
    "objects": (np.array([[1, None]], dtype=object), "expected numbers, found object"),
    "ragged": ([[object()]], "expected numbers, found object"),
    "one number": (3.0, r"expected features \[n, d\] or images .* got shape \(\)"),
    "one dimension": (np.zeros(3), r"got shape \(3,\)"),
    "five dimensions": (np.zeros((1, 1, 1, 1, 1)), r"got shape \(1, 1, 1, 1, 1\)"),
    "no examples": (np.zeros((0, 4)), r"no examples, or examples of size 0 \(shape \(0, 4\)\)"),
    "no features": (np.zeros((4, 0)), r"\(shape \(4, 0\)\)"),
    "complex": (np.zeros((2, 2), dtype=complex), "complex numbers cannot be used"),
    "nan": (np.array([[0, 1], [2, np.nan]]), "NaN in row 1, column 1; fill it in or drop the row"),
    "infinite": (np.array([[0, -np.inf], [2, 3]]), "an infinite value in row 0, column 1"),
    "nan in an image": (np.full((2, 3, 3), np.nan), "NaN in row 0, column 0"),
    "too large": (np.array([[0.0, 1.0], [1e300, 0.0]]), "row 1, column 0 is too large for single precision"),
    "dark pixels": (np.full((1, 2, 2), -1), r"pixels must lie in 0\.\.255 or 0\.\.1, found -1 to -1"),
    "bright pixels": (np.full((1, 2, 2), 256.0), "found 256 to 256"),
    "channels first": (np.zeros((2, 3, 32, 24)), r"looks like \[n, c, h, w\].*x\.transpose\(0, 2, 3, 1\)"),
    "grey, channels first": (np.zeros((2, 1, 28, 28)), r"shape \(2, 1, 28, 28\) looks like \[n, c, h, w\]"),
}


def refusal(reading, given, message):
    """The one line with which something is refused."""
    with pytest.raises(UserError, match=message) as caught:
        reading(given, "here: x")
    return one_line(caught)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_named_with_their_place(name):
    assert refusal(as_inputs, *BAD_INPUTS[name]).startswith("here: x: ")


def test_features_become_single_precision():
    for x in (np.arange(6).reshape(3, 2), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], np.ones((3, 2), dtype=bool)):
        found = as_inputs(x, "x")
        assert found.dtype == np.float32
        assert np.array_equal(found, np.asarray(x, dtype=np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
def test_images_become_bytes_channels_first(dtype):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3))
    pixels[0, 0, 0, 0] = 255
    found = as_inputs(pixels.astype(dtype), "x")
    assert found.dtype == np.uint8
    assert found.flags["C_CONTIGUOUS"]
    assert np.array_equal(found, pixels.transpose(0, 3, 1, 2))
    grey = as_inputs(pixels[..., 0].astype(dtype), "x")
    assert np.array_equal(grey, pixels[:, None, :, :, 0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_images_in_zero_to_one_are_scaled(dtype):
    pixels = np.arange(256).reshape(1, 16, 16)
    assert np.array_equal(as_inputs((pixels / 255).astype(dtype), "x")[0, 0], pixels[0])


def test_integers_of_zero_and_one_are_pixels_as_they_are():
    assert as_inputs(np.ones((1, 2, 2), dtype=int), "x").max() == 1


# --- labels and sets ----------------------------------------------------------------------------------------------

BAD_LABELS = {
    "outside": ([0, 3], "label 3 of example 1 is outside the classes 0 to 2"),
    "negative": ([-1, 0], "label -1 of example 0 is outside the classes 0 to 2; leave out examples without a label"),
    "fraction": ([0.0, 0.5], r"label 0\.5 of example 1"),
    "nan": ([0.0, np.nan], "label nan of example 1"),
    "infinite": ([np.inf], "label inf of example 0"),
    "words": (["a"], "expected one integer label for each example, got <U1 of shape"),
    "matrix": ([[0, 1]], r"got int64 of shape \(1, 2\)"),
    "flags": ([True], "got bool"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_bad_labels_are_named_with_their_place(name):
    y, message = BAD_LABELS[name]
    with pytest.raises(UserError, match=message) as caught:
        as_labels(y, 3, "here: y")
    assert one_line(caught).startswith("here: y: ")


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64])
def test_good_labels(dtype):
    found = as_labels(np.array([0, 2, 1], dtype=dtype), 3, "y")
    assert found.dtype == np.int64
    assert found.tolist() == [0, 2, 1]


BAD_SETS = {
    "vector": ([1, 0], r"expected a matrix \[n, k\] of 0 and 1, got int64 of shape \(2,\)"),
    "objects": (np.array([[None]], dtype=object), "expected a matrix"),
    "two": ([[1, 0], [0, 2]], "row 1, column 1 is 2; only 0 and 1 are allowed"),
    "half": ([[0.5, 1]], r"row 0, column 0 is 0\.5"),
    "nan": ([[1, np.nan]], "row 0, column 1 is nan"),
    "words": ([["a", "b"]], "row 0, column 0 is a"),
    "empty": ([[1, 0], [0, 0], [0, 0]], r"candidate set of example 1 is empty \(2 such\); give it at least one label"),
    "no rows": (np.zeros((0, 3)), r"no examples or no classes \(shape \(0, 3\)\)"),
    "no classes": (np.zeros((3, 0), dtype=bool), r"no examples or no classes \(shape \(3, 0\)\)"),
}


@pytest.mark.parametrize("name", BAD_SETS)
def test_bad_sets_are_named_with_their_place(name):
    assert refusal(as_candidates, *BAD_SETS[name]).startswith("here: x: ")


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32])
def test_good_sets(dtype):
    found = as_candidates(np.array([[1, 0], [1, 1]], dtype=dtype), "c")
    assert found.dtype == bool
    assert found.tolist() == [[True, False], [True, True]]


# --- the whole ----------------------------------------------------------------------------------------------------

X, Y, SETS = np.arange(6.0).reshape(3, 2), [0, 1, 1], np.ones((3, 2), dtype=bool)
BAD_DATA = {
    "nothing to learn from": ({"x": X}, "there are neither candidate sets .* nor labels"),
    "sets too few": ({"x": X, "candidates": SETS[:2]}, "x has 3 examples, but candidates has 2"),
    "labels too many": ({"x": X, "y": [0, 1, 1, 0]}, "x has 3 examples, but y has 4"),
    "ids too few": ({"x": X, "y": Y, "ids": ["a"]}, "x has 3 examples, but there are 1 ids"),
    "columns": ({"x": X, "candidates": SETS, "classes": ["a", "b", "c"]}, "candidates has 2 columns for 3 classes"),
    "label of no class": ({"x": X, "y": [0, 1, 2], "classes": 2}, "y: label 2 of example 2 is outside"),
    "bad x": ({"x": X[0], "y": Y}, r"x: expected features .* got shape \(2,\)"),
    "bad sets": ({"x": X, "candidates": [[0, 0]] * 3}, "candidates: the candidate set of example 0 is empty"),
    "test without labels": ({"x": X, "y": Y, "x_test": X}, "give both x_test and y_test, or neither"),
    "labels without test": ({"x": X, "y": Y, "y_test": Y}, "give both x_test and y_test, or neither"),
    "test of another length": (
        {"x": X, "y": Y, "x_test": X, "y_test": [0]},
        "x_test has 3 examples, but y_test has 1",
    ),
    "test of another shape": (
        {"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y},
        r"x_test has examples of shape \(1,\), x of shape \(2,\)",
    ),
    "bad test": ({"x": X, "y": Y, "x_test": X * np.nan, "y_test": Y}, "x_test: NaN in row 0"),
    "bad test labels": ({"x": X, "y": Y, "x_test": X, "y_test": [0, 1, 2]}, "y_test: label 2 of example 2"),
    "negative labels": ({"x": X, "y": [-1, -1, -1]}, "y: label -1 of example 0"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_named_with_its_place(name):
    arrays, message = BAD_DATA[name]
    with pytest.raises(UserError, match=message) as caught:
        make_dataset(**arrays, place="my.npz")
    assert one_line(caught).startswith("my.npz: ")


@pytest.mark.parametrize("y", [["a", "b", "c"], [0, 1, np.nan], []], ids=str)
def test_labels_are_checked_before_classes_are_counted(y):
    with pytest.raises(UserError, match=r"my\.npz: y: "):
        make_dataset(X, y=y, place="my.npz")


def test_classes_follow_from_sets_or_labels():
    assert make_dataset(X, candidates=SETS).classes == ("0", "1")
    assert make_dataset(X, y=[0, 4, 1]).classes == ("0", "1", "2", "3", "4")
    assert make_dataset(X, y=Y, classes=3).classes == ("0", "1", "2")
    assert make_dataset(X, y=Y, classes=["cat", "dog"]).classes == ("cat", "dog")


def test_dataset_says_what_it_is():
    data = make_dataset(X, candidates=SETS, ids=["a", "b", "c"])
    assert (data.n, data.shape, data.is_image, data.example_id(1), data.y) == (3, (2,), False, "b", None)
    image = make_dataset(np.zeros((2, 4, 5, 3), np.uint8), y=[0, 1])
    assert (image.n, image.shape, image.is_image, image.example_id(1)) == (2, (3, 4, 5), True, "1")
    with pytest.raises(AttributeError):
        data.y = Y


def test_fingerprint_tells_inputs_apart():
    plain = make_dataset(X, y=Y).fingerprint
    assert plain == make_dataset(X.copy(), y=[1, 0, 0]).fingerprint  # of the inputs, not of what is said of them
    changed = X.copy()
    changed[2, 1] += 1
    others = [make_dataset(changed, y=Y), make_dataset(X, y=Y, classes=["a", "b"]), make_dataset(X[:2], y=Y[:2])]
    assert len({plain, *(other.fingerprint for other in others)}) == 4


def test_candidates_are_drawn_or_the_datas_own():
    plain, own = make_dataset(X, y=Y), make_dataset(X, candidates=SETS)
    assert draw_candidates(own, None, 0) is own
    drawn = draw_candidates(plain, "uniform:q=1", 0)
    assert drawn.candidates.all()
    assert plain.candidates is None
    with pytest.raises(UserError, match="plain labels; choose how to draw candidate sets: --candidates uniform:q="):
        draw_candidates(plain, None, 0)
    with pytest.raises(UserError, match="has its own candidate sets; leave out the rule 'uniform:q=1'"):
        draw_candidates(own, "uniform:q=1", 0)
    with pytest.raises(UserError, match="needs superclasses"):
        draw_candidates(plain, "superclass:q=0.5", 0)


# --- normalisation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brightest", "said"),
    [(255, ""), (64, ""), (63, "63 of 255"), (16, "divide their values by 16, so that they lie in 0..1"), (0, "black")],
)
def test_images_that_are_nearly_black_are_remarked_on(brightest, said):
    x = np.zeros((3, 4, 4), dtype=np.uint8)
    x[1, 2, 3] = brightest
    lines = make_dataset(x, y=[0, 1, 0], classes=2).remarks()
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_features_are_never_too_dark():
    assert make_dataset(np.zeros((3, 4)), y=[0, 1, 0], classes=2).remarks() == []


def test_image_statistics_against_numpy():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)
    pixels[..., 1] //= 4
    normalise = Normaliser.of(make_dataset(pixels, y=np.zeros(20, dtype=int)))
    scaled = pixels.astype(np.float64) / 255
    np.testing.assert_allclose(normalise.mean.flatten().numpy(), scaled.mean(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(normalise.std.flatten().numpy(), scaled.std(axis=(0, 1, 2)), rtol=1e-6)
    out = normalise(torch.from_numpy(pixels.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(out.mean(dim=(0, 2, 3)).numpy(), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(dim=(0, 2, 3), unbiased=False).numpy(), 1, rtol=1e-5)
    assert normalise.mean.shape == (3, 1, 1)


def test_feature_statistics_against_numpy():
    x = np.random.default_rng(1).normal([0, 1e3, -5], [1, 7, 0.01], (500, 3)).astype(np.float32)
    normalise = Normaliser.of(make_dataset(x, y=np.zeros(500, dtype=int)))
    np.testing.assert_allclose(normalise.mean.numpy(), x.astype(np.float64).mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(normalise.std.numpy(), x.astype(np.float64).std(axis=0), rtol=1e-6)
    out = normalise(torch.from_numpy(x))
    np.testing.assert_allclose(out.mean(dim=0).numpy(), 0, atol=1e-3)
    np.testing.assert_allclose(out.std(dim=0, unbiased=False).numpy(), 1, rtol=1e-3)


def test_constant_columns_and_channels_keep_their_scale():
    x = np.array([[1.0, 5.0], [2.0, 5.0]])
    normalise = Normaliser.of(make_dataset(x, y=[0, 1]))
    assert normalise.std.tolist() == [0.5, 1.0]
    assert normalise(torch.from_numpy(x)).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    black = Normaliser.of(make_dataset(np.zeros((2, 3, 3), np.uint8), y=[0, 1]))
    assert black.std.flatten().tolist() == [1.0]


def test_published_values_take_precedence():
    pixels = np.full((2, 2, 2, 3), 51, np.uint8)
    data = make_dataset(pixels, y=[0, 1], mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    out = Normaliser.of(data)(torch.from_numpy(data.x))
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.1]))


def robustly_scaled(values: list[float]) -> list[float]:
    """Slowly: quartiles by hand, each value drawn in, then zero mean and unit variance."""
    ordered, n = sorted(values), len(values)

    def quantile(share: float) -> float:
        at = share * (n - 1)
        low = math.floor(at)
        return ordered[low] + (at - low) * (ordered[min(low + 1, n - 1)] - ordered[low])

    spread = quantile(0.75) - quantile(0.25)
    if spread == 0:
        mean = sum(values) / n
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / n) or 1.0
    drawn = [(v - quantile(0.5)) / spread for v in values]
    drawn = [v / math.sqrt(1 + (v / 3) ** 2) for v in drawn]
    mean = sum(drawn) / n
    deviation = math.sqrt(sum((v - mean) ** 2 for v in drawn) / n) or 1.0
    return [(v - mean) / deviation for v in drawn]


def test_robust_scaling_against_a_slow_version():
    rng = np.random.default_rng(2)
    x = rng.normal([0, 1e3, -5, 0, 7], [1, 7, 0.01, 0, 3], (101, 5)).astype(np.float32)
    x[3, 1], x[4, 0] = 1e9, -1e30  # outliers
    x[:, 4] *= np.arange(101) % 5 == 0  # four in five are the same: no quartiles to tell apart
    normalise = Normaliser.of(make_dataset(x, y=np.zeros(101, dtype=int)), robust=True)
    out = normalise(torch.from_numpy(x)).numpy()
    for column in range(5):
        np.testing.assert_allclose(out[:, column], robustly_scaled(x[:, column].tolist()), atol=2e-4)


def test_soft_clip_keeps_its_bound_and_its_slope():
    v = torch.tensor([0.0, 1e-3, 3.0, -3.0, 1e30, -torch.inf], dtype=torch.float64)
    expected = torch.tensor([0.0, 1e-3, 3 / 2**0.5, -3 / 2**0.5, 3.0, -3.0], dtype=torch.float64)
    torch.testing.assert_close(soft_clip(v), expected, rtol=1e-6, atol=1e-9)
    assert torch.isfinite(soft_clip(torch.tensor([3e38, -3e38]))).all()


def test_normaliser_travels_with_the_weights():
    one = Normaliser.of(make_dataset(X, y=Y))
    other = Normaliser(torch.zeros(2), torch.ones(2))
    other.load_state_dict(one.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(one(x), other(x))
    assert set(one.state_dict()) == {"mean", "std"}


# --- the order of examples ----------------------------------------------------------------------------------------


def draw(pool: int, steps: int, batch: int, seed: int = 0) -> torch.Tensor:
    members = torch.arange(100, 100 + 3 * pool, 3)
    return (draw_indices(members, steps, batch, torch.Generator().manual_seed(seed)) - 100) // 3


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (7, 7), (100, 64), (128, 64), (129, 64), (50, 7), (64, 64)])
def test_an_epoch_holds_every_example_and_no_batch_one_twice(n, batch):
    steps = -(-n // batch)
    index = draw(n, steps, batch)
    assert index.shape == (steps, batch)
    counts = torch.bincount(index.flatten(), minlength=n)
    assert len(counts) == n
    assert counts.min() == 1
    assert counts.max() <= 2
    assert all(len(row.unique()) == batch for row in index)


@pytest.mark.parametrize(("pool", "steps", "batch"), [(1, 3, 8), (3, 5, 8), (5, 1, 8), (10, 13, 64), (100, 10, 64)])
def test_small_pools_are_cycled_evenly(pool, steps, batch):
    counts = torch.bincount(draw(pool, steps, batch).flatten(), minlength=pool)
    assert len(counts) == pool
    assert counts.max() - counts.min() <= 1
    assert counts.sum() == steps * batch


@pytest.mark.parametrize(("pool", "steps", "batch"), [(100, 10, 64), (65, 40, 64), (10, 50, 7)])
def test_no_batch_holds_an_example_twice_when_a_pool_is_cycled(pool, steps, batch):
    assert all(len(row.unique()) == batch for row in draw(pool, steps, batch))


def test_a_pool_larger_than_the_epoch_is_sampled_without_repeats():
    index = draw(1000, 3, 8)
    assert len(index.unique()) == 24


def test_pools_keep_their_own_indices():
    pool = torch.tensor([5, 17, 90])
    index = draw_indices(pool, 2, 3, torch.Generator().manual_seed(0))
    assert [sorted(row.tolist()) for row in index] == [[5, 17, 90]] * 2


@pytest.mark.parametrize(
    ("n", "steps", "batch"),
    [(1000, 3, 8), (1000, 16, 64), (100, 9, 64), (97, 1, 97), (640, 10, 64), (999, 4, 300)],
)
@pytest.mark.parametrize("whole", [True, False])
def test_of_many_examples_the_order_is_the_same(n, steps, batch, whole, monkeypatch):
    pool = n if whole else 3 * torch.arange(n)
    generator, other = (torch.Generator().manual_seed(4) for _ in range(2))
    monkeypatch.setattr("crosel.training.batches._MANY", 1 << 30)
    plain = draw_indices(pool, steps, batch, other)
    monkeypatch.setattr("crosel.training.batches._MANY", 50)
    assert draw_indices(pool, steps, batch, generator).equal(plain)
    assert torch.rand(3, generator=generator).equal(torch.rand(3, generator=other))  # it has drawn as much


def test_order_is_random_and_follows_the_generator():
    assert torch.equal(draw(50, 5, 10, seed=1), draw(50, 5, 10, seed=1))
    assert not torch.equal(draw(50, 5, 10, seed=1), draw(50, 5, 10, seed=2))
    first = torch.bincount(torch.stack([draw(5, 1, 5, seed=s)[0, 0] for s in range(500)]), minlength=5)
    assert first.min() > 60  # 100 each on average, with a deviation of 9


def test_rounds_through_a_small_pool_have_their_own_order():
    index = draw(6, 20, 6)
    assert len({tuple(row.tolist()) for row in index}) > 10


def test_streams_become_batches_of_views():
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    data = make_dataset(x, y=[0, 1] * 5)
    views = make_views((2,), AugmentSettings(feature_noise=1.0))
    normalise = Normaliser.of(data)
    tensors = TrainingTensors(data, views, normalise, torch.device("cpu"))
    streams = {"all": Stream(("plain", "strong", "strong#2")), "some": Stream(("plain",), torch.tensor([3, 4]))}
    generator = torch.Generator().manual_seed(0)
    indices = tensors.draw_epoch_indices(streams, 3, 4, generator)
    assert {name: table.shape for name, table in indices.items()} == {"all": (3, 4), "some": (3, 4)}
    assert set(indices["some"].flatten().tolist()) == {3, 4}
    batch = tensors.batches({"all": indices["all"][0]}, streams, generator)["all"]
    assert torch.equal(batch["plain"], normalise(torch.from_numpy(x)[batch.index]))
    assert not torch.equal(batch["strong"], batch["strong#2"])
    assert not torch.equal(batch["strong"], batch["plain"])


@pytest.mark.parametrize(
    ("batch", "share", "ranks", "parts", "expected"),
    [
        (128, 1.0, 1, 1, 128), (128, 0.751, 1, 1, 128), (128, 0.75, 1, 1, 96), (128, 0.3, 1, 1, 64),
        (128, 0.01, 1, 1, 32), (128, 0.0, 1, 1, 32), (6, 0.1, 1, 1, 2), (1, 0.1, 1, 1, 1),
        (128, 0.01, 1, 32, 64), (128, 0.01, 1, 64, 128), (8, 0.1, 1, 4, 8),  # two examples for each part
        (12, 0.1, 4, 1, 4), (6, 0.1, 3, 1, 3),  # an example for each rank
    ],
)  # fmt: skip
def test_a_share_of_the_examples_has_smaller_batches(batch, share, ranks, parts, expected):
    size = stream_batch(batch, share, ranks, parts)
    assert size == expected
    assert batch >= size >= min(batch, share * batch, 2 * parts)
    assert len({stream_batch(batch, part / 100, ranks, parts) for part in range(101)}) <= 4  # so many recordings


def test_a_smaller_stream_leaves_the_others_as_they_are():
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    data = make_dataset(x, y=[0, 1] * 6)
    views = make_views((2,), AugmentSettings(feature_noise=1.0))
    tensors = TrainingTensors(data, views, Normaliser.of(data), torch.device("cpu"))
    tables = {}
    for share in (1.0, 0.5):
        streams = {"all": Stream(("strong",)), "some": Stream(("strong",), torch.arange(5), share=share)}
        tables[share] = tensors.draw_epoch_indices(streams, 3, 4, torch.Generator().manual_seed(0))
    assert torch.equal(tables[1.0]["all"], tables[0.5]["all"])
    assert tables[0.5]["some"].shape == (3, 2)
    assert set(tables[0.5]["some"].flatten().tolist()) == set(range(5))  # each comes once before one comes again
    batches = tensors.batches({n: t[0] for n, t in tables[0.5].items()}, streams, torch.Generator())
    assert {name: len(batch["strong"]) for name, batch in batches.items()} == {"all": 4, "some": 2}


# --- digits -------------------------------------------------------------------------------------------------------


def test_digits_split_never_changes():
    data = read_digits()
    assert (data.x.shape, data.x_test.shape, len(data.classes)) == ((1348, 1, 8, 8), (449, 1, 8, 8), 10)
    assert data.x.dtype == np.uint8
    assert (data.x.min(), data.x.max()) == (0, 255)
    assert not data.flips
    assert data.candidates is None
    assert data.fingerprint == "8f36d98659d2a09b"
    rest = data.y.tobytes() + data.y_test.tobytes() + data.x_test.tobytes()
    assert hashlib.sha256(rest).hexdigest()[:16] == "d35163ca7f83d817"


def test_digits_test_set_holds_none_of_the_training_set():
    from sklearn.datasets import load_digits

    data = read_digits()
    images, labels = load_digits(return_X_y=True)
    whole = Counter(
        (image.tobytes(), int(label))
        for image, label in zip(np.rint(images * 255 / 16).astype(np.uint8), labels, strict=True)
    )
    halves = [*zip(data.x, data.y, strict=True), *zip(data.x_test, data.y_test, strict=True)]
    assert Counter((image.tobytes(), int(label)) for image, label in halves) == whole
    assert np.bincount(data.y_test).min() >= 30


def test_digits_are_the_same_where_sklearn_keeps_its_file_elsewhere(monkeypatch):
    read = read_digits()
    monkeypatch.setattr("crosel.data.formats.digits.find_spec", lambda name: None)
    loaded = read_digits()
    for ours, theirs in ((read.x, loaded.x), (read.y, loaded.y), (read.x_test, loaded.x_test)):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


# --- npz ----------------------------------------------------------------------------------------------------------


def test_npz_is_read(tmp_path):
    path = tmp_path / "my.npz"
    np.savez(
        path, x=X, candidates=SETS, y=Y, x_test=X, y_test=Y, classes=np.array(["cat", "dog"]), ids=np.array([7, 8, 9])
    )
    data = load(str(path))
    assert (data.classes, data.ids) == (("cat", "dog"), ("7", "8", "9"))
    assert np.array_equal(data.x, X.astype(np.float32))
    assert np.array_equal(data.candidates, SETS)
    assert (data.y.tolist(), data.y_test.tolist()) == (Y, Y)
    assert load(str(path)).fingerprint == data.fingerprint


def test_npz_takes_labels_by_name(tmp_path):
    path = tmp_path / "my.npz"
    names = np.array(["dog", "cat"])
    np.savez(path, x=X, candidates=SETS, y=names[Y], x_test=X, y_test=names[Y], classes=names)
    data = load(str(path))
    assert (data.classes, data.y.tolist(), data.y_test.tolist()) == (("dog", "cat"), Y, Y)
    np.savez(
        path, x=X, y=np.array([b"10", b"9", b"10"]), x_test=X, y_test=["9", "9", "11"]
    )  # classes follow from these
    data = load(str(path))
    assert (data.classes, data.y.tolist(), data.y_test.tolist()) == (("9", "10", "11"), [1, 0, 1], [0, 0, 2])
    np.savez(path, x=X, y=Y, classes=np.array([b"cat", b"dog"]))
    assert load(str(path)).classes == ("cat", "dog")
    np.savez(path, x=X, y=["cat", "nan", "cat "])
    assert load(str(path)).notes == (
        "classes 'cat' and 'cat ' are treated as different; if they are the same class, spell them alike",
        "taken as classes: 'nan'; if this means that the label is unknown, leave such examples out",
    )
    np.savez(path, x=X, y=["cat", "nan", "cat "], classes=["cat", "cat ", "nan"])
    assert load(str(path)).notes == ()


NPZ_ERRORS = {
    "no x": ({"candidates": SETS}, "the array 'x' is missing"),
    "unknown": (
        {"x": X, "candidate": SETS},
        r"unknown array 'candidate' \(did you mean 'candidates'\?\); known arrays: x, ",
    ),
    "objects": ({"x": np.array([[None]], dtype=object), "y": Y}, "'x' holds Python objects, which are never loaded"),
    "object names": ({"x": X, "y": Y, "classes": np.array(["a", "b"], dtype=object)}, "'classes' holds Python objects"),
    "names without columns": ({"x": X, "candidates": SETS, "y": ["a", "b", "a"]}, "'classes' must name the columns of"),
    "another name": (
        {"x": X, "y": ["a", "b", "c"], "classes": ["a", "b"]},
        "y, row 2: 'c' is not one of the 2 classes",
    ),
    "no text": ({"x": X, "y": np.array([b"\xff", b"a", b"b"])}, "'y' is not plain text"),
    "classes": ({"x": X, "y": Y, "classes": np.array([["a"]])}, r"'classes' must be one-dimensional, not of shape"),
    "ids": ({"x": X, "y": Y, "ids": np.array("a")}, r"'ids' must be one-dimensional, not of shape \(\)"),
    "lengths": ({"x": X, "y": [0]}, "x has 3 examples, but y has 1"),
    "no label": ({"x": X, "y": [0, -1, 1]}, "is outside the class numbers, which begin with 0; leave out"),
    "nan": ({"x": X * np.nan, "y": Y}, "x: NaN in row 0, column 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", NPZ_ERRORS)
def test_npz_errors(name, tmp_path):
    arrays, message = NPZ_ERRORS[name]
    path = tmp_path / "my.npz"
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=message) as caught:
        load(str(path))
    assert one_line(caught).startswith(f"{path}: ")
    assert "np.savez" not in str(caught.value), "nothing is wrong with the archive itself"


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04N."])
def test_files_that_are_no_npz(content, tmp_path):
    path = tmp_path / "my.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a readable npz file") as caught:
        load(str(path))
    assert one_line(caught).startswith(f"{path}: ")
    assert "allow_pickle" not in str(caught.value)  # numpy's advice for whatever it does not know


def test_a_single_array_is_no_npz(tmp_path):
    path = tmp_path / "my.npz"
    with path.open("wb") as stream:
        np.save(stream, X)
    with pytest.raises(UserError, match="this is a single array; give an npz file with x and candidates"):
        load(str(path))


def test_truncated_npz(tmp_path):
    path = tmp_path / "my.npz"
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="not a readable npz file"):
            load(str(path))


def damage_compressed(path: Path) -> None:
    """Overwrite the beginning of the compressed data of x: what a bad disk or download does."""
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 4)), y=np.zeros(50, int))
    content = bytearray(path.read_bytes())
    start = 30 + struct.unpack("<H", content[26:28])[0] + struct.unpack("<H", content[28:30])[0]
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(bytes(content))


def test_damaged_compressed_npz(tmp_path):
    path = tmp_path / "my.npz"
    damage_compressed(path)
    with pytest.raises(UserError, match="not a readable npz file"):
        load(str(path))


# --- sources ------------------------------------------------------------------------------------------------------


def test_sources_by_name_or_ending(tmp_path):
    assert load("digits").n == 1348
    with pytest.raises(UserError, match=r"'digit' is neither a file nor one of .*\(did you mean 'digits'\?\)"):
        load("digit")
    with pytest.raises(UserError, match=r"cifar-10-batches-py does not exist; give the folder .* --data DIR"):
        load("cifar10", tmp_path)
    other = tmp_path / "data.csv"
    other.write_text("1,2")
    with pytest.raises(UserError, match=r"data\.csv, line 2: there are no rows below the column names"):
        load(str(other))
    with pytest.raises(UserError, match="cannot read a folder without"):
        load(str(tmp_path))
    np.save(tmp_path / "scores.npy", np.eye(2))
    with pytest.raises(UserError, match=r"scores\.npy: an array without a name; save it with its inputs as npz"):
        load(str(tmp_path / "scores.npy"))


# --- pickles without trust ----------------------------------------------------------------------------------------


def test_pickles_are_written_as_published():
    """The test's own files are what they claim to be."""
    content = as_published({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1]})
    assert content.startswith(b"\x80\x02}")
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in content
    assert b"cnumpy\nndarray\n" in content
    assert b"U\x04data" in content
    assert b"_codecs" not in content


class Call:
    """A pickle of this calls a function when it is read by the ordinary unpickler."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_hostile_pickles_run_nothing(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "data_batch_1"
    hostile = [
        Call(os.system, f"touch {marker}"),
        {b"data": Call(os.system, f"touch {marker}")},
        Call(eval, f"open({str(marker)!r}, 'w').close()"),
        Call(exec, f"open({str(marker)!r}, 'w').close()"),
        Call(Path.touch, marker),
        Call(np.fromfile, str(marker)),
        Call(open, str(marker), "w"),
    ]
    for content in hostile:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            path.write_bytes(pickle.dumps(content, protocol))
            with pytest.raises(UserError, match=r"not a CIFAR file \(it refers to .*, unlike any CIFAR file\)"):
                read_pickle(path)
    assert not marker.exists()
    # The pickles are dangerous indeed: the ordinary unpickler obeys them.
    pickle.loads(pickle.dumps(hostile[0]))
    assert marker.exists()


def test_pickles_cannot_ask_for_endless_memory(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Call(np.ndarray, (2**60,))}))
    with pytest.raises(UserError, match="not a CIFAR file"):
        read_pickle(path)


def test_pickles_larger_than_the_memory_are_told_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "data_batch_1"
    with open(path, "wb") as stream:
        stream.truncate(8_000_000)  # takes no room on the disk
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.01")
    with pytest.raises(UserError, match=r"data_batch_1: its content would take 15\.3 MiB"):
        read_pickle(path)


def test_a_memo_of_any_length_takes_no_memory(tmp_path):
    """A place in the memo is a number that the file chooses: as an array, it would be 32 GiB."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    before = peak_memory() or 0
    assert read_pickle(path) == {}
    assert (peak_memory() or 0) - before < 50 << 20


def test_pickles_change_no_type_of_numpy(tmp_path):
    """Asked without a copy, numpy gives its own type away, whose byte order could then be set for all arrays."""
    path = tmp_path / "data_batch_1"
    turned = b"K\x03U\x01>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    path.write_bytes(b"\x80\x02}U\x01acnumpy\ndtype\nU\x02i8\x85R(" + turned + b"s.")
    with pytest.raises(UserError, match="numbers that are not bytes"):
        read_pickle(path)
    assert np.dtype("i8").isnative


def test_truncated_and_damaged_pickles(tmp_path):
    path = tmp_path / "data_batch_1"
    whole = as_published({b"data": np.zeros((2, 8), np.uint8), b"labels": [1, 2]})
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="not a CIFAR file") as caught:
            read_pickle(path)
        assert str(path) in str(caught.value)
    path.write_bytes(whole)
    assert set(read_pickle(path)) == {"data", "labels"}


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"hello", pickle.dumps([1, 2]), pickle.dumps(None)])
def test_other_files_are_no_cifar_pickles(content, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a CIFAR file"):
        read_pickle(path)


# --- CIFAR --------------------------------------------------------------------------------------------------------


def write_cifar10(folder: Path, rows: int = 4) -> dict[str, Any]:
    """Five batches, a test batch and the names, in the published form, with random pictures."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    written = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = rng.integers(0, 256, (rows, 3072), dtype=np.uint8)
        labels = rng.integers(0, 10, rows).tolist()
        written[name] = (pixels, labels)
        content = {b"batch_label": name.encode(), b"labels": labels, b"data": pixels, b"filenames": [b"a.png"] * rows}
        (folder / name).write_bytes(as_published(content))
    names = [f"class {i}".encode() for i in range(10)]
    (folder / "batches.meta").write_bytes(as_published({b"num_cases_per_batch": rows, b"label_names": names}))
    return written


def write_cifar100(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    folder.mkdir()
    coarse_of = rng.permutation(np.arange(100) % 20)
    for name in ("train", "test"):
        fine = rng.permutation(100)
        pixels = rng.integers(0, 256, (100, 3072), dtype=np.uint8)
        content = {b"data": pixels, b"fine_labels": fine.tolist(), b"coarse_labels": coarse_of[fine].tolist()}
        (folder / name).write_bytes(as_published(content))
    names = {b"fine_label_names": [f"f{i}".encode() for i in range(100)], b"coarse_label_names": [b"c"] * 20}
    (folder / "meta").write_bytes(as_published(names))
    return coarse_of, fine


def test_cifar10_as_published(tmp_path):
    written = write_cifar10(tmp_path / "cifar-10-batches-py")
    data = load("cifar10", tmp_path)
    assert (data.x.shape, data.x_test.shape) == ((20, 3, 32, 32), (4, 3, 32, 32))
    batches = [written[f"data_batch_{i}"] for i in range(1, 6)]
    # A row is 1024 red values, then green, then blue, each row by row.
    assert np.array_equal(data.x.reshape(20, 3072), np.concatenate([pixels for pixels, _ in batches]))
    assert data.y.tolist() == [label for _, labels in batches for label in labels]
    assert np.array_equal(data.x_test.reshape(4, 3072), written["test_batch"][0])
    assert data.classes == tuple(f"class {i}" for i in range(10))
    assert (data.mean, data.std) == ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
    assert data.flips
    assert data.groups is None


def test_cifar100_as_published(tmp_path):
    coarse_of, fine_test = write_cifar100(tmp_path / "cifar-100-python")
    data = load("cifar100", tmp_path)
    assert data.x.shape == (100, 3, 32, 32)
    assert data.groups == tuple(coarse_of)
    assert data.y_test.tolist() == fine_test.tolist()
    assert len(data.classes) == 100
    assert (data.mean, data.std) == ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
    sets = draw_candidates(data, "superclass:q=1", 0).candidates
    assert (sets.sum(axis=1) == 5).all()


CIFAR_DAMAGE = {
    "no labels": ({b"data": np.zeros((4, 3072), np.uint8)}, r"no images \('data'\) or labels \('labels'\)"),
    "no images": ({b"labels": [0] * 4}, r"no images \('data'\)"),
    "other size": ({b"data": np.zeros((4, 768), np.uint8), b"labels": [0] * 4}, r"no images \('data'\)"),
    "other type": ({b"data": np.zeros((4, 3072), np.int16), b"labels": [0] * 4}, "numbers that are not bytes"),
    "a list": ({b"data": [0] * 3072, b"labels": [0]}, r"no images \('data'\)"),
    "lengths": ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 3}, "data_batch_3: 'labels' is not a list"),
    "labels in lists": ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [[1], [1, 2]]}, "'labels' is not a list"),
    "no list of labels": ({b"data": np.zeros((2, 3072), np.uint8), b"labels": None}, "'labels' is not a list"),
    "a key": ({b"\xff": 1}, "data_batch_3: not a CIFAR file"),
    "label": ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 0, 10, 0]}, "label 10 of example 10 is outside"),
}


@pytest.mark.parametrize("name", CIFAR_DAMAGE)
def test_damaged_cifar10(name, tmp_path):
    content, message = CIFAR_DAMAGE[name]
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    (folder / "data_batch_3").write_bytes(as_published(content))
    with pytest.raises(UserError, match=message) as caught:
        read_cifar10(folder)
    assert one_line(caught).startswith(str(folder))


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_missing_cifar10_file(name, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        read_cifar10(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("meta", {b"names": []}),
        ("meta", {b"fine_label_names": [1, 2, 3]}),
        ("meta", {b"fine_label_names": [b"\xff"] * 100}),
        ("train", {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [0]}),
        ("train", {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [100], b"coarse_labels": [0]}),
    ],
    ids=["no names", "names that are numbers", "names that are no text", "no coarse labels", "label 100"],
)
def test_damaged_cifar100(file, content, tmp_path):
    folder = tmp_path / "cifar-100-python"
    write_cifar100(folder)
    (folder / file).write_bytes(as_published(content))
    with pytest.raises(UserError):
        read_cifar100(folder)


def assert_published_statistics(data: Dataset) -> None:
    normalise = Normaliser.of(make_dataset(data.x.transpose(0, 2, 3, 1), y=data.y))
    np.testing.assert_allclose(normalise.mean.flatten().numpy(), data.mean, atol=1e-3)
    np.testing.assert_allclose(normalise.std.flatten().numpy(), data.std, atol=1e-3)


def test_real_cifar10():
    data = load("cifar10", real_data("cifar-10-batches-py"))
    assert (data.x.shape, data.x_test.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert data.classes == (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    assert np.bincount(data.y).tolist() == [5000] * 10
    assert np.bincount(data.y_test).tolist() == [1000] * 10
    assert_published_statistics(data)


def test_real_cifar100():
    data = load("cifar100", real_data("cifar-100-python"))
    assert (data.x.shape, data.x_test.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert (data.classes[0], data.classes[-1]) == ("apple", "worm")
    assert np.bincount(data.groups).tolist() == [5] * 20
    assert np.bincount(data.y).tolist() == [500] * 100
    assert np.bincount(data.y_test).tolist() == [100] * 100
    assert_published_statistics(data)


def test_arrays_that_run_backwards() -> None:
    """torch takes no negative strides."""
    sets = np.eye(3, dtype=bool)
    data = make_dataset(np.arange(6.0).reshape(3, 2)[::-1], sets[::-1])
    assert data.candidates is not None
    assert torch.from_numpy(data.candidates).tolist() == sets[::-1].tolist()
    assert torch.from_numpy(np.asarray(data.x)).tolist() == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("cells", "warned"), [("1.000;2", True), ("1.000;2.5", False), ("0.250;2", False), ("12.345;-7.000", True)]
)
def test_points_between_semicolons(cells: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where semicolons separate columns, 1.000 may be a thousand."""
    path = put(tmp_path / "a.csv", f"f;g;label\n{cells};a\n1;2;b\n")
    read(path)
    said = [text for text in caplog.messages if "if it means" in text]
    assert len(said) == warned
    if warned:
        first = cells.partition(";")[0]
        assert said == [f"{path}, line 2: '{first}' is read as {float(first):g}; if it means {first.replace('.', '')}, "
                        "write it without the point"]  # fmt: skip


def test_a_class_in_nearly_all_sets_is_remarked_on() -> None:
    sets = np.zeros((20, 4), bool)
    sets[np.arange(20), np.arange(20) % 3] = True
    sets[:14, 3] = True
    data = make_dataset(np.ones((20, 2)), candidates=sets, classes=["a", "b", "c", "the rest"])
    assert data.remarks() == [
        "class 'the rest' is a candidate of 70 % of the examples, others of 33 % on average: where candidates "
        "are guesses, it is named too often; give their weights (a column 'weight')"
    ]
    assert not replace(data, weights=sets / sets.sum(axis=1, keepdims=True)).remarks()
    sets[13, 3] = False
    assert not replace(data, candidates=sets).remarks()
    assert not replace(data, candidates=np.ones((20, 4), bool)).remarks()
