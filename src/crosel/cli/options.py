"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SOURCE = "digits, cifar10, cifar100, cifar100-coarse, svhn, a file or a folder"
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="run folder")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda")]


def _trust(given: bool) -> bool:
    if given:
        from crosel.methods.base import trust_method_code

        trust_method_code()
    return given


Trust = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust,
        help="let network.name=module:factory and --method module:Class import your code",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="folder with the published files of cifar10, …, or with moved files"),
]


def set_option(what: str) -> Any:
    """`--set`, which goes by the parameter name `set_` (see `crosel.cli.process`)."""
    return typer.Option("--set", metavar="NAME=VALUE", help=f"{what}; may be repeated")
