"""jsonl: one object a line, with the names of the csv columns; features as numbers of their own or a list `x`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.csvfile import dataset_of
from crosel.data.dataset import Dataset
from crosel.data.settings import DataSettings, OnImages
from crosel.data.table import (
    MEANINGS,
    Table,
    are_votes,
    as_features,
    meanings,
    refuse_our_labels,
    refuse_unnamed_images,
)
from crosel.data.text import json_objects
from crosel.errors import UserError, counted, did_you_mean
from crosel.utils.limits import check_bytes, shown

_LISTS = ("x", "features")  # keys that may hold a list of numbers
_OPTIONAL = ("label", "truth", "weight", "split")  # meanings that a row may leave out


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number too large to hold") from None


Lengths = dict[str, int | None]  # by key: how many numbers its list has; None: it is a number


def lengths_of(row: dict[str, Any], keys: Iterable[str]) -> Lengths:
    return {key: len(row[key]) if key.lower() in _LISTS and isinstance(row[key], list) else None for key in keys}


def wide_names(lengths: Lengths) -> list[str]:
    """A name for each number. Of a list of one, it is the list's, as that of a number."""
    return [n for key, length in lengths.items() for n in ([key] if length in (None, 1) else _items(key, length))]


def _items(key: str, length: int) -> list[str]:
    return [f"{key}[{i}]" for i in range(length)]


def row_numbers(row: dict[str, Any], lengths: Lengths, place: str) -> list[float]:
    """The numbers of a row; its lists must be as long as those of the first row."""
    out: list[float] = []
    for key, length in lengths.items():
        value = row[key]
        if length is None and type(value) is float:  # as most are
            out.append(value)
            continue
        values = value if isinstance(value, list) else [value]
        try:
            if length is None and values is value:
                raise ValueError("a list, not a number; a list of features must be named 'x'")
            if length not in (None, len(values)):
                numbers = counted(len(values), "number")
                raise ValueError(f"{numbers}, where the first row has {length}; give all rows the same")
            out += map(_float, values)
        except ValueError as error:
            raise UserError(f"{place}, column {shown(key)}: {error}") from None
    return out


@dataclass
class Layout:
    """Which keys the rows have, as the first row shows; some may be left out, or come later."""

    titles: dict[str, str]  # meaning -> key
    features: list[str]  # keys
    ignores_others: bool  # keys that are neither
    first: Set[str]  # keys of the first row

    @classmethod
    def of(cls, row: dict[str, Any], path: Path, line: int, inputs_elsewhere: bool) -> Layout:
        keys = list(row)
        titles = {meaning: keys[column] for meaning, column in meanings(keys, path, line).items()}
        ignores_others = "path" in titles or inputs_elsewhere
        features = [] if ignores_others else [key for key in keys if key not in titles.values()]
        return cls(titles, features, ignores_others, row.keys())

    def check(self, row: dict[str, Any], place: str) -> None:
        """Take in what may come late; a key that comes and goes otherwise is no column."""
        if row.keys() == self.first:
            return
        for key in row:
            meaning = MEANINGS.get(key.lower())
            if meaning in _OPTIONAL:
                self.titles.setdefault(meaning, key)
        optional = {self.titles[meaning] for meaning in _OPTIONAL if meaning in self.titles}
        missing = [key for key in (*self.titles.values(), *self.features) if key not in row and key not in optional]
        if missing:
            raise UserError(
                f"{place}, column {shown(missing[0])}: missing, but the first row has it; give all rows the same"
            )
        known = {*self.features, *self.titles.values()}
        late = [key for key in row if key not in known]
        if self.ignores_others:  # but rows are known by their ids, or by their numbers
            late = [] if self.titles.keys() & {"id", "path"} else [k for k in late if MEANINGS.get(k.lower()) == "id"]
        if late:
            raise UserError(f"{place}, column {shown(late[0])}: not in the first row; give all rows the same")


def open_objects(path: Path) -> tuple[int, dict[str, Any], Iterator[tuple[int, dict[str, Any]]]]:
    """The first object with its line, and all of them."""
    rows = json_objects(path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}, line 1: there are no rows")
    refuse_our_labels(first[1], path)
    return *first, chain([first], rows)


def open_jsonl(path: Path, inputs_elsewhere: bool = False) -> Table:
    lines, values = array("q"), array("d")
    columns: dict[str, list[Any]] = {}
    line, first, rows = open_objects(path)
    layout = Layout.of(first, path, line, inputs_elsewhere)
    refuse_unnamed_images({key: first[key] for key in layout.features}, f"{path}, line {line}")
    words = [key for key in layout.features if isinstance(first[key], str | list)]
    if "candidates" not in layout.titles and (near := did_you_mean("candidates", words)):
        raise UserError(f"{path}, line {line}: there is no 'candidates'{near}")
    lengths = lengths_of(first, layout.features)
    for line, row in rows:
        place = f"{path}, line {line}"
        layout.check(row, place)
        for meaning, key in layout.titles.items():
            if meaning not in columns:
                columns[meaning] = [None] * len(lines)
            columns[meaning].append(row.get(key))
        lines.append(line)
        values.extend(row_numbers(row, lengths, place))
        if len(lines) % 4096 == 0:
            check_bytes(12 * len(values), "the numbers", path)
    names, features = wide_names(lengths), None
    if names:
        features = as_features(np.frombuffer(values).reshape(len(lines), len(names)), path, lines, names)
    # Of one list, the numbers have no names.
    names = names if len(lengths) > 1 else layout.features
    unused = [key for key in first if key not in layout.features and key.lower() not in MEANINGS]
    return Table(path, lines, columns, layout.titles, features, names, unused=unused)


def read_jsonl(path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
    table = open_jsonl(path, settings.inputs is not None)
    if not table.columns.keys() & {"candidates", "weight", "label", "truth"}:
        raise UserError(
            f"{path}, line {table.lines[0]}: there is no 'candidates'{did_you_mean('candidates', table.unused)} and no "
            "'label'; add one of them to every row"
        )
    return dataset_of(table, "votes" if are_votes(table.columns) else "table", settings, progress)
