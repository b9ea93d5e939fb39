"""What benchmarks have in common: how they end, and what they leave behind, their result with command, commit,
versions and hardware beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosel.errors import UserError
from crosel.files import atomic_write
from crosel.run import environment


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write the record; without a file, show the result."""
    if out is None:
        print(json.dumps(result, indent=1))
        return
    record = {**environment(["python", *sys.argv]), "load": round(os.getloadavg()[0], 1), **result}
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(record, indent=1) + "\n")


def end_with(main: Callable[[], int | None]) -> None:
    """Run a benchmark to its exit code; what its user can mend is said in one line, as everywhere in crosel."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
