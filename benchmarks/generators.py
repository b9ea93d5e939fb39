"""How fast candidate sets are drawn, and how much memory that takes: a million examples, a thousand classes.

    python benchmarks/generators.py --out results/generators.json

Every rule has its own process, so that peaks do not mix. `beyond_mib` is the peak minus what the process had before
and minus the result (a byte for each cell: 954 MiB). The scores for `instance` are made beforehand, with 2 bytes for
each cell. On a busy machine look at `cpu_seconds`: all work is in one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import Arguments, count, end_with, save

RULES = (
    "uniform:q=0.1", "uniform:q=0.1,at_least_two=1,eta=0.1", "uniform-sets", "superclass:q=0.5", "instance:rate=0.4",
)  # fmt: skip


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(text: str, n: int, k: int) -> dict[str, Any]:
    import numpy as np

    from crosel.data.candidates import apply_rule, parse_rule

    labels = np.arange(n) % k
    scores = None
    if text.startswith("instance"):
        scores = np.random.default_rng(0).random((n // 100, k), dtype=np.float32).astype(np.float16)
        scores = np.repeat(scores, 100, axis=0)
    before, start, cpu = peak_mib(), time.perf_counter(), time.process_time()
    sets = apply_rule(parse_rule(text), labels, k, seed=0, groups=np.arange(k) // 10, scores=scores)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    rows = sets[:: max(1, n // 1000)]
    return {
        "rule": text, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
        "result_mib": round(sets.nbytes / 2**20), "beyond_mib": round(peak_mib() - before - sets.nbytes / 2**20),
        "mean_size": round(float(rows.sum(1).mean()), 2),
    }  # fmt: skip


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--examples", type=count, default=1_000_000)
    parser.add_argument("--classes", type=count, default=1_000)
    parser.add_argument("--rule", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rule:
        print(json.dumps(measure(args.rule, args.examples, args.classes)))
        return
    shape = ["--examples", str(args.examples), "--classes", str(args.classes)]
    rows: list[dict[str, Any]] = []
    for rule in RULES:
        command = [sys.executable, __file__, *shape, "--rule", rule]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(rows[-1], flush=True)
    if args.out is not None:
        save({"examples": args.examples, "classes": args.classes, "rules": rows}, args.out)


if __name__ == "__main__":
    end_with(main)
