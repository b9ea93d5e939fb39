"""`crosel tables`: runs beside the paper's figures."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import argument, option


def tables(
    folders: list[Path] = argument(..., "FOLDER", "folders that contain runs, at any depth"),
    format_: str | None = option(None, "NAME", "markdown, csv or latex  [default: as --out ends]", "--format"),
    out: Path | None = option(None, "FILE", "file to write (.md, .csv, .tex) instead of the screen"),
) -> None:
    """Compare runs with the paper's figures. The tables show mean and deviation over seeds."""
    from crosel.bench.tables import make_tables, pick_format
    from crosel.utils.files import atomic_write, new_folder, refuse_overwrite

    if out is not None:
        refuse_overwrite(out)
    form = pick_format(format_, out)
    text, notes = make_tables(folders, form)
    if form == "csv":  # it has no place for them, but nothing may be left out in silence
        for note in notes:
            typer.echo(note, err=True)
    if out is None:
        typer.echo(text.rstrip("\n"))
        return
    with new_folder(out.parent):
        atomic_write(out, text)
    typer.echo(f"tables: {out}")
