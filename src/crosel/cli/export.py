"""`crosel export`: the classifier for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crosel.cli.options import RunArgument, Trust


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(metavar="FORM", help="onnx or torch (a program of torch.export)")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="file to write: .onnx, or .pt2 for torch")],
    trust_code: Trust = False,
) -> None:
    """Write the classifier to one file that runs without crosel. Normalisation and class names are inside."""
    from crosel.runs.export import export_run
    from crosel.utils.text import counted

    description = export_run(run, to, out, trust_code)
    taken, classes = description["input"], description["classes"]
    shape = ", ".join(map(str, taken["shape"]))
    typer.echo(f"{taken['name']} {taken['dtype']} [{shape}] to {counted(len(classes), 'class')}: {out}")
