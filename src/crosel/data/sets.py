"""Rows with candidate sets, or with plain labels: each is an example with its own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.data.dataset import LABELS_UNUSED, Array, Dataset, make_dataset
from crosel.data.images import bad_inputs_note
from crosel.data.settings import DataSettings, OnImages
from crosel.data.store import Examples
from crosel.data.table import (
    Table,
    check_ids,
    check_test_labels,
    first_rows,
    index_of,
    is_test_row,
    optional_labels,
    split_rows,
    table_inputs,
    with_truth,
    without_repeated,
    without_rows,
)
from crosel.data.vocabulary import (
    EMPTY,
    Vocabulary,
    alike,
    check_cells,
    label_names,
    label_weights,
    looks_joined,
    looks_listed,
    may_be_unknown,
)
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, quoted

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
