"""`crosel predict`: labels and probabilities for new data."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import Device, RunArgument, Trust, argument, option
from crosel.utils.text import counted


def predict(
    run: RunArgument,
    input: Path = argument(..., "INPUT", "image, folder of images, or a csv, jsonl, npz or mat file"),
    out: Path = option(..., "FILE", "csv or jsonl file to write"),
    top: int = option(1, "N", "number of labels to give for each example", min=1),
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
