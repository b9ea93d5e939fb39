"""parquet, Arrow and feather files, and folders that Hugging Face's `datasets` saved (`save_to_disk`).

Columns have the names and roles of csv and jsonl. A column of lists of numbers holds features, a struct of bytes and
path an image, and the numbers of a ClassLabel stand for the names that the file's metadata give.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.data.formats.base import Chunk, InputSpec
from crosel.data.formats.rows import Numbers, RowFormat, Rows
from crosel.data.images import StoredImage
from crosel.data.settings import DataSettings, TableKind
from crosel.data.table import Table, column_roles, refuse_our_labels
from crosel.data.text import read_json
from crosel.errors import UserError
from crosel.utils.reading import check_plain
from crosel.utils.system import workers
from crosel.utils.text import counted, did_you_mean, one_line, quoted, some_of

logger = logging.getLogger(__name__)
_ROWS = 1024  # rows that are held at once as Python objects
_TOGETHER = 8  # images that are read at once
_PANDAS_INDEX = "__index_level_0__"
_LABELS = ("candidates", "label", "truth")  # roles whose numbers may stand for names
_DICT, _INFO, _STATE = "dataset_dict.json", "dataset_info.json", "state.json"  # files that `save_to_disk` writes


class _Batch:
    """Some rows; a column is converted once, when it is first asked for."""

    def __init__(self, part: _Part, start: int, first: int, split: str, convert: _Convert) -> None:
        self.columns, self.first, self.split = part.columns.slice(start, _ROWS), first, split
        self.part, self.start = part, start
        self._convert = convert
        self._cells: dict[str, list[Any]] = {}
        self.numbers: list[list[float]] | None = None

    def cells(self, title: str) -> list[Any]:
        if title not in self._cells:
            self._cells[title] = self._convert(self, title)
        return self._cells[title]


class ArrowRows(Rows):
    """Rows are pairs: a batch, and the place in it."""

    unit = "row"

    def __init__(self, path: Path, files: Sequence[Path], splits: Sequence[str] = ()) -> None:
        """`splits` say for each file what its rows are for; without them a column of this name does."""
        self.path, self._files, self._splits = path, files, splits
        with _readable(files[0]):
            self.schema = _open(files[0])[0]
            names: list[str] = [name for name in self.schema.names if name != _PANDAS_INDEX]
        refuse_our_labels(names, path)
        if repeated := [name for at, name in enumerate(names) if name in names[:at]]:
            raise UserError(f"{path}: two columns are named {quoted(repeated[0])}; rename one")
        titles = {role: names[column] for role, column in column_roles(names, path).items()}
        if "text" in titles and _is_number(self.schema.field(titles["text"]).type):
            del titles["text"]  # it counts a word
        images = [name for name in names if _is_image(self.schema.field(name).type)]
        if "path" not in titles and len(images) == 1:  # whatever it is called
            titles["path"] = images[0]
        if splits:
            titles["split"] = "split"
        self.class_names = _class_names(self.schema)
        others = [name for name in names if name not in titles.values()]
        self.unused_classes = [name for name in others if name in self.class_names]
        self._wanted = names
        first = next(self._batches(), None)
        if first is None:
            raise UserError(f"{path}: there are no rows")
        super().__init__(path, 0, titles, [name for name in others if name not in self.class_names], (first[0], 0))
        self._needed = self.features

    @property
    def head(self) -> str:
        return str(self.path)

    def _batches(self) -> Iterator[tuple[_Batch, int]]:
        """Rows, and how many."""
        first = 0
        for at, file in enumerate(self._files):
            with _readable(file):
                schema, parts = _open(file)
                if schema.names != self.schema.names:
                    raise UserError(f"{file}: other columns than in {self._files[0]}; give all files the same")
                for part in parts(self._wanted):
                    for start in range(0, part.columns.num_rows, _ROWS):
                        batch = _Batch(part, start, first, self._splits[at] if self._splits else "", self._cells)
                        yield batch, batch.columns.num_rows
                        first += batch.columns.num_rows

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        needed = {*self.titles.values(), *self._needed}
        self._wanted = [name for name in self.schema.names if name in needed]
        for batch, count in self._batches():
            yield from ((batch.first + at, (batch, at)) for at in range(count))

    def cell(self, row: Any, title: str) -> Any:
        batch, at = row
        if self._splits and title == self.titles["split"]:
            return batch.split
        return batch.cells(title)[at]

    def _cells(self, batch: _Batch, title: str) -> list[Any]:
        """As Python objects: images as such, and class numbers as names."""
        column = batch.columns.column(title)
        with _readable(self.path):
            if _is_image(column.type):
                return [_image(cell, batch.part, title, batch.start + at) for at, cell in enumerate(column)]
            values: list[Any] = column.to_pylist()
        names = self.class_names.get(title)
        return values if names is None else [_named(value, names) for value in values]

    def width(self, title: str) -> int | None:
        if not _is_list(self.schema.field(title).type):
            return None
        width = len(self.cell(self.first, title) or ())
        if not width:
            raise UserError(f"{self.place(0)}, column {quoted(title)}: no numbers; fill it in or drop the row")
        return width

    def ignore_features(self) -> None:
        self._needed = []

    def numbers(self, names: Sequence[str], others_allowed: bool = False) -> Numbers:
        widths, order = self.columns_with(names)
        self._needed = list(widths)

        def numbers(line: int, row: Any) -> Sequence[float]:
            batch, at = row
            if batch.numbers is None:
                columns = [self._matrix(batch, title, width) for title, width in widths.items()]
                values: list[list[float]] = np.concatenate(columns, axis=1)[:, order].tolist()
                batch.numbers = values
            taken: list[float] = batch.numbers[at]
            return tuple(taken)

        return numbers

    def _matrix(self, batch: _Batch, title: str, width: int | None) -> NDArray[np.float64]:
        """The numbers of a column [m, width]; NaN where there is none, which is refused later."""
        column, place = batch.columns.column(title), f"column {quoted(title)}"
        kind = column.type if width is None else column.type.value_type
        if not _is_number(kind):
            near = did_you_mean("candidates", [title]) if "candidates" not in self.titles else ""
            missing = f"; there is no column 'candidates'{near}" if near else ""
            raise UserError(f"{self.path}, {place}: {column.type}, not numbers; drop the column{missing}")
        if width is not None:
            lengths = _pyarrow("compute").list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            if (wrong := np.flatnonzero(lengths != width)).size:
                what = f"{counted(int(lengths[wrong[0]]), 'number')}, where the first row has {width}"
                raise UserError(f"{self.place(batch.first + int(wrong[0]))}, {place}: {what}; give all rows the same")
            column = column.flatten()
        with _readable(self.path):
            values = column.cast(_pyarrow().float64(), safe=False).to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype=np.float64).reshape(-1, width or 1)

    def classes(self) -> tuple[str, ...] | None:
        """Those that the metadata name, where all columns of labels have the same."""
        named = [self.class_names.get(self.titles[role]) for role in _LABELS if role in self.titles]
        return tuple(named[0]) if named and named[0] and all(names == named[0] for names in named) else None


class Arrow(RowFormat):
    title = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq", ".arrow", ".feather")

    def open(self, path: Path) -> ArrowRows:
        return ArrowRows(path, [path])

    def table(self, path: Path, settings: DataSettings, inputs_alone: bool = False) -> tuple[Table, TableKind]:
        rows = self.open(path)
        table, kind = self.collected(rows, settings, inputs_alone)
        table.classes = rows.classes()
        if rows.unused_classes:
            unused = some_of([quoted(name) for name in rows.unused_classes], 5)
            logger.warning(f"{path}: not used, because classes are no features: {unused}")
        return table, kind


class SavedDataset(Arrow):
    """A folder with one dataset, or with a folder for each of its splits; or with parquet files."""

    title, suffixes = "", ()

    def recognises(self, path: Path) -> bool:
        saved = (path / _DICT).is_file() or all((path / name).is_file() for name in (_INFO, _STATE))
        return path.is_dir() and (saved or bool(_shards(path)))

    def open(self, path: Path) -> ArrowRows:
        if (path / _DICT).is_file():
            return _of_splits(path, {name: partial(_data_files, path / name) for name in _split_names(path)})
        if (path / _STATE).is_file():
            return ArrowRows(path, _data_files(path))
        shards: dict[str, list[Path]] = {}
        for file in _shards(path):  # as in train-00000-of-00002.parquet
            shards.setdefault(file.stem.partition("-")[0], []).append(file)
        if not shards.keys() <= {"train", "test", "validation"}:
            return ArrowRows(path, [file for files in shards.values() for file in files])
        return _of_splits(path, {name: partial(list, files) for name, files in shards.items()})

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        if (path / _DICT).is_file():
            there = _split_names(path)
            raise UserError(f"{path}: has the splits {some_of(there, 8)}; name one of them: {path / there[-1]}")
        yield from super().read_chunks(path, spec)


def _of_splits(path: Path, files_of: Mapping[str, Callable[[], list[Path]]]) -> ArrowRows:
    """Those that a run uses, of the splits that are there."""
    if "train" not in files_of:
        raise UserError(f"{path}: there is no split 'train'; name the one to read: {path / next(iter(files_of))}")
    used = [name for name in ("train", "test") if name in files_of]
    if unused := [name for name in files_of if name not in used]:
        logger.warning(f"{path}: only train and test are used, not {some_of(unused, 5)}")
    files = [(file, name) for name in used for file in files_of[name]()]
    return ArrowRows(path, [file for file, _ in files], [name for _, name in files])


def _shards(folder: Path) -> list[Path]:
    """The parquet files that lie in a folder."""
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in (".parquet", ".pq") and file.is_file())


def _split_names(folder: Path) -> list[str]:
    found = read_json(folder / _DICT)
    names = found.get("splits") if isinstance(found, Mapping) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder / _DICT}: expected an object with the names of splits; save the dataset again")
    return names


def _data_files(folder: Path) -> list[Path]:
    path = folder / _STATE
    if not path.is_file():
        raise UserError(f"{path}: no such file; save the dataset again with save_to_disk")
    state = read_json(path)
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise UserError(f"{path}: rows are chosen by a list of their own; save it again: .flatten_indices()")
        if not names or not all(Path(name).name == name for name in names):
            raise ValueError
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(f"{path}: does not name the dataset's files; save it again with save_to_disk") from None
    return [folder / name for name in names]


# --- Arrow's own types ------------------------------------------------------------------------------------------------


def _pyarrow(part: str = "") -> Any:
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError:
        raise UserError("parquet and Arrow files need another package: pip install 'crosel[arrow]'") from None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever pyarrow says about a damaged file, in one line."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged file raises nearly anything
        what = f"not a {path.suffix.lstrip('.') or 'dataset'} file, or damaged"
        raise UserError(f"{path}: {what} ({one_line(error)}); write it again") from None


def _parquet(path: Path) -> Any:
    """Read in pages: by default pyarrow would read whole row groups, and there are files with only one."""
    return _pyarrow("parquet").ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)


class _ParquetImages:
    """Images of a parquet file, read again when they are needed, a few rows at a time: the file may be larger than the
    memory, and so may a row group.

    Threads ask for rows that lie near one another and rise. Rows that lie behind are read from their group's start.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, Lock()
        self._kept: dict[tuple[int, str, int], Any] = {}
        self._coming: dict[tuple[int, str], tuple[int, Iterator[Any]]] = {}  # how many were read, and the others

    def read(self, group: int, column: str, row: int) -> memoryview:
        number, at = divmod(row, _TOGETHER)
        with self._lock, _readable(self.path):
            if (group, column, number) not in self._kept:
                self._read_until(group, column, number)
            return _content(self._kept[group, column, number][at])

    def _read_until(self, group: int, column: str, number: int) -> None:
        done, batches = self._coming.pop((group, column), (number + 1, iter(())))
        if done > number:
            done, batches = 0, _parquet(self.path).iter_batches(_TOGETHER, row_groups=[group], columns=[column])
        for batch in batches:
            self._kept[group, column, done] = batch.column(0)
            done += 1
            if done > number:
                break
            _drop_oldest(self._kept, 4 * workers())
        _drop_oldest(self._kept, 4 * workers())
        self._coming[group, column] = done, batches
        _drop_oldest(self._coming, workers())
        if (group, column, number) not in self._kept:
            raise OSError("the file has changed")


def _drop_oldest(kept: dict[Any, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]


@dataclass(frozen=True)
class _Part:
    """Some rows of a file as Arrow has them, and where they lie in it."""

    columns: Any
    file: str  # with its size and time of change
    number: int
    first: int  # row of the part's first in the row group
    images: _ParquetImages | None = None  # None: Arrow maps the file into memory


_Convert = Callable[[_Batch, str], list[Any]]


def _open(path: Path) -> tuple[Any, Callable[[list[str]], Iterator[_Part]]]:
    """The schema, and what gives chosen columns part by part. Arrow files are mapped into memory, not read."""
    check_plain(path)
    about = os.stat(path)
    name = f"{os.path.abspath(path)}\0{about.st_size}\0{about.st_mtime_ns}"
    if path.suffix.lower() in (".parquet", ".pq"):
        file, images = _parquet(path), _ParquetImages(path)

        def row_groups(columns: list[str]) -> Iterator[_Part]:
            together = _TOGETHER if any(_is_image(file.schema_arrow.field(name).type) for name in columns) else _ROWS
            for group in range(file.num_row_groups):
                first = 0
                for batch in file.iter_batches(together, row_groups=[group], columns=columns):
                    yield _Part(batch, name, group, first, images)
                    first += batch.num_rows

        return file.schema_arrow, row_groups
    ipc, source = _pyarrow("ipc"), _pyarrow().memory_map(str(path))
    is_stream = source.read(6) != b"ARROW1"
    source.seek(0)
    if is_stream:
        reader = ipc.open_stream(source)
        stream_parts = enumerate(reader)
        return reader.schema, lambda columns: (_Part(_checked(b, columns), name, at, 0) for at, b in stream_parts)
    reader = ipc.open_file(source)
    batches = range(reader.num_record_batches)
    return reader.schema, lambda columns: (_Part(_checked(reader.get_batch(b), columns), name, b, 0) for b in batches)


def _checked(batch: Any, columns: list[str]) -> Any:
    """Those columns. Arrow believes the places that a file names, and would read anywhere in memory."""
    chosen = batch.select(columns)
    chosen.validate(full=True)
    return chosen


def _is_list(kind: Any) -> bool:
    types = _pyarrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    types = _pyarrow("types")
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(kind) for test in tests)


def _is_image(kind: Any) -> bool:
    """A struct of bytes and path, as `datasets` stores images; or bytes alone."""
    types = _pyarrow("types")
    if types.is_struct(kind):
        return {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _image(cell: Any, part: _Part, title: str, at: int) -> StoredImage | str | None:
    """An image without bytes is a path."""
    name, content = "", cell
    if _pyarrow("types").is_struct(cell.type):
        if not cell.is_valid:
            return None
        path = cell["path"].as_py()
        if not cell["bytes"].is_valid:
            return path if isinstance(path, str) else None
        name, content = path or "", cell["bytes"]
    if not content.is_valid:
        return None
    row = part.first + at
    where = f"{part.file}\0{title}\0{part.number}\0{row}"
    if part.images is not None:
        return StoredImage(name, where, partial(part.images.read, part.number, title, row))
    return StoredImage(name, where, partial(_content, cell))


def _content(cell: Any) -> memoryview:
    return memoryview((cell["bytes"] if _pyarrow("types").is_struct(cell.type) else cell).as_buffer())


def _class_names(schema: Any) -> dict[str, list[str]]:
    """By column, the names of a ClassLabel, also of one in a list."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        found = {column: _names_of(feature) for column, feature in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {column: names for column, names in found.items() if names}


def _names_of(feature: Any) -> list[str] | None:
    while isinstance(feature, Mapping) and "feature" in feature:
        feature = feature["feature"]
    if isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    names = feature.get("names") if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel" else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _named(value: Any, names: Sequence[str]) -> Any:
    """Numbers of classes -> their names. -1 is `datasets`' own sign that a label is unknown."""
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return None if value == -1 else names[value] if 0 <= value < len(names) else value
