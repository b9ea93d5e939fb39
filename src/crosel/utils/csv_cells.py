"""Cells of the csv files we write: quoted where necessary, and safe to open in a spreadsheet.

A spreadsheet runs a cell that begins with = + - @ (or a tab or line break) as a formula, and names of labels and files
come from outside. Such cells get an apostrophe in front, which marks text in a spreadsheet; numbers stay as they are.
`unescape_formula` removes that apostrophe, and only that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Cells that begin with apostrophes of their own get one more, so that reading removes only ours.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_GUARDED = re.compile(r"'+[=+\-@\t\r\n]")
_NAMES = re.compile(r"(?:[^\\|]|\\.)*", re.DOTALL)


def escape_formula(cell: str) -> str:
    """The cell as text that a spreadsheet does not run."""
    return "'" + cell if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def unescape_formula(cell: str) -> str:
    return cell[1:] if _GUARDED.match(cell) else cell


def csv_line(cells: Iterable[str]) -> bytes:
    """One row. Half characters (lone surrogates) have no UTF-8 and are written as \\udXXX."""
    # Not csv.writer: with "\n" as line end it does not quote "\r", which its own reader takes for a line end.
    safe = map(escape_formula, cells)
    quoted = ('"' + cell.replace('"', '""') + '"' if any(sign in cell for sign in ',"\r\n') else cell for cell in safe)
    return (",".join(quoted) + "\n").encode("utf-8", "backslashreplace")


def join_names(names: Sequence[str]) -> str:
    """cat|dog; a | or a backslash inside a name gets a backslash."""
    return "|".join(name.replace("\\", "\\\\").replace("|", "\\|") for name in names)


def split_names(cell: str) -> list[str]:
    if "\\" not in cell:  # nearly always, and a report reads a cell of each example
        return cell.split("|")
    names, at = [], 0
    while True:
        found = _NAMES.match(cell, at)
        assert found is not None  # it matches the empty string, too
        names.append(re.sub(r"\\(.)", r"\1", found.group(), flags=re.DOTALL))
        at = found.end() + 1
        if at > len(cell):
            return names
