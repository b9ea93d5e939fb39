"""The one form that all data takes: arrays, checked once, on the way in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.data.store import Examples, StoredImages, channel_counts, chunks
from crosel.errors import UserError

Array = NDArray[Any]
ANY_CLASS = 2**31  # for `as_labels`: as many classes as there may be
LABELS_UNUSED = "true labels are not used"  # the end of a note that says why
IN_NEARLY_ALL = 0.7  # of the sets: a class to be warned of


@dataclass(frozen=True)
class Dataset:
    """Training examples with candidate sets; true labels are optional and are never used to train."""

    x: Examples  # uint8 images [n, channels, height, width] or float32 features [n, d]
    classes: tuple[str, ...]
    candidates: NDArray[np.bool_] | None = None  # [n, k]; None until a rule has drawn them
    y: NDArray[np.int64] | None = None
    x_test: Examples | None = None
    y_test: NDArray[np.int64] | None = None
    ids: tuple[str, ...] | None = None  # the user's names for the examples; None: 0, 1, 2, …
    groups: tuple[int, ...] | None = None  # the superclass of each class
    mean: tuple[float, ...] | None = None  # published per-channel normalisation; None: from the training data
    std: tuple[float, ...] | None = None
    flips: bool = True  # whether a mirrored image is still the same class
    # Raw annotation, until a rule makes candidate sets of it, and what the annotators thought of each candidate.
    votes: NDArray[np.int32] | None = None  # [n, k]: how many annotators chose the label
    scores: NDArray[np.float32] | None = None  # [n, k]: a model's, of any scale
    weights: NDArray[np.float32] | None = None  # [n, k]: 0 outside the candidate set
    columns: tuple[str, ...] | None = None  # names of the features, where a table gives them
    embedded_by: tuple[str, str] | None = None  # name and digest of the backbone whose embeddings the features are
    originals: Any = None  # what the embeddings were made of, for people to look at: images, their files, or texts
    notes: tuple[str, ...] = ()  # what the reader left out, and why, for people to read

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    @property
    def is_image(self) -> bool:
        return self.x.ndim == 4

    @cached_property
    def brightest(self) -> int:
        """The largest value of any pixel of the training images."""
        return int(np.flatnonzero(self._summary[1].sum(axis=0))[-1]) if self._summary else brightest(self.x)

    @cached_property
    def _summary(self) -> tuple[str, NDArray[np.int64]] | None:
        """Of images on disk: the hash, and how often each channel has each value; found in one pass, and kept."""
        return self.x.summary(self._header) if isinstance(self.x, StoredImages) else None

    @property
    def _header(self) -> bytes:
        return repr((self.x.shape, str(self.x.dtype), self.classes)).encode()

    def channel_counts(self) -> NDArray[np.int64]:
        """How often each channel of the training images has each value, [c, 256]."""
        if self._summary:
            return self._summary[1]
        counts = np.zeros((self.shape[0], 256), np.int64)
        for _, part in chunks(self.x, 1024):
            counts += channel_counts(part)
        return counts

    def remarks(self) -> list[str]:
        """What may be wrong with inputs and sets, for people to read."""
        return [*self._remarks_on_brightness(), *self._remarks_on_sets()]

    def _remarks_on_brightness(self) -> list[str]:
        """Values from 0 to 16, say, are nearly black images."""
        if not self.is_image or self.brightest >= 64:
            return []
        if not self.brightest:
            return ["all training images are black: every pixel is 0"]
        return [
            f"the brightest pixel of all training images is {self.brightest} of 255: if that is white in your images, "
            f"divide their values by {self.brightest}, so that they lie in 0..1"
        ]

    def _remarks_on_sets(self) -> list[str]:
        """A class that a guesser finds likely everywhere fits nearly every set, so methods learn to name it."""
        if self.candidates is None or self.weights is not None or len(self.classes) < 3:
            return []
        shares = self.candidates.mean(axis=0)
        top = int(shares.argmax())
        others = float(np.delete(shares, top).mean())
        if shares[top] < IN_NEARLY_ALL or others > shares[top] / 2:
            return []
        often, seldom = f"{100 * shares[top]:.0f} %", f"{100 * others:.0f} %"
        return [
            f"class '{self.classes[top]}' is a candidate of {often} of the examples, others of {seldom} on average: "
            "where candidates are guesses, it is named too often; give their weights (a column 'weight')"
        ]

    def example_id(self, row: int) -> str:
        return self.ids[row] if self.ids is not None else str(row)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the training inputs, so that a resumed run can tell that it sees the same data."""
        if self._summary:
            return self._summary[0][:16]
        digest = hashlib.sha256(self._header)
        digest.update(np.ascontiguousarray(self.x).data)
        return digest.hexdigest()[:16]


def as_examples(x: Any, place: str) -> Examples:
    """The same for all examples of a source, whose images may stay on disk."""
    return x if isinstance(x, StoredImages) else as_inputs(x, place)


def brightest(x: Examples) -> int:
    """The largest value of any pixel."""
    return max(int(part.max()) for _, part in chunks(x, 1024))


def as_inputs(x: Any, place: str, first_row: int = 0) -> Array:
    """Bring images or features into our form, or say what is wrong with them.

    [n, d] are features; [n, h, w] and [n, h, w, c] are images, uint8 or floats in 0..1 or 0..255. Of a file read
    in chunks, `first_row` is where this one begins: errors count from the start of the file.
    """
    x = np.asarray(x)
    check_numbers(x, place, first_row)
    if x.ndim not in (2, 3, 4):
        raise UserError(f"{place}: expected features [n, d] or images [n, h, w] or [n, h, w, c], got shape {x.shape}")
    if x.ndim == 2:
        with np.errstate(over="ignore"):  # said below, with the place
            features: Array = x.astype(np.float32)
        if not np.isfinite(features).all():
            row, column = first_place(~np.isfinite(features))
            where = f"row {first_row + row}, column {column}"
            raise UserError(f"{place}: {where} is too large for single precision; rescale it")
        return features
    return _as_pixels(x if x.ndim == 4 else x[..., None], place)


def check_numbers(x: Array, place: str, first_row: int = 0) -> None:
    """Refuse what holds no numbers, or some that cannot be learnt from."""
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise UserError(f"{place}: expected numbers, found {x.dtype}")
    if 0 in x.shape:
        raise UserError(f"{place}: there are no examples, or examples of size 0 (shape {x.shape})")
    if np.issubdtype(x.dtype, np.complexfloating):
        raise UserError(f"{place}: complex numbers cannot be used")
    check_finite(np.atleast_1d(x), place, first_row)


def first_place(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    """Where the first of them is. A list of all the places would take sixteen times the table's memory."""
    return tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))


def check_finite(x: Array, place: str, first_row: int = 0) -> None:
    if not np.issubdtype(x.dtype, np.floating):
        return
    finite = np.isfinite(x).reshape(len(x), -1)
    if not finite.all():
        row, column = first_place(~finite)
        value = "NaN" if np.isnan(x.reshape(len(x), -1)[row, column]) else "an infinite value"
        raise UserError(f"{place}: {value} in row {first_row + row}, column {column}; fill it in or drop the row")


def _as_pixels(x: Array, place: str) -> Array:
    _, height, width, channels = x.shape
    if channels > 4 and (height == 3 or (height == 1 and width == channels)):
        raise UserError(
            f"{place}: shape {x.shape} looks like [n, c, h, w]; give images as [n, h, w, c]: x.transpose(0, 2, 3, 1)"
        )
    if x.dtype != np.uint8:
        x = np.rint(x * pixel_scale(float(x.min()), float(x.max()), x.dtype, place)).astype(np.uint8)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def pixel_scale(low: float, high: float, dtype: np.dtype[Any], place: str) -> float:
    """By what images with values from low to high are multiplied to lie in 0..255."""
    if low < 0 or high > 255:
        raise UserError(f"{place}: pixels must lie in 0..255 or 0..1, found {low:g} to {high:g}")
    return 255.0 if high <= 1.0 and np.issubdtype(dtype, np.floating) else 1.0


def as_labels(y: Any, classes: int, place: str) -> NDArray[np.int64]:
    y = np.asarray(y)
    if y.ndim != 1 or not (np.issubdtype(y.dtype, np.integer) or np.issubdtype(y.dtype, np.floating)):
        raise UserError(f"{place}: expected one integer label for each example, got {y.dtype} of shape {y.shape}")
    wrong = np.flatnonzero((y != np.floor(y)) | (y < 0) | (y >= classes))
    if len(wrong):
        label = y[wrong[0]]
        bounds = f"classes 0 to {classes - 1}" if classes < ANY_CLASS else "class numbers, which begin with 0"
        remedy = "" if label >= 0 else "; leave out examples without a label"
        raise UserError(f"{place}: label {label} of example {wrong[0]} is outside the {bounds}{remedy}")
    labels: NDArray[np.int64] = y.astype(np.int64)
    return labels


def as_candidates(candidates: Any, place: str) -> NDArray[np.bool_]:
    c = np.asarray(candidates)
    if c.ndim != 2 or c.dtype == object:
        raise UserError(f"{place}: expected a matrix [n, k] of 0 and 1, got {c.dtype} of shape {c.shape}")
    if c.dtype != bool:
        odd = (c != 0) & (c != 1)
        if odd.any():
            row, column = first_place(odd)
            raise UserError(f"{place}: row {row}, column {column} is {c[row, column]}; only 0 and 1 are allowed")
        c = c.astype(bool)
    if c.shape[1] < 1 or c.shape[0] < 1:
        raise UserError(f"{place}: no examples or no classes (shape {c.shape})")
    empty = np.flatnonzero(~c.any(axis=1))
    if len(empty):
        raise UserError(
            f"{place}: the candidate set of example {empty[0]} is empty ({len(empty)} such); give it at least one label"
        )
    return np.ascontiguousarray(c)  # torch takes no S[::-1]


def as_table(values: Any, n: int, k: int, dtype: Any, place: str, signed: bool = False) -> Array:
    """Check a table [n, k] of votes, scores or weights."""
    table = np.asarray(values)
    if not (np.issubdtype(table.dtype, np.integer) or np.issubdtype(table.dtype, np.floating) or table.dtype == bool):
        raise UserError(f"{place}: expected numbers, found {table.dtype}")
    if table.shape != (n, k):
        raise UserError(f"{place}: expected one row for each of {n} examples and one column for each of {k} classes, "
                        f"got shape {table.shape}")  # fmt: skip
    out: Array = table.astype(dtype)
    wrong = ~np.isfinite(out) | (~np.isfinite(table) if np.issubdtype(table.dtype, np.floating) else False)
    if np.issubdtype(out.dtype, np.integer):
        wrong |= out != table
    if not signed:
        wrong |= table < 0
    if wrong.any():
        row, column = first_place(wrong)
        kind = "whole number" if np.issubdtype(out.dtype, np.integer) else "finite number"
        least = "" if signed else " of 0 or more"
        raise UserError(f"{place}: row {row}, column {column} is {table[row, column]}; expected a {kind}{least}")
    return out


def make_dataset(
    x: Any,
    candidates: Any = None,
    y: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    classes: Sequence[str] | int | None = None,
    ids: Sequence[str] | None = None,
    place: str = "data",
    votes: Any = None,
    scores: Any = None,
    weights: Any = None,
    **hints: Any,
) -> Dataset:
    """Check everything and return a Dataset; `place` is named in errors. Readers end with this call."""
    inputs = as_examples(x, f"{place}: x")
    sets = None if candidates is None else as_candidates(candidates, f"{place}: candidates")
    if sets is None and y is None and votes is None and scores is None:
        raise UserError(f"{place}: there are neither candidate sets ('candidates') nor labels ('y') to draw them for")
    if classes is None:
        classes = _count_classes(sets, votes, scores, y, place)
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(map(str, classes))
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(f"{place}: classes: {twice!r} appears twice; name each class once")
    if sets is not None and sets.shape[1] != len(names):
        raise UserError(f"{place}: candidates has {sets.shape[1]} columns for {len(names)} classes")
    truth = None if y is None else as_labels(y, len(names), f"{place}: y")
    for what, rows in (("candidates", sets), ("y", truth)):
        if rows is not None and len(rows) != len(inputs):
            raise UserError(f"{place}: x has {len(inputs)} examples, but {what} has {len(rows)}")
    if ids is not None and len(ids) != len(inputs):
        raise UserError(f"{place}: x has {len(inputs)} examples, but there are {len(ids)} ids")
    test, test_truth = _test_set(x_test, y_test, inputs.shape[1:], len(names), place)
    tables: dict[str, Any] = {
        name: as_table(table, len(inputs), len(names), dtype, f"{place}: {name}", signed=name == "scores")
        for name, table, dtype in (
            ("votes", votes, np.int32), ("scores", scores, np.float32), ("weights", weights, np.float32),
        ) if table is not None
    }  # fmt: skip
    named = None if ids is None else tuple(map(str, ids))
    return Dataset(inputs, names, sets, truth, test, test_truth, named, **tables, **hints)


def _test_set(
    x: Any, y: Any, shape: tuple[int, ...], classes: int, place: str
) -> tuple[Examples, NDArray[np.int64]] | tuple[None, None]:
    """Test examples of this shape with their labels, or neither."""
    inputs = None if x is None else as_examples(x, f"{place}: x_test")
    if inputs is not None and inputs.shape[1:] != shape:
        raise UserError(f"{place}: x_test has examples of shape {inputs.shape[1:]}, x of shape {shape}")
    truth = None if y is None else as_labels(y, classes, f"{place}: y_test")
    if inputs is None and truth is None:
        return None, None
    if inputs is None or truth is None:
        raise UserError(f"{place}: give both x_test and y_test, or neither")
    if len(inputs) != len(truth):
        raise UserError(f"{place}: x_test has {len(inputs)} examples, but y_test has {len(truth)}")
    return inputs, truth


def _count_classes(sets: Any, votes: Any, scores: Any, y: Any, place: str) -> int:
    for table in (sets, votes, scores):
        if table is not None and np.ndim(table) == 2:
            return int(np.shape(table)[1])
    if y is None:
        raise UserError(f"{place}: votes and scores must be tables [n, k]")
    count = int(as_labels(y, ANY_CLASS, f"{place}: y").max(initial=-1)) + 1
    if count == 0:
        raise UserError(f"{place}: y: there are no labels")
    return count


def hold_out(data: Dataset, share: float, seed: int) -> Dataset:
    """Move a share of the examples to the test set."""
    if data.x_test is not None:
        raise UserError(
            "setting 'data.test_share': this data has its own test set; to hold out training examples "
            "instead, add --set data.own_test=false"
        )
    if data.y is None:
        raise UserError(
            "setting 'data.test_share': a test set needs true labels, which this data does not have; leave it out"
        )
    train, test = random_split(data.n, share, seed)
    if not len(train) or not len(test):
        raise UserError(
            f"setting 'data.test_share': {share:g} of {data.n} examples leaves one side empty; change the share"
        )
    return replace(only_rows(data, train), x_test=data.x[test], y_test=data.y[test])


def random_split(n: int, share: float, seed: int) -> tuple[Array, Array]:
    """Rows to keep and a share to hold out, each in order; the same ones for a seed, on every machine."""
    order = np.random.Philox(np.random.SeedSequence(seed)).random_raw(n).argsort(kind="stable")
    count = round(share * n)
    return np.sort(order[count:]), np.sort(order[:count])


def only_rows(data: Dataset, rows: Array) -> Dataset:
    """The data with some of its training examples; the test set is left alone."""
    tables = {name: getattr(data, name) for name in ("candidates", "votes", "scores", "weights", "y")}
    kept: dict[str, Any] = {name: None if table is None else table[rows] for name, table in tables.items()}
    if data.originals is not None:
        kept["originals"] = (
            data.originals[rows] if isinstance(data.originals, np.ndarray) else data.originals.take(rows)
        )
    return replace(data, x=data.x[rows], ids=tuple(data.example_id(int(row)) for row in rows), **kept)
