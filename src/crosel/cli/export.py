"""`crosel export`: the classifier for use elsewhere."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import RunArgument, Trust, option


def export(
    run: RunArgument,
    out: Path = option(..., "FILE", "file to write: .onnx, or .pt2 for torch"),
    to: str | None = option(
        None, "FORM", "onnx or torch (a program of torch.export)  [default: by the ending of --out]"
    ),
    trust_code: Trust = False,
) -> None:
    """Write the classifier to one file that runs without crosel. Normalisation and class names are inside."""
    from crosel.runs.export import export_run
    from crosel.utils.text import counted

    by_ending = "torch" if out.suffix.lower() == ".pt2" else "onnx"
    description = export_run(run, to or by_ending, out, trust_code)
    taken, classes = description["input"], description["classes"]
    shape = ", ".join(map(str, taken["shape"]))
    typer.echo(f"{taken['name']} {taken['dtype']} [{shape}] to {counted(len(classes), 'class')}: {out}")
