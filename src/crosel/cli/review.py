"""`crosel review`: a local page to correct labels."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import RunArgument, Trust, flag, option
from crosel.utils.text import counted


def review(
    run: RunArgument,
    port: int = option(0, "N", "port on 127.0.0.1; 0: any free port"),
    no_browser: bool = flag("--no-browser", "print the address instead of opening a browser"),
    export: Path | None = option(None, "FILE", "write the decisions to this csv instead of opening the page"),
    trust_code: Trust = False,
) -> None:
    """Open a local web page to look through and correct labels."""
    from crosel.review import export_corrections, serve_review

    if export is None:
        serve_review(run, port, not no_browser)
    else:
        typer.echo(f"{counted(export_corrections(run, export), 'decision')}: {export}")
