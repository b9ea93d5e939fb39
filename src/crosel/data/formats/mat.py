"""MATLAB files: PALM's (features with candidate sets, transposed) and SVHN's `*_32x32.mat` as published."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import IO, Any

import numpy as np

from crosel.data.dataset import LABELS_UNUSED, Array, Dataset, first_place, make_dataset
from crosel.data.formats.base import Chunk, Format, InputSpec, array_chunks
from crosel.data.settings import DataSettings, OnImages
from crosel.data.vocabulary import check_cells
from crosel.errors import UserError
from crosel.utils.reading import open_file
from crosel.utils.system import check_bytes
from crosel.utils.text import one_line


class Mat(Format):
    title, suffixes, published = "mat", (".mat",), {"svhn": ("train_32x32.mat", "test_32x32.mat")}

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        shapes = _shapes_in(path)
        if {"data", "partial_target"} <= shapes.keys():
            return _read_palm(path, shapes)
        if {"X", "y"} <= shapes.keys():  # with its test file beside it, both
            test = path.with_name(path.name.replace("train", "test"))
            return _read_svhn(path, test if test != path and test.is_file() else None)
        raise _neither(path, shapes, "'data' and 'partial_target'")

    def read_published(self, name: str, paths: Sequence[Path]) -> Dataset:
        return _read_svhn(*paths)

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        yield from array_chunks(_read_x(path), spec, path)


def _read_x(path: Path) -> Array:
    """Examples alone, with sets or without: PALM's features [n, d] or SVHN's images [n, h, w, c]."""
    shapes = _shapes_in(path)
    if "data" in shapes:
        return _palm_features(path, _load_variables(path, ["data"], shapes))
    if {"X", "y"} <= shapes.keys():
        return _svhn_part(path)[0]
    raise _neither(path, shapes, "'data'")


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without the content."""
    from scipy.io import whosmat  # half a second, only for those who read MATLAB files

    try:
        with open_file(path) as stream:
            if stream.read(512).startswith(b"MATLAB 7.3"):
                raise UserError(f"{path}: a MATLAB 7.3 file; save it again with -v7")
        return {str(name): tuple(int(side) for side in shape) for name, shape, _ in whosmat(str(path))}
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged file raises nearly anything
        raise UserError(f"{path}: not a readable MATLAB file ({one_line(error)}); save it again with -v7") from None


def _load_variables(path: Path, names: list[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    from scipy.io import loadmat

    for name in names:
        if min(shapes[name], default=0) < 0:
            raise UserError(f"{path}: '{name}' has the shape {shapes[name]}; save it again with -v7")
        # Sparse tables are dense in the end: a byte a cell. 8 bytes are MATLAB's numbers.
        check_bytes(math.prod(shapes[name]) * (8 if name == "data" else 1), f"'{name}'", path)
    # Either kind of sparse table will do. SciPy 1.18 warns whoever does not say which, 1.12 knows only one.
    kind_of_table = {"spmatrix": False} if "spmatrix" in signature(loadmat).parameters else {}
    try:
        _check_types(path, names)
        found: dict[str, Any] = loadmat(str(path), variable_names=names, **kind_of_table)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: not a readable MATLAB file ({one_line(error)}); save it again with -v7") from None
    for name in names:
        value = found.get(name)
        kind = getattr(value, "dtype", None)
        if kind is None or not (np.issubdtype(kind, np.number) or np.issubdtype(kind, np.bool_)):
            raise UserError(f"{path}: '{name}' is not a table of numbers; save it as one")
    return found


_NUMBERS = frozenset({1, 2, 3, 4, 5, 6, 7, 9, 12, 13})  # types of values in a file
_MATRIX, _PACKED = 14, 15  # types of elements
_SPARSE, _LAST = 5, 15  # classes of variables: a sparse table, and the last of those with plain numbers
_COMPLEX = 0x800


def _check_types(path: Path, names: list[str]) -> None:
    """Raise an error unless these variables hold numbers of known types.

    SciPy takes the number of a type for a place in its table, wherever in memory that leads.
    """
    with open_file(path) as stream:
        head = stream.read(128)
        if 0 in head[:4]:  # version 4, which has no such numbers
            return
        order = "<" if head[126:] == b"IM" else ">"
        while len(tag := stream.read(8)) == 8:
            kind, size = struct.unpack(f"{order}II", tag)
            start = stream.tell()
            read: Callable[[int], bytes] = stream.read
            if kind == _PACKED:
                read = _Unpacked(stream, size).read
                kind = struct.unpack(f"{order}II", read(8))[0]
            if kind == _MATRIX:
                _check_variable(read, order, names, path)
            stream.seek(start + size)


def _check_variable(read: Callable[[int], bytes], order: str, names: list[str], path: Path) -> None:
    _, flags = _element(read, order, 8)
    _element(read, order, 1 << 10)  # its shape
    _, name = _element(read, order, 1 << 16)
    if name.decode("latin-1") not in names:
        return
    (kind,) = struct.unpack(f"{order}I", flags[:4])
    if not _SPARSE <= kind & 0xFF <= _LAST:
        raise UserError(f"{path}: '{name.decode('latin-1')}' is not a table of numbers; save it as one")
    parts = (3 if kind & 0xFF == _SPARSE else 1) + (kind & _COMPLEX > 0)  # places, real parts, imaginary ones
    for part in range(parts):
        values, _ = _element(read, order, 0 if part == parts - 1 else 1 << 40, keep=False)
        if values not in _NUMBERS:
            raise ValueError(f"values of the unknown type {values}")


def _element(read: Callable[[int], bytes], order: str, most: int, keep: bool = True) -> tuple[int, bytes]:
    """The type of the next element and its content, of at most so many bytes; with `most` 0 it is not read."""
    tag = read(8)
    first, size = struct.unpack(f"{order}II", tag)
    if first >> 16:  # a small one, inside its tag
        return first & 0xFFFF, tag[4 : 4 + (first >> 16)]
    if size > most > 0:
        raise ValueError(f"an element of {size} bytes")
    content, left = b"", -(-size // 8) * 8 if most else 0
    while left:
        part = read(min(left, 1 << 20))
        if not part:
            raise ValueError("it is cut short")
        content, left = content + part if keep else b"", left - len(part)
    return first, content[:size]


class _Unpacked:
    """A part of a file, unpacked as far as it is read."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream, self._left, self._unpack = stream, size, zlib.decompressobj()

    def read(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            packed = self._unpack.unconsumed_tail
            if not packed:
                packed = self._stream.read(min(self._left, 1 << 16))
                self._left -= len(packed)
            part = self._unpack.decompress(packed, count - len(out))
            if not part and not packed:
                break
            out += part
        return bytes(out)


def _dense(value: Any) -> Array:
    return np.asarray(value.toarray() if hasattr(value, "toarray") else value)


def _one_hot(value: Any, n: int, path: Path, name: str) -> Array:
    """A table k x n of 0 and 1, as PALM keeps it, or n x k -> [n, k]."""
    if value.ndim != 2 or n not in value.shape:
        raise UserError(f"{path}: '{name}' has the shape {tuple(value.shape)}; expected k x {n}, for {n} examples")
    if 0 in value.shape:
        raise UserError(f"{path}: '{name}' is empty (shape {tuple(value.shape)})")
    table = value.T if value.shape[1] == n else value
    check_cells(table.shape[0], table.shape[1], 9, path)
    dense = _dense(table)
    if not np.isin(dense, (0, 1)).all():
        row, column = first_place(~np.isin(dense, (0, 1)))
        raise UserError(
            f"{path}: '{name}': example {row}, class {column} is {dense[row, column]}; only 0 and 1 are allowed"
        )
    return dense.astype(bool)


def _neither(path: Path, shapes: dict[str, tuple[int, ...]], wanted: str) -> UserError:
    found = one_line(", ".join(sorted(shapes)[:8]) or "nothing")
    return UserError(f"{path}: expected PALM's {wanted} or SVHN's 'X' and 'y'; found {found}")


def _palm_features(path: Path, found: dict[str, Any]) -> Array:
    x = _dense(found["data"])
    if x.ndim != 2:
        raise UserError(f"{path}: 'data' has the shape {x.shape}; expected n x d")
    return x


def _read_palm(path: Path, shapes: dict[str, tuple[int, ...]]) -> Dataset:
    names = ["data", "partial_target", *(["target"] if "target" in shapes else [])]
    found = _load_variables(path, names, shapes)
    x = _palm_features(path, found)
    sets = _one_hot(found["partial_target"], len(x), path, "partial_target")
    y = None
    notes: tuple[str, ...] = ()
    if "target" in found:
        target = _one_hot(found["target"], len(x), path, "target")
        if target.shape != sets.shape:
            raise UserError(
                f"{path}: 'target' has {target.shape[1]} classes, 'partial_target' {sets.shape[1]}; "
                "save both with all classes"
            )
        if (target.sum(axis=1) == 1).all():
            y = target.argmax(axis=1)
        else:
            notes = (f"'target' does not have one label for every example; {LABELS_UNUSED}",)
    return make_dataset(x, sets, y=y, place=str(path), notes=notes)


def _svhn_part(path: Path) -> tuple[Array, Array]:
    shapes = _shapes_in(path)
    if not {"X", "y"} <= shapes.keys() or shapes["X"][:3] != (32, 32, 3) or len(shapes["X"]) != 4:
        raise UserError(f"{path}: not SVHN's file: expected 'X' of 32 x 32 x 3 x n and 'y'")
    found = _load_variables(path, ["X", "y"], shapes)
    x, y = found["X"], found["y"].reshape(-1)
    if x.dtype != np.uint8 or len(y) != x.shape[3] or not len(y) or y.min() < 1 or y.max() > 10:
        raise UserError(f"{path}: not SVHN's file: expected bytes in 'X' and a label from 1 to 10 for each in 'y'")
    return x.transpose(3, 0, 1, 2), y.astype(np.int64) % 10  # label 10 is the digit 0


def _read_svhn(train: Path, test: Path | None) -> Dataset:
    x, y = _svhn_part(train)
    x_test, y_test = (None, None) if test is None else _svhn_part(test)
    # A mirrored digit is another sign; the normalisation is the one of published work.
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=10, place=str(train), flips=False,
        mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    )  # fmt: skip
