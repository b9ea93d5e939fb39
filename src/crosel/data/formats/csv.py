"""csv: rows with candidates or labels, votes (long or wide), or scores. The header shows which."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from crosel.data.columns import (
    NAME_THEM,
    column_roles,
    guess_kind,
    named_columns,
    other_columns,
    refuse_data_as_names,
    refuse_our_labels,
    refuse_unnamed_images,
    vote_columns,
)
from crosel.data.formats.base import InputSpec
from crosel.data.formats.rows import Numbers, RowFormat, Rows, input_role
from crosel.data.settings import DataSettings, TableKind
from crosel.data.table import Table
from crosel.data.text import CsvFile, is_number
from crosel.data.vocabulary import NO_VOTE
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, quoted

logger = logging.getLogger(__name__)

_LOOK_AT = 200  # rows that show which columns hold votes, where there are features beside them
_WHICH_ARE_VOTES = f"; if this column holds votes, name all columns with votes: {NAME_THEM}"
_LONG_VOTES = "; if rows are votes, name their columns task, worker and label"
_POINT = re.compile(r"\s*[-+]?\d+\.\d+\s*")
_THOUSANDS = re.compile(r"\s*[-+]?[1-9]\d{0,2}\.\d{3}\s*")  # or a number with three decimals
_WHOLE = re.compile(r"\s*-?\d+\.0\s*")


class CsvRows(Rows):
    first: list[str]

    def __init__(self, path: Path, needs_ids: bool = False) -> None:
        """A first column without a name is the index that pandas writes. Where examples are joined by id, or rows hold
        no sets and no labels, it is the id."""
        file = CsvFile(path)
        header, rows = file.header, file.rows()
        start = list(islice(rows, _LOOK_AT))
        if not start:
            raise UserError(f"{path}, line 2: there are no rows below the column names")
        refuse_our_labels(header, path)
        self.start = [row for _, row in start]
        has = column_roles(header, path).keys()
        no_name = not header[0] and all(row[0].strip() for row in self.start)
        if no_name and not has & {"id", "path"} and (needs_ids or not has & {"candidates", "weight", "label"}):
            header[0] = "id"
        self.header, self.known = header, column_roles(header, path)
        if "text" in self.known and all(is_number(row[self.known["text"]]) for row in self.start):
            del self.known["text"]  # it counts a word, or scores a class
        titles = {role: header[column] for role, column in self.known.items()}
        super().__init__(path, 1, titles, [header[c] for c in other_columns(header, self.known)], self.start[0])
        self.first_line = start[0][0]
        self._rows = chain(start, rows)
        self._at = {name: column for column, name in enumerate(header)}
        # Where columns are separated by semicolons, decimals often have commas, and points stand between thousands.
        cells = (cell for row in self.start for cell in row)
        self._doubt = file.delimiter == ";" and not any(
            _POINT.fullmatch(c) and not _THOUSANDS.fullmatch(c) for c in cells
        )
        self.hint: Callable[[list[str]], str] = lambda row: ""  # what cells that are not numbers may be instead

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        return self._rows

    def cell(self, row: Any, title: str) -> Any:
        return row[self._at[title]]

    def numbers(self, names: Sequence[str], others_allowed: bool = False) -> Numbers:
        columns, path = [self._at[name] for name in names], self.path
        take = _cells_in(columns)

        def numbers(line: int, row: list[str]) -> tuple[float, ...]:
            cells = take(row)
            if self._doubt and (cell := next(filter(_THOUSANDS.fullmatch, cells), None)):
                self._doubt = False  # said once
                number = f"{float(cell):g}; if it means {cell.strip().replace('.', '')}, write it without the point"
                logger.warning(f"{path}, line {line}: {quoted(cell)} is read as {number}")
            try:
                if "_" in "".join(cells):  # a code such as 3_1, which Python takes for 31
                    raise ValueError
                return tuple(map(float, cells))
            except ValueError:
                raise self._no_number(line, row, columns) from None

        return numbers

    def check_names(self, names: Sequence[str]) -> None:
        refuse_data_as_names(names, self.path)

    def _no_number(self, line: int, row: list[str], columns: Sequence[int]) -> UserError:
        """The error for the first cell of a row that is not a number."""
        column = next(c for c in columns if not is_number(row[c]))
        hint = self.hint(row)
        what = f"{quoted(row[column])} is not a number; correct it, or drop the row or the column{hint}"
        if not row[column].strip():
            what = f"empty; fill it in or drop the row{hint}"
        elif is_number(row[column].replace(",", ".", 1)):
            what = f"{quoted(row[column])} is not a number; write decimals with a point"
        return UserError(f"{self.path}, line {line}, column {quoted(self.header[column])}: {what}")


def _cells_in(columns: Sequence[int]) -> Callable[[list[str]], Sequence[str]]:
    start = min(columns, default=0)
    end = start + len(columns)
    if list(columns) == list(range(start, end)):  # a slice is the quickest way to take neighbours
        return lambda row: row[start:end]
    return itemgetter(*columns)


class Csv(RowFormat):
    title, suffixes = "csv", (".csv", ".tsv")

    def open(self, path: Path) -> Rows:
        return CsvRows(path)

    def table(self, path: Path, settings: DataSettings, inputs_alone: bool = False) -> tuple[Table, TableKind]:
        if inputs_alone:
            settings = DataSettings(format="table", classes=settings.classes)
        rows = CsvRows(path, needs_ids=inputs_alone)
        header, start, known = rows.header, rows.start, rows.known
        kind, votes = settings.format, list[int]()
        if settings.annotators:
            kind, votes = "wide-votes", named_columns(path, header, settings.annotators)
        votes_known = votes or {"worker", "label"} <= known.keys()
        if "path" not in known and not (votes_known and settings.inputs):  # else no other column is read
            rest = {name: rows.cell(rows.first, name) for name in rows.features if header.index(name) not in votes}
            refuse_unnamed_images(rest, f"{path}, line {rows.first_line}")
        if kind == "auto" and not votes:
            kind = guess_kind(path, header, start, known)
        if kind == "wide-votes" and not votes:
            votes = other_columns(header, known)
            if settings.format == "auto":
                votes = vote_columns(path, header, votes, start, settings.separator)
        for role in ("candidates", "weight"):
            if votes and role in known and known[role] not in votes:
                raise UserError(f"{path}, line 1: votes cannot have a column {role!r}; if it is a feature, rename it")
        annotators = [header[column] for column in votes]
        rows.titles = {role: title for role, title in rows.titles.items() if title not in annotators}
        rows.features = [title for title in rows.features if title not in annotators]
        rows.hint = lambda row: _words_hint(rows, kind, row)
        numbers = [name for name in rows.features if is_number(rows.cell(rows.first, name))]
        inputs = input_role(rows, settings, numbers if kind != "scores" else [])
        has_inputs = inputs is not None or settings.inputs is not None
        table = rows.collect(bool(rows.features) and (kind == "scores" or not has_inputs), annotators)
        if not any(map(_WHOLE.fullmatch, settings.classes or ())):  # unless classes are named so
            for role in table.columns.keys() & {"candidates", "label", "truth"}:
                table.columns[role] = _whole_numbers(table.columns[role])
            table.texts = {name: _whole_numbers(cells) for name, cells in table.texts.items()}
        table.kind_guessed = settings.format == "auto"
        return table, kind

    def settings_to_evaluate(self, path: Path, settings: DataSettings, spec: InputSpec) -> DataSettings:
        """Where the run's own file has votes or scores, and this one has not: inputs and true labels are enough."""
        header = CsvFile(path).header
        known = column_roles(header, path)
        others = [header[column] for column in other_columns(header, known)]
        columns = set(spec.columns or ())
        if not set(settings.annotators or ()).isdisjoint(header):
            return settings
        has_features = (columns and columns <= set(others)) or spec.shape == (len(others),)
        has_images = bool({"path", "text"} & known.keys()) and not known.keys().isdisjoint({"label", "truth"})
        has_inputs_alone = "worker" not in known and (has_images or not others or has_features)
        # The guess would take numbers beside an id for scores, and words beside a path and `truth` for votes.
        guess_may_fail = columns == set(others) or (has_images and "label" not in known)
        as_table = has_inputs_alone and (settings.format != "auto" or guess_may_fail)
        return settings.model_copy(update={"annotators": None, "format": "table" if as_table else settings.format})


def _words_hint(rows: CsvRows, kind: TableKind, row: list[str]) -> str:
    """What a column that holds words, where numbers are expected, may be instead."""
    words = [name for name in rows.features if not is_number(rows.cell(row, name))]
    if kind == "table" and "candidates" not in rows.titles and (near := did_you_mean("candidates", words)):
        return f"; there is no column 'candidates'{near}"
    if kind == "table" and "label" in rows.titles and "candidates" not in rows.titles:
        filled = all(rows.cell(row, name).strip() for name in rows.features)  # a blank is no worker
        return _LONG_VOTES if filled else ""
    return _WHICH_ARE_VOTES if kind != "table" else ""


def _whole_numbers(cells: list[str]) -> list[str]:
    """Labels 3.0 -> 3, in a column that has no others: pandas writes whole numbers so where some cells are blank."""
    said = (cell for cell in cells if cell.strip().lower() not in NO_VOTE)
    if not all(map(_WHOLE.fullmatch, said)):  # ends with the first of most other columns
        return cells
    return [cell.strip().removesuffix(".0") for cell in cells]
