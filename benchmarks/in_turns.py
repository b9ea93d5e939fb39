"""Two versions of crosel train the same in turns: is the newer one as fast?

    python benchmarks/in_turns.py --before OLD/src --after src --data DIR --out results/speed/in-turns.jsonl

OLD is a checkout of the version to compare with. DIR contains cifar-10-batches-py, of which the first `--images` are
taken. A line per run: seconds on the clock and of the processor, for the whole command and, by metrics.jsonl, for its
epochs. Last comes a line per case with the median over rounds of after / before. Where the cores are shared, seconds of
the processor say more.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import Arguments, add, count, end_with, origin


def cases(folder: Path, data: Path, images: int) -> dict[str, list[str]]:
    from crosel.data import load

    cifar = load("cifar10", data)
    assert cifar.y is not None
    assert cifar.x_test is not None
    assert cifar.y_test is not None
    x, x_test = (np.asarray(part[:images]).transpose(0, 2, 3, 1) for part in (cifar.x, cifar.x_test))
    np.savez(folder / "cifar.npz", x=x, y=cifar.y[:images], x_test=x_test, y_test=cifar.y_test[:images])
    common = ["--candidates", "uniform:q=0.3", "--device", "cpu"]
    small = ["network.name=small-cnn", "network.width=8", "train.epochs=3", "method.warmup=1"]
    sets = [part for item in small for part in ("--set", item)]
    return {
        "digits, the demo's preset": ["digits", "--preset", "demo/digits", *common],
        f"{images} images of CIFAR-10, CroSel": [str(folder / "cifar.npz"), *common, *sets],
    }


def run(tree: Path, command: list[str], folder: Path) -> dict[str, float]:
    out = folder / "run"
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run(["rm", "-rf", str(out)], check=True)
    began = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        arguments = [sys.executable, "-m", "crosel", "train", *command, "--out", str(out)]
        process = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((folder / "log.txt").read_text()[-1000:])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "epochs_seconds": sum(row["seconds"] for row in rows),
        "last_loss": rows[-1]["loss"],
    }


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--before", type=Path, required=True, help="folder with the older crosel")
    parser.add_argument("--after", type=Path, required=True, help="folder with the newer crosel")
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10-batches-py")
    parser.add_argument("--images", type=count, default=4000)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    trees = {"before": a.before.resolve(), "after": a.after.resolve()}
    asked = ["rev-parse", "--short=12", "HEAD"]
    commits = {
        name: subprocess.run(["git", "-C", str(tree), *asked], capture_output=True, text=True).stdout.strip()
        for name, tree in trees.items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        for case, command in cases(Path(scratch), a.data, a.images).items():
            if a.only not in case:
                continue
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
            for number in range(a.rounds):
                for name in list(trees)[:: 1 if number % 2 else -1]:
                    found[name].append(run(trees[name], command, Path(scratch)))
                    what = {"case": case, "round": number, "tree": name, "of": commits[name]}
                    row = what | found[name][-1] | {"load": os.getloadavg()[0]} | origin("gpu", "cpu_count")
                    add(row, a.out)
                    print(json.dumps(row), flush=True)
            ratios = {
                key: statistics.median(
                    late[key] / early[key] for early, late in zip(found["before"], found["after"], strict=True)
                )
                for key in ("seconds", "cpu_seconds", "epochs_seconds")
            }
            add({"case": case, "after_by_before": ratios} | origin("gpu", "cpu_count"), a.out)
            print(case, ratios, flush=True)


if __name__ == "__main__":
    end_with(main)
