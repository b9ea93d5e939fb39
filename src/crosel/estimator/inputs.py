"""From what users pass to the estimators to our arrays: inputs, candidate sets, labels of any hashable type."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets

from crosel.data.dataset import as_candidates, as_inputs, check_numbers
from crosel.data.embeddings import Embedder, Encoder, embed_texts
from crosel.data.images import embed_arrays
from crosel.data.settings import DataSettings
from crosel.errors import UserError
from crosel.utils.system import check_bytes

Array = NDArray[Any]

BYTES, FLOAT_BYTES, UNIT = "integers in 0..255", "floats in 0..255", "floats in 0..1"


class UserTypeError(UserError, TypeError):
    """A UserError where scikit-learn's users expect a TypeError."""


CandidateSets = tuple[NDArray[np.bool_], Array]  # bool [n, k], and the k labels that its columns stand for


# --- inputs -------------------------------------------------------------------------------------------------------


def is_image_like(x: Any) -> bool:
    """Whether x has three or four dimensions. Everything else goes to scikit-learn's validation of features."""
    if hasattr(x, "shape"):
        return len(x.shape) in (3, 4)
    try:
        return np.asarray(x).ndim in (3, 4)
    except ValueError:  # rows of different lengths
        return False


def are_texts(x: Any) -> bool:
    """Whether x is one text after the other, and no table."""
    return isinstance(next(iter(_one_column(x)), None), str)


def _one_column(x: Any) -> Sequence[Any]:
    """The items of a list, array or series of one dimension; nothing of anything else."""
    if len(getattr(x, "shape", (0,))) != 1 or hasattr(x, "columns"):
        return ()
    x = x.to_list() if hasattr(x, "to_list") else x.tolist() if isinstance(x, np.ndarray) else x
    return x if isinstance(x, list | tuple) else ()


def embedded(x: Any, encoder: Encoder, kind: str | None) -> Array:
    """Embeddings [n, d] of texts, or of images whose numbers mean `kind`."""
    if encoder.takes == "texts":
        if not are_texts(x):
            raise UserError(f"X: network '{encoder.name}' takes texts; pass a list of them")
        settings = DataSettings(cache=False).embedding(Embedder(encoder))
        return embed_texts(_one_column(x), lambda row: f"X: row {row}", settings, None)[0]
    if kind is None:
        raise UserError(f"X: network '{encoder.name}' takes images; pass images [n, h, w] or [n, h, w, c]")
    return embed_arrays(as_inputs(to_uint8(x, kind), "X"), Embedder(encoder), None)


def to_host(x: Any) -> Any:
    """Turn tensors and sparse matrices into arrays; leave everything else as it is."""
    if issparse(x):
        check_bytes(4 * math.prod(x.shape), "X, which is sparse, as a table of single precision", "fit")
        return x.astype(np.float32).toarray()
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x


def pixel_kind(x: Any) -> str:
    """What the numbers of images mean; `fit` decides it once."""
    x = np.asarray(x)
    if x.dtype == bool or (np.issubdtype(x.dtype, np.floating) and bool((x <= 1).all())):
        return UNIT
    return FLOAT_BYTES if np.issubdtype(x.dtype, np.floating) else BYTES


def to_uint8(images: Any, kind: str) -> Array:
    """Images as uint8, by the meaning that `fit` found. uint8 images stay as they are, whatever `fit` saw."""
    x: Array = np.asarray(images)
    if x.dtype == np.uint8:
        return x if x.flags.writeable else x.copy()  # torch warns of arrays it may not write to
    check_numbers(x, "X")
    low, high = float(x.min()), float(x.max())
    top = 1.0 if kind == UNIT else 255.0
    if kind == UNIT and low >= 0 and high > top:
        raise UserError(f"X: the training images were {UNIT}, these go up to {high:g}; divide them by 255")
    if low < 0 or high > top:
        raise UserError(f"X: pixels must lie in 0..255 or 0..1, found {low:g} to {high:g}")
    if kind == BYTES and np.issubdtype(x.dtype, np.floating) and 0 < high <= 1 and (x % 1 != 0).any():
        raise UserError(f"X: the training images were {BYTES}, these are floats up to {high:g}; multiply them by 255")
    scaled: Array = np.rint(x.astype(np.float64) * (255.0 / top)).astype(np.uint8)
    return scaled


# --- candidate sets -----------------------------------------------------------------------------------------------


def read_candidates(given: Any, classes: Any = None) -> CandidateSets:
    """Read a 0/1 matrix, a list of label collections, or plain labels (singleton sets).

    `classes` names the columns of a matrix, or all labels. Without it, the data decide: the column names of a data
    frame, 0 to k-1 for other matrices, otherwise the sorted labels that occur.
    """
    known = None if classes is None else label_array(_check_classes(classes))
    if hasattr(given, "columns") and len(given.columns) > 1 and not _holds_words(given):  # pandas or polars
        names = label_array([_item(name) for name in given.columns])
        return _from_matrix(np.asarray(given.to_numpy()), known, names)
    rows = _as_rows(given)
    if isinstance(rows, np.ndarray) and rows.ndim == 2:
        return _from_matrix(rows, known, np.arange(rows.shape[1]))
    if isinstance(rows, np.ndarray):
        _warn_of_joined(rows.tolist())
        return _from_labels(rows, known)
    return _from_sets(rows, known)


def split_weights(given: Any) -> tuple[Any, Array | None]:
    """A matrix of fractions holds weights of candidates: the 0/1 matrix of those above 0, and the weights. All else is
    what it was, without weights."""
    values = to_host(given.toarray() if issparse(given) else given)
    table = values.to_numpy() if hasattr(values, "columns") else values
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype.kind != "f":
        return given, None
    with np.errstate(invalid="ignore"):
        fractions = np.isfinite(table).all() and (table >= 0).all() and (table != np.rint(table)).any()
    if not fractions:
        return given, None
    return (given > 0 if hasattr(values, "columns") else table > 0), table.astype(np.float32)


def inside(predicted: Sequence[Any], given: Any, classes: Array) -> NDArray[np.bool_]:
    """Whether each predicted label is the true one, or is in the given candidate set."""
    rows = _as_rows(split_weights(given)[0])
    if len(rows) != len(predicted):
        raise UserError(f"X has {len(predicted)} examples, but y has {len(rows)}")
    if isinstance(rows, np.ndarray) and rows.ndim == 2:
        matrix = _candidate_matrix(rows)
        if matrix.shape[1] != len(classes):
            raise UserError(f"y: {matrix.shape[1]} columns for {len(classes)} classes")
        return matrix[np.arange(len(matrix)), class_indices(predicted, classes)]
    sets = [[truth] for truth in rows.tolist()] if isinstance(rows, np.ndarray) else rows
    known = classes.tolist()
    if not any(label in known for row in sets for label in row):  # ends at the first known label
        other = next((label for row in sets for label in row), None)
        warnings.warn(
            f"y: no label is a class ({other!r} is none; {known[0]!r} is one), so the score is 0", stacklevel=3
        )
    return np.array([label in row for label, row in zip(predicted, sets, strict=True)], bool)


def _as_rows(given: Any) -> Array | list[list[Any]]:
    """A 2-d array (matrix), a 1-d array (plain labels), or a list of label lists."""
    if given is None:
        raise UserError("fit requires y to be passed, but the target y is None; give candidate sets or labels")
    given = given.toarray() if issparse(given) else to_host(given)
    if hasattr(given, "columns"):
        if len(given.columns) > 1 and _holds_words(given):
            return _votes(given)
        given = np.asarray(given.to_numpy())
    elif hasattr(given, "to_list"):  # a pandas or polars series
        given = given.to_list()
    elif not isinstance(given, np.ndarray) and hasattr(given, "__array__"):
        given = np.asarray(given)
    if isinstance(given, np.ndarray):
        array = _ravel(given)
        if array.ndim not in (1, 2):
            raise UserError(f"candidates: expected a matrix [n, k], label lists or labels, got shape {array.shape}")
        if array.ndim == 2 and not _is_text(array):
            return array.astype(float) if array.dtype == object else array
        if array.ndim == 1 and (array.dtype != object or not _holds_sets(array)):
            return array
        given = list(array)
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise UserError(f"candidates: expected a matrix [n, k], label lists or labels, got {type(given).__name__}")
    items = list(given)
    if not items:
        raise UserError("candidates: there are no examples (n_samples=0)")
    if not _holds_sets(items):
        mixed = len({isinstance(item, str) for item in items}) > 1  # numpy would turn [1, "a"] into strings
        return _object_array(items) if mixed else np.asarray(items)
    return _label_lists(items)


def _holds_words(frame: Any) -> bool:
    values = np.asarray(frame.to_numpy())
    return values.dtype.kind in "US" or (values.dtype == object and any(isinstance(v, str) for v in values.flat))


def _votes(frame: Any) -> list[list[Any]]:
    """A frame with a column for each annotator -> all labels that anyone chose. An empty cell is no vote."""
    rows: list[list[Any]] = []
    for row in np.asarray(frame.to_numpy()).tolist():
        said = [(name, vote) for name, vote in zip(frame.columns, row, strict=True) if not _is_missing(vote)]
        for name, vote in said:
            if not isinstance(vote, str):  # an id beside a matrix, say
                raise UserError(
                    f"candidates: column {name!r} holds {vote!r}, other columns hold words; a frame has 0 and 1 for "
                    "each class, or words for each annotator"
                )
        rows.append(list(dict.fromkeys(vote for _, vote in said if vote.strip())))
    if {vote.strip().lower() for row in rows for vote in row} <= {"0", "1", "true", "false"}:
        raise UserError(
            "candidates: a frame with nothing but the texts 0 and 1 may be a matrix or votes; pass a matrix as "
            "numbers, votes as sets"
        )
    _warn_of_joined([vote for row in rows for vote in row])
    return rows


def _ravel(array: Array) -> Array:
    """Take one column of labels as labels, with scikit-learn's own warning."""
    if array.ndim != 2 or array.shape[1] != 1 or array.dtype == bool:
        return array
    warnings.warn(
        "A column-vector y was passed when a 1d array was expected. Please change the shape of y to (n_samples, ), "
        "for example using ravel().", DataConversionWarning, stacklevel=5,
    )  # fmt: skip
    column: Array = array[:, 0]
    return column


def _warn_of_joined(labels: Sequence[Any]) -> None:
    """A column of our csv files, passed as it is, would make each set a class of its own."""
    joined = next((label for label in labels if isinstance(label, str) and "|" in label), None)
    if joined is not None:
        warnings.warn(
            f"candidates: {joined!r} is read as one label; if it is a set, split it: [text.split('|') for text in y]",
            stacklevel=5,
        )


def _is_set(item: Any) -> bool:
    return isinstance(item, Collection) and not isinstance(item, str | bytes | dict)


def _is_text(values: Array) -> bool:
    """Whether a matrix holds labels instead of 0 and 1."""
    if values.dtype != object:
        return values.dtype.kind in "US"
    return not all(isinstance(v, bool | int | float | np.number | np.bool_) for v in values.flat)


def _holds_sets(items: Iterable[Any]) -> bool:
    return any(_is_set(item) for item in items)


def _label_lists(items: Sequence[Any]) -> Array | list[list[Any]]:
    rows: list[list[Any]] = []
    for position, item in enumerate(items):
        if not _is_set(item):
            raise UserError(f"candidates: example {position} is {item!r}, but others are collections of labels")
        rows.append([_item(label) for label in item])
    flat = [label for row in rows for label in row]
    same_length = len({len(row) for row in rows}) == 1
    if same_length and flat and all(isinstance(label, bool) for label in flat):
        return np.array(rows)
    if same_length and len(rows[0]) > 1 and all(isinstance(v, int | float) and v in (0, 1) for v in flat):
        raise UserError(
            "candidates: lists of equal length with only 0 and 1 may be a matrix or label lists; "
            "pass a matrix as a numpy array, label lists as sets"
        )
    return rows


def _item(label: Any) -> Any:
    return label.item() if isinstance(label, np.generic) else label


def _candidate_matrix(values: Array) -> NDArray[np.bool_]:
    try:
        matrix = as_candidates(values, "candidates")
        return matrix if matrix.flags.writeable else matrix.copy()
    except UserError as error:
        if values.ndim == 2 and np.issubdtype(values.dtype, np.number) and "only 0 and 1" in str(error):
            raise UserError(f"{error} (pass label lists as lists or sets, not as an array)") from None
        raise


def _from_matrix(values: Array, known: Array | None, columns: Array) -> CandidateSets:
    """`columns` are the labels that the matrix itself has."""
    matrix = _candidate_matrix(values)
    if known is not None and len(known) != len(columns):
        raise UserError(f"candidates: {len(columns)} columns for {len(known)} classes")
    return matrix, columns if known is None else known


def _from_labels(labels: Array, known: Array | None) -> CandidateSets:
    """Plain labels: every set has one member."""
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        row = int(np.argwhere(~np.isfinite(labels))[0, 0])
        raise UserError(f"y: NaN or infinity at example {row}; every example needs a label")
    if len(labels) == 0:
        raise UserError("y: there are no examples (n_samples=0)")
    if labels.dtype != object:
        try:
            check_classification_targets(labels)
        except ValueError as error:
            raise UserError(str(error).splitlines()[0]) from None
    if labels.dtype == object or known is not None:
        return _from_sets([[_item(label)] for label in labels.tolist()], known)
    found, index = np.unique(labels, return_inverse=True)
    return np.eye(len(found), dtype=bool)[index], found


def _is_missing(label: Any) -> bool:
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas' NA has no truth value
        return True


def _from_sets(rows: Sequence[Sequence[Any]], known: Array | None) -> CandidateSets:
    found: set[Hashable] = set()
    for position, row in enumerate(rows):
        if not row:
            raise UserError(f"candidates: the candidate set of example {position} is empty; give it at least one label")
        try:
            found.update(row)
        except TypeError:
            raise UserError(f"candidates: example {position} has a label that is not hashable: {row!r}") from None
        if any(map(_is_missing, row)):
            raise UserError(
                f"candidates: example {position} has a missing label (None or NaN); leave it out of the set"
            )
        if "" in row:
            raise UserError(f"candidates: example {position} has an empty string as a label; leave it out of the set")
    classes = label_array(_sorted_labels(found)) if known is None else known
    column = {label: j for j, label in enumerate(classes.tolist())}
    matrix = np.zeros((len(rows), len(classes)), bool)
    for position, row in enumerate(rows):
        for label in row:
            if label not in column:
                raise UserError(f"candidates: example {position} has the label {label!r}, which is not in `classes`")
            matrix[position, column[label]] = True
    return matrix, classes


# --- labels -------------------------------------------------------------------------------------------------------


def _sorted_labels(labels: Iterable[Any]) -> list[Any]:
    """Sorted; labels that cannot be compared by type and text, which is the same order every time."""
    labels = list(labels)
    try:
        return sorted(labels)
    except TypeError:
        return sorted(labels, key=lambda label: (type(label).__name__, repr(label)))


def _check_classes(classes: Any) -> list[Any]:
    labels = [_item(label) for label in (classes.tolist() if isinstance(classes, np.ndarray) else classes)]
    try:
        repeated = len(set(labels)) < len(labels)
    except TypeError:
        raise UserError("classes: every label must be hashable") from None
    if repeated or not labels:
        raise UserError("classes: expected at least one label, each once")
    return labels


def label_array(labels: Sequence[Any]) -> Array:
    """A one-dimensional array: of a numpy type if all labels have one simple type, otherwise of objects."""
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {str, bool, int, float}:
        try:
            array = np.array(labels)
        except OverflowError:
            array = _object_array(labels)
        return array if array.dtype.kind in "Ubif" else _object_array(labels)
    return _object_array(labels)


def _object_array(labels: Sequence[Any]) -> Array:
    array = np.empty(len(labels), dtype=object)
    for position, label in enumerate(labels):  # one by one: numpy would turn a list of tuples into a matrix
        array[position] = label
    return array


def class_indices(labels: Sequence[Any], classes: Array) -> NDArray[np.int64]:
    """The column of each label."""
    column = {label: j for j, label in enumerate(classes.tolist())}
    return np.array([column[label] for label in labels], np.int64)


def encode_labels(labels: Array) -> dict[str, Any]:
    """Labels as JSON that `decode_labels` turns back into the same types."""
    if labels.dtype != object:
        return {"dtype": labels.dtype.str, "values": labels.tolist()}
    return {"dtype": "object", "values": [_encode(label) for label in labels]}


def decode_labels(saved: dict[str, Any]) -> Array:
    if saved["dtype"] != "object":
        return np.array(saved["values"], dtype=np.dtype(saved["dtype"]))
    return _object_array([_decode(item) for item in saved["values"]])


def _encode(label: Any) -> list[Any]:
    if isinstance(label, tuple):
        return ["tuple", [_encode(part) for part in label]]
    if type(label) in (str, int, float, bool):
        return [type(label).__name__, label]
    raise UserError(
        f"labels of type {type(label).__name__} cannot be saved; use strings, numbers or tuples of them, or pickle"
    )


def _decode(item: list[Any]) -> Any:
    kind, value = item
    if kind == "tuple":
        return tuple(_decode(part) for part in value)
    return {"str": str, "int": int, "float": float, "bool": bool}[kind](value)


# --- parameters ---------------------------------------------------------------------------------------------------


def check_settings(name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UserError(f"{name}: expected a dict of settings, got {type(given).__name__}")
    if "name" in given:
        raise UserError(f"{name}: the name is a separate parameter of the classifier")
    return {str(key): value for key, value in given.items()}


def to_python(value: Any) -> Any:
    """Grid searches pass numpy's numbers, which the config does not take."""
    if isinstance(value, Mapping):
        return {key: to_python(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_python(item) for item in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value
