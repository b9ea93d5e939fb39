"""`crosel bench`: many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crosel.cli.options import DataDir, Device, Trust, set_option


def bench(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="name of a suite (`crosel bench list` lists them), or a YAML file")
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="folder for the runs  [default: bench/SUITE]")] = None,
    on: Annotated[str, typer.Option(metavar="NAME", help="where to make the runs: local or ray")] = "local",
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="number of seeds, instead of the suite's own")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="make only runs whose names match, as in '*-seed0'; may be repeated"),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="number of runs at once; on Ray, the number that share a GPU")
    ] = 1,
    set_: Annotated[
        list[str] | None,
        set_option("a setting for every run"),
    ] = None,
    data: DataDir = None,
    list_: Annotated[bool, typer.Option("--list", help="show the runs and their state; start nothing")] = False,
    oracle: Annotated[bool, typer.Option("--oracle", help="let a search judge its trials by true labels")] = False,
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Make the runs of a suite, or its search. Finished runs are skipped, interrupted ones are resumed."""
    from crosel.bench.command import bench_command

    ended_well = bench_command(
        suite, out, on=on, seeds=seeds, jobs=jobs, settings=tuple(set_ or ()), only=tuple(only or ()), data_dir=data,
        only_list=list_, device=device, oracle=oracle, trust_code=trust_code, echo=typer.echo,
    )  # fmt: skip
    if not ended_well:
        raise SystemExit(1)  # typer.Exit would be lost: main() runs the app without its standalone mode
