"""Photographs on a frozen backbone: CC, PRODEN and CroSel beside the same head with true labels.

    python benchmarks/photographs.py --data DIR --weights FILE --work FOLDER --out photographs.jsonl

Takes images of CIFAR-10's training set alone (DIR holds `cifar-10-batches-py`), writes them as PNG files, and for each
draw gives `--n` of them candidate sets and holds `--held-out` others out. The backbone is timm/tf_efficientnet_lite0 at
its own size, 224 pixels. Embeddings are kept in FOLDER; the first draw's are timed with an empty cache.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from record import Arguments, add, chosen, count, done, end_with, origin, positive

from crosel.candidates import uniform
from crosel.config import build_config
from crosel.data.sources import load
from crosel.runs.folder import load_data
from crosel.runs.pipeline import train_run
from crosel.runs.result import Result
from crosel.utils.csv_cells import join_names

POOL = 2  # times as many images as a draw needs


def write_images(data: Path, folder: Path, count: int) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """The first `count` training images in a fixed random order, as files."""
    source = load("cifar10", data)
    assert source.y is not None
    rows = np.random.default_rng(0).permutation(source.n)[:count]
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{row:05d}.png" for row in rows]
    for name, row in zip(names, rows, strict=True):
        if not (folder / name).exists():
            Image.fromarray(source.x[row].transpose(1, 2, 0)).save(folder / name)
    return names, source.y[rows], source.classes


def write_list(
    path: Path, names: list[str], y: np.ndarray, sets: np.ndarray, test: int, classes: tuple[str, ...]
) -> None:
    lines = ["path,candidates,label,split"]
    for row, name in enumerate(names):
        candidates = join_names([classes[j] for j in np.flatnonzero(sets[row])])
        lines.append(f"{name},{candidates},{classes[y[row]]},{'test' if row >= len(names) - test else 'train'}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


METHODS = ("true labels", "cc", "proden", "crosel")


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10-batches-py")
    parser.add_argument("--weights", required=True, help="tensors of timm's tf_efficientnet_lite0")
    parser.add_argument("--work", type=Path, required=True, help="folder for images, embeddings and runs")
    parser.add_argument("--out", type=Path, required=True, help="record, which grows run by run")
    parser.add_argument("--n", type=count, default=2500, help="training images in a draw")
    parser.add_argument("--held-out", type=count, default=500)
    parser.add_argument("--q", type=positive, default=0.3)
    parser.add_argument("--draws", type=count, default=5)
    parser.add_argument("--methods", default=";".join(METHODS))
    args = parser.parse_args()
    total, folder = args.n + args.held_out, args.work / "images"
    names, y, classes = write_images(args.data, folder, POOL * total)
    there = done(args.out, "n", "q", "draw", "method")
    for draw in range(args.draws):
        rows = np.random.default_rng(100 + draw).permutation(len(names))[:total]
        sets = uniform(y[rows], classes=10, q=args.q, seed=draw)
        for method in chosen(args.methods, METHODS, "--methods"):
            case = {"n": args.n, "q": args.q, "draw": draw, "method": method}
            if tuple(case.values()) in there:
                continue
            known = method == "true labels"
            source = folder / f"n{args.n}-q{args.q:g}-draw{draw}{'-true' if known else ''}.csv"
            truth = np.eye(10, dtype=bool)[y[rows]]
            write_list(source, [names[i] for i in rows], y[rows], truth if known else sets, args.held_out, classes)
            config = build_config(
                values={"source": str(source), "method": {"name": "cc" if known else method}, "seed": draw},
                settings=["network.name=timm/tf_efficientnet_lite0", f"network.weights={args.weights}"],
            )
            start = time.perf_counter()
            load_data(config)
            read = time.perf_counter()
            run = args.work / "runs" / f"{source.stem}-{method.replace(' ', '-')}"
            session = train_run(config, run, torch.device("cpu"), resume=True)
            last, truth_now = session.progress.rows[-1], session.data.y
            result = {
                "held_out": args.held_out, "accuracy": last["test_accuracy"],
                "labels_right": float((Result.of(session).labels == truth_now).mean()),
                "seconds_reading_and_embedding": read - start, "seconds_training": time.perf_counter() - read,
                "load_average": os.getloadavg()[0], "epochs": config.train.epochs, "threads": torch.get_num_threads(),
            }  # fmt: skip
            add({**case, **result, **origin("command", "platform", "cpu_count")}, args.out)
            print(f"draw {draw}  {method:<12} {100 * last['test_accuracy']:.1f} %", flush=True)


if __name__ == "__main__":
    end_with(main)
