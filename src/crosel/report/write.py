"""Writing a report, and its plots beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from crosel.data import Dataset
from crosel.errors import UserError
from crosel.report import run_figures
from crosel.report.compare import comparison_page
from crosel.report.figure import Figure
from crosel.report.gather import RunData, gather, training_inputs
from crosel.report.page import run_page
from crosel.report.raster import png
from crosel.runs.folder import RunFolder
from crosel.utils.files import atomic_write, make_folder, remove_temporary_files


def write_report(
    folders: Sequence[RunFolder], out: Path, *, data: Dataset | None = None, plots: Path | None = None
) -> None:
    """Write one html file about one run, or about several compared; with `plots`, all charts as SVG and PNG there.

    `data` is the runs' training set, if it is in memory already; otherwise it is looked for, for pictures.
    """
    runs = gather(folders)
    inputs = _inputs(runs, data)
    single = len(runs) == 1
    html = run_page(runs[0], inputs[0], count(1)) if single else comparison_page(runs, inputs, count(1))
    atomic_write(out, html)
    if plots is not None:
        figures = run_figures.run_figures(runs[0], inputs[0]) if single else run_figures.shared_curves(runs)
        write_plots(figures, plots)


def write_run_report(folder: RunFolder, data: Dataset) -> None:
    """Write the report that every finished run carries, with its plots."""
    write_report([folder], folder / "report.html", data=data, plots=folder / "plots")


def _inputs(runs: Sequence[RunData], data: Dataset | None) -> list[NDArray[Any] | None]:
    """Each run's training inputs; those of the same data are read once."""
    known: dict[str, NDArray[Any] | None] = {}
    for run in runs:
        if run.labels is not None and known.get(run.fingerprint) is None:
            try:
                known[run.fingerprint] = training_inputs(run.config, run.fingerprint, data)
            except (UserError, OSError):  # moved or deleted since: the report goes without pictures
                known[run.fingerprint] = None
    return [known.get(run.fingerprint) for run in runs]


def write_plots(figures: Sequence[Figure], folder: Path) -> None:
    make_folder(folder)
    remove_temporary_files(folder)
    for figure in figures:
        drawing = figure.with_words()
        atomic_write(folder / f"{figure.name}.svg", drawing.svg_file(figure.description), durable=False)
        atomic_write(folder / f"{figure.name}.png", png(drawing), durable=False)
