"""The command line: thin. Everything heavy is imported inside the commands, so that --help answers at once."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from crosel.cli.process import run_app
from crosel.errors import UserError, counted

app = typer.Typer(
    name="crosel", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Train a classifier from sets of candidate labels, and get the true labels back.",
)  # fmt: skip

data_app = typer.Typer(rich_markup_mode=None, help="Download published datasets.")
app.add_typer(data_app, name="data")

SOURCE = "digits, cifar10, cifar100, cifar100-coarse, svhn, a file or a folder"
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="run folder")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda")]
Trust = Annotated[bool, typer.Option("--trust-code", help="let network.name=module:factory import your code")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="folder with the published files of cifar10, …, or with moved files"),
]


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder for the demo's runs and report")] = Path("demo-run"),
    device: Device = "cpu",
) -> None:
    """Train CroSel and CC on handwritten digits, and compare them."""
    from crosel.cli.demo import run_demo

    run_demo(out, device)


@app.command()
def train(
    source: Annotated[str | None, typer.Argument(metavar="SOURCE", help=SOURCE)] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="method; `crosel info` lists them  [default: crosel]")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="settings that come with crosel, such as demo/digits; `crosel info` lists them"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with settings")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a setting, such as train.epochs=20; may be repeated"),
    ] = None,
    candidates: Annotated[
        str | None, typer.Option(metavar="RULE", help="how to make candidate sets, such as uniform:q=0.3")
    ] = None,
    data: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="run folder  [default: runs/SOURCE-METHOD-SEED]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="seed of candidate sets, weights and everything else random  [default: 0]"),
    ] = None,
    corrections: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="labels known to be right: csv or jsonl from a review or from labels --only-outside"
        ),
    ] = None,
    logger: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="also send metrics to tensorboard or wandb; may be repeated"),
    ] = None,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Train a classifier and write a run folder. Under torchrun, several processes share the work."""
    from crosel.config import RunConfig, build_config
    from crosel.report import write_run_report
    from crosel.runs.folder import RunFolder
    from crosel.runs.pipeline import train_run
    from crosel.training.devices import pick_device
    from crosel.utils.console import Console
    from crosel.utils.distributed import joined
    from crosel.utils.log import say_nothing

    values: dict[str, Any] = {
        "source": source, "data_dir": str(data) if data else None, "candidates": candidates, "seed": seed,
        "method": {"name": method} if method is not None else None,
    }  # fmt: skip

    def build() -> RunConfig:
        base: dict[str, Any] = {}
        named = any(item.startswith("source=") for item in set_ or ())
        if source is None and config is None and not (named and (preset or not resume)):
            if preset is not None or not (resume and out):
                raise UserError("give something to train on (digits, cifar10, a file, …), or --resume with --out RUN")
            base = RunFolder(out).read_config(lambda text: typer.echo(text, err=True)).model_dump(mode="json")
        return build_config(preset=preset, file=config, settings=set_ or (), values=values, base=base)

    with joined(pick_device(device)) as (world, place):
        if world.rank:
            say_nothing()
        built = world.begin(build, lambda made: made, lambda told: told)
        out = out or Path("runs") / f"{Path(built.source).stem}-{built.method.name}-{built.seed}"
        console = Console(quiet=world.rank > 0)
        session = train_run(
            built, out, place, resume=resume, console=console, trust_code=trust_code, corrections=corrections,
            world=world, loggers=logger or (), write_report=write_run_report,
        )  # fmt: skip
    if world.rank:
        return
    row = session.progress.rows[-1]
    if "test_accuracy" in row:
        typer.echo(f"test accuracy {100 * row['test_accuracy']:.2f} % (last epoch)")
    typer.echo(f"run folder: {out}")


@app.command()
def eval(
    run: RunArgument,
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="other data with true labels  [default: the run's test set]"),
    ] = None,
    data: DataDir = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="how to read SOURCE, such as data.image_root=DIR; may be repeated"
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Measure a run on its own test set, or on another source."""
    from crosel.cli.evaluate import evaluate_run
    from crosel.training.devices import pick_device

    result = evaluate_run(run, source, data, pick_device(device), trust_code, set_ or ())
    if json_:
        typer.echo(json.dumps(result))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            typer.echo(f"{name:<{width}}  {value:.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}")


@app.command()
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
    from crosel.cli.predict import predict_file
    from crosel.training.devices import pick_device
    from crosel.utils.console import Console

    with contextlib.closing(Console()) as console:
        count = predict_file(
            run, input, out, top, pick_device(device), trust_code,
            lambda done: console.show(counted(done, "prediction")),
        )  # fmt: skip
    typer.echo(f"{counted(count, 'prediction')}: {out}")


@app.command()
def labels(
    run: RunArgument,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="csv, jsonl, npz (for cleanlab) or json (for Label Studio) file to write"),
    ],
    outside_gamma: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="CroSel: confidence, at most the run's γ, that makes a label not in the set count as `outside`; lower "
            "values find more  [default: the run's method.outside_gamma]",
        ),
    ] = None,
    only_outside: Annotated[
        bool,
        typer.Option(
            "--only-outside",
            help="write only the examples flagged `outside`, with the new labels, for train --corrections",
        ),
    ] = False,
    doubtful_first: Annotated[
        bool,
        typer.Option("--doubtful-first", help="put the least confident labels first, instead of the order of the data"),
    ] = False,
    from_name: Annotated[str, typer.Option(metavar="NAME", help="Label Studio: name of the choices tag")] = "label",
    to_name: Annotated[
        str, typer.Option(metavar="NAME", help="Label Studio: name of the tag that the choices label")
    ] = "image",
    data_key: Annotated[
        str, typer.Option(metavar="NAME", help="Label Studio: field of a task's data that holds the id")
    ] = "image",
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Label Studio: the project's JSON export, to keep its task ids and data"),
    ] = None,
    data: DataDir = None,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Write the cleaned labels of the training set."""
    from crosel.runs.folder import load_run
    from crosel.runs.labels import LabelStudio, check_ending, label_table, write_labels, write_outside
    from crosel.training.devices import pick_device
    from crosel.utils.files import folder_of, keep_apart

    check_ending(out, only_outside)  # before what may take minutes
    session = load_run(run, pick_device(device), trust_code, data_dir=data)
    in_run = out.absolute().parent.resolve() == run.resolve()
    rewrites = "labels.csv" if in_run and not only_outside else ""  # a run's own are all of its labels
    keep_apart(out, session.config.source, session.config.data.inputs, tasks, rewrites=rewrites)
    if doubtful_first and in_run:  # whose labels.csv is read by row
        raise UserError(f"{out}: files in a run folder keep the order of the data; choose another --out")
    table = label_table(session, outside_gamma)
    if doubtful_first:
        table = table.doubtful_first()
    with folder_of(out):
        if only_outside:
            typer.echo(f"{write_outside(table, out):,} of {len(table.flags):,} sets seem to miss the true label: {out}")
            return
        write_labels(table, out, LabelStudio(from_name, to_name, data_key, tasks))
    flags = Counter(flag or "clear" for flag in table.flags)
    kinds = ", ".join(f"{n:,} {flag}" for flag, n in flags.most_common())
    typer.echo(f"{counted(len(table.flags), 'label')} ({kinds}): {out}")


@app.command()
def candidates(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="npz file to write")],
    rule: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="how to make candidate sets, such as votes:min=2 or uniform:q=0.3"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="seed of what the rule draws")] = 0,
    data: DataDir = None,
    inputs: Annotated[
        Path | None, typer.Option(metavar="PATH", help="file or folder with the inputs of votes or scores")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a setting, such as data.image_size=64; may be repeated"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as one JSON object")] = False,
) -> None:
    """Convert data to an npz file, and summarise its sets."""
    from crosel.config import build_config
    from crosel.data.convert import convert
    from crosel.utils.console import Console

    values = {"source": source, "data": {"inputs": str(inputs)} if inputs else None}
    settings = build_config(settings=set_ or (), values=values).data
    with contextlib.closing(Console()) as console:
        summary = convert(source, out, rule, seed, data, settings, console.on_images)
    typer.echo(json.dumps(summary.as_dict(), ensure_ascii=False) if json_ else "\n".join(summary.lines()))
    if not json_:
        typer.echo(f"written: {out}")


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="cifar10, cifar100 or svhn")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="folder to write to; pass it to other commands as --data")],
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="another place with the same files  [default: $CROSEL_MIRROR]")
    ] = None,
) -> None:
    """Download a published dataset. Files are verified, and broken downloads are resumed."""
    from crosel.data.download import get
    from crosel.utils.console import Console

    def megabytes(file: str, done: int, total: int | None) -> str:
        return f"{file}  {done / 1e6:.1f}" + (f" of {total / 1e6:.1f} MB" if total else " MB")

    with contextlib.closing(Console()) as console:
        get(name, to, mirror, lambda *now: console.show(megabytes(*now)))
    typer.echo(f"{name} is in {to}; train on it with: crosel train {name} --data {to}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run folders; several are compared")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="html file to write")],
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="also save the charts in this folder, as SVG and PNG")
    ] = None,
) -> None:
    """Write an html report of one or more runs. It has curves, confusion, calibration and examples."""
    from crosel.report import write_report
    from crosel.runs.folder import RunFolder
    from crosel.utils.files import folder_of

    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: the report is an .html file; use this ending")
    folders = [RunFolder(path) for path in runs]
    for folder in folders:
        folder.read_config()  # says what is wrong with the folder, if anything
    with folder_of(out):
        write_report(folders, out, plots=plots)
    typer.echo(f"report: {out}")
    if plots is not None:
        typer.echo(f"plots: {plots}")


@app.command()
def bench(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="name of a suite (`crosel bench list` lists them), or a YAML file")
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="folder for the runs  [default: bench/SUITE]")] = None,
    on: Annotated[str, typer.Option(metavar="NAME", help="where to run cells: local or ray")] = "local",
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="number of seeds, instead of the suite's own")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="run only cells whose names match, as in '*-seed0'; may be repeated"),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="number of runs at once; on Ray, the number that share a GPU")
    ] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a setting for every cell; may be repeated"),
    ] = None,
    data: DataDir = None,
    list_: Annotated[bool, typer.Option("--list", help="show the cells and their state; run nothing")] = False,
    oracle: Annotated[bool, typer.Option("--oracle", help="let a search judge its trials by true labels")] = False,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Run the cells of a suite, or its search. Finished cells are skipped, interrupted ones are resumed."""
    from crosel.bench.command import bench_command

    ended_well = bench_command(
        suite, out, on=on, seeds=seeds, jobs=jobs, settings=tuple(set_ or ()), only=tuple(only or ()), data_dir=data,
        only_list=list_, device=device, oracle=oracle, trust_code=trust_code, echo=typer.echo,
    )  # fmt: skip
    if not ended_well:
        raise SystemExit(1)  # typer.Exit would be lost: main() runs the app without its standalone mode


@app.command()
def tables(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="folders that contain runs, at any depth")],
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="markdown, csv or latex  [default: as --out ends]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write (.md, .csv, .tex) instead of the screen")
    ] = None,
) -> None:
    """Compare runs with the paper's figures. The tables show mean and deviation over seeds."""
    from crosel.bench.tables import tables_command

    tables_command(folders, format_, out, typer.echo)


@app.command()
def review(
    run: RunArgument,
    port: Annotated[int, typer.Option(metavar="N", help="port on 127.0.0.1; 0: any free port")] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="print the address instead of opening a browser")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the decisions to this csv instead of opening the page")
    ] = None,
) -> None:
    """Open a local web page to look through and correct labels."""
    from crosel.review import export_corrections, serve_review

    if export is None:
        serve_review(run, port, not no_browser)
    else:
        typer.echo(f"{counted(export_corrections(run, export), 'decision')}: {export}")


@app.command()
def info(
    settings: Annotated[bool, typer.Option("--settings", help="list all settings with their defaults instead")] = False,
) -> None:
    """Show versions, devices, methods and presets."""
    from crosel.cli.info import info_lines, settings_lines

    for line in settings_lines() if settings else info_lines():
        typer.echo(line)


def main() -> None:
    run_app(app)
