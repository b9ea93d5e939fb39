"""Our own file: npz with x, candidates [n, k] bool or plain labels y, optional x_test, y_test, classes, ids.

Raw annotation (votes, scores, weights [n, k]) and what is known of the images (groups, mean, std, flips) have their
places too. Votes and scores may stand without x: their inputs are joined by id (`data.inputs`).
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import ANY_CLASS, Array, Dataset, as_labels, check_finite, make_dataset, pixel_scale
from crosel.data.formats.base import Chunk, Format, InputSpec
from crosel.data.settings import DataSettings, OnImages
from crosel.data.store import Examples
from crosel.data.table import Table
from crosel.data.vocabulary import Vocabulary, alike, may_be_unknown
from crosel.data.votes import Inputs, join_inputs
from crosel.errors import UserError
from crosel.utils.files import atomic_write_with
from crosel.utils.reading import is_text, npy_header, open_file
from crosel.utils.system import check_bytes
from crosel.utils.text import did_you_mean, one_line

_SAVE_X = "; save the inputs under this name"
FIELDS = (
    "x", "candidates", "y", "x_test", "y_test", "classes", "ids", "votes", "scores", "weights", "groups", "mean", "std",
    "flips", "columns",
)  # fmt: skip


class Npz(Format):
    title, suffixes = "npz", (".npz", ".npy")

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        arrays = _read_arrays(path)
        given, ids = _pop_names(arrays, "classes", path), _pop_names(arrays, "ids", path)
        hints, classes = _pop_hints(arrays, path), _labels_as_numbers(arrays, given, path)
        if given is None and classes is not None:
            hints["notes"] = (*alike(classes), *may_be_unknown(classes, "leave such examples out"))
        if "x" not in arrays:
            arrays = _with_inputs(arrays, classes, ids, path, settings, progress)
        elif settings.inputs is not None:
            raise UserError(f"{path}: it has its inputs already, the array 'x'; leave out data.inputs, or x")
        data = make_dataset(**{**hints, **arrays}, classes=classes, ids=ids, place=str(path))
        if data.groups is not None and len(data.groups) != len(data.classes):
            raise UserError(f"{path}: 'groups' has {len(data.groups)} entries for {len(data.classes)} classes")
        check_columns(data.columns, data.shape, path)
        channels = data.shape[0]
        for name, values in (("mean", data.mean), ("std", data.std)):
            if values is not None and (len(values) != channels or (name == "std" and min(values) <= 0)):
                raise UserError(f"{path}: '{name}' must have {channels} numbers{' above 0' if name == 'std' else ''}")
        return data

    def read_inputs(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Inputs:
        """x with its ids; labels as names where both y and the classes are there."""
        arrays = _read_arrays(path)
        if "x" not in arrays:
            raise UserError(f"{path}: the array 'x' is missing{_SAVE_X}")
        classes, ids = _pop_names(arrays, "classes", path), _pop_names(arrays, "ids", path)
        classes = _labels_as_numbers(arrays, classes, path)
        x = arrays["x"]
        n = len(x) if x.ndim else 0
        if ids is not None and len(ids) != n:
            raise UserError(f"{path}: x has {n} examples, but there are {len(ids)} ids; give one for each")

        def labels(name: str, count: int) -> tuple[str, ...] | None:
            if name not in arrays:
                return None
            y = as_labels(arrays[name], len(classes) if classes else ANY_CLASS, f"{path}: {name}")
            if len(y) != count:
                raise UserError(f"{path}: {count} examples, but {name} has {len(y)}")
            return tuple(classes[i] if classes else str(i) for i in y)

        columns = _pop_hints(arrays, path).get("columns")
        check_columns(columns, x.shape[1:], path)
        x_test = arrays.get("x_test")
        y_test = None if x_test is None or not x_test.ndim else labels("y_test", len(x_test))
        return Inputs(x, tuple(ids or map(str, range(n))), labels("y", n), x_test if y_test else None, y_test, columns)

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        with open_archive(path, "x") as (archive, members):
            if "x" not in archive.files:
                raise UserError(f"{path}: the array 'x' is missing{_SAVE_X}")
            named = _read_some(archive, members, [name for name in ("ids", "columns") if name in archive.files], path)
            ids, columns = _pop_names(named, "ids", path), _pop_names(named, "columns", path)
            yield from _stored_chunks(_StoredArray(path, members), ids, columns, spec)


def write_npz(data: Dataset, out: Path) -> None:
    """Write everything that training needs; votes and scores have become candidate sets and weights."""

    def outside(x: Examples | None) -> Array | None:  # images as the file has them, [n, h, w, c]: a view
        return None if x is None else np.asarray(x).transpose(0, 2, 3, 1) if x.ndim == 4 else np.asarray(x)

    values = {
        "x": outside(data.x), "candidates": data.candidates, "classes": data.classes, "y": data.y,
        "x_test": outside(data.x_test), "y_test": data.y_test, "ids": data.ids, "weights": data.weights,
        "columns": data.columns, "groups": data.groups, "mean": data.mean, "std": data.std, "flips": data.flips,
    }  # fmt: skip
    present: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    atomic_write_with(out, lambda stream: np.savez(stream, **present))


# --- arrays, whole --------------------------------------------------------------------------------------------------


def _read_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an npz file, none of them objects (those are pickles: never from outside)."""
    with open_archive(path, "x and candidates") as (archive, members):
        unknown = [name for name in archive.files if name not in FIELDS]
        if "pred_probs" in unknown and "flags" in unknown:
            raise UserError(
                f"{path}: these are labels that crosel wrote, without the examples themselves; give the source "
                "that the run was trained on"
            )
        if unknown:
            near = did_you_mean(unknown[0], FIELDS)
            raise UserError(f"{path}: unknown array '{unknown[0]}'{near}; known arrays: {', '.join(FIELDS)}")
        return _read_some(archive, members, archive.files, path)


def _read_some(archive: Any, members: zipfile.ZipFile, names: Sequence[str], path: Path) -> dict[str, Any]:
    """The arrays of these names; what they take is counted before any is unpacked."""
    wanted = [member for member in members.infolist() if member.filename.removesuffix(".npy") in names]
    check_bytes(sum(_working_bytes(members, member) for member in wanted), "its content", path)
    return {name: _read_array(archive, name, path) for name in names}


def _working_bytes(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """What an array takes at the most, while it is checked and brought into our form.

    Compressed zeros can unfold to any size: what the archive says is all that is ever unpacked.
    """
    with members.open(member) as stream:
        try:
            shape, _, dtype = npy_header(stream)
        except ValueError:  # not an array, which is said when it is read, or one with a header of another kind
            return 18 * member.file_size
    numbers, width = math.prod(shape), dtype.itemsize
    if numbers * width > member.file_size:  # it is cut short, which is said when it is read
        return member.file_size
    if dtype.kind in "US":  # as Python's own texts
        return numbers * (2 * width + 64)
    if not member.filename.startswith("x"):
        return numbers * (2 * width + 16)
    if len(shape) == 2:
        return numbers * (width + 6)
    return numbers * (2 if dtype == np.uint8 else 3 * width + 3)


@contextmanager
def open_archive(path: Path, wanted: str) -> Iterator[tuple[Any, zipfile.ZipFile]]:
    """An npz file as numpy and as zipfile have it; anything wrong with it is a UserError."""
    if path.suffix.lower() == ".npy":
        raise UserError(
            f"{path}: an array without a name; save it with its inputs as npz: np.savez('mine.npz', x=x, scores=s)"
        )
    with open_file(path) as stream:  # numpy takes anything else for a pickle, and suggests loading it unsafely
        start = stream.read(6)
    if not start.startswith((b"PK", b"\x93NUMPY")):
        raise UserError(f"{path}: not a readable npz file; give an archive of arrays, as np.savez writes it")
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise UserError(f"{path}: this is a single array; give an npz file with {wanted}")
        with loaded as archive, zipfile.ZipFile(path) as members:
            yield archive, members
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # zip, zlib and numpy each have their own errors for a damaged file
        raise UserError(f"{path}: not a readable npz file ({one_line(error)}); write it again with np.savez") from None


def _read_array(archive: Any, name: str, path: Path) -> Any:
    try:
        found = archive[name]
        if isinstance(found, bytes):  # how numpy returns what does not begin as an array
            raise UserError(f"{path}: '{name}' is not an array; write the file again with np.savez")
        if not is_text(found):
            raise UserError(f"{path}: '{name}' is not plain text")
        return found
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise UserError(
            f"{path}: '{name}' holds Python objects, which are never loaded; convert it to numbers or text with astype"
        ) from None


def _pop_names(arrays: dict[str, Any], name: str, path: Path) -> list[str] | None:
    return as_names(arrays.pop(name), name, path) if name in arrays else None


def as_names(values: Any, name: str, path: Path) -> list[str]:
    """Ids or classes as text, bytes among them; numbers are written out."""
    if values.ndim != 1:
        raise UserError(f"{path}: '{name}' must be one-dimensional, not of shape {values.shape}")
    return _as_text(values, name, path) if values.dtype.kind in "SU" else [str(value) for value in values]


def check_columns(columns: Sequence[str] | None, shape: tuple[int, ...], path: Path) -> None:
    """Names of the features, for examples of this shape."""
    if columns is not None and shape != (len(columns),):
        raise UserError(f"{path}: 'columns' has {len(columns)} names, but there must be one for each feature")


def _as_text(values: Any, name: str, path: Path) -> list[str]:
    try:
        return [str(value) for value in (np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values)]
    except UnicodeDecodeError:
        raise UserError(f"{path}: '{name}' is not plain text") from None


def _labels_as_numbers(arrays: dict[str, Any], classes: list[str] | None, path: Path) -> list[str] | None:
    """Put numbers for labels that are names, and return the classes, which may follow from these names."""
    named = {
        name: _as_text(arrays[name], name, path)
        for name in ("y", "y_test")
        if name in arrays and arrays[name].dtype.kind in "SU" and arrays[name].ndim == 1
    }
    if not named:
        return classes
    table = next((name for name in ("candidates", "votes", "scores") if name in arrays), None)
    if classes is None and table is not None:
        raise UserError(f"{path}: '{next(iter(named))}' has names, so 'classes' must name the columns of '{table}'")
    vocabulary = Vocabulary((label for labels in named.values() for label in labels), classes)
    for name, labels in named.items():
        numbers = np.empty(len(labels), np.int64)
        for row, label in enumerate(labels):
            try:
                numbers[row] = vocabulary[label]
            except ValueError as error:
                raise UserError(f"{path}: {name}, row {row}: {error}") from None
        arrays[name] = numbers
    return list(vocabulary.classes)


def _pop_hints(arrays: dict[str, Any], path: Path) -> dict[str, Any]:
    """What is known of the inputs: superclasses, normalisation, whether mirroring is harmless, names of features."""
    out: dict[str, Any] = {}
    for name, kind in (("groups", np.integer), ("mean", np.floating), ("std", np.floating)):
        values = arrays.pop(name, None)
        if values is not None:
            if values.ndim != 1 or not np.issubdtype(values.dtype, kind) or not np.isfinite(values).all():
                raise UserError(
                    f"{path}: '{name}' must be a row of numbers, not {values.dtype} of shape {values.shape}"
                )
            out[name] = tuple(value.item() for value in values)
    flips = arrays.pop("flips", None)
    if flips is not None:
        if flips.shape != () or flips.dtype != bool:
            raise UserError(f"{path}: 'flips' must be one true or false")
        out["flips"] = bool(flips)
    columns = _pop_names(arrays, "columns", path)
    return out if columns is None else {**out, "columns": tuple(columns)}


def _with_inputs(
    arrays: dict[str, Any], classes: list[str] | None, ids: list[str] | None, path: Path,
    settings: DataSettings, progress: OnImages | None,
) -> dict[str, Any]:  # fmt: skip
    raw = arrays.get("votes", arrays.get("scores"))
    if raw is None or settings.inputs is None:
        remedy = _SAVE_X if raw is None else "; give the file with the inputs: --set data.inputs=FILE"
        raise UserError(f"{path}: the array 'x' is missing{remedy}")
    if raw.ndim != 2:
        raise UserError(f"{path}: votes and scores must be tables [n, k], not of shape {raw.shape}")
    names = ids or [str(row) for row in range(len(raw))]
    joined = join_inputs(Table(path, range(len(names)), {"id": names}, {}, unit="row"), names, settings, progress)
    if joined.bad:
        raise UserError(joined.bad[min(joined.bad)])
    if joined.columns is not None:
        arrays["columns"] = joined.columns
    vocabulary = Vocabulary((), classes or [str(i) for i in range(raw.shape[1])])
    place = f"{settings.inputs}: label"
    if joined.labels is not None and "y" not in arrays:
        arrays["y"] = vocabulary.indices(joined.labels, place)
    if joined.labels_test is not None and "y_test" not in arrays:
        arrays["x_test"], arrays["y_test"] = joined.x_test, vocabulary.indices(joined.labels_test, place)
    return {**arrays, "x": joined.x}


# --- arrays, a few rows at a time -----------------------------------------------------------------------------------


class _StoredArray:
    """The array x of an npz file, read a few rows at a time."""

    def __init__(self, path: Path, members: zipfile.ZipFile) -> None:
        self.path, self._members = path, members
        self._member = "x.npy" if "x.npy" in members.namelist() else "x"
        with members.open(self._member) as stream:
            self.shape, self._by_columns, self.dtype = npy_header(stream)

    def checked_shape(self) -> tuple[int, ...]:
        """The shape of one example, channels first; an array of something else is refused."""
        place, shape, dtype = f"{self.path}: x", self.shape, self.dtype
        if dtype.hasobject:
            raise UserError(f"{place}: Object arrays cannot be loaded; expected numbers")
        if not (np.issubdtype(dtype, np.number) or dtype == np.bool_) or np.issubdtype(dtype, np.complexfloating):
            raise UserError(f"{place}: expected numbers, found {dtype}")
        if len(shape) not in (2, 3, 4) or 0 in shape:
            what = "no examples, or of size 0," if 0 in shape else "neither features [n, d] nor images [n, h, w, c]"
            raise UserError(f"{place}: {what} in shape {shape}")
        if len(shape) == 2:
            return shape[1:]
        return (1, *shape[1:]) if len(shape) == 3 else (shape[3], *shape[1:3])

    def parts(self, rows: int) -> Iterator[tuple[int, Array]]:
        """(first row, at most so many rows), from the start to the end."""
        n = self.shape[0]
        if self._by_columns:  # there are no rows to read one after the other
            check_bytes(_working_bytes(self._members, self._members.getinfo(self._member)), "its content", self.path)
            with np.load(self.path, allow_pickle=False) as archive:
                x = archive["x"]
            yield from ((start, x[start : start + rows]) for start in range(0, n, rows))
            return
        values = math.prod(self.shape[1:])  # of one row
        with self._members.open(self._member) as stream:
            npy_header(stream)
            for start in range(0, n, rows):
                count = min(rows, n - start)
                content = bytearray(stream.read(count * values * self.dtype.itemsize))  # torch wants it writeable
                yield start, np.frombuffer(content, self.dtype, count * values).reshape(count, *self.shape[1:])


def _stored_chunks(
    stored: _StoredArray, ids: list[str] | None, columns: list[str] | None, spec: InputSpec
) -> Iterator[Chunk]:
    path, place = stored.path, f"{stored.path}: x"
    shape = stored.checked_shape()
    check_columns(columns, shape, path)
    order = None if columns is None else spec.order(columns, str(path))
    spec.check_shape(shape if order is None else (len(order),), path)
    n = stored.shape[0]
    if ids is not None and len(ids) != n:
        raise UserError(f"{path}: x has {n} examples, but there are {len(ids)} ids; give one for each")
    scale = _scale_of_all(stored, spec, place) if len(shape) == 3 and stored.dtype != np.uint8 else None
    for start, x in stored.parts(spec.rows):
        names = ids[start : start + len(x)] if ids is not None else [str(start + row) for row in range(len(x))]
        values = x if scale is None else np.rint(x * scale).astype(np.uint8)
        values = values if order is None else values[:, order]
        yield Chunk(names, spec.inputs(values, place, first_row=start))


def _scale_of_all(stored: _StoredArray, spec: InputSpec, place: str) -> float:
    """One scale for the whole file: a dark chunk must not be taken for one in 0..1."""
    low, high = math.inf, -math.inf
    for start, x in stored.parts(spec.rows):
        check_finite(x, place, first_row=start)
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    return pixel_scale(low, high, stored.dtype, place)
