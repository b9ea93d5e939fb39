"""A pretrained backbone fine-tuned with candidate sets in so many minutes: CroSel on CIFAR-10 and CIFAR-100.

    python benchmarks/fine_tuning.py cifar10 --data DIR --weights FILE --q 0.5 --minutes 9 --out fine-tuning.jsonl
    python benchmarks/fine_tuning.py cifar100 --data DIR --weights FILE --q 0.1 --minutes 9 --out fine-tuning.jsonl
    python benchmarks/fine_tuning.py cifar10 … --held-out 5000    # choose settings so: the test images are not read
    python benchmarks/fine_tuning.py cifar10 … --only-time        # seconds of steps and passes, at several sizes
    python benchmarks/fine_tuning.py cifar10 … --only-time --profile                    # and the kernels of a step
    python benchmarks/fine_tuning.py cifar10 … --only-time --versus train.fused=false   # and with this setting

The images are enlarged on the device to `--size` pixels. With `--minutes`, steps of both phases and the pass over the
training set are timed first, and the run has as many epochs as fit, from the start of the process on; `--epochs` says
how many instead. Runs that share a card would be timed at each other's mercy: they take `--times`, the record of
`--only-time` on that card alone, and `--share 0.5`, of two. Views are drawn on small images, before they are enlarged.
`--set` takes settings as `crosel train` does. On a CPU, in miniature: --images 300 --size 32 --epochs 2 --batch 32.

The last epoch counts, whatever came before it. Every epoch's numbers are in a second record as soon as it ends,
`fine-tuning.epochs.jsonl` beside `fine-tuning.jsonl`: what a run that was killed leaves.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Arguments, add, count, end_with, origin, positive
from speed import Steps, begin, seconds, wait

from crosel.config import RunConfig, build_config
from crosel.data import Dataset, draw_candidates, load
from crosel.errors import UserError
from crosel.training.build import build_session, resolve
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import fit

STARTED = time.perf_counter()
RESERVE = 0.04  # of the time: steps take a little longer beside evaluation, and kernels are compiled once more
TRIED = (96, 128, 160, 192, 224)  # sizes in pixels


def read(args: Namespace) -> Dataset:
    """Training images with candidate sets, and test images: with `--held-out`, other training images."""
    data = load(args.source, args.data)
    assert data.y is not None
    order = np.random.default_rng(args.seed).permutation(data.n)
    rest, held = order[args.held_out or 0 :], order[: args.held_out or 0]
    kept = np.sort(rest[: args.images])
    x_test, y_test = (data.x[held], data.y[held]) if args.held_out else (data.x_test, data.y_test)
    data = dataclasses.replace(data, x=data.x[kept], y=data.y[kept], x_test=x_test, y_test=y_test)
    return draw_candidates(data, f"uniform:q={args.q:g}", args.seed)


def configuration(args: Namespace, data: Dataset, device: torch.device, epochs: int, size: int) -> RunConfig:
    network = {"name": args.network, "weights": args.weights, "freeze": False, "size": size}
    values = {
        "source": args.source, "method": {"name": args.method}, "network": network, "seed": args.seed,
        "train": {"epochs": epochs, "batch_size": args.batch, "lr": args.lr, "body_lr": args.body_lr},
    }  # fmt: skip
    faster = [f"train.eval_batch_size={512 if device.type == 'cuda' else 64}"]
    return resolve(build_config(values=values, settings=[*faster, *args.set]), data, device)


def measure(args: Namespace, data: Dataset, device: torch.device, size: int) -> dict[str, float]:
    """Milliseconds of a step in the first phase and after it, and seconds of the passes at the end of an epoch."""
    found: dict[str, float] = {"size": size}
    for name, epoch in (("warm-up", 1), ("selection", 100)):
        session = begin(build_session(configuration(args, data, device, 100, size), data, device), epoch)
        steps, start = Steps(session), time.perf_counter()
        seconds(steps, device, 5)  # choice of kernels, compilation, recording
        found[f"first steps {name} (s)"] = time.perf_counter() - start
        found[f"{name} (ms)"] = 1e3 * seconds(steps, device, args.repeats)
    if args.profile:
        profile(steps, device)
    found["passes (s)"] = time_of_passes(session, device)
    found["images/s"] = 1e3 * session.batch_size / found["selection (ms)"]
    if device.type == "cuda":
        found["peak MiB"] = torch.cuda.max_memory_allocated(device) / 2**20
    del session, steps
    gc.collect()  # a recorded step keeps its memory as long as it lives
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def profile(steps: Steps, device: torch.device) -> None:
    """Print what takes longest in three steps."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        seconds(steps, device, 3)
    by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=90), flush=True)


@torch.no_grad()
def time_of_passes(session: Session, device: torch.device) -> float:
    """Seconds for all training and test images, from a few chunks of them."""
    session.method.eval()
    rows = min(session.data.n, session.config.train.eval_batch_size)
    x = session.train.rows(torch.arange(rows, device=device))
    for _ in range(3):  # the second one is recorded
        session.forward(x)
    chunk = seconds(lambda _: session.forward(x), device, 3)
    total = session.data.n + (0 if session.data.x_test is None else len(session.data.x_test))
    return chunk * total / rows


def recorded_times(args: Namespace, data: Dataset) -> dict[str, float]:
    """Those of the last fitting row of `--times`. Other sizes are counted by their pixels, which is too much for larger
    ones: some of a step does not grow with them."""
    about = {"n": data.n, "held_out": args.held_out, "network": args.network, "method": args.method,
             "batch": args.batch}  # fmt: skip
    fused = "train.fused=false" not in args.set
    rows = [json.loads(line) for line in args.times.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get("times") and all(row[name] == value for name, value in about.items())
            and ("train.fused=false" not in row["set"]) == fused]  # fmt: skip
    if not rows:
        raise UserError(f"{args.times}: no times of such steps; make them with --only-time and the same arguments")
    found: dict[str, float] = min(reversed(rows), key=lambda row: row["times"]["size"] != args.size)["times"]
    grown = (args.size / found["size"]) ** 2
    return {name: value * (grown if name.endswith("(ms)") or name == "passes (s)" else 1)
            for name, value in found.items()}  # fmt: skip


def plan(args: Namespace, data: Dataset, device: torch.device, found: dict[str, float]) -> int:
    """The most epochs that end in time."""
    steps = -(-data.n // args.batch)
    left = (60 * args.minutes - (time.perf_counter() - STARTED)) * (1 - RESERVE)
    left -= found["first steps warm-up (s)"] + found["first steps selection (s)"]
    phases = {name: (steps * found[f"{name} (ms)"] / 1e3 + found["passes (s)"]) / args.share
              for name in ("warm-up", "selection")}  # fmt: skip
    epochs, needed = 0, 0.0
    while needed <= left:
        epochs += 1
        method = configuration(args, data, device, epochs + 1, args.size).method
        warmup = getattr(method, "warmup", None) or 0
        needed = warmup * phases["warm-up"] + (epochs + 1 - warmup) * phases["selection"]
    if epochs < 2:
        raise UserError(f"--minutes {args.minutes:g}: not even two epochs fit; lower --size or --images")
    print(
        f"an epoch takes {phases['warm-up']:.1f} s in the warm-up and {phases['selection']:.1f} s after it: "
        f"{epochs} epochs in the {left:.0f} s that are left", flush=True,
    )  # fmt: skip
    return epochs


SHOWN = {
    "loss": ".3f", "selection_ratio": ".3f", "oracle_selection_accuracy": ".4f", "covering_rate": ".4f",
    "test_accuracy": ".4f",
}  # fmt: skip


class Reported:
    """Every epoch's numbers, as they come: on the screen, and in a record of their own."""

    def __init__(self, about: dict[str, Any], record: Path) -> None:
        self.about, self.record = about, record

    def on_step(self, *_: Any) -> None:
        pass

    def on_checkpoint(self, *_: Any) -> None:
        pass

    def on_epoch(self, session: Session, row: dict[str, Any]) -> None:
        shown = "  ".join(f"{name} {row[name]:{form}}" for name, form in SHOWN.items() if name in row)
        passed = time.perf_counter() - STARTED
        print(f"epoch {row['epoch']:3d}  {row['phase']:9s}  {shown}  {row['seconds']:.1f} s, {passed:.0f} s in all",
              flush=True)  # fmt: skip
        add({**self.about, **row, "seconds_since_start": passed}, self.record)


def arguments() -> Arguments:
    parser = Arguments(str(__doc__))
    parser.add_argument("source", help="cifar10, cifar100, or a file of images with labels")
    parser.add_argument("--data", type=Path, help="folder with the published files")
    parser.add_argument("--weights", help="file with the backbone's weights; default: a download")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite0")
    parser.add_argument("--method", default="crosel")
    parser.add_argument("--q", type=positive, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=count, help="training images; default: all")
    parser.add_argument("--held-out", type=count, help="test on so many training images instead of the test images")
    parser.add_argument("--size", type=count, default=160, help="side in pixels of what the backbone sees")
    parser.add_argument("--batch", type=count, default=128)
    parser.add_argument("--lr", type=positive, default=0.002, help="learning rate of the head")
    parser.add_argument("--body-lr", type=positive, default=0.1, help="that of the backbone, as a share of it")
    parser.add_argument("--epochs", type=count, default=20)
    parser.add_argument("--minutes", type=positive, help="as many epochs as fit, instead of --epochs")
    parser.add_argument("--times", type=Path, help="of --minutes: a record of --only-time, instead of timing")
    parser.add_argument("--share", type=positive, default=1.0, help="of --minutes: the run's share of the card")
    parser.add_argument("--set", action="append", default=[], help="a setting, as in crosel train")
    parser.add_argument("--repeats", type=count, default=10, help="steps that are timed")
    parser.add_argument("--only-time", action="store_true", help="time steps at several sizes, and train nothing")
    parser.add_argument("--versus", help="of --only-time: time with this setting, too")
    parser.add_argument("--profile", action="store_true", help="of --only-time: list the kernels that take longest")
    parser.add_argument("--sizes", default=";".join(map(str, TRIED)), help="of --only-time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="record, which grows run by run")
    return parser


def main() -> None:
    args = arguments().parse_args()
    device = pick_device(args.device)
    data = read(args)
    about = {
        "source": args.source, "n": data.n, "q": args.q, "seed": args.seed, "held_out": args.held_out,
        "network": args.network, "method": args.method, "batch": args.batch, "set": args.set,
    }  # fmt: skip
    where = origin("command", "platform", "cpu_count", *(["gpu", "cuda"] if device.type == "cuda" else []))
    if args.only_time:
        given = args.set
        for size in map(int, args.sizes.split(";")):
            for settings in ([], [args.versus]) if args.versus else ([],):
                args.set = [*given, *settings]
                found = measure(args, data, device, size)
                print("  ".join([*settings, *(f"{name} {value:.5g}" for name, value in found.items())]), flush=True)
                row = {**about, "set": args.set, "times": found, "load_average": os.getloadavg()[0], **where}
                add(row, args.out)
        return
    epochs, found = args.epochs, None
    if args.minutes:
        found = recorded_times(args, data) if args.times else measure(args, data, device, args.size)
        print("  ".join(f"{name} {value:.5g}" for name, value in found.items()), flush=True)
        epochs = plan(args, data, device, found)
    about |= {"size": args.size, "lr": args.lr, "body_lr": args.body_lr, "epochs": epochs}
    config = configuration(args, data, device, epochs, args.size)
    session = build_session(config, data, device)
    start = time.perf_counter()
    rows = fit(session, (Reported({**about, "commit": where["commit"]}, args.out.with_suffix(".epochs.jsonl")),))
    wait(device)
    end = time.perf_counter()
    last = {name: rows[-1][name] for name in (*SHOWN, "test_accuracy_1", "test_accuracy_2") if name in rows[-1]}
    settings = {part: getattr(config, part).model_dump(mode="json") for part in ("method", "augment", "train")}
    add({
        **about, **last,
        "seconds_training": end - start, "seconds": end - STARTED, "times": found,
        "test_accuracy_by_epoch": [row.get("test_accuracy") for row in rows],
        "seconds_by_epoch": [row["seconds"] for row in rows],
        "peak_memory_mib": rows[-1].get("peak_memory_mib"), "settings": settings,
        "load_average": os.getloadavg()[0], **where,
    }, args.out)  # fmt: skip
    print(f"{100 * last['test_accuracy']:.2f} % in the last epoch, {end - STARTED:.0f} s in all", flush=True)


if __name__ == "__main__":
    end_with(main)
