"""Formats whose files are rows, as csv and jsonl: one parser, whose rows are collected into a `Table` to train on, or
taken chunk by chunk to predict."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import Dataset
from crosel.data.embeddings import NEEDS_BACKBONE, Embedder, embed_texts
from crosel.data.formats.base import Chunk, Format, InputSpec, image_chunks
from crosel.data.images import ImageSource, StoredImage
from crosel.data.settings import DataSettings, OnImages, TableKind
from crosel.data.table import (
    ALL_ROWS,
    Table,
    are_votes,
    as_features,
    check_test_labels,
    image_path,
    optional_labels,
    own_ids,
    refuse_unnamed_images,
    sets_dataset,
    split_rows,
    table_inputs,
    with_truth,
)
from crosel.data.vocabulary import label_name
from crosel.data.votes import Inputs, long_votes, score_table, wide_votes
from crosel.errors import UserError
from crosel.utils.system import check_bytes
from crosel.utils.text import did_you_mean, quoted, some_of

logger = logging.getLogger(__name__)
Numbers = Callable[[int, Any], Sequence[float]]  # (line, row) -> features

_BYTES_PER_CELL = 64  # of a Python object, or of a row's place, at the least


class Rows:
    """A file of rows, opened: what its columns hold is known, and the rows come one by one."""

    unit = "line"  # what errors count

    def __init__(self, path: Path, line: int, titles: dict[str, str], features: list[str], first: Any) -> None:
        self.path = path
        self.line = line  # that shows the columns
        self.titles = titles  # role -> its column; rows may add to it
        self.features = features  # columns without a role, which hold numbers unless they are ignored
        self.first = first  # row

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """(line, row) of all rows, the first included."""
        raise NotImplementedError

    def place(self, line: int) -> str:
        return f"{self.path}, {self.unit} {line}"

    def _places(self, lines: Sequence[int]) -> Callable[[int], str]:
        return lambda row: self.place(lines[row])

    @property
    def head(self) -> str:
        """The place of what is wrong with the columns themselves."""
        return self.place(self.line)

    def cell(self, row: Any, title: str) -> Any:
        """What a row holds in a column."""
        raise NotImplementedError

    def width(self, title: str) -> int | None:
        """How long the lists of a column are; None: it holds no lists."""
        return None

    def number_names(self, titles: Sequence[str] | None = None) -> list[str]:
        """A name for each number of these columns: one may hold several. Of a list of one, it is the column's."""
        names: list[str] = []
        for title in self.features if titles is None else titles:
            width = self.width(title)
            names += [title] if width in (None, 1) else [f"{title}[{i}]" for i in range(width)]
        return names

    def columns_with(self, names: Sequence[str]) -> tuple[dict[str, int | None], list[int]]:
        """Columns that hold these numbers, with their widths, and where among all numbers of theirs each is."""
        wanted = set(names)
        widths = {title: self.width(title) for title in self.features if wanted & set(self.number_names([title]))}
        places = {name: at for at, name in enumerate(self.number_names(list(widths)))}
        return widths, [places[name] for name in names]

    def numbers(self, names: Sequence[str], others_allowed: bool = False) -> Numbers:
        """What takes these numbers out of a row; rows may then have other columns, too, or not."""
        raise NotImplementedError

    def ignore_features(self) -> None:
        """Rows may have any columns beside those with a role."""

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse what is no name of a feature; only asked where no feature has a name that the run knows."""

    @property
    def has_names(self) -> bool:
        """Whether the numbers have names of their own; those of one list have none."""
        return len(self.features) > 1 or self.number_names() == self.features

    def collect(self, with_features: bool = True, votes: Sequence[str] = ()) -> Table:
        """All rows. Numbers go straight into one array: no list of cells is ever held for them."""
        if not with_features:
            self.ignore_features()
        names = self.number_names() if with_features else []
        numbers = self.numbers(names) if names else None
        lines, values = array("q"), array("d")
        columns: dict[str, list[Any]] = {role: [] for role in self.titles}
        texts: dict[str, list[str]] = {title: [] for title in votes}
        for line, row in self:
            for role, title in self.titles.items():
                if role not in columns:
                    columns[role] = [None] * len(lines)
                columns[role].append(self.cell(row, title))
            for title, cells in texts.items():
                cells.append(self.cell(row, title))
            lines.append(line)
            if numbers is not None:
                values.extend(numbers(line, row))
            if len(lines) % 4096 == 0:  # a few kilobytes of parquet may be millions of rows
                count = len(lines) * (len(columns) + len(texts) + 1)
                check_bytes(12 * len(values) + _BYTES_PER_CELL * count, "its rows", self.path)
        if not names:
            return Table(self.path, lines, columns, self.titles, texts=texts, unused=self.features, unit=self.unit)
        numbers_read = np.frombuffer(values).reshape(len(lines), len(names))
        features = as_features(numbers_read, self._places(lines), names)
        return Table(
            self.path, lines, columns, self.titles, features, names if self.has_names else self.features, texts,
            unit=self.unit,
        )  # fmt: skip

    def chunks(self, spec: InputSpec) -> Iterator[Chunk]:
        """The examples that the rows name or hold, as many at a time as `spec` says."""
        place = self.head
        title = self._image_column(spec)
        if title is not None:
            self.ignore_features()
            yield from image_chunks(self._images(title, spec), spec, self.path)
            return
        if spec.takes_texts and "text" in self.titles:
            yield from self._text_chunks(spec)
            return
        names = self.number_names()
        if spec.is_image or spec.takes_texts:
            spec.check_width(len(names), place)
        wanted = [names[at] for at in spec.order(names, place)] if self.has_names else names
        by_name = not set(wanted).isdisjoint(spec.columns or ())
        rows = self._examples(self.numbers(wanted, others_allowed=by_name))
        spec.check_width(len(wanted), place)
        if not by_name:
            self.check_names(wanted)
        while batch := list(islice(rows, spec.rows)):
            values = np.array([numbers for _, _, numbers in batch], dtype=np.float64)
            features = as_features(values, self._places([line for _, line, _ in batch]), wanted)
            yield Chunk([name for name, _, _ in batch], features)

    def _text_chunks(self, spec: InputSpec) -> Iterator[Chunk]:
        self.ignore_features()
        title = self.titles["text"]
        assert spec.encoder is not None
        settings = DataSettings(cache=False).embedding(Embedder(spec.encoder))
        rows = self._examples(lambda _, row: self.cell(row, title))
        while batch := list(islice(rows, spec.rows)):
            places = self._places([line for _, line, _ in batch])
            named = partial(_in_column, places, title)
            x, _ = embed_texts([text for _, _, text in batch], named, settings, None)
            yield Chunk([name for name, _, _ in batch], x)

    def _image_column(self, spec: InputSpec) -> str | None:
        """The column that names images: the ids may do so, as in votes."""
        title = self.titles.get("path")
        if title is None and spec.is_image and "id" in self.titles:
            with suppress(ValueError):  # no path
                if self._image_root(self.cell(self.first, self.titles["id"]), spec):
                    return self.titles["id"]
        return title

    def _image_root(self, cell: Any, spec: InputSpec) -> Path | None:
        """Where paths start from, as the first image shows: beside the list, or where those of the run do."""
        for root in (self.path.parent, spec.image_root):
            if root is not None and not isinstance(cell, StoredImage) and image_path(cell, root).exists():
                return root
        return None

    def _images(self, title: str, spec: InputSpec) -> Iterator[tuple[str, ImageSource, str]]:
        """(id, file, place) of the images that a column names."""
        root: Path | None = None
        for name, line, cell in self._examples(lambda _, row: self.cell(row, title)):
            place, starts = f"{self.place(line)}, column {quoted(title)}", root is None
            if isinstance(cell, StoredImage):
                yield name, cell, place
                continue
            try:
                root = root or self._image_root(cell, spec)
                image = image_path(cell, root or self.path.parent)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
            if root is None:
                remedy = "give paths from the list's own folder"
                raise UserError(f"{place}: {quoted(str(image))}: no such image file; {remedy}")
            if starts and root != self.path.parent:
                logger.warning(f"{self.path}: images are read from {root}, like those of the run")
            yield name, image, place

    def _examples(self, content: Callable[[int, Any], Any]) -> Iterator[tuple[str, int, Any]]:
        """(id, line, content) of each row; of votes on one example, of the first that has some."""
        votes = are_votes({*self.titles, "label"})  # which is not needed here
        seen: dict[str, tuple[int, int]] = {}  # name -> line and digest of the first
        blank: dict[str, int] = {}  # name -> line of the first, where no row has had the content yet
        for number, (line, row) in enumerate(self):
            name, value = self._row_id(number, line, row), content(line, row)
            if votes and (value is None or (isinstance(value, str) and not value.strip())):
                if name not in seen:
                    blank.setdefault(name, line)
                continue
            if votes:
                blank.pop(name, None)
                digest = _row_digest(value)
                before, same = seen.setdefault(name, (line, digest))
                if digest != same:
                    what = f"{self.unit} {before} has something else for {quoted(name)}"
                    raise UserError(f"{self.place(line)}: {what}; {ALL_ROWS}")
                if before != line:
                    continue
            yield name, line, value
        yield from ((name, line, "") for name, line in blank.items())  # refused, with the line

    def _row_id(self, number: int, line: int, row: Any) -> str:
        if "id" not in self.titles:
            path = self.cell(row, self.titles["path"]) if "path" in self.titles else None
            return path.strip() if isinstance(path, str) else str(number)
        try:
            return label_name(self.cell(row, self.titles["id"]), what="name")
        except ValueError as error:
            raise UserError(f"{self.place(line)}, column {quoted(self.titles['id'])}: {error}") from None


def _in_column(places: Callable[[int], str], title: str, row: int) -> str:
    return f"{places(row)}, column {quoted(title)}"


def input_role(rows: Rows, settings: DataSettings, features: Sequence[str]) -> str | None:
    """The role that inputs have: None for columns of numbers, `features`. One line tells which others are there."""
    if settings.inputs is not None:
        return None
    role = "text" if settings.takes_texts and "text" in rows.titles else "path" if "path" in rows.titles else None
    others = [rows.titles[other] for other in ("text", "path") if other in rows.titles and other != role]
    others += features if role is not None else []
    if others and (role is not None or features):
        used = f"column {quoted(rows.titles[role])}" if role is not None else f"columns of numbers ({len(features)})"
        text = f"; to learn from texts: {NEEDS_BACKBONE}" if "text" in rows.titles and role != "text" else ""
        logger.warning(f"{rows.path}: inputs: {used}; not used: {some_of([quoted(name) for name in others], 5)}{text}")
    return role


def _row_digest(value: Any) -> int:
    """Differs where the content of two rows differs, in little memory."""
    if not isinstance(value, tuple):
        return hash(value.content if isinstance(value, StoredImage) else str(value).strip())
    with np.errstate(over="ignore"):  # reported later
        return hash((np.array(value, dtype=np.float32) + 0).tobytes())  # -0 is 0


class RowFormat(Format):
    """A format that can open a file as `Rows`, and knows what they are: sets, votes or scores."""

    def open(self, path: Path) -> Rows:
        raise NotImplementedError

    def table(self, path: Path, settings: DataSettings, inputs_alone: bool = False) -> tuple[Table, TableKind]:
        """All rows, and what they are. With `inputs_alone` they only say what other examples' inputs are."""
        return self.collected(self.open(path), settings, inputs_alone)

    def collected(self, rows: Rows, settings: DataSettings, inputs_alone: bool) -> tuple[Table, TableKind]:
        """All rows of a format in which only sets, labels and long votes are written."""
        numbers = [key for key in rows.features if not isinstance(rows.cell(rows.first, key), str | None)]
        role = input_role(rows, settings, numbers)
        with_features = role is None and (inputs_alone or settings.inputs is None)
        if with_features:
            cells = {key: rows.cell(rows.first, key) for key in rows.features}
            refuse_unnamed_images(cells, rows.head)
            words = [key for key, cell in cells.items() if isinstance(cell, str | list)]
            if "candidates" not in rows.titles and (near := did_you_mean("candidates", words)):
                raise UserError(f"{rows.head}: there is no 'candidates'{near}")
        table = rows.collect(with_features)
        if not inputs_alone and not table.columns.keys() & {"candidates", "weight", "label", "truth"}:
            raise UserError(
                f"{rows.head}: there is no 'candidates'{did_you_mean('candidates', table.unused)} "
                "and no 'label'; add one of them to every row"
            )
        return table, "votes" if are_votes(table.columns) else "table"

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        table, kind = self.table(path, settings)
        if settings.classes is None and table.classes is not None:
            settings = settings.model_copy(update={"classes": table.classes})
        if kind != "table" and len(tests := split_rows(table)[1]):
            raise UserError(
                f"{table.place(int(tests[0]), 'split')}: votes and scores are for training; put test rows in the "
                "file of inputs: --set data.inputs=FILE"
            )
        of_kind = {"votes": long_votes, "wide-votes": wide_votes, "scores": score_table}.get(kind, sets_dataset)
        return of_kind(table, settings, progress)

    def read_inputs(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Inputs:
        table = with_truth(self.table(path, settings, inputs_alone=True)[0])
        own_ids(table)  # a repeated id is reported before images are decoded
        x, bad = table_inputs(table, settings, progress)
        if bad:
            good = [row for row in range(table.n) if row not in bad]
            table, x = table.take(good), x[good]
        ids = own_ids(table)
        train, test = split_rows(table)
        labels, cells = optional_labels(table, train)
        known = None if labels is None else tuple(labels)
        if not len(test):
            return Inputs(x, tuple(ids), known, columns=table.feature_names)
        check_test_labels(table, test, cells)
        test_labels = tuple(str(cells[row]) for row in test)
        return Inputs(x[train], tuple(ids[row] for row in train), known, x[test], test_labels, table.feature_names)

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        yield from self.open(path).chunks(spec)
