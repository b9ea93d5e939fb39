"""What benchmarks have in common: how they end, and what they leave behind, their result with command, commit,
versions and hardware beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from crosel.errors import UserError, did_you_mean
from crosel.files import atomic_write


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write the record; without a file, show the result."""
    if out is None:
        print(json.dumps(result, indent=1))
        return
    from crosel.run import environment  # brings torch, which benchmarks of little memory end without

    record = {**environment(["python", *sys.argv]), "load": round(os.getloadavg()[0], 1), **result}
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(record, indent=1) + "\n")


def chosen(names: str, known: Iterable[str], flag: str) -> list[str]:
    """What a flag names, separated by ';', each of it known."""
    given, there = names.split(";"), list(known)
    for name in given:
        if name not in there:
            raise UserError(
                f"{flag} {name}: there is no such thing{did_you_mean(name, there)}; there are {'; '.join(there)}"
            )
    return given


def some(rows: list[dict[str, Any]], place: Path) -> list[dict[str, Any]]:
    """The rows of a table, if there are any."""
    if not rows:
        raise UserError(f"{place}: no runs are recorded here; make them by 'run', with the same --out")
    return rows


def end_with(main: Callable[[], int | None]) -> None:
    """Run a benchmark to its exit code; what its user can mend is said in one line, as everywhere in crosel."""
    try:
        sys.exit(main())
    except UserError as error:
        said = str(error)
    except OSError as error:
        if error.filename is None:  # no file that was named to us
            raise
        said = f"{error.filename}: {(error.strerror or str(error)).lower()}"
    print(f"{Path(sys.argv[0]).name}: {said}", file=sys.stderr)
    sys.exit(2)
