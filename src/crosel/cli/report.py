"""`crosel report`: curves, confusion, galleries, comparison of runs."""

from __future__ import annotations

from pathlib import Path

import typer

from crosel.cli.options import Trust, argument, option
from crosel.errors import UserError


def report(
    runs: list[Path] = argument(..., "RUN", "run folders; several are compared"),
    out: Path | None = option(None, "FILE", "html file to write  [default: report.html in the run folder]"),
    plots: Path | None = option(None, "DIR", "also save the charts in this folder, as SVG"),
    trust_code: Trust = False,
) -> None:
    """Write an html report of one or more runs. It has curves, confusion, calibration and examples."""
    from crosel.report import write_report
    from crosel.runs.folder import RunFolder
    from crosel.utils.files import new_folder, refuse_overwrite

    if out is None:
        if len(runs) > 1:
            raise UserError("several runs are compared in one file; say which: --out FILE.html")
        out = runs[0] / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: the report is an .html file; use this ending")
    refuse_overwrite(out)
    with new_folder(out.parent):
        write_report([RunFolder(path) for path in runs], out, plots=plots)
    typer.echo(f"report: {out}")
    if plots is not None:
        typer.echo(f"plots: {plots}")
