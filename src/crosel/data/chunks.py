"""What is to be predicted, chunk by chunk: images, csv, jsonl or npz, whose length costs no memory; or .mat.

Training wants a whole `Dataset`; here examples have no labels, and must look like those that a run was trained on.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from crosel.data.csvfile import as_numbers, no_number, open_rows, refuse_data_as_names
from crosel.data.dataset import Array, as_inputs, check_finite, pixel_scale
from crosel.data.images import SUFFIXES, read_images
from crosel.data.inputs import images_in
from crosel.data.jsonl import Layout, lengths_of, open_objects, row_numbers, wide_names
from crosel.data.matfile import read_mat_inputs
from crosel.data.npz import as_names, check_columns, open_archive, read_array
from crosel.data.settings import DataSettings
from crosel.data.table import ALL_ROWS, are_votes, as_features, image_path, meanings, other_columns
from crosel.data.vocabulary import label_name
from crosel.errors import UserError, counted, did_you_mean, tell
from crosel.utils.limits import check_plain, shown

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
        if width == 0:
            raise UserError(f"{place}: there are no columns of features; give a file with those of training")
        if width != self.shape[0]:
            raise UserError(
                f"{place}: {counted(width, 'feature')}, but the run was trained on {self.shape[0]}; give the same ones"
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
    at = {key: column for column, key in enumerate(found)}
    missing = [name for name, key in zip(trained, wanted, strict=True) if key not in at]
    if missing:
        near = did_you_mean(missing[0], [name for name, key in zip(there, found, strict=True) if key not in wanted])
        raise UserError(f"{place}: there is no column {shown(missing[0])}, which the run was trained on{near}; add it")
    return [at[key] for key in wanted]


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
            yield from _images(iter([(path.name, path, "")]), form, path)
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


def _image_root(cell: Any, form: Form, path: Path) -> Path | None:
    """Where the paths of a list start from, as its first image tells: beside the list, or where those of the run do."""
    for root in (path.parent, form.image_root):
        if root is not None and image_path(cell, root).exists():
            return root
    return None


def _listed_images(rows: Iterator[tuple[str, int, Any]], form: Form, path: Path, title: str) -> Iterator[Chunk]:
    """Images that a column of a table names: (id, line, cell) of each row."""

    def files() -> Iterator[tuple[str, Path, str]]:
        root: Path | None = None
        for name, line, cell in rows:
            place, starts = f"{path}, line {line}, column {shown(title)}", root is None
            try:
                root = root or _image_root(cell, form, path)
                image = image_path(cell, root or path.parent)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
            if root is None:
                remedy = "give paths from the list's own folder"
                raise UserError(f"{place}: {shown(str(image))}: no such image file; {remedy}")
            if starts and root != path.parent:
                form.say(f"{path}: images are read from {root}, like those of the run")
            yield name, image, place

    yield from _images(files(), form, path)


def _features(
    rows: Iterator[tuple[str, int, Sequence[float]]], form: Form, path: Path, names: list[str]
) -> Iterator[Chunk]:
    """Numbers of a table: (id, line, numbers) of each row."""
    while batch := list(islice(rows, form.rows)):
        values = np.array([numbers for _, _, numbers in batch], dtype=np.float64)
        yield Chunk([name for name, _, _ in batch], as_features(values, path, [line for _, line, _ in batch], names))


# --- one reader a format ------------------------------------------------------------------------------------------


def _folder(path: Path, form: Form) -> Iterator[Chunk]:
    form.images(path)  # refuses before the folder is walked through
    images = images_in(path)
    yield from _images(((image.relative_to(path).as_posix(), image, "") for image in images), form, path)


@dataclass(frozen=True)
class _Listing:
    """A csv or jsonl file, row by row."""

    path: Path
    line: int  # which tells the columns
    titles: Mapping[str, str]  # meaning -> name of the column
    first: Any  # row
    rows: Iterator[tuple[int, Any]]  # (line, row) of all, the first included
    cell: Callable[[Any, str], Any]  # of a row in a column

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.line}"

    def images(self, form: Form) -> str | None:
        """The column that names images: the ids may do so, as in votes."""
        title = self.titles.get("path")
        if title is None and form.is_image and "id" in self.titles:
            with suppress(ValueError):  # no path
                if _image_root(self.cell(self.first, self.titles["id"]), form, self.path):
                    return self.titles["id"]
        return title

    def examples(self, content: Callable[[int, Any], Any]) -> Iterator[tuple[str, int, Any]]:
        """(id, line, content) of each row; of votes on one example, of the first that has some."""
        votes = are_votes({*self.titles, "label"})  # which is not needed here
        seen: dict[str, tuple[int, int]] = {}  # name -> line and digest of the first
        blank: dict[str, int] = {}  # name -> line of the first, where no row has told the content yet
        for number, (line, row) in enumerate(self.rows):
            name, value = self._name(number, line, row), content(line, row)
            if votes and (value is None or (isinstance(value, str) and not value.strip())):
                if name not in seen:
                    blank.setdefault(name, line)
                continue
            if votes:
                blank.pop(name, None)
                digest = _digest(value)
                before, same = seen.setdefault(name, (line, digest))
                if digest != same:
                    what = f"line {before} has something else for {shown(name)}"
                    raise UserError(f"{self.path}, line {line}: {what}; {ALL_ROWS}")
                if before != line:
                    continue
            yield name, line, value
        yield from ((name, line, "") for name, line in blank.items())  # refused, with the line

    def _name(self, number: int, line: int, row: Any) -> str:
        if "id" not in self.titles:
            return str(self.cell(row, self.titles["path"])).strip() if "path" in self.titles else str(number)
        try:
            return label_name(self.cell(row, self.titles["id"]), what="name")
        except ValueError as error:
            raise UserError(f"{self.path}, line {line}, column {shown(self.titles['id'])}: {error}") from None


def _digest(value: Any) -> int:
    """Tells what two rows hold apart, in little memory."""
    if not isinstance(value, tuple):
        return hash(str(value).strip())
    with np.errstate(over="ignore"):  # told of later
        return hash((np.array(value, dtype=np.float32) + 0).tobytes())  # -0 is 0


def _csv(path: Path, form: Form) -> Iterator[Chunk]:
    header, first, rows = open_rows(path)
    known = meanings(header, path)
    titles, column_of = {meaning: header[c] for meaning, c in known.items()}, {name: c for c, name in enumerate(header)}
    listing = _Listing(path, 1, titles, first[0][1], rows, lambda row, title: row[column_of[title]])
    if (title := listing.images(form)) is not None:
        yield from _listed_images(listing.examples(lambda _, row: listing.cell(row, title)), form, path, title)
        return
    columns = other_columns(header, known)
    order = form.order([header[column] for column in columns], listing.place)
    columns = [columns[at] for at in order]
    form.check_width(len(columns), listing.place)
    if form.columns is None or header[columns[0]] not in form.columns:
        refuse_data_as_names([header[column] for column in columns], path)

    def numbers(line: int, row: list[str]) -> tuple[float, ...]:
        try:
            return tuple(as_numbers([row[column] for column in columns]))
        except ValueError:
            raise no_number(path, line, header, columns, row) from None

    yield from _features(listing.examples(numbers), form, path, [header[column] for column in columns])


def _jsonl(path: Path, form: Form) -> Iterator[Chunk]:
    line, first, rows = open_objects(path)
    layout = Layout.of(first, path, line, False)

    def checked() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, row in rows:
            layout.check(row, f"{path}, line {number}")
            yield number, row

    listing = _Listing(path, line, layout.titles, first, checked(), lambda row, title: row.get(title))
    if (title := listing.images(form)) is not None:
        layout = replace(layout, ignores_others=True)
        yield from _listed_images(listing.examples(lambda _, row: row.get(title)), form, path, title)
        return
    lengths = lengths_of(first, layout.features)
    names = wide_names(lengths)
    if form.is_image:
        form.check_width(len(names), listing.place)
    one_list = len(lengths) == 1 and names != layout.features  # its numbers have no names
    order = list(range(len(names))) if one_list else form.order(names, listing.place)
    wanted = [names[at] for at in order]
    chosen = set(wanted)
    lengths = {key: length for key, length in lengths.items() if not chosen.isdisjoint(wide_names({key: length}))}
    form.check_width(len(row_numbers(first, lengths, listing.place)), listing.place)
    by_name = not chosen.isdisjoint(form.columns or ())
    layout = replace(layout, features=list(lengths), ignores_others=by_name)
    places = {name: at for at, name in enumerate(wide_names(lengths))}
    at = [places[name] for name in wanted]

    def numbers(line: int, row: dict[str, Any]) -> tuple[float, ...]:
        values = row_numbers(row, lengths, f"{path}, line {line}")
        return tuple(map(values.__getitem__, at))

    yield from _features(listing.examples(numbers), form, path, wanted)


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

        def names(array: str) -> list[str] | None:
            return as_names(read_array(archive, array, path), array, path) if array in archive.files else None

        yield from _npz_chunks(_StoredArray(path, members), names("ids"), names("columns"), form)


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


def _npz_chunks(stored: _StoredArray, ids: list[str] | None, columns: list[str] | None, form: Form) -> Iterator[Chunk]:
    path, place = stored.path, f"{stored.path}: x"
    shape = stored.checked_shape()
    check_columns(columns, shape, path)
    order = None if columns is None else form.order(columns, str(path))
    form.check_shape(shape if order is None else (len(order),), path)
    n = stored.shape[0]
    if ids is not None and len(ids) != n:
        raise UserError(f"{path}: x has {n} examples, but there are {len(ids)} ids; give one for each")
    scale = _scale_of_all(stored, form, place) if form.is_image and stored.dtype != np.uint8 else None
    for start, x in stored.parts(form.rows):
        names = ids[start : start + len(x)] if ids is not None else [str(start + row) for row in range(len(x))]
        values = x if scale is None else np.rint(x * scale).astype(np.uint8)
        values = values if order is None else values[:, order]
        yield Chunk(names, as_inputs(values, place, first_row=start))


def _scale_of_all(stored: _StoredArray, form: Form, place: str) -> float:
    """One scale for the whole file: a dark chunk must not be taken for one in 0..1."""
    low, high = math.inf, -math.inf
    for start, x in stored.parts(form.rows):
        check_finite(x, place, first_row=start)
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    return pixel_scale(low, high, stored.dtype, place)
