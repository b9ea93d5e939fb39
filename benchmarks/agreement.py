"""Does the fast path compute the same as the plain path? CIFAR-10 with q = 0.5, on one GPU.

    python benchmarks/agreement.py steps --data DIR --out results/agreement/steps.json
    python benchmarks/agreement.py runs --data DIR --out results/agreement --workers 6

`steps` compares the losses of 20 steps of CroSel. Both paths have the same starting weights and draws. It
repeats this for several seeds of both.

* `start`: the first 20 steps of a run with the preset fast/cifar10-crosel.
* `comix`: 20 steps of that run's first epoch with co-mix, with four of five examples selected. They begin at starting
  weights and have the learning rates of the first 20 steps.
* `steep` and `gentle`: with co-mix, WRN-28-2 and batches of 64. The learning rate is 0.01 or 0.001 from the first
  step on, without the preset's rise. At 0.01 the first steps multiply any difference, and float32 does not agree with
  itself. The row `plain, last bit changed` shows this: walks of the plain path whose starting weights differ in the
  last bit.

Two things must hold. Recorded and eager steps, and weights cast once or in every pass, give the same bits. And every
step differs by no more than the rounding of bfloat16 (a part in 2^8). This is checked in two ways: from the same
weights (those of the plain path before each step), and with each path on its own. For comparison, the output shows
how far PyTorch's own bfloat16 is away (autocast, its batch norm, eager), and the fast path with a pass for each
batch.

`runs` compares test accuracies after a short training: three seeds on the fast path (bfloat16, fused kernels,
recorded steps) and three on the plain path (float32, eager). The difference of the means should lie within the spread
of the seeds, which is the largest minus the smallest value of the path that spreads more. Several runs share the
card, so their times mean nothing.

The exit status is 1 if the paths do not agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record import Arguments, count, end_with, save
from speed import EPOCH, FAST, PLAIN, Steps, begin, images, on_device

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.training.build import build_session, resolve
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import learning_rate

SEEDS = (0, 1, 2)
METHODS = ("crosel", "cc")
PATHS = {"fast": FAST, "plain": PLAIN}
ROUNDING = 2**-8  # of bfloat16
LAST_BIT = 2**-24  # of float32
STEPS, NUDGES = 20, 3
PRESET = "fast/cifar10-crosel"
WALKS = {"start": 1, "comix": EPOCH, "steep": EPOCH, "gentle": EPOCH}  # the epoch whose steps are taken
CONSTANT = {"steep": 0.01, "gentle": 0.001}  # learning rates of walks without a rise
SMALLER = ("network.name=wrn-28-2", "train.batch_size=64")  # and what else they change
SETTINGS = ("network.name=wrn-16-2", "train.batch_size=256", "train.epochs=5", "train.lr=0.1", "train.nesterov=true")
# So that five epochs teach something.
CROSEL = ("warmup=3", "bank_length=2", "gamma=0.6", "lambda_cr=1", "temperature=1")


class Walk:
    """20 steps of two networks on one path. All walks of a seed have the same starting weights and the same draws."""

    def __init__(
        self, data: Any, options: argparse.Namespace, seed: int, path: dict[str, bool], shared: bool = True,
        joined: bool = True, nudge: int | None = None, kind: str = "comix",
    ) -> None:  # fmt: skip
        device = pick_device(options.device)
        values = {"source": "cifar10", "seed": seed, "train": on_device(path, device)}
        settings = [*(SMALLER if kind in CONSTANT else ()), *options.set]
        config = resolve(build_config(preset=PRESET, settings=settings, values=values), data)
        session = build_session(config, draw_candidates(data, "uniform:q=0.5", seed), device)
        self.steps = Steps(begin(session, WALKS[kind]))
        self.method, self.joined = self.steps.session.method, joined
        if not shared:
            self.steps.stepper.casts = None
        if nudge is not None:
            generator = torch.Generator(device).manual_seed(nudge)
            with torch.no_grad():
                for p in self.method.parameters():
                    p.mul_(1 + LAST_BIT * torch.randn(p.shape, generator=generator, device=device))

    def loss(self, i: int, lr: float) -> float:
        sums = self.steps.session.progress.sums
        for total in sums.values():
            total.zero_()
        with (
            nullcontext() if self.joined else mock.patch("crosel.nn.networks._norms_support_parts", return_value=False)
        ):
            self.steps(i, lr)
        return float(sums["loss"])

    def losses(self, rates: list[float]) -> list[float]:
        return [self.loss(i, lr) for i, lr in enumerate(rates)]

    def losses_beside(self, leader: Walk, rates: list[float]) -> list[tuple[float, float]]:
        """Our loss and the leader's in each step, both from the leader's weights."""
        out = []
        for i, lr in enumerate(rates):
            self.method.load_state_dict(leader.method.state_dict())  # in place: recorded steps go on
            out.append((self.loss(i, lr), leader.loss(i, lr)))
        return out


def away(ours: list[float], theirs: list[float]) -> list[float]:
    return [(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]


def largest(values: list[float]) -> float:
    return max(map(abs, values))


def learning_rates(kind: str, session: Session) -> list[float]:
    if kind in CONSTANT:
        return [CONSTANT[kind]] * STEPS
    return [learning_rate(session.config.train, 1, i, session.steps) for i in range(STEPS)]


def compare_seed(data: Any, options: argparse.Namespace, seed: int, kind: str) -> dict[str, Any]:
    def walk(path: dict[str, bool], **changes: Any) -> Walk:
        return Walk(data, options, seed, path, kind=kind, **changes)

    plain = walk(PLAIN)
    lr = learning_rates(kind, plain.steps.session)
    by_pytorch = PLAIN | {"bf16": True}
    beside = {
        name: walk(path, shared=path is FAST).losses_beside(walk(PLAIN), lr)
        for name, path in (("fast", FAST), ("bfloat16 by PyTorch alone", by_pytorch))
    }
    alone = {
        "plain": plain.losses(lr),
        "fast": walk(FAST).losses(lr),
        "fast, eager": walk(FAST | {"cuda_graphs": False}).losses(lr),
        "fast, cast in every pass": walk(FAST, shared=False).losses(lr),
        "fast, a pass for each batch": walk(FAST, joined=False).losses(lr),
        "bfloat16 by PyTorch alone": walk(by_pytorch, shared=False).losses(lr),
        **{f"plain, last bit changed ({i})": walk(PLAIN, nudge=i).losses(lr) for i in range(NUDGES)},
    }
    same_weights = {name: away(*map(list, zip(*pairs, strict=True))) for name, pairs in beside.items()}
    by_itself = {name: away(values, alone["plain"]) for name, values in alone.items() if name != "plain"}
    agrees = {
        "recorded = eager": alone["fast"] == alone["fast, eager"],
        "cast once = cast in every pass": alone["fast"] == alone["fast, cast in every pass"],
        "from the same weights, within rounding": largest(same_weights["fast"]) < ROUNDING,
        "by itself, within rounding": largest(by_itself["fast"]) < ROUNDING,
    }
    return {
        "walk": kind, "seed": seed, "learning_rates": lr, "agrees": agrees, "losses": alone,
        "from_the_same_weights": same_weights, "by_itself": by_itself,
        "largest_from_the_same_weights": {name: largest(values) for name, values in same_weights.items()},
        "largest_by_itself": {name: largest(values) for name, values in by_itself.items()},
    }  # fmt: skip


def compare_steps(options: argparse.Namespace) -> bool:
    data, rows = images(options.data, 2000), []
    for kind in options.walks or WALKS:
        for seed in range(options.seeds):
            row = compare_seed(data, options, seed, kind)
            rows.append(row)
            print(f"{kind}, seed {seed}:", {name: "yes" if value else "NO" for name, value in row["agrees"].items()})
            for which in ("largest_from_the_same_weights", "largest_by_itself"):
                print(f"   {which}:", {name: f"{value:.1e}" for name, value in row[which].items()}, flush=True)
            result = {"preset": PRESET, "settings": options.set, "rounding": ROUNDING}
            save({**result, "last_bit": LAST_BIT, "rows": rows}, options.out)
    return all(all(row["agrees"].values()) for row in rows)


def train(options: argparse.Namespace, run: tuple[str, str, int]) -> float:
    """Train in a process of its own and return the accuracy after the last epoch. A finished run is not repeated."""
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


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("verb", choices=("steps", "runs"))
    parser.add_argument(
        "--data", type=Path, help="folder with cifar-10-batches-py; without it, steps takes random images"
    )
    parser.add_argument("--out", type=Path, required=True, help="file (steps) or folder (runs)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--walks", nargs="+", choices=WALKS, help="steps: only these")
    parser.add_argument("--seeds", type=count, default=5, help="steps: number of seeds")
    parser.add_argument("--source", default="cifar10", help="runs: what to train on")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--workers", type=count, default=6, help="runs: number of runs at once")
    options = parser.parse_args()
    if pick_device(options.device).type == "cpu":
        print("on a CPU there is only one path, which agrees with itself: compare them on a GPU", file=sys.stderr)
    agrees = compare_steps(options) if options.verb == "steps" else compare_runs(options)
    return 0 if agrees else 1


if __name__ == "__main__":
    end_with(main)
