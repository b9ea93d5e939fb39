"""`crosel review`: a local page to correct labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crosel.cli.options import RunArgument, Trust
from crosel.utils.text import counted


def review(
    run: RunArgument,
    port: Annotated[int, typer.Option(metavar="N", help="port on 127.0.0.1; 0: any free port")] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="print the address instead of opening a browser")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the decisions to this csv instead of opening the page")
    ] = None,
    trust_code: Trust = False,
) -> None:
    """Open a local web page to look through and correct labels."""
    from crosel.review import export_corrections, serve_review

    if export is None:
        serve_review(run, port, not no_browser)
    else:
        typer.echo(f"{counted(export_corrections(run, export), 'decision')}: {export}")
