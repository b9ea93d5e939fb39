"""csv: rows with candidates or labels, votes (long or wide), or scores. The header tells which."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path

import numpy as np

from crosel.data.dataset import Dataset
from crosel.data.scores import score_table
from crosel.data.sets import sets_dataset
from crosel.data.settings import DataSettings, Format, OnImages
from crosel.data.table import (
    ANNOTATOR,
    NAME_THEM,
    Table,
    are_votes,
    as_features,
    meanings,
    other_columns,
    refuse_our_labels,
    refuse_unnamed_images,
    split_rows,
)
from crosel.data.text import NO_NAMES, CsvFile, is_number
from crosel.data.vocabulary import NO_VOTE, label_names
from crosel.data.votes import long_votes, wide_votes
from crosel.errors import UserError, did_you_mean
from crosel.utils.limits import check_bytes, shown

_CHECK_EVERY = 1 << 14  # rows between looks at the memory
_WHICH_ARE_VOTES = f"; if this column holds votes, name all columns with votes: {NAME_THEM}"
_LONG_VOTES = "; if rows are votes, name their columns task, worker and label"
_WHOLE = re.compile(r"\s*-?\d+\.0\s*")
Line = tuple[int, list[str]]  # the number of a row's first line, and its cells
_LOOK_AT = 200  # rows that show which columns hold votes, where features stand beside them


def _is_fraction(cell: str) -> bool:
    return is_number(cell) and cell.strip().lower() not in NO_VOTE and not float(cell).is_integer()


def find_format(path: Path, header: list[str], rows: Sequence[Sequence[str]]) -> Format:
    """What a csv file holds, by its header; where only other columns are left, by its first rows."""
    known = meanings(header, path)
    others = other_columns(header, known)
    if are_votes(known):
        return "votes"
    if "candidates" in known or "weight" in known:
        return "table"
    named = [column for column in others if ANNOTATOR.fullmatch(header[column])]
    if others and named == others:
        return "wide-votes"
    if "label" in known:
        return "table"
    if "worker" in known and not named:
        raise UserError(
            f"{path}, line 1: {shown(header[known['worker']])} says who voted; name the column of the labels 'label'"
        )
    if known.keys() & {"id", "path"} and others:
        if named and not any(_is_fraction(row[column]) for row in rows for column in named):
            return "wide-votes"
        if len(others) == 1 and is_number(rows[0][others[0]]) and "truth" not in known:
            raise UserError(
                f"{path}, line 1: {shown(header[others[0]])} alone is no table of scores, which has a column for each "
                "class; if it holds labels, name it 'label'"
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
    near = did_you_mean("candidates", header)
    raise UserError(
        f"{path}, line 1: cannot read '{path.suffix}' without a column 'candidates'{near} or 'label', or an 'id' or "
        f"'path' with votes or scores next to it; it has {', '.join(map(shown, header[:5]))}. "
        f"If some are annotators: {NAME_THEM}"
    )


def _features_beside_truth(path: Path, labels: set[str], cells: set[str]) -> Format:
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
    labels = {label for column in votes for cell in said[column] for label in _labels(cell, separator)}
    unclear = [column for column in numbers if column not in votes]
    if named or not any(map(is_number, labels)) or not unclear:
        return votes
    # Classes that are numbers (1|7), or a feature with a word in it (n/a): numbers beside these may be either.
    if all(said[column] <= labels for column in unclear):
        return list(others)
    raise UserError(
        f"{path}, line 1: {shown(header[unclear[0]])} may hold votes or a feature, since numbers are among the votes "
        f"of other columns; name the columns that hold votes: {NAME_THEM}"
    )


def _labels(cell: str, separator: str) -> Sequence[str]:
    try:
        return label_names(cell, separator)
    except ValueError:  # told with its place when votes are read
        return [cell]


def _named_columns(path: Path, header: Sequence[str], names: Sequence[str]) -> list[int]:
    for name in names:
        if name not in header:
            raise UserError(
                f"{path}, line 1: there is no column {shown(name)} of votes{did_you_mean(name, header)}; "
                "change data.annotators"
            )
    return [header.index(name) for name in names]


def no_number(
    path: Path, line: int, header: Sequence[str], columns: Sequence[int], row: Sequence[str], or_else: str = ""
) -> UserError:
    """The error for the first cell of a row that is not a number; `or_else`: what the column may hold instead."""
    column = next(c for c in columns if not is_number(row[c]))
    what = f"{shown(row[column])} is not a number; correct it, or drop the row or the column{or_else}"
    if not row[column].strip():
        what = f"empty; fill it in or drop the row{or_else}"
    elif is_number(row[column].replace(",", ".", 1)):
        what = f"{shown(row[column])} is not a number; write decimals with a point"
    return UserError(f"{path}, line {line}, column {shown(header[column])}: {what}")


def refuse_data_as_names(names: Sequence[str], path: Path) -> None:
    """Whole numbers may be names, as pandas writes 0, 1, 2; but 5.1 is none."""
    if all(map(is_number, names)) and any(map(_is_fraction, names)):
        raise UserError(f"{path}, line 1: {shown(names[0])} is no name of a column; {NO_NAMES}")


def as_numbers(cells: Sequence[str]) -> Iterator[float]:
    """Cells of features; ValueError, now or when they are taken, if one is no number (`no_number` tells which)."""
    if "_" in "".join(cells):  # a code such as 3_1, which Python takes for 31
        raise ValueError
    return map(float, cells)


def _getter(columns: Sequence[int]) -> Callable[[list[str]], Sequence[str]]:
    first, last = columns[0], columns[-1]
    if list(columns) == list(range(first, last + 1)):  # a slice is the quickest way to take neighbours
        return lambda row: row[first : last + 1]
    return itemgetter(*columns)


def gather(
    path: Path,
    header: Sequence[str],
    rows: Iterable[Line],
    kind: Format,
    votes: Sequence[int] = (),
    inputs_elsewhere: bool = False,
) -> Table:
    """Read all rows. Numbers go straight into one array: no list of cells is ever held for them."""
    known = {meaning: column for meaning, column in meanings(header, path).items() if column not in votes}
    rest = [column for column in other_columns(header, known) if column not in votes]
    numeric = rest if kind == "scores" or not ("path" in known or inputs_elsewhere) else []
    lines, values = array("q"), array("d")
    cells: list[tuple[list[str], int]] = [([], column) for column in known.values()]
    texts: list[tuple[list[str], int]] = [([], column) for column in votes]
    wanted = cells + texts
    take = _getter(numeric) if numeric else None
    for line, row in rows:
        lines.append(line)
        for column_cells, column in wanted:
            column_cells.append(row[column])
        if take is not None:
            try:
                values.extend(as_numbers(take(row)))
            except ValueError:
                labels_alone = kind == "table" and "label" in known and "candidates" not in known
                or_else = _WHICH_ARE_VOTES if kind != "table" else ""
                if labels_alone and all(cell.strip() for cell in take(row)):  # a blank is no worker
                    or_else = _LONG_VOTES
                words = [header[column] for column in numeric if not is_number(row[column])]
                if kind == "table" and "candidates" not in known and (near := did_you_mean("candidates", words)):
                    or_else = f"; there is no column 'candidates'{near}"
                raise no_number(path, line, header, numeric, row, or_else) from None
        if len(lines) % _CHECK_EVERY == 0:
            check_bytes(12 * len(values), "the numbers", path)
    names = [header[column] for column in numeric]
    features = None
    if numeric:
        features = as_features(np.frombuffer(values).reshape(len(lines), len(numeric)), path, lines, names)
    return Table(
        path, lines, {meaning: c for meaning, (c, _) in zip(known, cells, strict=True)},
        {meaning: header[column] for meaning, column in known.items()}, features, names,
        {header[column]: c for c, column in texts}, [] if numeric else [header[column] for column in rest],
    )  # fmt: skip


def _whole_numbers(cells: list[str]) -> list[str]:
    """Labels 3.0 -> 3, in a column that has no others: pandas writes whole numbers so where some cells are blank."""
    said = (cell for cell in cells if cell.strip().lower() not in NO_VOTE)
    if not all(map(_WHOLE.fullmatch, said)):  # ends with the first of most other columns
        return cells
    return [cell.strip().removesuffix(".0") for cell in cells]


def open_rows(path: Path, needs_ids: bool = False) -> tuple[list[str], list[Line], Iterator[Line]]:
    """The names of the columns, the first few rows, and all rows.

    A first column without a name is the index that pandas writes. Where examples are joined by id, or rows hold no sets
    and no labels, it is the id.
    """
    source = CsvFile(path)
    header, rows = source.header, source.rows()
    first = list(islice(rows, _LOOK_AT))
    if not first:
        raise UserError(f"{path}, line 2: there are no rows below the column names")
    refuse_our_labels(header, path)
    has = meanings(header, path).keys()
    no_name = not header[0] and all(row[0].strip() for _, row in first)
    if no_name and not has & {"id", "path"} and (needs_ids or not has & {"candidates", "weight", "label"}):
        header[0] = "id"
    return header, first, chain(first, rows)


def open_csv(path: Path, settings: DataSettings, needs_ids: bool = False) -> tuple[Table, Format]:
    """A csv file as a table; what it holds is told by the settings, else by its header and first rows."""
    header, first, rows = open_rows(path, needs_ids)
    kind, votes = settings.format, list[int]()
    if settings.annotators:
        kind, votes = "wide-votes", _named_columns(path, header, settings.annotators)
    known = meanings(header, path)
    told = votes or {"worker", "label"} <= known.keys()  # which columns hold votes
    if "path" not in known and not (told and settings.inputs):  # else no other column is read
        line, row = first[0]
        rest = {header[c]: row[c] for c in other_columns(header, known) if c not in votes}
        refuse_unnamed_images(rest, f"{path}, line {line}")
    if kind == "auto" and not votes:
        kind = find_format(path, header, [row for _, row in first])
    if kind == "wide-votes" and not votes:
        votes = other_columns(header, known)
        if settings.format == "auto":
            votes = vote_columns(path, header, votes, [row for _, row in first], settings.separator)
    for meaning in ("candidates", "weight"):
        if votes and meaning in known and known[meaning] not in votes:
            raise UserError(f"{path}, line 1: votes cannot have a column {meaning!r}; if it is a feature, rename it")
    table = gather(path, header, rows, kind, votes, settings.inputs is not None)
    if not any(map(_WHOLE.fullmatch, settings.classes or ())):  # unless classes are named so
        for meaning in table.columns.keys() & {"candidates", "label", "truth"}:
            table.columns[meaning] = _whole_numbers(table.columns[meaning])
        table.texts = {name: _whole_numbers(cells) for name, cells in table.texts.items()}
    return table, kind


def read_csv(path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
    table, kind = open_csv(path, settings)
    return dataset_of(table, kind, settings, progress)


def dataset_of(table: Table, kind: Format, settings: DataSettings, progress: OnImages | None) -> Dataset:
    if kind != "table" and len(tests := split_rows(table)[1]):
        raise UserError(
            f"{table.place(int(tests[0]), 'split')}: votes and scores are for training; put test rows in the "
            "file of inputs: --set data.inputs=FILE"
        )
    read = {"votes": long_votes, "wide-votes": wide_votes, "scores": score_table}.get(kind, sets_dataset)
    return read(table, settings, progress)
