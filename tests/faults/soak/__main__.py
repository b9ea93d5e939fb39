"""The long forms of the fault tests: `make soak`, or `python tests/faults/soak [--out FOLDER] [PART ...]`.

    kills        400 SIGKILLs at random moments and inside writes, over all methods
    stores       200 SIGKILLs while images are decoded to disk, and read from there
    embeddings   200 SIGKILLs while images are embedded, and a head is trained
    decisions    200 SIGKILLs to the review page while somebody decides
    flips        every byte of a checkpoint flipped in turn
    leak         500 epochs on digits, memory of the process
    predict      a stream of a million rows, memory of the process
    review       50 clients for five minutes on the review page, on loopback
    hostile      10,000 run folders changed at random, each read by every command, and 1,000,000 changed inputs
    threads      same bits with one thread, how far apart with 1, 2 and 4

Each part ends with one line of JSON and OK or FAILED; with --out they are also written there, with the machine and the
commit. The exit code is 1 if any part failed. Takes under 20 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: small batches are slower on several threads
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from soak import decisions, embeddings, flips, growth, hostile, kills, review, stores, threads  # noqa: E402

PARTS = {
    "kills": kills.run, "flips": flips.run, "leak": growth.leak, "predict": growth.predict, "review": review.run,
    "threads": threads.run, "stores": stores.run, "embeddings": embeddings.run, "decisions": decisions.run,
    "hostile": hostile.run,
}  # fmt: skip


def machine() -> dict[str, Any]:
    import torch

    from crosel.runs.environment import environment

    found = environment([])
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 1), "python": found["python"], "torch": torch.__version__,
        "commit": found["commit"], "started": found["started"],
    }  # fmt: skip


def processor_seconds() -> float:
    """Of this process and of all children that have ended: unlike the clock it does not count others' work."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_part(name: str, out: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    started, worked = time.perf_counter(), processor_seconds()
    row: dict[str, Any] = {"part": name, **machine()}
    try:
        with tempfile.TemporaryDirectory(prefix=f"crosel-soak-{name}-") as folder:
            known = inspect.signature(PARTS[name]).parameters
            row |= PARTS[name](Path(folder), out, **{key: value for key, value in options.items() if key in known})
        row.setdefault("ok", True)
    except Exception:
        row |= {"ok": False, "error": traceback.format_exc()[-3000:]}
    row["seconds"] = round(time.perf_counter() - started, 1)
    row["processor_seconds"] = round(processor_seconds() - worked, 1)
    print(json.dumps(row), "OK" if row["ok"] else "FAILED", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="The long forms of the fault tests.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, help="folder for soak.json and what a part has to show")
    parser.add_argument("--workers", type=int, help="processes at once, where a part can use several")
    parser.add_argument("--minutes", type=float, help="for kills and hostile: stop then, whatever is done")
    for name in ("first", "folders", "inputs"):
        parser.add_argument(f"--{name}", type=int, help="for hostile: the first seed, or how many there are")
    a = parser.parse_args()
    options = {name: value for name, value in vars(a).items() if name not in ("parts", "out") and value is not None}
    unknown = set(a.parts) - PARTS.keys()
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in a.parts or PARTS:
        rows.append(run_part(name, a.out, options))
        if a.out is not None:
            keep(a.out / "soak.json", rows)
    print(f"{sum(row['seconds'] for row in rows):.0f} seconds in all", flush=True)
    return int(not all(row["ok"] for row in rows))


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write what was found; parts that were not run this time stay as they were."""
    old = json.loads(path.read_text())["parts"] if path.exists() else []
    found = {row["part"]: row for row in [*old, *rows]}
    path.write_text(json.dumps({"parts": [found[name] for name in PARTS if name in found]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
