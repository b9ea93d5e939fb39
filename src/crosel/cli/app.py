"""The command line, put together. Commands import what is heavy when called, so that --help answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from crosel.cli import bench, candidates, data, demo, eval, export, info, labels, predict, report, review, tables, train
from crosel.cli.process import run_app

app = typer.Typer(
    name="crosel", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Train a classifier from sets of candidate labels, and get the true labels back.",
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        from crosel import __version__

        typer.echo(f"crosel {__version__}")
        raise typer.Exit


@app.callback()
def crosel(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass  # only there for its option


app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("eval")(eval.evaluate)
app.command("predict")(predict.predict)
app.command("labels")(labels.labels)
app.command("candidates")(candidates.candidates)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("bench")(bench.bench)
app.command("tables")(tables.tables)
app.command("review")(review.review)
app.command("info")(info.info)
app.add_typer(data.app, name="data")


def main() -> None:
    run_app(app)
