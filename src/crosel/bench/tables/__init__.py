"""Tables of many runs: mean and deviation over seeds, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from crosel.bench.tables.build import (
    Collection,
    Estimate,
    PairedTest,
    ResultsTable,
    Row,
    RunSummary,
    build,
    collect,
    estimate,
    paired_t_test,
)
from crosel.bench.tables.paper import main_figures, paper
from crosel.bench.tables.render import notes_of, pick_format, render
from crosel.errors import UserError

__all__ = [
    "Collection", "Estimate", "PairedTest", "ResultsTable", "Row", "RunSummary", "TablesText", "build", "collect",
    "estimate", "main_figures", "make_tables", "notes_of", "paired_t_test", "paper", "pick_format", "render",
]  # fmt: skip


class TablesText(NamedTuple):
    """The tables as text, and the notes that a csv has no place for."""

    text: str
    notes: list[str]


def make_tables(folders: Sequence[Path], form: str = "markdown") -> TablesText:
    """Tables of all runs in or below these folders."""
    form = pick_format(form)
    collection = collect(folders)
    if not collection.finished:
        raise UserError(f"{', '.join(map(str, folders))}: {_nothing(collection)}")
    tables = build(collection.finished)
    notes = notes_of(tables, collection)
    return TablesText(render(tables, form, notes), notes)


def _nothing(collection: Collection) -> str:
    """Why there is no finished run, and what to do."""
    if collection.unfinished:
        first = collection.unfinished[0]
        return f"no run is finished; continue the first with: crosel train --resume --out {first.path}"
    if collection.problems:
        return f"no run can be read ({collection.problems[0]})"
    return "no runs found; give the --out folder of crosel train or crosel bench"
