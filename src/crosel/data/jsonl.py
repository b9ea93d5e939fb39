"""jsonl: one object a line, with the names of the csv columns; features as numbers of their own or a list `x`."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.csvfile import dataset_of
from crosel.data.dataset import Dataset
from crosel.data.limits import check_bytes, shown
from crosel.data.settings import DataSettings, Progress
from crosel.data.table import MEANINGS, Table, as_features, meanings, refuse_our_labels
from crosel.data.text import json_objects
from crosel.errors import UserError


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is no number")
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
        raise UserError(f"{place}, column {shown(names[0])}: {len(out)} numbers, where the first row has {width}")
    return out


def open_jsonl(path: Path) -> Table:
    lines, values = array("q"), array("d")
    columns: dict[str, list[Any]] = {}
    titles: dict[str, str] = {}
    names: list[str] = []
    keys: set[str] = set()
    width = -1
    for line, row in json_objects(path, '{"path": "a.png", "candidates": ["cat"]}'):
        place = f"{path}, line {line}"
        if not lines:
            refuse_our_labels(row, path)
            known = meanings(list(row), path, line)
            titles = {meaning: list(row)[column] for meaning, column in known.items()}
            columns = {meaning: [] for meaning in titles}
            names = [] if "path" in titles else [name for name in row if name not in titles.values()]
            keys = set(names)
        for name in row:
            meaning = MEANINGS.get(name.lower())
            if meaning in ("label", "weight", "split") and meaning not in titles:
                titles[meaning], columns[meaning] = name, [None] * len(lines)
        # A key that comes and goes is no column: only label, weight and split may be left out.
        optional = {titles[m] for m in ("label", "weight", "split") if m in titles}
        missing = [k for k in (*titles.values(), *names) if k not in row and k not in optional]
        if missing:
            raise UserError(f"{place}, column {shown(missing[0])}: missing, unlike in the first row")
        late = [k for k in row if k not in keys and k not in titles.values()]
        if late and "path" not in titles:
            raise UserError(f"{place}, column {shown(late[0])}: not in the first row")
        lines.append(line)
        for meaning, name in titles.items():
            columns[meaning].append(row.get(name))
        if names:
            numbers = _features(row, names, width, place)
            width = len(numbers)
            values.extend(numbers)
            if len(lines) % 4096 == 0:
                check_bytes(12 * len(values), "the numbers", path)
    if not lines:
        raise UserError(f"{path}, line 1: cannot read '{path.suffix}' without a line")
    features = None
    if width > 0:
        wide = names if width == len(names) else [f"{names[0]}[{i}]" for i in range(width)]
        features = as_features(np.frombuffer(values).reshape(len(lines), width), path, lines, wide)
    return Table(path, lines, columns, titles, features, names)


def read_jsonl(path: Path, settings: DataSettings, progress: Progress | None = None) -> Dataset:
    table = open_jsonl(path)
    votes = {"worker", "label"} <= table.columns.keys() and bool(table.columns.keys() & {"id", "path"})
    if not votes and not table.columns.keys() & {"candidates", "weight", "label"}:
        raise UserError(f"{path}, line {table.lines[0]}: there are neither 'candidates' nor a 'label'")
    return dataset_of(table, "votes" if votes and "candidates" not in table.columns else "table", settings, progress)
