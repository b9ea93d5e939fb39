"""The command line, one module a command."""

from __future__ import annotations


def main() -> None:
    from crosel.cli.app import main as run

    run()
