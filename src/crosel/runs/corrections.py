"""Decisions of a review as a table, and as known labels for the next training."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data import Dataset
from crosel.data.text import CsvFile
from crosel.errors import UserError
from crosel.runs.folder import RunFolder
from crosel.utils.files import atomic_write, claim, disk_errors, new_folder, refuse_overwrite
from crosel.utils.reading import APPEND, open_plain, read_run_text
from crosel.utils.system import sync_folder
from crosel.utils.text import counted, csv_line, did_you_mean, quoted, unescape_formula

logger = logging.getLogger(__name__)

COLUMNS = ("id", "label", "decision")


def corrections_csv(decisions: Decisions, ids: Sequence[str], classes: Sequence[str]) -> bytes:
    lines = [csv_line(COLUMNS)]
    for row, decision in decisions.in_force():
        lines.append(csv_line((ids[row], "" if decision.label < 0 else classes[decision.label], decision.kind)))
    return b"".join(lines)


def export_corrections(run: Path, out: Path) -> int:
    """Write a run's decisions as csv (id, label, decision), also while it is under review; return their number."""
    folder = RunFolder(run)
    config = folder.read_config()  # says what is wrong with the folder, if anything
    examples = folder.training_set()
    ids, decisions = examples.ids, Decisions(examples.n)
    for warning in replay(
        read_log(run / "review.jsonl"), decisions, _RowsById(ids).row_of, examples.classes
    ).warnings():
        logger.warning(warning)
    refuse_overwrite(out, run / "review.jsonl", config.source, config.data.inputs)
    if out.suffix.lower() != ".csv":
        raise UserError(f"{out}: decisions are written as .csv; use this ending")
    count = int((decisions.kinds > 0).sum())
    if not count:
        raise UserError(f"{run}: no decisions yet; review it first: crosel review {run}")
    with new_folder(out.parent):
        atomic_write(out, corrections_csv(decisions, ids, examples.classes))
    return count


def read_corrections(path: Path, data: Dataset) -> dict[int, int]:
    """Known labels by row, as class numbers, from an exported csv or from a log (jsonl). Skipped examples have none."""
    rows = _RowsById([data.example_id(i) for i in range(data.n)])
    if path.suffix.lower() == ".jsonl":
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        decisions = Decisions(data.n)
        skipped = replay(read_log(path, links=True), decisions, rows.row_of, data.classes)
        if skipped.unknown:
            raise UserError(
                f"{path}: line {skipped.unknown[0]}: this decision is not about this data (another id, row or label); "
                "give the decisions of a run on this data"
            )
        if skipped.truncated:
            logger.warning(
                f"{path}: line {skipped.truncated[0]} is cut short or not JSON, and is ignored "
                f"({len(skipped.truncated)} such)"
            )
        return {row: decision.label for row, decision in decisions.in_force() if decision.label >= 0}
    if path.suffix.lower() == ".csv":
        return _read_csv(path, data, rows)
    raise UserError(f"{path}: corrections must be a .csv (exported) or .jsonl (the log) file")


def _read_csv(path: Path, data: Dataset, rows: _RowsById) -> dict[int, int]:
    number = {name: j for j, name in enumerate(data.classes)}
    found: dict[int, int] = {}
    for place, name, label in _csv_rows(path):
        if label == "":
            continue
        row = rows.find(name) if rows.find(name) is not None else rows.find(unescape_formula(name))
        if row is None:
            raise UserError(
                f"{place}: no example has the id {quoted(name)}; remove the line, or give the ids of the data"
            )
        if row < 0:
            raise UserError(f"{place}: several examples have the id {quoted(name)}; ids must be unique")
        j = number.get(label, number.get(unescape_formula(label)))
        if j is None:
            near = did_you_mean(label, data.classes)
            raise UserError(f"{place}: {quoted(label)} is not one of the {len(data.classes)} classes{near}")
        if found.setdefault(row, j) != j:
            raise UserError(f"{place}: example {quoted(name)} has two labels; remove one of them")
    return found


def _csv_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    """(place, id, label) of each row."""
    try:
        table = CsvFile(path)
        missing = [name for name in ("id", "label") if name not in table.header]
        if missing:
            raise UserError(f"{path}, line 1: there is no column '{missing[0]}'; corrections need id and label")
        name, label = map(table.header.index, ("id", "label"))
        for line, row in table.rows():
            yield f"{path}, line {line}", row[name], row[label]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


class _RowsById:
    """Finds rows by id. Where several examples share an id, its row must be given, too."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        self._row: dict[str, int] = {}
        for row, name in enumerate(ids):
            self._row[name] = -1 if name in self._row else row

    def find(self, name: str) -> int | None:
        """The row; -1 for an id that several examples have, None for one that none has."""
        return self._row.get(name)

    def row_of(self, entry: dict[str, Any]) -> int:
        name, row = entry.get("id"), entry.get("row")
        if isinstance(row, int) and not isinstance(row, bool) and 0 <= row < len(self._ids) and self._ids[row] == name:
            return row
        found = self._row.get(name) if isinstance(name, str) else None  # the order of the data may have changed
        if found is None or found < 0:
            raise ValueError("no such example")
        return found


def apply_corrections(data: Dataset, corrections: dict[int, int]) -> Dataset:
    """Give examples with a known label a candidate set of that label alone, which every method takes as true."""
    assert data.candidates is not None
    if not corrections:
        return data
    rows, labels = np.array(list(corrections)), np.array(list(corrections.values()))
    changed: dict[str, Any] = {}
    for name in ("candidates", "weights"):  # both are [n, k], and 0 outside the set
        table = getattr(data, name)
        if table is not None:
            table = table.copy()
            table[rows] = 0
            table[rows, labels] = 1
            changed[name] = table
    return replace(data, **changed)


# --- decisions ------------------------------------------------------------------------------------------------------
# Decisions of a review: an append-only log with one JSON object per line.
#
# A line is flushed to the disk before the page reports it as saved. No line is ever changed: an undo is a line, too.
# After a crash the file may end with part of a line that was never reported.

# `choose`: another label of the set; `outside`: a label that is not in it.
KINDS = ("accept", "choose", "outside", "skip")
UNDO = "undo"
CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}


@dataclass(frozen=True)
class Decision:
    kind: str
    label: int = -1  # the class; -1 for `skip`


class Decisions:
    """The decisions in force and their history for undo, in memory."""

    def __init__(self, n: int) -> None:
        self.kinds = np.zeros(n, np.int8)  # 0: undecided, otherwise one of CODES
        self.labels = np.full(n, -1, np.int32)
        self.version = 0  # goes up with every change
        self._counts = [n, *(0 for _ in KINDS)]  # by code
        self._stacks: dict[int, list[Decision]] = {}
        self._order: list[int] = []  # rows, in the order of the decisions that were not undone

    def decide(self, row: int, decision: Decision) -> None:
        self._stacks.setdefault(row, []).append(decision)
        self._order.append(row)
        self._show(row)

    @property
    def last_row(self) -> int | None:
        return self._order[-1] if self._order else None

    def undo(self, row: int) -> bool:
        """Undo the last decision about this row; return False if there is none."""
        stack = self._stacks.get(row)
        if not stack:
            return False
        stack.pop()
        # Search from the end: it is nearly always the last decision that is undone.
        place = len(self._order) - 1
        while self._order[place] != row:
            place -= 1
        del self._order[place]
        self._show(row)
        return True

    def get(self, row: int) -> Decision | None:
        stack = self._stacks.get(row)
        return stack[-1] if stack else None

    def _show(self, row: int) -> None:
        decision = self.get(row)
        code = 0 if decision is None else CODES[decision.kind]
        self._counts[int(self.kinds[row])] -= 1
        self._counts[code] += 1
        self.version += 1
        self.kinds[row] = code
        self.labels[row] = -1 if decision is None else decision.label

    def counts(self) -> dict[str, int]:
        return {kind: self._counts[code] for kind, code in CODES.items()}

    def in_force(self) -> Iterator[tuple[int, Decision]]:
        """(row, decision) in the order of the rows."""
        for row in np.flatnonzero(self.kinds):
            decision = self.get(int(row))
            assert decision is not None
            yield int(row), decision


@dataclass(frozen=True)
class SkippedLines:
    """Line numbers, from 1: cut short by a crash, or complete but not about this data."""

    truncated: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.truncated) + len(self.unknown)

    def warnings(self) -> list[str]:
        if not len(self):
            return []
        return [f"{counted(len(self), 'line')} of review.jsonl ignored: cut short, or from another run"]


FindRow = Callable[[dict[str, Any]], int]  # the row of the example that a line is about, or ValueError


def replay(lines: Iterable[str], decisions: Decisions, find_row: FindRow, classes: Sequence[str]) -> SkippedLines:
    """Apply the lines of a log; return those that were skipped."""
    number = {name: j for j, name in enumerate(classes)}
    skipped = SkippedLines()
    for count, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # part of a JSON object is never valid JSON
            skipped.truncated.append(count)
            continue
        try:
            if not isinstance(entry, dict):
                raise ValueError("not an object")
            kind, row = entry.get("decision"), find_row(entry)
            if kind == UNDO:
                decisions.undo(row)
            elif kind == "skip":
                decisions.decide(row, Decision("skip"))
            elif kind in KINDS and entry.get("label") in number:
                decisions.decide(row, Decision(kind, number[entry["label"]]))
            else:
                raise ValueError("no decision")
        except (ValueError, TypeError):
            skipped.unknown.append(count)
    return skipped


def read_log(path: Path, links: bool = False) -> list[str]:
    """The lines of a log, whatever it contains; a missing log is empty."""
    try:
        # Only \n ends a line: splitlines() would also split at characters that an id may contain.
        return read_run_text(path, links).split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


class DecisionLog:
    """The log of one run, open for appending, and the decisions in force. Safe to use from several threads."""

    def __init__(self, path: Path, ids: Sequence[str], classes: Sequence[str]) -> None:
        self.path = path
        self._ids, self._classes = ids, classes
        self._lock = threading.Lock()
        with disk_errors(path, elsewhere="copy the run folder to a writable place and review the copy"):
            new = not path.exists()
            self._file = open_plain(path, links=False, flags=APPEND)
        try:
            claim(self._file, f"{path} is open in another review of this run; use that one, or stop it")
            self.decisions = Decisions(len(ids))
            lines = read_log(path)
            self.skipped_lines = replay(lines, self.decisions, self._find_row, classes)
            self._truncated = bool(lines) and lines[-1] != ""  # the last line was cut short: begin on a new one
            if new:
                sync_folder(path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def _find_row(self, entry: dict[str, Any]) -> int:
        row = entry.get("row")
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < len(self._ids):
            raise ValueError("no such row")
        if entry.get("id") != self._ids[row]:
            raise ValueError("the row has another id")
        return row

    def decide(self, row: int, decision: Decision) -> None:
        with self._lock:
            self._append(row, decision.kind, "" if decision.label < 0 else self._classes[decision.label])
            self.decisions.decide(row, decision)

    def undo(self) -> int | None:
        """Take back the last decision that still holds; return its row, or None if there is none."""
        with self._lock:
            row = self.decisions.last_row
            if row is not None:
                self._append(row, UNDO, "")
                self.decisions.undo(row)
            return row

    def _append(self, row: int, decision: str, label: str) -> None:
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry = {"time": time, "id": self._ids[row], "row": row, "decision": decision, "label": label}
        # ASCII only: a truncated line has no partial character, and every id can be written.
        data = (b"\n" if self._truncated else b"") + json.dumps(entry).encode() + b"\n"
        with disk_errors(self.path):
            if not os.fstat(self._file).st_nlink or not self.path.exists():
                raise UserError(f"{self.path} was removed while this page was open; put it back, or review again")
            self._truncated = True  # until all of it is there
            while data:
                data = data[os.write(self._file, data) :]
            self._truncated = False
            os.fsync(self._file)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
