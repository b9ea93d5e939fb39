"""csv: rows with candidates or labels, votes (long or wide), or scores. The header shows which."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from crosel.data.formats.base import InputSpec
from crosel.data.formats.rows import Numbers, RowFormat, Rows, input_role
from crosel.data.settings import DataSettings, TableKind
from crosel.data.table import (
    ANNOTATOR,
    NAME_THEM,
    SETS,
    Table,
    are_votes,
    column_roles,
    refuse_our_labels,
    refuse_unnamed_images,
)
from crosel.data.text import NO_NAMES, CsvFile, is_number
from crosel.data.vocabulary import NO_VOTE, label_names
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, quoted, some_of

logger = logging.getLogger(__name__)

SHOWN = 12  # columns that an error names
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


# --- what a file holds: by its header, and, where that does not show it, by its first cells -------------------------


def other_columns(header: Sequence[str], known: Mapping[str, int]) -> list[int]:
    """Columns that have a name, but no role."""
    return [column for column, name in enumerate(header) if name and column not in known.values()]


def refuse_data_as_names(names: Sequence[str], path: Path) -> None:
    """Whole numbers may be names, as pandas writes 0, 1, 2; but 5.1 is none."""
    if all(map(is_number, names)) and any(map(_is_fraction, names)):
        raise UserError(f"{path}, line 1: {quoted(names[0])} is not a column name; {NO_NAMES}")


def _is_fraction(cell: str) -> bool:
    return is_number(cell) and cell.strip().lower() not in NO_VOTE and not float(cell).is_integer()


def guess_kind(
    path: Path, header: list[str], rows: Sequence[Sequence[str]], known: Mapping[str, int] | None = None
) -> TableKind:
    """What a csv file holds, by its header; where only other columns are left, by its first rows."""
    known = column_roles(header, path) if known is None else known
    others = other_columns(header, known)
    if are_votes(known):
        return "votes"
    if "candidates" in known or "weight" in known:
        return "table"
    named = [column for column in others if ANNOTATOR.fullmatch(header[column])]
    if others and named == others:
        return "wide-votes"
    if "label" in known:
        if "worker" in known and SETS.isdisjoint(known) and (name := _id_column(header, others, rows)):
            raise UserError(
                f"{path}, line 1: votes need a column 'id', which says what they are about; if that is {quoted(name)}, "
                "call it 'id'"
            )
        return "table"
    if "worker" in known and not named:
        raise UserError(
            f"{path}, line 1: {quoted(header[known['worker']])} says who voted; name the column of the labels 'label'"
        )
    if known.keys() & {"id", "path", "text"} and others:
        if named and not any(_is_fraction(row[column]) for row in rows for column in named):
            return "wide-votes"
        if len(others) == 1 and is_number(rows[0][others[0]]) and "truth" not in known:
            raise UserError(
                f"{path}, line 1: {quoted(header[others[0]])} alone is not a table of scores, which has a column "
                "for each class; if it holds labels, name it 'label'"
            )
        cells = {row[column].strip().lower() for row in rows for column in others}
        numbers = all(is_number(rows[0][column]) for column in others)
        if numbers and "truth" in known:
            labels = {row[known["truth"]].strip().lower().removesuffix(".0") for row in rows} - NO_VOTE
            if labels and labels.isdisjoint(header[column].lower() for column in others):  # else these are scores
                return _features_beside_truth(path, labels, cells)
        _refuse_coded_votes(path, cells)
        return "scores" if numbers else "wide-votes"
    if "truth" in known:
        return "table"
    if near := did_you_mean("candidates", header):
        raise UserError(f"{path}, line 1: there is no column 'candidates'{near}; rename the column that holds the sets")
    name = _id_column(header, others, rows)
    hint = f"If {quoted(name)} says which example a row is about, call it 'id'. " if name else ""
    raise UserError(
        f"{path}, line 1: cannot read '{path.suffix}' without a column 'candidates' or 'label', or an 'id' or "
        f"'path' with votes or scores next to it; it has {some_of([quoted(name) for name in header], SHOWN)}. "
        f"{hint}If some are annotators: {NAME_THEM}"
    )


def _id_column(header: Sequence[str], columns: Sequence[int], rows: Sequence[Sequence[str]]) -> str:
    """Which column may say what a row is about, under a name of its own: the first of words, or the only one."""
    words = [column for column in columns if not all(is_number(row[column]) for row in rows)]
    for column in words or columns[: len(columns) == 1]:
        if len({row[column] for row in rows}) > 1:
            return header[column]
    return ""


def _features_beside_truth(path: Path, labels: set[str], cells: set[str]) -> TableKind:
    """Numbers beside true labels are features; but whole ones may be votes by number of the class."""
    if labels <= cells and not any(map(_is_fraction, cells)):
        raise UserError(
            f"{path}: whole numbers, true labels among them, may be votes or features; say which: "
            "--set data.format=wide-votes or --set data.format=table"
        )
    return "table"


def _refuse_coded_votes(path: Path, cells: set[str]) -> None:
    """Numbers alone are scores; but whole ones, of which some say "no vote", may be votes by number of the class."""
    if cells & NO_VOTE and all(cell in NO_VOTE or (is_number(cell) and not _is_fraction(cell)) for cell in cells):
        none = "blank" if "" in cells else next(iter(sorted(cells & NO_VOTE)))
        raise UserError(
            f"{path}: whole numbers, some of them {none}, may be votes or scores; say which: "
            "--set data.format=wide-votes or --set data.format=scores"
        )


def vote_columns(
    path: Path, header: Sequence[str], others: Sequence[int], rows: Sequence[Sequence[str]], separator: str
) -> list[int]:
    """Columns of votes among columns of features: annotators by their name, and all whose cells are not numbers."""
    said = {column: {cell for row in rows if (cell := row[column].strip()).lower() not in NO_VOTE} for column in others}
    numbers = [column for column in others if said[column] and all(map(is_number, said[column]))]
    named = [column for column in others if ANNOTATOR.fullmatch(header[column])]
    votes = [column for column in others if column in named or column not in numbers]
    labels = {label for column in votes for cell in said[column] for label in _cell_labels(cell, separator)}
    unclear = [column for column in numbers if column not in votes]
    if named or not any(map(is_number, labels)) or not unclear:
        return votes
    # Classes that are numbers (1|7), or a feature with a word in it (n/a): numbers beside these may be either.
    if all(said[column] <= labels for column in unclear):
        return list(others)
    raise UserError(
        f"{path}, line 1: {quoted(header[unclear[0]])} may hold votes or a feature, since numbers are among the votes "
        f"of other columns; name the columns that hold votes: {NAME_THEM}"
    )


def _cell_labels(cell: str, separator: str) -> Sequence[str]:
    try:
        return label_names(cell, separator)
    except ValueError:  # reported with its place when votes are read
        return [cell]


def named_columns(path: Path, header: Sequence[str], names: Sequence[str]) -> list[int]:
    for name in names:
        if name not in header:
            raise UserError(
                f"{path}, line 1: there is no column {quoted(name)} of votes{did_you_mean(name, header)}; "
                "change data.annotators"
            )
    return [header.index(name) for name in names]
