"""jsonl: one object a line, with the names of the csv columns; features as numbers of their own or a list `x`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from crosel.data.formats.rows import Numbers, RowFormat, Rows
from crosel.data.table import ROLES, column_roles, refuse_our_labels
from crosel.data.text import json_objects
from crosel.errors import UserError
from crosel.utils.text import counted, quoted

_LISTS = ("x", "features")  # keys that may hold a list of numbers
_OPTIONAL = ("label", "truth", "weight", "split")  # roles that a row may leave out
Lengths = dict[str, int | None]  # by key: how many numbers its list has; None: it is a number


class JsonlRows(Rows):
    """The first row shows the keys; some may be left out, or come later."""

    first: dict[str, Any]

    def __init__(self, path: Path) -> None:
        rows = json_objects(path)
        start = next(rows, None)
        if start is None:
            raise UserError(f"{path}, line 1: there are no rows")
        line, first = start
        refuse_our_labels(first, path)
        keys = list(first)
        titles = {role: keys[column] for role, column in column_roles(keys, path, line).items()}
        if "text" in titles and isinstance(first[titles["text"]], int | float):
            del titles["text"]  # it counts a word
        super().__init__(path, line, titles, [key for key in keys if key not in titles.values()], first)
        self._rows = chain([start], rows)
        self._needed, self._others_allowed = self.features, False

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for line, row in self._rows:
            self._check_keys(row, line)
            yield line, row

    def cell(self, row: Any, title: str) -> Any:
        return row.get(title)

    def width(self, title: str) -> int | None:
        value = self.first[title]
        return len(value) if title.lower() in _LISTS and isinstance(value, list) else None

    def ignore_features(self) -> None:
        self._needed, self._others_allowed = [], True

    def numbers(self, names: Sequence[str], others_allowed: bool = False) -> Numbers:
        lengths, order = self.columns_with(names)
        self._needed, self._others_allowed = list(lengths), others_allowed
        _row_numbers(self.first, lengths, f"{self.path}, line {self.line}")  # says what is wrong before widths do
        if order == list(range(sum(1 if length is None else length for length in lengths.values()))):
            return lambda line, row: tuple(_row_numbers(row, lengths, f"{self.path}, line {line}"))

        def numbers(line: int, row: dict[str, Any]) -> tuple[float, ...]:
            values = _row_numbers(row, lengths, f"{self.path}, line {line}")
            return tuple(map(values.__getitem__, order))

        return numbers

    def _check_keys(self, row: dict[str, Any], line: int) -> None:
        """Take in what may come late; a key that comes and goes otherwise is no column."""
        if row.keys() == self.first.keys():
            return
        for key in row:
            role = ROLES.get(key.lower())
            if role in _OPTIONAL:
                self.titles.setdefault(role, key)
        optional = {self.titles[role] for role in _OPTIONAL if role in self.titles}
        missing = [key for key in (*self.titles.values(), *self._needed) if key not in row and key not in optional]
        if missing:
            what = "missing, but the first row has it; give all rows the same"
            raise UserError(f"{self.path}, line {line}, column {quoted(missing[0])}: {what}")
        known = {*self._needed, *self.titles.values()}
        late = [key for key in row if key not in known]
        if self._others_allowed:  # but rows are known by their ids, or by their numbers
            late = [] if self.titles.keys() & {"id", "path"} else [k for k in late if ROLES.get(k.lower()) == "id"]
        if late:
            what = "not in the first row; give all rows the same"
            raise UserError(f"{self.path}, line {line}, column {quoted(late[0])}: {what}")


def _row_numbers(row: dict[str, Any], lengths: Lengths, place: str) -> list[float]:
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
            out += map(_as_float, values)
        except ValueError as error:
            raise UserError(f"{place}, column {quoted(key)}: {error}") from None
    return out


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{quoted(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number too large to hold") from None


class Jsonl(RowFormat):
    title, suffixes = "jsonl", (".jsonl", ".ndjson")

    def open(self, path: Path) -> Rows:
        return JsonlRows(path)
