"""`crosel train`: one run into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from crosel.cli.options import SOURCE, DataDir, Device, Trust, argument, flag, option, set_option
from crosel.errors import UserError


def train(
    source: str | None = argument(None, "SOURCE", SOURCE),
    method: str | None = option(
        None, "NAME", "method; `crosel info` lists them; or your own, module:Class  [default: crosel]"
    ),
    preset: str | None = option(
        None, "NAME", "settings that come with crosel, such as demo/digits; `crosel info` lists them"
    ),
    config: Path | None = option(None, "FILE", "YAML file with settings"),
    set_: list[str] | None = set_option("a setting, such as train.epochs=20"),
    candidates: str | None = option(None, "RULE", "how to make candidate sets, such as uniform:q=0.3"),
    data: DataDir = None,
    out: Path | None = option(None, "RUN", "run folder  [default: runs/SOURCE-METHOD-SEED]"),
    resume: bool = flag("--resume", "continue the run in --out"),
    seed: int | None = option(None, "N", "seed of candidate sets, weights and everything else random  [default: 0]"),
    corrections: Path | None = option(
        None, "FILE", "labels known to be right: csv or jsonl from a review or from labels --only-outside"
    ),
    folds: int | None = option(
        None,
        "K",
        "judge each label by networks that trained on the other K-1 parts; 0: off  [default: 5 for features]",
    ),
    logger: list[str] | None = option(None, "NAME", "also send metrics to tensorboard or wandb; may be repeated"),
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
