"""Decisions of a review as a table, and as known labels for the next training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data import Dataset
from crosel.data.text import CsvFile
from crosel.errors import UserError
from crosel.runs.decisions import Decisions, read_log, replay
from crosel.runs.folder import RunFolder
from crosel.utils.csv_cells import csv_line, unescape_formula
from crosel.utils.files import atomic_write, new_folder, refuse_overwrite
from crosel.utils.text import did_you_mean, quoted

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
