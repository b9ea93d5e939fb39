"""`crosel data get`: download published datasets."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import argument, option

app = typer.Typer(rich_markup_mode=None, help="Download published datasets.")


@app.command()
def get(
    name: str = argument(..., "NAME", "cifar10, cifar100 or svhn"),
    to: Path = option(..., "DIR", "folder to write to; pass it to other commands as --data"),
    mirror: str | None = option(None, "URL", "another place with the same files  [default: $CROSEL_MIRROR]"),
) -> None:
    """Download a published dataset. Files are verified, and broken downloads are resumed."""
    from crosel.data.download import get as download
    from crosel.utils.console import Console

    def show(file: str, done: int, total: int | None) -> None:
        amount = f"{done / 1e6:.1f}" + (f" of {total / 1e6:.1f} MB" if total else " MB")
        console.show(f"{file}  {amount}", done, total)

    with Console() as console:
        download(name, to, mirror, show)
    typer.echo(f"{name} is in {to}; train on it with: crosel train {name} --data {to}")
