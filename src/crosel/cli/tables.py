"""`crosel tables`: runs beside the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tables(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="folders that contain runs, at any depth")],
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="markdown, csv or latex  [default: as --out ends]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write (.md, .csv, .tex) instead of the screen")
    ] = None,
) -> None:
    """Compare runs with the paper's figures. The tables show mean and deviation over seeds."""
    from crosel.bench.tables import tables_command

    tables_command(folders, format_, out, typer.echo)
