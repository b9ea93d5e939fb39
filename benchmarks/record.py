"""What every benchmark leaves behind: its result, with command, commit, versions and hardware beside it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from crosel.files import atomic_write
from crosel.run import environment


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write the record; without a file, show the result."""
    if out is None:
        print(json.dumps(result, indent=1))
        return
    record = {**environment(["python", *sys.argv]), "load": round(os.getloadavg()[0], 1), **result}
    atomic_write(out, json.dumps(record, indent=1) + "\n")
