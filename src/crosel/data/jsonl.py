"""jsonl: one object a line, with the names of the csv columns; features as numbers of their own or a list `x`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.csvfile import dataset_of
from crosel.data.dataset import Dataset
from crosel.data.settings import DataSettings, OnImages
from crosel.data.table import MEANINGS, Table, as_features, meanings, refuse_our_labels, refuse_unnamed_images
from crosel.data.text import json_objects
from crosel.errors import UserError
from crosel.limits import check_bytes, shown

_OPTIONAL = ("label", "truth", "weight", "split")  # meanings that a row may leave out


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number too large to hold") from None


def _features(row: dict[str, Any], names: list[str], width: int, place: str) -> list[float]:
    """The numbers of a row; its list `x` first."""
    out: list[float] = []
    for name in names:
        value = row[name]
        try:
            out += (
                [_float(v) for v in value] if name in ("x", "features") and isinstance(value, list) else [_float(value)]
            )
        except ValueError as error:
            raise UserError(f"{place}, column {shown(name)}: {error}") from None
    if width not in (-1, len(out)):
        raise UserError(
            f"{place}, column {shown(names[0])}: {len(out)} numbers, where the first row has {width}; "
            "give all rows the same"
        )
    return out


@dataclass
class _Layout:
    """Which keys the rows have, as the first row shows; some may be left out, or come later."""

    titles: dict[str, str]  # meaning -> key
    features: list[str]  # keys
    ignores_others: bool  # keys that are neither

    def __post_init__(self) -> None:
        self._known = frozenset(self.features)  # looked at for every key of every row

    @classmethod
    def of(cls, row: dict[str, Any], path: Path, line: int, inputs_elsewhere: bool) -> _Layout:
        keys = list(row)
        titles = {meaning: keys[column] for meaning, column in meanings(keys, path, line).items()}
        ignores_others = "path" in titles or inputs_elsewhere
        return cls(titles, [] if ignores_others else [k for k in keys if k not in titles.values()], ignores_others)

    def check(self, row: dict[str, Any], place: str) -> None:
        """Take in what may come late; a key that comes and goes otherwise is no column."""
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
        late = [key for key in row if key not in self._known and key not in self.titles.values()]
        if late and not self.ignores_others:
            raise UserError(f"{place}, column {shown(late[0])}: not in the first row; give all rows the same")


def open_jsonl(path: Path, inputs_elsewhere: bool = False) -> Table:
    lines, values = array("q"), array("d")
    columns: dict[str, list[Any]] = {}
    layout = _Layout({}, [], False)
    width = -1
    for line, row in json_objects(path, '{"path": "a.png", "candidates": ["cat"]}'):
        place = f"{path}, line {line}"
        if not lines:
            refuse_our_labels(row, path)
            layout = _Layout.of(row, path, line, inputs_elsewhere)
            refuse_unnamed_images({key: row[key] for key in layout.features}, place)
        layout.check(row, place)
        for meaning, key in layout.titles.items():
            if meaning not in columns:
                columns[meaning] = [None] * len(lines)
            columns[meaning].append(row.get(key))
        lines.append(line)
        if layout.features:
            numbers = _features(row, layout.features, width, place)
            width = len(numbers)
            values.extend(numbers)
            if len(lines) % 4096 == 0:
                check_bytes(12 * len(values), "the numbers", path)
    if not lines:
        raise UserError(f"{path}, line 1: cannot read '{path.suffix}' without a line")
    features = None
    if width > 0:
        names = layout.features
        wide = names if width == len(names) else [f"{names[0]}[{i}]" for i in range(width)]
        features = as_features(np.frombuffer(values).reshape(len(lines), width), path, lines, wide)
    return Table(path, lines, columns, layout.titles, features, layout.features)


def read_jsonl(path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
    table = open_jsonl(path, settings.inputs is not None)
    votes = {"worker", "label"} <= table.columns.keys() and bool(table.columns.keys() & {"id", "path"})
    if not votes and not table.columns.keys() & {"candidates", "weight", "label"}:
        raise UserError(
            f"{path}, line {table.lines[0]}: there is no 'candidates' and no 'label'; add one of them to every row"
        )
    return dataset_of(table, "votes" if votes and "candidates" not in table.columns else "table", settings, progress)
