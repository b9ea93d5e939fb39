"""Predicting with a finished run: a folder of images, csv, jsonl or npz in; csv or jsonl out.

Inputs are read, predicted and written in chunks: memory does not grow with their number.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.cells import csv_line
from crosel.data.dataset import Array, as_inputs
from crosel.data.images import read_images
from crosel.data.inputs import list_images
from crosel.data.limits import check_plain, one_line, shown
from crosel.data.settings import DataSettings
from crosel.data.table import MEANINGS, as_features, image_path, meanings
from crosel.data.text import CsvFile, parse_json, read_lines
from crosel.errors import UserError
from crosel.files import atomic_write_with, keep_apart
from crosel.run import load_run
from crosel.session import Session
from crosel.train import predict_chunks

_ROWS = 1024  # examples held at once
_BYTES = 1 << 26  # and how much they may take, where examples are large

Progress = Callable[[int], None]  # called with the number of predictions so far


@dataclass(frozen=True)
class Chunk:
    """Some examples in the form that networks take: uint8 [m, c, h, w] or float32 [m, d]."""

    ids: Sequence[str]
    x: Array


@dataclass(frozen=True)
class Form:
    """What one example of the run looks like."""

    shape: tuple[int, ...]

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @property
    def rows(self) -> int:
        return max(1, min(_ROWS, _BYTES // (math.prod(self.shape) * (1 if self.is_image else 4))))

    def images(self, path: Path) -> DataSettings:
        """Settings that decode images to the run's own size and mode."""
        if not self.is_image:
            raise UserError(f"{path}: the run was trained on {self.shape[0]} features an example, not on images")
        channels, height, width = self.shape
        if height != width or channels not in (1, 3):
            raise UserError(
                f"{path}: the run was trained on images of shape {self.shape}; only square ones with 1 or 3 channels "
                "can be read from image files. Give an npz file with x"
            )
        return DataSettings(image_size=height, image_mode="RGB" if channels == 3 else "L", cache=False)

    def check_width(self, width: int, place: str) -> None:
        if self.is_image:
            raise UserError(f"{place}: there is no column 'path', and the run was trained on images")
        if width != self.shape[0]:
            raise UserError(f"{place}: {width} features; the run was trained on {self.shape[0]}")


# --- readers, each a stream of chunks ---------------------------------------------------------------------------------


def open_inputs(path: Path, shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Read what is to be predicted, chunk by chunk; whatever is wrong with it is a UserError."""
    form = Form(shape)
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
        elif suffix in (".csv", ".tsv"):
            yield from _csv(path, form)
        elif suffix in (".jsonl", ".ndjson"):
            yield from _jsonl(path, form)
        else:
            raise UserError(f"{path}: cannot read '{path.suffix}'; give a folder of images, csv, jsonl or npz")
    except OSError as error:  # must not be taken for trouble with the file that is written
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None


def _images(rows: Iterator[tuple[str, Path, str]], form: Form, settings: DataSettings, beside: Path) -> Iterator[Chunk]:
    """Rows of (id, file, place)."""
    while batch := list(islice(rows, form.rows)):
        pixels = read_images([file for _, file, _ in batch], settings, [place for _, _, place in batch], beside)
        yield Chunk([name for name, _, _ in batch], as_inputs(pixels, str(beside)))


def _folder(path: Path, form: Form) -> Iterator[Chunk]:
    settings, images = form.images(path), list_images(path)
    if not images:
        raise UserError(f"{path}: there are no images in this folder")
    rows = ((image.relative_to(path).as_posix(), image, str(path)) for image in images)
    yield from _images(rows, form, settings, path)


def _features(
    rows: Iterator[tuple[str, int, list[float]]], form: Form, path: Path, names: list[str]
) -> Iterator[Chunk]:
    """Rows of (id, line, numbers)."""
    while batch := list(islice(rows, form.rows)):
        values = np.array([numbers for _, _, numbers in batch])
        yield Chunk([name for name, _, _ in batch], as_features(values, path, [line for _, line, _ in batch], names))


def _csv(path: Path, form: Form) -> Iterator[Chunk]:
    source = CsvFile(path)
    known = meanings(source.header, path)
    name_column = known.get("id", known.get("path"))
    rows = source.rows()
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}, line 2: there are no rows below the column names")

    def all_rows() -> Iterator[tuple[int, int, list[str]]]:
        yield 0, *first
        yield from ((number, line, row) for number, (line, row) in enumerate(rows, 1))

    def name(number: int, row: list[str]) -> str:
        return row[name_column] if name_column is not None else str(number)

    if "path" in known:
        settings, column = form.images(path), known["path"]
        title = source.header[column]
        yield from _images(
            ((name(i, row), _path(row[column], path, line, title), f"{path}, line {line}, column {shown(title)}")
             for i, line, row in all_rows()), form, settings, path,
        )  # fmt: skip
        return
    columns = [column for column, title in enumerate(source.header) if title and column not in known.values()]
    form.check_width(len(columns), f"{path}, line 1")

    def number(line: int, row: list[str], column: int) -> float:
        try:
            return float(row[column])
        except ValueError:
            what = f"{shown(row[column])} is no number" if row[column].strip() else "empty; fill it in or drop the row"
            raise UserError(f"{path}, line {line}, column {shown(source.header[column])}: {what}") from None

    numbers = ((name(i, row), line, [number(line, row, c) for c in columns]) for i, line, row in all_rows())
    yield from _features(numbers, form, path, [source.header[c] for c in columns])


def _path(cell: Any, path: Path, line: int, title: str) -> Path:
    try:
        return image_path(cell, path.parent)
    except ValueError as error:
        raise UserError(f"{path}, line {line}, column {shown(title)}: {error}") from None


def _jsonl(path: Path, form: Form) -> Iterator[Chunk]:
    titles: dict[str, str] = {}  # meaning -> key, as the first row has them
    names: list[str] = []

    def rows() -> Iterator[tuple[int, int, dict[str, Any]]]:
        number = 0
        for line, text in enumerate(read_lines(path), 1):
            if not text.strip():
                continue
            row = parse_json(text, str(path), line)
            if not isinstance(row, dict):
                raise UserError(f'{path}, line {line}, column 1: expected an object, as in {{"path": "a.png"}}')
            yield number, line, row
            number += 1

    def name(number: int, row: dict[str, Any]) -> str:
        given = row.get(titles.get("id", titles.get("path", "")))
        return str(given) if given is not None else str(number)

    def values(line: int, row: dict[str, Any]) -> list[float]:
        if [key for key in row if key.lower() not in MEANINGS] != names:
            odd = next(iter(set(row).symmetric_difference(names) - {k for k in row if k.lower() in MEANINGS}), "x")
            raise UserError(f"{path}, line {line}, column {shown(odd)}: other columns than in the first row")
        out: list[float] = []
        for key in names:
            cells = row[key] if isinstance(row[key], list) else [row[key]]
            for cell in cells:
                if isinstance(cell, bool) or not isinstance(cell, int | float) or abs(cell) > 1e300:
                    raise UserError(f"{path}, line {line}, column {shown(key)}: {shown(cell)} is no number we can hold")
                out.append(float(cell))
        form.check_width(len(out), f"{path}, line {line}")
        return out

    stream = rows()
    first = next(stream, None)
    if first is None:
        raise UserError(f"{path}, line 1: there are no rows")
    titles.update({meaning: list(first[2])[at] for meaning, at in meanings(list(first[2]), path, first[1]).items()})
    names += [key for key in first[2] if key.lower() not in MEANINGS]

    def all_rows() -> Iterator[tuple[int, int, dict[str, Any]]]:
        yield first
        yield from stream

    if "path" in titles:
        title = titles["path"]
        yield from _images(
            ((name(i, row), _path(row.get(title), path, line, title), f"{path}, line {line}, column {shown(title)}")
             for i, line, row in all_rows()), form, form.images(path), path,
        )  # fmt: skip
    else:
        numbers = ((name(i, row), line, values(line, row)) for i, line, row in all_rows())
        yield from _features(numbers, form, path, [f"number {i + 1}" for i in range(form.shape[0])])


def _npz(path: Path, form: Form) -> Iterator[Chunk]:
    try:
        archive = np.load(path, allow_pickle=False)  # object arrays are pickles: never from outside
        if isinstance(archive, np.ndarray):
            raise UserError(f"{path}: this is a single array; an npz file with x is needed")
        with archive, zipfile.ZipFile(path) as members:
            if "x" not in archive.files:
                raise UserError(f"{path}: the array 'x' is missing")
            ids = [str(name) for name in archive["ids"]] if "ids" in archive.files else None
            member = "x.npy" if "x.npy" in members.namelist() else "x"
            yield from _npz_rows(members, member, ids, path, form)
    except (UserError, OSError):
        raise
    except Exception as error:  # zip, zlib and numpy each have their own errors for a damaged file
        raise UserError(f"{path}: not a readable npz file ({one_line(error)})") from None


def _npz_rows(members: zipfile.ZipFile, member: str, ids: list[str] | None, path: Path, form: Form) -> Iterator[Chunk]:
    with members.open(member) as stream:
        shape, fortran, dtype = _header(stream)
    if dtype.hasobject:
        raise UserError(f"{path}: x: Object arrays cannot be loaded; expected numbers")
    n = shape[0] if shape else 0
    if not (np.issubdtype(dtype, np.number) or dtype == np.bool_) or np.issubdtype(dtype, np.complexfloating):
        raise UserError(f"{path}: x: expected numbers, found {dtype}")
    if len(shape) not in (2, 3, 4) or 0 in shape:
        what = "no examples, or of size 0," if 0 in shape else "neither features [n, d] nor images [n, h, w, c]"
        raise UserError(f"{path}: x: {what} in shape {shape}")
    ours = shape[1:] if len(shape) == 2 else (1, *shape[1:]) if len(shape) == 3 else (shape[3], *shape[1:3])
    if ours != form.shape:
        raise UserError(f"{path}: examples of shape {ours}; the run was trained on {form.shape}")
    if ids is not None and len(ids) != n:
        raise UserError(f"{path}: x has {n} examples, but there are {len(ids)} ids")

    def parts() -> Iterator[tuple[int, Array]]:
        if fortran:  # column by column: there are no rows to read one after the other
            with np.load(path, allow_pickle=False) as archive:
                x = archive["x"]
            yield from ((start, x[start : start + form.rows]) for start in range(0, n, form.rows))
            return
        size = math.prod(shape[1:]) * dtype.itemsize
        with members.open(member) as stream:
            _header(stream)
            for start in range(0, n, form.rows):
                rows = min(form.rows, n - start)
                content = bytearray(stream.read(rows * size))  # torch wants memory it may write to
                yield start, np.frombuffer(content, dtype, rows * math.prod(shape[1:])).reshape(rows, *shape[1:])

    scale = 1.0
    if form.is_image and dtype != np.uint8:
        for start, x in parts():
            _check_finite(x, start, path)
        low = min(float(x.min()) for _, x in parts())
        high = max(float(x.max()) for _, x in parts())
        if low < 0 or high > 255:
            raise UserError(f"{path}: x: pixels must lie in 0..255 or 0..1, found {low:g} to {high:g}")
        # One scale for the whole file: a dark chunk must not be taken for one in 0..1.
        scale = 255.0 if high <= 1.0 and np.issubdtype(dtype, np.floating) else 1.0
    for start, x in parts():
        _check_finite(x, start, path)
        if form.is_image and dtype != np.uint8:
            x = np.rint(x * scale).astype(np.uint8)
        names = ids[start : start + len(x)] if ids is not None else [str(start + row) for row in range(len(x))]
        yield Chunk(names, as_inputs(x, f"{path}: x"))


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the npy format holds no plain numbers")


def _check_finite(x: NDArray[Any], start: int, path: Path) -> None:
    """As `as_inputs` does, but with the row of the whole file."""
    if np.issubdtype(x.dtype, np.floating):
        finite = np.isfinite(x).reshape(len(x), -1)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            value = "NaN" if np.isnan(x.reshape(len(x), -1)[row, column]) else "an infinite value"
            raise UserError(f"{path}: x: {value} in row {start + row}, column {column}; fill it in or drop the row")


# --- predictions out --------------------------------------------------------------------------------------------------


def predict_file(
    run: Path,
    source: Path,
    out: Path,
    top: int,
    device: torch.device,
    trust_code: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write id, label and probability of the `top` labels, chunk by chunk, to csv or jsonl; return how many."""
    if out.suffix not in (".csv", ".jsonl"):
        raise UserError(f"{out}: predictions are written as .csv or .jsonl; give the file one of these endings")
    keep_apart(out, source)
    session = load_run(run, device, trust_code, needs_data=False)
    top = min(top, len(session.data.classes))
    line = _csv_row if out.suffix == ".csv" else _json_row
    count = 0

    def write(stream: IO[bytes]) -> None:
        nonlocal count
        if out.suffix == ".csv":
            more = [f"{word}_{rank}" for rank in range(2, top + 1) for word in ("label", "confidence")]
            stream.write(csv_line(["id", "label", "confidence", *more]))
        for chunk in open_inputs(source, session.data.shape):
            for name, pairs in _predictions(session, chunk, top):
                stream.write(line(name, pairs))
            count += len(chunk.x)
            if progress is not None:
                progress(count)

    atomic_write_with(out, write)
    return count


def _predictions(session: Session, chunk: Chunk, top: int) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    classes = session.data.classes
    for start, outputs in predict_chunks(session, chunk.x):
        best, order = session.method.combine(outputs).topk(top, dim=1)
        for row, (values, labels) in enumerate(zip(best.tolist(), order.tolist(), strict=True)):
            yield chunk.ids[start + row], [(classes[j], p) for j, p in zip(labels, values, strict=True)]


def _csv_row(name: str, pairs: list[tuple[str, float]]) -> bytes:
    return csv_line([name, *(cell for label, p in pairs for cell in (label, f"{p:.6f}"))])


def _json_row(name: str, pairs: list[tuple[str, float]]) -> bytes:
    top = [{"label": label, "probability": p} for label, p in pairs]
    row = {"id": name, "label": pairs[0][0], "confidence": pairs[0][1], "top": top}
    # A file name that is no text has half characters, which JSON can hold as \udXXX but UTF-8 cannot.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
