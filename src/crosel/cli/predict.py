"""`crosel predict`: labels and probabilities for new data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crosel.cli.options import Device, RunArgument, Trust
from crosel.utils.text import counted


def predict(
    run: RunArgument,
    input: Annotated[
        Path, typer.Argument(metavar="INPUT", help="image, folder of images, or a csv, jsonl, npz or mat file")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="csv or jsonl file to write")],
    top: Annotated[int, typer.Option(min=1, metavar="N", help="number of labels to give for each example")] = 1,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Predict labels and probabilities for new data."""
    from crosel.runs.predict import predict_file
    from crosel.training.devices import pick_device
    from crosel.utils.console import Console

    with Console() as console:
        count = predict_file(
            run, input, out, top, pick_device(device), trust_code,
            lambda done: console.show(counted(done, "prediction")),
        )  # fmt: skip
    typer.echo(f"{counted(count, 'prediction')}: {out}")
