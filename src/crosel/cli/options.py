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


def option(default: Any, metavar: str, what: str, *names: str, **more: Any) -> Any:
    """An option with a value; a default of ... makes it required. Without `names` it is called like its parameter."""
    return typer.Option(default, *names, metavar=metavar, help=what, **more)


def argument(default: Any, metavar: str, what: str) -> Any:
    return typer.Argument(default, metavar=metavar, help=what)


def flag(name: str, what: str) -> Any:
    return typer.Option(False, name, help=what)


def set_option(what: str) -> Any:
    """`--set`, which goes by the parameter name `set_` (see `crosel.cli.process`)."""
    return option(None, "NAME=VALUE", f"{what}; may be repeated", "--set")
