"""What benchmarks have in common: their arguments, their exit codes, and their records, in which command, commit,
versions and hardware stand next to the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from crosel.errors import UserError
from crosel.utils.files import atomic_write
from crosel.utils.text import did_you_mean


class Arguments(argparse.ArgumentParser):
    """A benchmark's command line. Errors in it are one line, as everywhere in crosel."""

    def __init__(self, description: str = "", **more: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows what there is")


def count(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, not {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value


def seeds(text: str) -> list[int]:
    """Argument type: a range, as in 0-9, or a list, as in 0,3,5."""
    first, dash, last = text.partition("-")
    parts = [first, last] if dash else text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts) or (dash and int(first) > int(last)):
        raise argparse.ArgumentTypeError(f"seeds are written as 0-9 or as 0,3,5, not {text!r}")
    return list(range(int(first), int(last) + 1)) if dash else list(map(int, parts))


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write the record; without a file, print the result."""
    if out is None:
        print(json.dumps(result, indent=1))
        return
    from crosel.runs.environment import environment  # imports torch, which benchmarks of little memory must not

    record = {**environment(["python", *sys.argv]), "load": round(os.getloadavg()[0], 1), **result}
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(record, indent=1) + "\n")


def origin(*names: str) -> dict[str, Any]:
    """Where a line of a growing record comes from: commit, start, versions, and what else is named."""
    from crosel.runs.environment import environment

    known = environment(["python", *sys.argv])
    return {name: known.get(name) for name in ("commit", "started", "python", "torch", *names)}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record that grows run by run; none if it does not exist yet."""
    from crosel.data.text import json_objects

    return [row for _, row in json_objects(path, '{"seed": 0}')] if path.is_file() else []


def done(path: Path, *names: str) -> set[tuple[Any, ...]]:
    """What a growing record has already, by the fields that tell its lines apart."""
    return {tuple(row[name] for name in names) for row in read(path)}


def add(row: dict[str, Any], path: Path) -> None:
    """Add a line to such a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def chosen(names: str, known: Iterable[str], flag: str) -> list[str]:
    """The known names in the value of an option, separated by ';'."""
    given, there = names.split(";"), list(known)
    for name in given:
        if name not in there:
            raise UserError(
                f"{flag} {name}: there is no such thing{did_you_mean(name, there)}; there are {'; '.join(there)}"
            )
    return given


def digits(seed: int, held_out: bool) -> Any:
    """scikit-learn's digits; on request a quarter of the training images, another for each seed, replaces the test
    images."""
    import numpy as np

    from crosel.data import load

    data = load("digits")
    if not held_out:
        return data
    assert data.y is not None
    order = np.random.default_rng(1000 + seed).permutation(data.n)
    held, rest = order[: data.n // 4], order[data.n // 4 :]
    return dataclasses.replace(data, x=data.x[rest], y=data.y[rest], x_test=data.x[held], y_test=data.y[held])


def some(rows: list[dict[str, Any]], place: Path) -> list[dict[str, Any]]:
    """The rows of a table; refuse an empty one."""
    if not rows:
        raise UserError(f"{place}: no runs are recorded here; make them by 'run', with the same --out")
    return rows


def end_with(main: Callable[[], int | None]) -> None:
    """Run a benchmark and exit with its code. Errors that the user can fix are one line, as everywhere in crosel."""
    try:
        sys.exit(main())
    except UserError as error:
        said = str(error)
    except OSError as error:
        if error.filename is None:  # not about a file that the user named
            raise
        said = f"{error.filename}: {(error.strerror or str(error)).lower()}"
    print(f"{Path(sys.argv[0]).name}: {said}", file=sys.stderr)
    sys.exit(2)
