"""Does the fast path compute what the plain path computes? CIFAR-10 with q=0.5, on one GPU.

    python benchmarks/agreement.py steps --data DIR --out results/agreement/steps.json
    python benchmarks/agreement.py runs --data DIR --out results/agreement --workers 6

`steps`: losses of 20 steps of CroSel, the same starting weights and draws. Recorded or eager steps, weights cast once
or in every pass: not a bit of difference. Against eager float32: within the rounding of bfloat16 (a part in 2^8). How
far PyTorch's own bfloat16 is away (autocast, its batch norm, eager, a pass for each batch) is shown beside it.
`runs`: accuracy on the test images after a short training, three seeds by the fast path (bfloat16, fused kernels,
recorded steps) and three by the plain one (float32, eager). The difference of the means should lie within the spread of
the seeds: largest minus smallest of the path that spreads more. Several runs share the card: their times mean nothing.

Exit status 1 where they do not agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from record import save
from speed import FAST, PLAIN, Steps, images, open_session

SEEDS = (0, 1, 2)
METHODS = ("crosel", "cc")
PATHS = {"fast": FAST, "plain": PLAIN}
ROUNDING = 2**-8
SETTINGS = ("network.name=wrn-16-2", "train.batch_size=256", "train.epochs=5", "train.lr=0.1", "train.nesterov=true")
CROSEL = (
    "warmup=3",
    "bank_length=2",
    "gamma=0.6",
    "lambda_cr=1",
    "temperature=1",
)  # so that five epochs teach something


def losses(data: Any, network: str, path: dict[str, bool], device: torch.device, shared: bool = True) -> list[float]:
    """The loss of each of 20 steps."""
    steps = Steps(open_session(data, network, 64, "crosel", path, device))
    if not shared:
        steps.stepper.casts = None
    out, sums = [], steps.session.progress.sums
    for i in range(20):
        for total in sums.values():
            total.zero_()
        steps(i)
        out.append(float(sums["loss"]))
    return out


def compare_steps(options: argparse.Namespace) -> bool:
    data, device = images(options.data, 2000), torch.device(options.device)
    found = {
        "plain": losses(data, options.network, PLAIN, device),
        "fast": losses(data, options.network, FAST, device),
        "fast, eager": losses(data, options.network, FAST | {"cuda_graphs": False}, device),
        "fast, cast in every pass": losses(data, options.network, FAST, device, shared=False),
        "bfloat16 by PyTorch alone": losses(data, options.network, PLAIN | {"bf16": True}, device, shared=False),
    }
    away = {
        name: [abs(a - b) / abs(b) for a, b in zip(values, found["plain"], strict=True)]
        for name, values in found.items()
    }
    agrees = {
        "recorded = eager": found["fast"] == found["fast, eager"],
        "cast once = cast in every pass": found["fast"] == found["fast, cast in every pass"],
        "fast = plain within rounding": max(away["fast"]) < ROUNDING,
    }
    result = {
        "network": options.network, "agrees": agrees, "losses": found,
        "largest_relative_difference_to_plain": {name: max(values) for name, values in away.items()},
        "first_relative_difference_to_plain": {name: values[0] for name, values in away.items()},
    }  # fmt: skip
    for name, value in agrees.items():
        print(f"{name}: {'yes' if value else 'NO'}")
    print("largest difference to plain:", {name: f"{max(values):.1e}" for name, values in away.items()})
    save(result, options.out)
    return all(agrees.values())


def train(options: argparse.Namespace, run: tuple[str, str, int]) -> float:
    """One run in a process of its own; the accuracy after its last epoch. A finished one is not run again."""
    method, path, seed = run
    name = f"{method}-{path}-seed{seed}"
    settings = [*SETTINGS, *(f"train.{key}={str(value).lower()}" for key, value in PATHS[path].items()), *options.set]
    if method == "crosel":
        settings += [f"method.{setting}" for setting in CROSEL]
    command = [
        "train", options.source, "--method", method, "--candidates", "uniform:q=0.5", "--seed", str(seed),
        "--device", options.device, "--out", name, *(part for s in settings for part in ("--set", s)),
    ]  # fmt: skip
    if options.data:
        command += ["--data", str(options.data.resolve())]
    metrics = options.out / name / "metrics.jsonl"
    if not (options.out / name / "done").is_file():
        # In the folder itself, so that the run's record of its command names no place of this machine.
        subprocess.run(
            [sys.executable, "-m", "crosel", *command], check=True, cwd=options.out, stdout=subprocess.DEVNULL
        )
    return float(json.loads(metrics.read_text().splitlines()[-1])["test_accuracy"])


def compare_runs(options: argparse.Namespace) -> bool:
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [(method, path, seed) for method in METHODS for path in ("plain", "fast") for seed in SEEDS]
    with ThreadPoolExecutor(options.workers) as pool:
        accuracy = dict(zip(runs, pool.map(lambda run: train(options, run), runs), strict=True))
    result: dict[str, Any] = {}
    for method in METHODS:
        found = {path: [accuracy[method, path, seed] for seed in SEEDS] for path in PATHS}
        difference = statistics.mean(found["fast"]) - statistics.mean(found["plain"])
        spread = max(max(values) - min(values) for values in found.values())
        result[method] = {
            "test_accuracy": found, "difference_of_means": difference, "spread": spread,
            "mean": {path: statistics.mean(values) for path, values in found.items()},
            "deviation": {path: statistics.stdev(values) for path, values in found.items()},
            "agrees": abs(difference) <= spread,
        }  # fmt: skip
        print(f"{method}: {found}; difference {difference:+.4f}, spread {spread:.4f}")
    save({"accuracy": result}, options.out / "runs.json")
    return all(row["agrees"] for row in result.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("steps", "runs"))
    parser.add_argument("--data", type=Path, help="folder with cifar-10-batches-py; steps: random images without")
    parser.add_argument("--out", type=Path, required=True, help="file (steps) or folder (runs)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", default="wrn-28-2", help="steps: the network")
    parser.add_argument("--source", default="cifar10", help="runs: the data")
    parser.add_argument("--set", action="append", default=[], help="runs: further settings")
    parser.add_argument("--workers", type=int, default=6, help="runs: how many at once")
    options = parser.parse_args()
    agrees = compare_steps(options) if options.verb == "steps" else compare_runs(options)
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
