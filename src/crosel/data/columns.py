"""Which column of a table holds what: by its name, and, where the name does not show it, by its first cells."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosel.data.images import ends_as_image
from crosel.data.settings import TableKind
from crosel.data.text import NO_NAMES, is_number
from crosel.data.vocabulary import NO_VOTE, label_names
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, quoted, some_of

# Columns with a role, under the names that tools give them.
ROLES = {
    "path": "path", "image": "path", "filename": "path", "id": "id", "task": "id", "item": "id",
    "candidates": "candidates", "label": "label", "weight": "weight", "split": "split",
    "worker": "worker", "annotator": "worker", "truth": "truth", "text": "text",
}  # fmt: skip
ANNOTATOR = re.compile(r"(annotator|worker|reader|rater|expert|label)[ _-]?\w*", re.IGNORECASE)  # a column of votes
NAME_THEM = "--set data.annotators=[NAME,NAME]"
OUR_LABELS = {"id", "label", "confidence", "selected", "candidates", "flag"}  # columns of what `crosel labels` writes
SHOWN = 12  # columns that an error names
ALL_ROWS = "a task must have the same in all its rows"
_SETS = {"candidates", "weight"}  # roles with which a row is an example with its set


def refuse_our_labels(names: Iterable[str], path: Path) -> None:
    """Labels that we wrote look like data, but what they are labels of is not in them."""
    if set(names) - {"outside_label"} == OUR_LABELS:
        raise UserError(
            f"{path}, line 1: these are labels that crosel wrote, without the examples themselves; give the source "
            "that the run was trained on. To train on the labels: crosel train SOURCE --corrections LABELS.csv"
        )


def column_roles(header: Sequence[str], path: Path, line: int = 1) -> dict[str, int]:
    """Which column holds what; two columns of one role are an error."""
    found: dict[str, int] = {}
    for column, name in enumerate(header):
        role = ROLES.get(name.lower())
        if role is None:
            continue
        if role in found:
            both = f"{quoted(header[found[role]])} and {quoted(name)}"
            raise UserError(f"{path}, line {line}, column {column + 1}: {both} mean the same; rename one")
        found[role] = column
    return found


def other_columns(header: Sequence[str], known: Mapping[str, int]) -> list[int]:
    """Columns that have a name, but no role."""
    return [column for column, name in enumerate(header) if name and column not in known.values()]


def are_votes(known: Collection[str]) -> bool:
    """Whether rows with columns of these roles are votes, one a row; several are about one example."""
    return {"worker", "label"} <= set(known) and not {"id", "path"}.isdisjoint(known) and _SETS.isdisjoint(known)


def refuse_unnamed_images(row: Mapping[str, Any], place: str) -> None:
    """Columns that are taken for features or votes, although the first row has the name of an image there."""
    for name, cell in row.items():
        if isinstance(cell, str) and ends_as_image(cell.strip()):
            raise UserError(
                f"{place}, column {quoted(name)}: {quoted(cell)} seems to be an image; "
                "name the column 'path', or drop it"
            )


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
        if "worker" in known and _SETS.isdisjoint(known) and (name := _id_column(header, others, rows)):
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
