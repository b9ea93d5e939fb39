"""Tables of many runs: mean and deviation over seeds, beside the paper's figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from crosel.bench.tables.build import Row, Table, build
from crosel.bench.tables.collect import Collection, Run, collect
from crosel.bench.tables.paper import main_figures, paper
from crosel.bench.tables.render import ENDINGS, FORMATS, notes_of, render
from crosel.bench.tables.statistics import Estimate, PairedTest, estimate, paired_t_test
from crosel.errors import UserError, choose_from
from crosel.utils.files import atomic_write, new_folder

__all__ = [
    "FORMATS", "Collection", "Estimate", "PairedTest", "Row", "Run", "Table", "TablesText", "build", "collect",
    "estimate", "main_figures", "make_tables", "notes_of", "paired_t_test", "paper", "pick_format", "render",
    "tables_command",
]  # fmt: skip


class TablesText(NamedTuple):
    """The tables as text, and the notes that a csv has no place for."""

    text: str
    notes: list[str]


def pick_format(form: str | None, out: Path | None = None) -> str:
    """The format asked for, or that of the file's ending, or markdown."""
    if form is None:
        if out is None:
            return "markdown"
        if out.suffix.lower() not in ENDINGS:
            raise UserError(f"{out}: use one of the endings {', '.join(ENDINGS)}, or add --format")
        return ENDINGS[out.suffix.lower()]
    if form not in FORMATS:
        raise UserError(f"unknown format '{form}'{choose_from(form, FORMATS)}")
    return form


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


def tables_command(folders: Sequence[Path], form: str | None, out: Path | None, echo: Callable[[str], object]) -> None:
    """What `crosel tables` does."""
    form = pick_format(form, out)
    text, notes = make_tables(folders, form)
    if form == "csv":  # it has no place for them, but nothing may be left out in silence
        for note in notes:
            sys.stderr.write(f"{note}\n")
    if out is None:
        echo(text.rstrip("\n"))
        return
    with new_folder(out.parent):
        atomic_write(out, text)
    echo(f"tables: {out}")
