"""Fifty clients at once on the review page: no error, every decision on the disk, memory flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from soak.growth import ALLOWED_MIB, growth

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "review_load.py"


def run(folder: Path, out: Path | None, clients: int = 50, seconds: float = 300.0) -> dict[str, Any]:
    answer = folder / "load.json"
    # No bar for the time of an answer here: the benchmark has one for eight clients.
    command = [sys.executable, str(SCRIPT), "--clients", str(clients), "--seconds", str(seconds), "--limit", "1e9",
               "--examples", "20000", "--requests", "100000000", "--out", str(answer)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(answer.read_text())
    if out is not None:
        (out / "review.json").write_text(answer.read_text())
    assert result["errors"] == 0, result["first_errors"]
    grown = growth([s for s in result["server_memory_mib"] if s])
    assert grown < ALLOWED_MIB, result["server_memory_mib"]
    return {
        "clients": clients, "seconds_of_load": result["seconds"], "requests": result["all"]["count"],
        "errors": result["errors"], "p95_ms": result["all"]["p95_ms"], "grown_mib": round(grown, 2),
        "allowed_mib": ALLOWED_MIB,
    }  # fmt: skip
