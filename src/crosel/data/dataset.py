"""The one form that all data takes: arrays in memory, checked once, on the way in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.candidates import apply_rule, parse_rule
from crosel.errors import UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """Training examples with candidate sets; true labels are optional and are never used to train."""

    x: Array  # uint8 images [n, channels, height, width] or float32 features [n, d]
    classes: tuple[str, ...]
    candidates: NDArray[np.bool_] | None = None  # [n, k]; None until a rule has drawn them
    y: NDArray[np.int64] | None = None
    x_test: Array | None = None
    y_test: NDArray[np.int64] | None = None
    ids: tuple[str, ...] | None = None  # the user's names for the examples; None: 0, 1, 2, …
    groups: tuple[int, ...] | None = None  # the superclass of each class
    mean: tuple[float, ...] | None = None  # published per-channel normalisation; None: from the training data
    std: tuple[float, ...] | None = None
    flips: bool = True  # whether a mirrored image is still the same class

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    @property
    def is_image(self) -> bool:
        return self.x.ndim == 4

    def example_id(self, row: int) -> str:
        return self.ids[row] if self.ids is not None else str(row)

    def fingerprint(self) -> str:
        """A hash of the training inputs, so that a resumed run can tell that it sees the same data."""
        digest = hashlib.sha256(repr((self.x.shape, str(self.x.dtype), self.classes)).encode())
        digest.update(np.ascontiguousarray(self.x).data)
        return digest.hexdigest()[:16]


def as_inputs(x: Any, place: str) -> Array:
    """Bring images or features into our form, or say what is wrong with them.

    [n, d] are features; [n, h, w] and [n, h, w, c] are images, uint8 or floats in 0..1 or 0..255.
    """
    x = np.asarray(x)
    if x.dtype == object or not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise UserError(f"{place}: expected numbers, found {x.dtype}")
    if x.ndim not in (2, 3, 4):
        raise UserError(f"{place}: expected features [n, d] or images [n, h, w] or [n, h, w, c], got shape {x.shape}")
    if 0 in x.shape:
        raise UserError(f"{place}: there are no examples, or examples of size 0 (shape {x.shape})")
    if np.issubdtype(x.dtype, np.complexfloating):
        raise UserError(f"{place}: complex numbers cannot be used")
    if not np.issubdtype(x.dtype, np.integer) and x.dtype != bool:
        finite = np.isfinite(x).reshape(len(x), -1)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            value = "NaN" if np.isnan(x.reshape(len(x), -1)[row, column]) else "an infinite value"
            raise UserError(f"{place}: {value} in row {row}, column {column}; fill it in or drop the row")
    if x.ndim == 2:
        features: Array = x.astype(np.float32)
        if not np.isfinite(features).all():
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise UserError(f"{place}: row {row}, column {column} is too large for single precision; rescale it")
        return features
    return _as_pixels(x if x.ndim == 4 else x[..., None], place)


def _as_pixels(x: Array, place: str) -> Array:
    if x.dtype != np.uint8:
        low, high = float(x.min()), float(x.max())
        if low < 0 or high > 255:
            raise UserError(f"{place}: pixels must lie in 0..255 or 0..1, found {low:g} to {high:g}")
        scale = 255.0 if high <= 1.0 and np.issubdtype(x.dtype, np.floating) else 1.0
        x = np.rint(x * scale).astype(np.uint8)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def as_labels(y: Any, classes: int, place: str) -> NDArray[np.int64]:
    y = np.asarray(y)
    if y.ndim != 1 or not (np.issubdtype(y.dtype, np.integer) or np.issubdtype(y.dtype, np.floating)):
        raise UserError(f"{place}: expected one integer label for each example, got {y.dtype} of shape {y.shape}")
    wrong = np.flatnonzero((y != np.floor(y)) | (y < 0) | (y >= classes))
    if len(wrong):
        raise UserError(f"{place}: label {y[wrong[0]]} of example {wrong[0]} is outside the classes 0 to {classes - 1}")
    labels: NDArray[np.int64] = y.astype(np.int64)
    return labels


def as_candidates(candidates: Any, place: str) -> NDArray[np.bool_]:
    c = np.asarray(candidates)
    if c.ndim != 2 or c.dtype == object:
        raise UserError(f"{place}: expected a matrix [n, k] of 0 and 1, got {c.dtype} of shape {c.shape}")
    if c.dtype != bool:
        odd = np.argwhere((c != 0) & (c != 1))
        if len(odd):
            row, column = odd[0]
            raise UserError(f"{place}: row {row}, column {column} is {c[row, column]}; only 0 and 1 are allowed")
        c = c.astype(bool)
    if c.shape[1] < 1 or c.shape[0] < 1:
        raise UserError(f"{place}: no examples or no classes (shape {c.shape})")
    empty = np.flatnonzero(~c.any(axis=1))
    if len(empty):
        raise UserError(
            f"{place}: the candidate set of example {empty[0]} is empty ({len(empty)} such); give it at least one label"
        )
    return c


def make_dataset(
    x: Any,
    candidates: Any = None,
    y: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    classes: Sequence[str] | int | None = None,
    ids: Sequence[str] | None = None,
    place: str = "data",
    **hints: Any,
) -> Dataset:
    """Check everything and return a Dataset; `place` is named in errors. Readers end with this call."""
    inputs = as_inputs(x, f"{place}: x")
    sets = None if candidates is None else as_candidates(candidates, f"{place}: candidates")
    if sets is None and y is None:
        raise UserError(f"{place}: there are neither candidate sets ('candidates') nor labels ('y') to draw them for")
    if sets is not None and len(sets) != len(inputs):
        raise UserError(f"{place}: x has {len(inputs)} examples, but candidates has {len(sets)}")
    if classes is None:
        classes = sets.shape[1] if sets is not None else int(as_labels(y, 2**31, f"{place}: y").max(initial=-1)) + 1
        if classes == 0:
            raise UserError(f"{place}: y: there are no labels")
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(map(str, classes))
    if sets is not None and sets.shape[1] != len(names):
        raise UserError(f"{place}: candidates has {sets.shape[1]} columns for {len(names)} classes")
    truth = None if y is None else as_labels(y, len(names), f"{place}: y")
    if truth is not None and len(truth) != len(inputs):
        raise UserError(f"{place}: x has {len(inputs)} examples, but y has {len(truth)}")
    if ids is not None and len(ids) != len(inputs):
        raise UserError(f"{place}: x has {len(inputs)} examples, but there are {len(ids)} ids")
    test = None if x_test is None else as_inputs(x_test, f"{place}: x_test")
    if test is not None and test.shape[1:] != inputs.shape[1:]:
        raise UserError(f"{place}: x_test has examples of shape {test.shape[1:]}, x of shape {inputs.shape[1:]}")
    test_truth = None if y_test is None else as_labels(y_test, len(names), f"{place}: y_test")
    if (test_truth is None) != (test is None):
        raise UserError(f"{place}: x_test and y_test come together or not at all")
    if test is not None and test_truth is not None and len(test) != len(test_truth):
        raise UserError(f"{place}: x_test has {len(test)} examples, but y_test has {len(test_truth)}")
    return Dataset(inputs, names, sets, truth, test, test_truth, None if ids is None else tuple(map(str, ids)), **hints)


def draw_candidates(data: Dataset, rule: str | None, seed: int) -> Dataset:
    """Return the data with candidate sets: its own, or drawn for its plain labels by a rule."""
    if rule is None:
        if data.candidates is None:
            raise UserError("this data has plain labels; say how to draw candidate sets: --candidates uniform:q=0.3")
        return data
    parsed = parse_rule(rule)
    if data.candidates is not None:
        raise UserError(f"this data has its own candidate sets; leave out the rule '{rule}'")
    assert data.y is not None
    return replace(data, candidates=apply_rule(parsed, data.y, len(data.classes), seed, data.groups))
