"""`crosel eval`: accuracy and more of a run."""

from __future__ import annotations

import json

import typer

from crosel.cli.options import DataDir, Device, RunArgument, Trust, argument, flag, set_option


def evaluate(
    run: RunArgument,
    source: str | None = argument(None, "SOURCE", "other data with true labels  [default: the run's test set]"),
    data: DataDir = None,
    set_: list[str] | None = set_option("how to read SOURCE, such as data.image_root=DIR"),
    json_: bool = flag("--json", "print one JSON object"),
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Measure a run on its own test set, or on another source."""
    from crosel.runs.predict import evaluate_run
    from crosel.training.devices import pick_device

    result = evaluate_run(run, source, data, pick_device(device), trust_code, set_ or ())
    if json_:
        typer.echo(json.dumps(result))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            typer.echo(f"{name:<{width}}  {value:.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}")
