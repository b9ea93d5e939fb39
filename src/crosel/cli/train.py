"""`crosel train`: one run into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from crosel.cli.options import SOURCE, DataDir, Device, Trust, set_option
from crosel.errors import UserError


def train(
    source: Annotated[str | None, typer.Argument(metavar="SOURCE", help=SOURCE)] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="method; `crosel info` lists them; or your own, module:Class  [default: crosel]"
        ),
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
        set_option("a setting, such as train.epochs=20"),
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
    folds: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="judge each label by networks that trained on the other K-1 parts; 0: off  [default: 5 for features]",
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
    from crosel.utils.console import Console, mute
    from crosel.utils.distributed import init_distributed

    values: dict[str, Any] = {
        "source": source, "data_dir": str(data) if data else None, "candidates": candidates, "seed": seed,
        "method": {"name": method} if method is not None else None,
        "train": {"folds": folds} if folds is not None else None,
    }  # fmt: skip

    def build() -> RunConfig:
        base: dict[str, Any] = {}
        named = any(item.startswith("source=") for item in set_ or ())
        if source is None and config is None and not (named and (preset or not resume)):
            if preset is not None or not (resume and out):
                raise UserError("give something to train on (digits, cifar10, a file, …), or --resume with --out RUN")
            base = RunFolder(out).read_config().model_dump(mode="json")
        return build_config(preset=preset, file=config, settings=set_ or (), values=values, base=base)

    with init_distributed(pick_device(device)) as (world, place):
        if world.rank:
            mute()
        built = world.from_rank0(build, lambda made: made, lambda told: told)
        out = out or Path("runs") / f"{Path(built.source).stem}-{built.method.name.replace(':', '.')}-{built.seed}"
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
