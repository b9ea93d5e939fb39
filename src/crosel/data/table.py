"""Which column of a table holds what, and its rows in memory: the columns with a role, and numbers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from crosel.data.dataset import LABELS_UNUSED, Array, Dataset, first_place, make_dataset
from crosel.data.embeddings import NEEDS_BACKBONE, embed_texts
from crosel.data.images import ImageSource, StoredImage, bad_inputs_note, ends_as_image, read_usable_images
from crosel.data.settings import DataSettings, OnImages
from crosel.data.store import Examples
from crosel.data.vocabulary import (
    EMPTY,
    Vocabulary,
    alike,
    check_cells,
    label_name,
    label_names,
    label_weights,
    looks_joined,
    looks_listed,
    may_be_unknown,
)
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, has_control_characters, quoted

T = TypeVar("T")


# --- which column holds what ----------------------------------------------------------------------------------------

# Columns with a role, under the names that tools give them.
ROLES = {
    "path": "path", "image": "path", "filename": "path", "id": "id", "task": "id", "item": "id",
    "candidates": "candidates", "label": "label", "weight": "weight", "split": "split",
    "worker": "worker", "annotator": "worker", "truth": "truth", "text": "text",
}  # fmt: skip
ANNOTATOR = re.compile(r"(annotator|worker|reader|rater|expert|label)[ _-]?\w*", re.IGNORECASE)  # a column of votes
NAME_THEM = "--set data.annotators=[NAME,NAME]"
OUR_LABELS = {"id", "label", "confidence", "selected", "candidates", "flag"}  # columns of what `crosel labels` writes
ALL_ROWS = "a task must have the same in all its rows"
SETS = {"candidates", "weight"}  # roles with which a row is an example with its set


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


def are_votes(known: Collection[str]) -> bool:
    """Whether rows with columns of these roles are votes, one a row; several are about one example."""
    return {"worker", "label"} <= set(known) and not {"id", "path"}.isdisjoint(known) and SETS.isdisjoint(known)


def refuse_unnamed_images(row: Mapping[str, Any], place: str) -> None:
    """Columns that are taken for features or votes, although the first row has the name of an image there."""
    for name, cell in row.items():
        if isinstance(cell, str) and ends_as_image(cell.strip()):
            raise UserError(
                f"{place}, column {quoted(name)}: {quoted(cell)} seems to be an image; "
                "name the column 'path', or drop it"
            )


# --- rows -----------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    path: Path
    lines: Sequence[int]  # the line each row begins on, or its number in a file without lines
    columns: dict[str, list[Any]]  # role -> cells
    titles: dict[str, str]  # role -> the name in the file
    features: NDArray[np.float32] | None = None
    names: list[str] = field(default_factory=list)  # of the features
    texts: dict[str, list[str]] = field(default_factory=dict)  # other columns, where text is wanted
    unused: Sequence[str] = ()  # names of columns that are not read
    kind_guessed: bool = False  # whether it may be something else: `data.format` says what it is
    unit: str = "line"  # what `lines` are
    classes: tuple[str, ...] | None = None  # in order, where the file names them

    @property
    def n(self) -> int:
        return len(self.lines)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """One for each feature; None for images, and for features that are one list."""
        wide = self.features is not None and self.features.shape[1] == len(self.names)
        return tuple(self.names) if wide and self.names else None

    @property
    def key(self) -> str | None:
        """The column that rows are known by: their ids, else their paths."""
        if "id" in self.columns:
            return "id"
        paths = self.columns.get("path")
        return "path" if paths is not None and all(isinstance(cell, str) for cell in paths) else None

    @property
    def head(self) -> str:
        """The place of what is wrong with the columns themselves."""
        return f"{self.path}, line 1" if self.unit == "line" else str(self.path)

    def place(self, row: int, role: str | None = None) -> str:
        column = f", column {quoted(self.titles.get(role, role))}" if role else ""
        return f"{self.path}, {self.line(row)}{column}"

    def line(self, row: int) -> str:
        return f"{self.unit} {self.lines[row]}"

    def take(self, rows: Sequence[int]) -> Table:
        """Some of the rows."""
        return replace(
            self, lines=[self.lines[row] for row in rows],
            columns={role: [cells[row] for row in rows] for role, cells in self.columns.items()},
            features=None if self.features is None else self.features[np.asarray(rows, dtype=np.int64)],
            texts={name: [cells[row] for row in rows] for name, cells in self.texts.items()},
        )  # fmt: skip

    def parsed(self, role: str, parse: Callable[[Any], T], rows: Iterable[int] | None = None) -> list[T]:
        """Cells of a column, those of all rows or some, through a parser, equal cells once; its ValueError gets the
        place."""
        known: dict[Hashable, T] = {}
        out: list[T] = []
        cells = self.columns[role]
        for row in range(self.n) if rows is None else rows:
            cell = cells[row]
            try:
                if isinstance(cell, str):
                    if cell not in known:
                        known[cell] = parse(cell)
                    out.append(known[cell])
                else:
                    out.append(parse(cell))
            except ValueError as error:
                raise UserError(f"{self.place(row, role)}: {error}") from None
        return out


def as_features(values: Array, place: Callable[[int], str], names: Sequence[str]) -> NDArray[np.float32]:
    """Check numbers and bring them to single precision, with the row and column of the first that does not fit."""
    with np.errstate(over="ignore"):
        out: NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(out).all():
        row, column = first_place(~np.isfinite(out))
        value = values[row, column]
        what = "NaN" if np.isnan(value) else "an infinite value" if np.isinf(value) else f"{value:g} is too large"
        raise UserError(f"{place(int(row))}, column {quoted(names[column])}: {what}; fill it in or drop the row")
    return out


def check_ids(table: Table, role: str = "id") -> list[str]:
    """The ids as text; a repeated one is an error that names both lines."""
    ids = table.parsed(role, partial(label_name, what="name"))
    seen: dict[str, int] = {}
    for row, name in enumerate(ids):
        if name in seen:
            raise UserError(
                f"{table.place(row, role)}: id {quoted(name)} was already given in {table.line(seen[name])}; "
                "give each row its own"
            )
        seen[name] = row
    return ids


def own_ids(table: Table) -> list[str]:
    """What the rows are known by; without a column that says so, their numbers."""
    return check_ids(table, table.key) if table.key else [str(row) for row in range(table.n)]


def image_path(cell: Any, root: Path) -> ImageSource:
    """A path as written in a file -> where it is; a stored image as it is. ValueError if it is neither."""
    if isinstance(cell, StoredImage):
        return cell
    if not isinstance(cell, str) or not cell.strip():
        raise ValueError(f"{quoted(cell)} is not a path to an image")
    text = cell.strip().removeprefix("file://")
    if "://" in text:
        raise ValueError(f"{quoted(text)} is an address, not a file; download the images first")
    if has_control_characters(text) or len(text) > 4000:
        raise ValueError("not a path to an image")
    path = root / text
    if "\\" in text and not path.exists():  # a list that was written on Windows
        return root / text.replace("\\", "/")
    if not text.isascii() and not path.exists():  # an é is one character on most systems, and two in lists from a Mac
        others = (root / unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
        return next((other for other in others if other.exists()), path)
    return path


def image_root(settings: DataSettings, path: Path) -> Path:
    return Path(settings.image_root) if settings.image_root else path.parent


def table_inputs(table: Table, settings: DataSettings, progress: OnImages | None) -> tuple[Examples, dict[int, str]]:
    """Inputs of all rows: feature columns, or the images that a column names, with those that `data.skip_bad` leaves
    out (`read_usable_images`)."""
    if settings.takes_texts:
        if "text" not in table.columns:
            raise UserError(f"{table.head}: there is no column 'text', and the network takes texts; add it")
        return embed_texts(table.columns["text"], lambda row: table.place(row, "text"), settings, table.path, progress)
    if table.features is not None and table.features.shape[1]:
        return table.features, {}
    if "path" not in table.columns and "text" in table.columns:
        raise UserError(f"{table.head}: to learn from column 'text', choose a network for texts: {NEEDS_BACKBONE}")
    if "path" not in table.columns:
        name = table.titles.get("id")
        hint = f"; if {quoted(name)} holds the names of images, name it 'path'" if name else ""
        raise UserError(
            f"{table.head}: there are no inputs; add a column 'path' with images, 'text', or columns of numbers{hint}"
        )
    return table_images(table, "path", table.columns["path"], settings, progress)


def table_images(
    table: Table, role: str | None, cells: Sequence[Any], settings: DataSettings, progress: OnImages | None
) -> tuple[Examples, dict[int, str]]:
    """The images that cells name, one for each row: those of the column with this role, or the names of the rows."""
    root, paths = image_root(settings, table.path), list[ImageSource]()
    places = [table.place(row, role) for row in range(table.n)]
    for place, cell in zip(places, cells, strict=True):
        try:
            paths.append(image_path(cell, root))
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
    if paths and not (settings.skip_bad or paths[0].exists()):
        hint = "if paths are relative to another folder: --set data.image_root=FOLDER"
        if role != "path":
            hint += "; if these are ids, give the file with their inputs: --set data.inputs=FILE"
        raise UserError(f"{places[0]}: {quoted(str(paths[0]))}: no such image file; {hint}")
    return read_usable_images(paths, settings, places, table.path, progress)


def is_test_row(cell: Any) -> bool:
    """Whether a row is for testing."""
    word = "" if cell is None else cell.strip().lower() if isinstance(cell, str) else None
    if word not in ("train", "test", ""):
        raise ValueError(f"{quoted(cell)} is neither train nor test")
    return word == "test"


def optional_label(cell: Any) -> str | None:
    return None if cell is None or (isinstance(cell, str) and not cell.strip()) else label_name(cell)


def split_rows(table: Table) -> tuple[Array, Array]:
    """Rows for training and for testing."""
    if "split" not in table.columns:
        return np.arange(table.n), np.arange(0)
    test = np.array(table.parsed("split", is_test_row), dtype=bool)
    if test.all():
        raise UserError(f"{table.path}: all rows are for testing; leave some for training (train in column 'split')")
    return np.flatnonzero(~test), np.flatnonzero(test)


def optional_labels(table: Table, rows: Array) -> tuple[list[str] | None, list[str | None]]:
    """True labels of these rows (None unless all are there), and the cells of every row."""
    if "label" not in table.columns:
        return None, [None] * table.n
    cells = table.parsed("label", optional_label)
    known = [label for row in rows if (label := cells[row]) is not None]
    return (known if len(known) == len(rows) else None), cells


def check_test_labels(table: Table, rows: Array, labels: Sequence[str | None]) -> None:
    for row in rows:
        if labels[row] is None:
            raise UserError(
                f"{table.place(int(row), 'label')}: a test row needs its true label; "
                "fill it in, or make it a training row"
            )


def index_of(name: str, vocabulary: Vocabulary, place: Callable[[int, str], str], row: int, role: str) -> int:
    try:
        return vocabulary[name]
    except ValueError as error:
        raise UserError(f"{place(row, role)}: {error}") from None


def with_truth(table: Table) -> Table:
    """True labels may be named as votes and scores name them."""
    if "truth" not in table.columns or "label" in table.columns:
        return table
    columns = {**table.columns, "label": table.columns["truth"]}
    return replace(table, columns=columns, titles={**table.titles, "label": table.titles["truth"]})


def first_rows(table: Table, role: str) -> tuple[list[str], list[int]]:
    """The cells of a column as text, and for each row the first that has the same."""
    names = [str(cell).strip() for cell in table.columns[role]]
    first: dict[str, int] = {}
    return names, [first.setdefault(name, row) for row, name in enumerate(names)]


def without_repeated(table: Table, notes: list[str]) -> Table:
    """Of rows with one id (or path, where there are no ids) the first."""
    if table.key is None:
        return table
    _, first = first_rows(table, table.key)
    return without_rows(table, [first[row] != row for row in range(table.n)], "the path or id of an earlier one", notes)


def without_rows(table: Table, left_out: Sequence[bool], what: str, notes: list[str]) -> Table:
    if not any(left_out):
        return table
    if all(left_out):
        raise UserError(f"{table.path}: no row can be used; all have {what}")
    notes.append(f"rows with {what}, left out: {sum(left_out)} ({table.place(left_out.index(True))})")
    return table.take([row for row, out in enumerate(left_out) if not out])


# --- rows with candidate sets, or with plain labels: each is an example with its own inputs -------------------------

_TRUTH = {"target", "targets", "class", "labels", "y", "y_true", "true_label", "ground_truth"}
_NUMBER = "number"  # no column of a file: what rows go by where some were left out, and have no name
Weights = list[dict[str, float]]


def sets_dataset(table: Table, settings: DataSettings, progress: OnImages | None) -> Dataset:
    """Rows with candidates, or with plain labels."""
    if settings.inputs is not None:
        raise UserError(
            f"{table.head}: data.inputs is for votes and scores; rows with candidates or labels hold their "
            "inputs themselves: leave data.inputs out, and add a column 'path' or columns of numbers"
        )
    notes = [f"feature {quoted(name)}: if it is the true label, name it 'label'" for name in _may_be_truth(table.names)]
    if {"truth", "label"} <= table.columns.keys():
        unused, used = quoted(table.titles["truth"]), quoted(table.titles["label"])
        notes.append(f"column {unused} is not used: true labels are those in {used}; keep one of the two")
    table = with_truth(table)
    x: Examples | None = None
    if settings.skip_bad:
        table, x = _usable(table, settings, progress, notes)
    train, test = split_rows(table)
    truth, labels = optional_labels(table, train)
    no_label = next((int(row) for row in train if labels[row] is None), 0)
    partly = truth is None and any(labels[row] is not None for row in train)
    if partly:
        notes.append(f"some rows have no label ({table.line(no_label)} is the first); {LABELS_UNUSED}")
    sets, weights = _parse_sets(table, train, settings.separator)
    if sets is None and truth is None:
        place = table.place(no_label, "label")
        unsure = table.kind_guessed and table.titles.get("truth") == table.titles.get("label", "")
        scores = "; if the numbers are scores: --set data.format=scores" if unsure else ""
        near = did_you_mean("candidates", table.unused)
        if partly and not near:
            raise UserError(f"{place}: no label, though other rows have one; fill it in, or leave the row out{scores}")
        raise UserError(f"{place}: no label, and there is no column 'candidates'{near}; add one of them{scores}")
    check_test_labels(table, test, labels)
    found = {name for s in sets or () for name in s} | {label for label in labels if label is not None}
    found.update(name for pairs in weights or () for name in pairs)
    vocabulary = Vocabulary(found, settings.classes)
    notes += _doubtful_names(vocabulary.classes, sets, settings)
    ids = _example_ids(table, notes)
    matrix, weight_matrix = _matrices(table, train, sets, weights, vocabulary)
    if x is None:
        x, _ = table_inputs(table, settings, progress)

    def indices(rows: Array) -> list[int]:
        return [index_of(str(labels[row]), vocabulary, table.place, int(row), "label") for row in rows]

    return make_dataset(
        x if len(train) == table.n else x[train], matrix, y=None if truth is None else indices(train),
        x_test=x[test] if len(test) else None, y_test=indices(test) if len(test) else None,
        classes=vocabulary.classes, ids=None if ids is None else [ids[row] for row in train],
        weights=weight_matrix, notes=tuple(notes), place=str(table.path), columns=table.feature_names,
    )  # fmt: skip


def _doubtful_names(classes: Sequence[str], sets: list[tuple[str, ...]] | None, settings: DataSettings) -> list[str]:
    """Notes, where the names of classes suggest that cells were meant otherwise than they were read."""
    notes = alike(classes)
    if settings.classes is None:
        notes += may_be_unknown(classes)
    if listed := looks_listed(classes):
        return notes + listed
    alone = sets is not None and all(len(names) == 1 for names in sets)
    return notes + (looks_joined(classes) if alone else [])


def _example_ids(table: Table, notes: list[str]) -> list[str] | None:
    """Names for the examples; None: their numbers. Paths are names only where no two are the same."""
    if "id" in table.columns:
        return check_ids(table)
    if table.key != "path":
        return table.columns.get(_NUMBER)
    paths, first = first_rows(table, "path")
    again = [row for row in range(table.n) if first[row] != row]
    if not again:
        return paths
    notes.append(
        f"{table.place(again[0], 'path')}: the same image as in {table.line(first[again[0]])} "
        f"(repeated rows: {len(again)}), so examples are numbered; give them a column 'id', "
        "or leave such rows out: --set data.skip_bad=true"
    )
    return None


def _may_be_truth(names: Sequence[str]) -> list[str]:
    """Features with a name that tools give to true labels; but y beside x is a place."""
    small = [name.lower() for name in names]
    return [
        name for name, word in zip(names, small, strict=True) if word in _TRUTH and not (word == "y" and "x" in small)
    ]


def _usable(
    table: Table, settings: DataSettings, progress: OnImages | None, notes: list[str]
) -> tuple[Table, Examples]:
    """The rows that can be used, with their inputs; notes tell which were left out."""
    tests = table.parsed("split", is_test_row) if "split" in table.columns else [False] * table.n
    if table.key is None:  # those that are kept go by the numbers that they had among all
        numbers = np.cumsum(np.logical_not(tests)) - 1
        table = replace(table, columns={**table.columns, _NUMBER: list(map(str, numbers))})
    if "candidates" in table.columns:
        sets = table.columns["candidates"]
        empty = [not test and _is_blank(cell) for test, cell in zip(tests, sets, strict=True)]
        table = without_rows(table, empty, "an empty set", notes)
    table = without_repeated(table, notes)
    x, bad = table_inputs(table, settings, progress)
    notes += bad_inputs_note(bad)
    good = [row for row in range(table.n) if row not in bad]
    return (table.take(good), x[good]) if bad else (table, x)


def _parse_sets(table: Table, rows: Array, separator: str) -> tuple[list[tuple[str, ...]] | None, Weights | None]:
    """Candidate sets and weights of the training rows; weights with names may stand for the sets."""
    sets: list[tuple[str, ...]] | None = None
    if "candidates" in table.columns:
        sets = table.parsed("candidates", partial(_label_set, separator=separator), rows)
    if "weight" not in table.columns:
        return sets, None
    weights: Weights = []
    for at, row in enumerate(rows):
        try:
            known = None if sets is None else sets[at]
            weights.append(label_weights(table.columns["weight"][row], known, separator))
        except ValueError as error:
            raise UserError(f"{table.place(int(row), 'weight')}: {error}") from None
    return sets or [tuple(name for name, weight in w.items() if weight > 0) for w in weights], weights


def _is_blank(cell: Any) -> bool:
    if isinstance(cell, list):
        return all(item is None or item != item for item in cell)  # NaN differs from itself
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in EMPTY)


def _label_set(cell: Any, separator: str) -> tuple[str, ...]:
    if _is_blank(cell):
        raise ValueError("an empty set; give it at least one label, or leave such rows out: --set data.skip_bad=true")
    return label_names(cell, separator)


def _matrices(
    table: Table, train: Array, sets: list[tuple[str, ...]] | None, weights: Weights | None, vocabulary: Vocabulary
) -> tuple[NDArray[np.bool_] | None, NDArray[np.float32] | None]:
    if sets is None:
        return None, None
    n, k = len(sets), len(vocabulary)
    rows: list[int] = []
    columns: list[int] = []
    known: dict[tuple[str, ...], list[int]] = {}
    for at, names in enumerate(sets):
        if names not in known:
            known[names] = [index_of(name, vocabulary, table.place, int(train[at]), "candidates") for name in names]
        rows += [at] * len(names)
        columns += known[names]
    check_cells(n, k, 1, table.path)
    matrix = np.zeros((n, k), dtype=bool)
    matrix[rows, columns] = True
    if weights is None:
        return matrix, None
    check_cells(n, k, 4, table.path)
    out = np.zeros((n, k), dtype=np.float32)
    for at, pairs in enumerate(weights):
        for name, weight in pairs.items():
            out[at, index_of(name, vocabulary, table.place, int(train[at]), "weight")] = weight
    return matrix, np.where(matrix, out, 0)
