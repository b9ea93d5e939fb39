"""One run, or several side by side, as one self-contained web page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from crosel.data import Dataset
from crosel.errors import UserError
from crosel.report.figures import run_figures, shared_curves
from crosel.report.page import comparison_page, run_page
from crosel.report.run import Run, read_runs
from crosel.runs.folder import RunFolder, training_inputs
from crosel.runs.result import Result
from crosel.utils.files import atomic_write, make_own_folder, remove_temporary_files

__all__ = ["write_report", "write_run_report"]


def write_report(
    folders: Sequence[RunFolder], out: Path, *, data: Dataset | None = None, plots: Path | None = None
) -> None:
    """Write one html file about one run, or about several compared; with `plots`, all charts as SVG there.

    `data` is the runs' training set, if it is in memory already; otherwise it is looked for, for images.
    """
    _write_page(read_runs(folders), out, data, plots)


def write_run_report(folder: RunFolder, data: Dataset, result: Result) -> None:
    """Write the report that every finished run carries, with its charts; data and result are in memory."""
    run = Run.read(folder, folder.path.resolve().name, result)
    _write_page([run], folder / "report.html", data, folder / "plots")


def _write_page(runs: Sequence[Run], out: Path, data: Dataset | None, plots: Path | None) -> None:
    inputs = _inputs_of_runs(runs, data)
    single = len(runs) == 1
    html = run_page(runs[0], inputs[0], count(1)) if single else comparison_page(runs, inputs, count(1))
    atomic_write(out, html)
    if plots is None:
        return
    make_own_folder(plots)
    remove_temporary_files(plots)
    for figure in run_figures(runs[0], inputs[0]) if single else shared_curves(runs):
        atomic_write(plots / f"{figure.name}.svg", figure.svg_file(), durable=False)


def _inputs_of_runs(runs: Sequence[Run], data: Dataset | None) -> list[NDArray[Any] | None]:
    """Each run's training inputs; those of the same data are read once."""
    known: dict[str, NDArray[Any] | None] = {}
    for run in runs:
        fingerprint = run.examples.fingerprint
        if run.result is not None and known.get(fingerprint) is None:
            try:
                known[fingerprint] = training_inputs(run.config, run.examples, data)
            except (UserError, OSError):  # moved or deleted since: the report goes without images
                known[fingerprint] = None
    return [known.get(run.examples.fingerprint) for run in runs]
