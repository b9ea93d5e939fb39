"""`crosel candidates`: any input in our own format, with a summary of its sets."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from crosel.cli.options import SOURCE, DataDir, argument, flag, option, set_option


def candidates(
    source: str = argument(..., "SOURCE", SOURCE),
    out: Path | None = option(None, "FILE", "npz file to write  [default: none, only the summary]"),
    rule: str | None = option(
        None, "RULE", "how to make candidate sets, such as votes:min=2 or uniform:q=0.3", "--rule", "--candidates"
    ),
    seed: int = option(0, "N", "seed of what the rule draws", min=0),
    data: DataDir = None,
    inputs: Path | None = option(None, "PATH", "file or folder with the inputs of votes or scores"),
    set_: list[str] | None = set_option("a setting, such as data.image_size=64"),
    json_: bool = flag("--json", "print the summary as one JSON object"),
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
