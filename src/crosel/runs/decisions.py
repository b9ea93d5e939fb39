"""Decisions of a review: an append-only log with one JSON object per line.

A line is flushed to the disk before the page reports it as saved. No line is ever changed: an undo is a line, too.
After a crash the file may end with part of a line that was never reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from crosel.errors import UserError
from crosel.utils.files import claim, disk_errors
from crosel.utils.reading import APPEND, open_plain, read_run_text
from crosel.utils.system import sync_folder
from crosel.utils.text import counted

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
