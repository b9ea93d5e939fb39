"""Text files line by line: UTF-8, no endless lines, and every error with its line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from crosel.errors import UserError
from crosel.utils.reading import open_file
from crosel.utils.system import MAX_JSON, MAX_LINE
from crosel.utils.text import counted, one_line, quoted

# How pandas writes a first column again that had no name: its index. (Unnamed: 3 may be anything, such as a feature.)
_UNNAMED = re.compile(r"Unnamed: 0(\.\d+)*")

NO_NAMES = "if this line holds data, put a line of column names above it"

_BAD_ROWS = {  # a part of the message of Python's reader, and our message
    "new-line character": "it has bare CR line ends; save it with LF or CRLF",
    "unexpected end of data": "a quote is opened here, or further on in this row, and never closed; close or remove it",
}

_BOM = b"\xef\xbb\xbf"


def read_lines(path: Path, longest: int = MAX_LINE, links: bool = True) -> Generator[str, None, None]:
    """Lines with their ends. Decoded one by one, so that a bad byte has a line."""
    number = 0
    with open_file(path, links) as stream:
        while line := stream.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise UserError(f"{path}, line {number}: longer than {longest >> 20} MiB; this is not a table of text")
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise UserError(f"{path}, line 1: this is UTF-16; save it as UTF-8")
                line = line.removeprefix(_BOM)
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                column = len(line[: error.start].decode("utf-8", "replace")) + 1
                raise UserError(f"{path}, line {number}, column {column}: not UTF-8 text; save it as UTF-8") from None


def _delimiter(path: Path, header: str) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    return max(",;\t", key=header.count) if header.count(",") == 0 else ","


class CsvFile:
    """A csv file: its header at once, then rows of exactly as many cells, each with the line it begins on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = read_lines(path)
        first = next(self._lines, None)
        if first is None or not first.strip():
            raise UserError(f"{path}, line 1: cannot read '{path.suffix}' without a line of column names")
        self.delimiter = _delimiter(path, first)
        self._reader = csv.reader(self._again(first), delimiter=self.delimiter, strict=True)
        self._end = 0
        names = [name.strip() for name in self._next() or []]
        self.header = ["" if _UNNAMED.fullmatch(name) else name for name in names]
        seen: dict[str, int] = {}
        for column, name in enumerate(self.header, 1):
            if name and name in seen:
                remedy = NO_NAMES if all(map(is_number, names)) else "rename one"
                raise UserError(
                    f"{path}, line 1: columns {seen[name]} and {column} are both named {quoted(name)}; {remedy}"
                )
            seen[name] = column

    def _again(self, first: str) -> Iterator[str]:
        yield first
        yield from self._lines

    def _next(self) -> list[str] | None:
        try:
            return next(self._reader, None)
        except csv.Error as error:
            reason = next((ours for theirs, ours in _BAD_ROWS.items() if theirs in str(error)), one_line(error))
            raise UserError(f"{self.path}, line {self._end + 1}: not a valid csv row ({reason})") from None

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        width, reader = len(self.header), self._reader
        self._end = reader.line_num
        while (row := self._next()) is not None:
            line, self._end = self._end + 1, reader.line_num
            if len(row) != width:
                if not row:  # a blank line
                    continue
                at = min(len(row), width) + (len(row) > width)
                remedy = "fill in the rest" if len(row) < width else "put a cell that contains the separator in quotes"
                cells = f"{counted(len(row), 'cell')} for {counted(width, 'column')}"
                raise UserError(f"{self.path}, line {line}, column {at}: {cells}; {remedy}")
            yield line, row


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # a name such as 3_1, which Python takes for 31


def parse_json(text: str, place: str, first_line: int = 1) -> Any:
    """JSON with the line and column of whatever is wrong with it."""
    try:
        return json.loads(text.rstrip())  # what is missing at the end is missing on the last line, not below it
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{place}, line {line}, column {error.colno}: not valid JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        reason = "too deeply nested" if isinstance(error, RecursionError) else one_line(error)
        raise UserError(f"{place}, line {first_line}, column 1: not usable JSON ({reason})") from None


def json_objects(
    path: Path, example: str = '{"path": "a.png", "candidates": ["cat"]}'
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) for every line of a jsonl file that is not blank; `example` is shown where one holds no object."""
    for line, text in enumerate(read_lines(path), 1):
        if not text.strip():
            continue
        row = parse_json(text, str(path), line)
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {line}, column 1: expected an object, as in {example}")
        yield line, row


def read_json(path: Path) -> Any:
    size = path.stat().st_size
    if size > MAX_JSON:
        raise UserError(f"{path}: {size / 2**30:.1f} GiB; a JSON file may have at most 1 GiB. Export it in parts")
    return parse_json("".join(read_lines(path, MAX_JSON)), str(path))  # all of it may be one line
