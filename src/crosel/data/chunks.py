"""What is to be predicted, chunk by chunk: images, csv, jsonl or npz, whose length costs no memory; or .mat.

Training wants a whole `Dataset`; here examples have no labels, and must look like those that a run was trained on.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from crosel.data.csvfile import no_number
from crosel.data.dataset import Array, as_inputs, check_finite, pixel_scale
from crosel.data.images import SUFFIXES, read_images
from crosel.data.inputs import images_in
from crosel.data.matfile import read_mat_inputs
from crosel.data.npz import as_names, open_archive, read_array
from crosel.data.settings import DataSettings
from crosel.data.table import MEANINGS, as_features, image_path, meanings
from crosel.data.text import CsvFile, json_objects
from crosel.errors import UserError, tell
from crosel.limits import check_plain, shown

_ROWS = 1024  # examples held at once
_BYTES = 1 << 26  # and how much they may take, where examples are large

Say = Callable[[str], None]  # takes a line for the user


@dataclass(frozen=True)
class Chunk:
    """Some examples in the form that networks take: uint8 [m, c, h, w] or float32 [m, d]."""

    ids: Sequence[str]
    x: Array


@dataclass(frozen=True)
class Form:
    """What one example of the run looks like."""

    shape: tuple[int, ...]
    columns: Sequence[str] | None  # names of the features, where they are known
    say: Say
    image_root: Path | None = None  # where the run's own image paths start from, unless beside their list

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @property
    def rows(self) -> int:
        """Examples in a chunk."""
        return max(1, min(_ROWS, _BYTES // (math.prod(self.shape) * (1 if self.is_image else 4))))

    def images(self, path: Path) -> DataSettings:
        """Settings that decode images to the run's own size and mode."""
        if not self.is_image:
            raise UserError(
                f"{path}: the run was trained on {self.shape[0]} features per example, not on images; "
                "give csv, jsonl or npz"
            )
        channels, height, width = self.shape
        if height != width or channels not in (1, 3):
            raise UserError(
                f"{path}: the run was trained on images of shape {self.shape}; only square images with 1 or 3 channels "
                "can be read from image files. Give an npz file with x"
            )
        return DataSettings(image_size=height, image_mode="RGB" if channels == 3 else "L", cache=False)

    def check_shape(self, shape: tuple[int, ...], path: Path) -> None:
        if shape != self.shape:
            raise UserError(
                f"{path}: examples of shape {shape}, but the run was trained on {self.shape}; give such examples"
            )

    def order(self, there: Sequence[str], place: str) -> list[int]:
        return columns_of_training(self.columns, there, place, self.say)

    def check_width(self, width: int, place: str) -> None:
        if self.is_image:
            raise UserError(
                f"{place}: there is no column 'path', and the run was trained on images; name them in such a column"
            )
        if width != self.shape[0]:
            raise UserError(
                f"{place}: {width} features, but the run was trained on {self.shape[0]}; give the same ones"
            )


def columns_of_training(trained: Sequence[str] | None, there: Sequence[str], place: str, say: Say) -> list[int]:
    """Where the features that a run was trained on are, by name; where all have other names, they are taken in their
    order, and `say` tells so."""
    if trained is None:
        return list(range(len(there)))
    wanted, found = trained, there
    if not set(wanted) & set(found):  # all of them in capitals, say: still the same names
        wanted, found = _without_case(trained), _without_case(there)
    if not set(wanted) & set(found):
        if len(trained) == len(there):  # else one side is a list without names, or what follows refuses it
            say(
                f"{place}: no column has a name that the run was trained on; columns are used in order, "
                f"{shown(there[0])} for {shown(trained[0])} and so on"
            )
        return list(range(len(there)))
    missing = [name for name, key in zip(trained, wanted, strict=True) if key not in found]
    if missing:
        raise UserError(f"{place}: there is no column {shown(missing[0])}, which the run was trained on; add it")
    return [found.index(key) for key in wanted]


def _without_case(names: Sequence[str]) -> Sequence[str]:
    """The names in lower case, unless two would be the same."""
    lower = [name.casefold() for name in names]
    return lower if len(set(lower)) == len(lower) else names


def open_inputs(
    path: Path,
    shape: tuple[int, ...],
    columns: Sequence[str] | None = None,
    say: Say = tell,
    image_root: Path | None = None,
) -> Iterator[Chunk]:
    """Read what is to be predicted, chunk by chunk; whatever is wrong with it is a UserError."""
    form = Form(shape, columns, say, image_root)
    try:
        if path.is_dir():
            yield from _folder(path, form)
            return
        if not path.exists():
            raise UserError(f"{path}: no such file")
        check_plain(path)
        suffix = path.suffix.lower()
        if suffix == ".npz":
            yield from _npz(path, form)
        elif suffix in SUFFIXES:
            yield from _images(iter([(path.name, path, str(path))]), form, path)
        elif suffix in (".csv", ".tsv"):
            yield from _csv(path, form)
        elif suffix in (".jsonl", ".ndjson"):
            yield from _jsonl(path, form)
        elif suffix == ".mat":
            yield from _mat(path, form)
        else:
            raise UserError(
                f"{path}: cannot read '{path.suffix}'; give an image, a folder of images, csv, jsonl, npz or mat"
            )
    except OSError as error:  # must not be taken for trouble with the file that is written
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None


# --- images and features ------------------------------------------------------------------------------------------


def _images(files: Iterator[tuple[str, Path, str]], form: Form, beside: Path) -> Iterator[Chunk]:
    """Images in files: (id, file, what to call its place in an error) of each."""
    settings = form.images(beside)
    while batch := list(islice(files, form.rows)):
        pixels = read_images([file for _, file, _ in batch], settings, [place for _, _, place in batch], beside)
        yield Chunk([name for name, _, _ in batch], as_inputs(pixels, str(beside)))


def _listed_images(rows: Iterator[tuple[str, int, Any]], form: Form, path: Path, title: str) -> Iterator[Chunk]:
    """Images that a column of a table names: (id, line, cell) of each row."""

    def files() -> Iterator[tuple[str, Path, str]]:
        root: Path | None = None  # one for the whole list, as its first image tells
        for name, line, cell in rows:
            place = f"{path}, line {line}, column {shown(title)}"
            try:
                if root is None:
                    root = path.parent
                    there = form.image_root
                    if there is not None and not image_path(cell, root).exists() and image_path(cell, there).exists():
                        form.say(f"{path}: images are read from {there}, like those of the run")
                        root = there
                yield name, image_path(cell, root), place
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None

    yield from _images(files(), form, path)


def _features(
    rows: Iterator[tuple[str, int, list[float]]], form: Form, path: Path, names: list[str]
) -> Iterator[Chunk]:
    """Numbers of a table: (id, line, numbers) of each row."""
    while batch := list(islice(rows, form.rows)):
        values = np.array([numbers for _, _, numbers in batch])
        yield Chunk([name for name, _, _ in batch], as_features(values, path, [line for _, line, _ in batch], names))


# --- one reader a format ------------------------------------------------------------------------------------------


def _folder(path: Path, form: Form) -> Iterator[Chunk]:
    form.images(path)  # refuses before the folder is walked through
    images = images_in(path)
    yield from _images(((image.relative_to(path).as_posix(), image, str(path)) for image in images), form, path)


def _csv(path: Path, form: Form) -> Iterator[Chunk]:
    source = CsvFile(path)
    header, known = source.header, meanings(source.header, path)
    rows = source.rows()
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}, line 2: there are no rows below the column names")
    id_column = known.get("id", known.get("path"))
    named = (
        (str(number) if id_column is None else row[id_column], line, row)
        for number, (line, row) in enumerate(chain([first], rows))
    )
    if "path" in known:
        column = known["path"]
        cells = ((name, line, row[column]) for name, line, row in named)
        yield from _listed_images(cells, form, path, header[column])
        return
    columns = [column for column, title in enumerate(header) if title and column not in known.values()]
    order = form.order([header[column] for column in columns], f"{path}, line 1")
    columns = [columns[at] for at in order]
    form.check_width(len(columns), f"{path}, line 1")

    def numbers(line: int, row: list[str]) -> list[float]:
        cells = [row[column] for column in columns]
        try:
            if "_" in "".join(cells):  # a code such as 3_1, which Python takes for 31
                raise ValueError
            return list(map(float, cells))
        except ValueError:
            raise no_number(path, line, header, columns, row) from None

    values = ((name, line, numbers(line, row)) for name, line, row in named)
    yield from _features(values, form, path, [header[column] for column in columns])


def _jsonl(path: Path, form: Form) -> Iterator[Chunk]:
    rows = json_objects(path, '{"path": "a.png"}')
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}, line 1: there are no rows")
    keys = list(first[1])
    titles = {meaning: keys[at] for meaning, at in meanings(keys, path, first[0]).items()}
    id_key = titles.get("id", titles.get("path"))
    named = (
        (str(number) if id_key is None or row.get(id_key) is None else str(row[id_key]), line, row)
        for number, (line, row) in enumerate(chain([first], rows))
    )
    if "path" in titles:
        title = titles["path"]
        yield from _listed_images(((name, line, row.get(title)) for name, line, row in named), form, path, title)
        return
    names = _feature_names(first[1])
    if form.is_image:
        form.check_width(len(names), f"{path}, line {first[0]}")
    order = form.order(names, f"{path}, line {first[0]}")
    wanted = [names[at] for at in order]
    values = (
        (name, line, _json_numbers(row, names, wanted, form, f"{path}, line {line}")) for name, line, row in named
    )
    yield from _features(values, form, path, [f"number {i + 1}" for i in range(form.shape[0])])


def _feature_names(row: dict[str, Any]) -> list[str]:
    return [key for key in row if key.lower() not in MEANINGS]


def _json_numbers(row: dict[str, Any], names: list[str], wanted: list[str], form: Form, place: str) -> list[float]:
    """The wanted numbers of a row with the features of the first one, in any order; each is a number or a list."""
    odd = set(_feature_names(row)).symmetric_difference(names)
    if odd:
        raise UserError(
            f"{place}, column {shown(min(odd))}: the columns differ from those of the first row; give all rows the same"
        )
    out: list[float] = []
    for key in wanted:
        for cell in row[key] if isinstance(row[key], list) else [row[key]]:
            if isinstance(cell, bool) or not isinstance(cell, int | float) or abs(cell) > 1e300:
                raise UserError(f"{place}, column {shown(key)}: {shown(cell)} is not a number, or too large")
            out.append(float(cell))
    form.check_width(len(out), place)
    return out


def _mat(path: Path, form: Form) -> Iterator[Chunk]:
    x = read_mat_inputs(path)
    form.check_shape(x.shape[1:] if x.ndim == 2 else (x.shape[3], *x.shape[1:3]), path)
    for start in range(0, len(x), form.rows):
        part = x[start : start + form.rows]
        yield Chunk([str(start + row) for row in range(len(part))], as_inputs(part, str(path), first_row=start))


def _npz(path: Path, form: Form) -> Iterator[Chunk]:
    with open_archive(path, "x") as (archive, members):
        if "x" not in archive.files:
            raise UserError(f"{path}: the array 'x' is missing; save the inputs under this name")
        ids = as_names(read_array(archive, "ids", path), "ids", path) if "ids" in archive.files else None
        yield from _npz_chunks(_StoredArray(path, members), ids, form)


class _StoredArray:
    """The array x of an npz file, read a few rows at a time."""

    def __init__(self, path: Path, members: zipfile.ZipFile) -> None:
        self.path, self._members = path, members
        self._member = "x.npy" if "x.npy" in members.namelist() else "x"
        with members.open(self._member) as stream:
            self.shape, self._by_columns, self.dtype = _npy_header(stream)

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
            with np.load(self.path, allow_pickle=False) as archive:
                x = archive["x"]
            yield from ((start, x[start : start + rows]) for start in range(0, n, rows))
            return
        values = math.prod(self.shape[1:])  # of one row
        with self._members.open(self._member) as stream:
            _npy_header(stream)
            for start in range(0, n, rows):
                count = min(rows, n - start)
                content = bytearray(stream.read(count * values * self.dtype.itemsize))  # torch wants it writeable
                yield start, np.frombuffer(content, self.dtype, count * values).reshape(count, *self.shape[1:])


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the numbers are stored by columns, and their type."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the npy format does not hold plain numbers")


def _npz_chunks(stored: _StoredArray, ids: list[str] | None, form: Form) -> Iterator[Chunk]:
    path, place = stored.path, f"{stored.path}: x"
    form.check_shape(stored.checked_shape(), path)
    n = stored.shape[0]
    if ids is not None and len(ids) != n:
        raise UserError(f"{path}: x has {n} examples, but there are {len(ids)} ids; give one for each")
    scale = _scale_of_all(stored, form, place) if form.is_image and stored.dtype != np.uint8 else None
    for start, x in stored.parts(form.rows):
        names = ids[start : start + len(x)] if ids is not None else [str(start + row) for row in range(len(x))]
        pixels = x if scale is None else np.rint(x * scale).astype(np.uint8)
        yield Chunk(names, as_inputs(pixels, place, first_row=start))


def _scale_of_all(stored: _StoredArray, form: Form, place: str) -> float:
    """One scale for the whole file: a dark chunk must not be taken for one in 0..1."""
    low, high = math.inf, -math.inf
    for start, x in stored.parts(form.rows):
        check_finite(x, place, first_row=start)
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    return pixel_scale(low, high, stored.dtype, place)
