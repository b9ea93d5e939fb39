"""`crosel labels`: the training set's labels, cleaned."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import DataDir, Device, RunArgument, Trust, flag, option
from crosel.errors import UserError
from crosel.utils.text import counted


def labels(
    run: RunArgument,
    out: Path = option(..., "FILE", "csv, jsonl, npz (for cleanlab) or json (for Label Studio) file to write"),
    outside_gamma: float | None = option(
        None,
        "NUMBER",
        "CroSel: confidence, at most the run's γ, that makes a label not in the set count as `outside`; lower values "
        "find more  [default: the run's method.outside_gamma]",
    ),
    only_outside: bool = flag(
        "--only-outside", "write only the examples flagged `outside`, with the new labels, for train --corrections"
    ),
    doubtful_first: bool = flag("--doubtful-first", "the most doubtful labels first, instead of the order of the data"),
    from_name: str | None = option(
        None, "NAME", "Label Studio: name of the choices tag  [default: that of --tasks, or label]"
    ),
    to_name: str | None = option(
        None, "NAME", "Label Studio: name of the tag that the choices label  [default: that of --tasks, or image]"
    ),
    data_key: str = option("image", "NAME", "Label Studio: field of a task's data that holds the id"),
    tasks: Path | None = option(
        None,
        "FILE",
        "Label Studio: the project's JSON export, to keep its task ids and data; predictions for its API are written "
        "beside",
    ),
    data: DataDir = None,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Write the cleaned labels of the training set."""
    from crosel.runs.folder import load_run
    from crosel.runs.folds import read_out_of_sample
    from crosel.runs.labels import LabelStudioNames, check_label_suffix, write_labels, write_outside
    from crosel.runs.result import Result
    from crosel.training.devices import pick_device
    from crosel.utils.files import new_folder, refuse_overwrite

    check_label_suffix(out, only_outside)  # before what may take minutes
    session = load_run(run, pick_device(device), trust_code, data_dir=data)
    in_run = out.absolute().parent.resolve() == run.resolve()
    rewrites = "labels.csv" if in_run and not only_outside else ""  # a run's own are all of its labels
    refuse_overwrite(out, session.config.source, session.config.data.inputs, tasks, rewrites=rewrites)
    if doubtful_first and in_run:  # whose labels.csv is read by row
        raise UserError(f"{out}: files in a run folder keep the order of the data; choose another --out")
    result = Result.of(session, outside_gamma, out_of_sample=read_out_of_sample(run / "folds.npz", session))
    if doubtful_first:
        result = result.doubtful_first()
    n = len(result.labels)
    with new_folder(out.parent):
        if only_outside:
            typer.echo(f"{write_outside(result, out):,} of {n:,} sets seem to miss the true label: {out}")
            return
        write_labels(result, out, LabelStudioNames(from_name, to_name, data_key, tasks))
    count, kinds = result.to_check()
    clear = f"{n - count:,} clear"
    typer.echo(f"{counted(n, 'label')} ({f'{clear}, {kinds}' if kinds else clear}): {out}")
    if result.error is not None:
        typer.echo(result.error.line())
