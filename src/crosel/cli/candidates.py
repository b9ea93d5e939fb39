"""`crosel candidates`: any input in our own format, with a summary of its sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from crosel.cli.options import SOURCE, DataDir, set_option


def candidates(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="npz file to write  [default: none, only the summary]")
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule",
            "--candidates",
            metavar="RULE",
            help="how to make candidate sets, such as votes:min=2 or uniform:q=0.3",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="seed of what the rule draws")] = 0,
    data: DataDir = None,
    inputs: Annotated[
        Path | None, typer.Option(metavar="PATH", help="file or folder with the inputs of votes or scores")
    ] = None,
    set_: Annotated[
        list[str] | None,
        set_option("a setting, such as data.image_size=64"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as one JSON object")] = False,
) -> None:
    """Summarise candidate sets, also of votes whose inputs are not there yet; with --out, write all to an npz file."""
    from crosel.config import build_config
    from crosel.data.convert import convert
    from crosel.utils.console import Console

    values = {"source": source, "data": {"inputs": str(inputs)} if inputs else None}
    settings = build_config(settings=set_ or (), values=values).data
    with Console() as console:
        summary = convert(source, out, rule, seed, data, settings, console.on_images)
    typer.echo(json.dumps(summary.as_dict(), ensure_ascii=False) if json_ else "\n".join(summary.lines()))
    if out is not None and not json_:
        typer.echo(f"written: {out}")
