"""What photographs.py and texts.py share: draws of examples with candidate sets, and the same head learned from true
labels and by the methods, on embeddings that are kept in a folder.

All draws are run by the first method, then by the second one. A draw can have a process and a folder of its own
(`--draw`), so that each draw's time has its embedding in it: side_by_side.py runs several on cores of their own.

"best inside" learns one label of each set: the true one, or the likeliest of a set that misses it. No method that takes
its labels from the sets can have more of them right.

With `--search N` each setting of a grid is tried on N other draws, of examples that are in none of the draws: those
after the first `drawn_from`, if there are any.
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Arguments, add, chosen, count, done, origin, positive

from crosel.candidates import uniform
from crosel.config import build_config
from crosel.runs.folder import load_data
from crosel.runs.pipeline import train_run
from crosel.runs.result import Result

METHODS = ("crosel", "true labels", "proden", "cc", "best inside")
# Rows and the number of the draw -> candidate sets [rows, k], or weights of the candidates, which are above 0.
Draw = Callable[[np.ndarray, int], np.ndarray]
WriteSource = Callable[[str, np.ndarray, np.ndarray], Path]  # stem, rows, those -> the file, the last rows for testing


def arguments(description: str, n: int, held_out: int, draws: int) -> Arguments:
    parser = Arguments(description)
    parser.add_argument("--work", type=Path, required=True, help="folder for lists, embeddings and runs")
    parser.add_argument("--out", type=Path, required=True, help="record, which grows run by run")
    parser.add_argument("--n", type=count, default=n, help="training examples in a draw")
    parser.add_argument("--held-out", type=count, default=held_out)
    parser.add_argument("--q", type=positive, default=0.3)
    parser.add_argument("--draws", type=count, default=draws)
    parser.add_argument("--draw", type=int, choices=range(draws), help="this one alone")
    parser.add_argument("--methods", default=";".join(METHODS[:4]))
    parser.add_argument("--search", type=count, help="try a grid instead, on so many draws of other examples")
    parser.add_argument("--folds", type=int, help="as in crosel train; 0 is faster and leaves the accuracy as it is")
    parser.add_argument("--lr", default="0.003;0.01;0.03;0.1", help="learning rates of the grid")
    parser.add_argument("--decay", default="0.003;0.01;0.03;0.1;0.3", help="weight decays of the grid")
    return parser


def uniform_draw(args: Namespace, y: np.ndarray, k: int) -> Draw:
    return lambda rows, draw: uniform(y[rows], classes=k, q=args.q, seed=draw)


def drawn(args: Namespace, drawn_from: int) -> list[np.ndarray]:
    """The rows of each draw, of the first `drawn_from`."""
    total = args.n + args.held_out
    return [np.random.default_rng(100 + draw).permutation(drawn_from)[:total] for draw in range(args.draws)]


def write_list(
    folder: Path, field: str, inputs: Sequence[str], y: np.ndarray, classes: Sequence[str], n: int
) -> WriteSource:
    """A list of images (`path`) or of texts (`text`), of which the first `n` rows are for training."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(stem: str, rows: np.ndarray, sets: np.ndarray) -> Path:
        path = folder / f"{stem}.jsonl"
        with path.open("w", encoding="utf-8") as stream:
            for at, row in enumerate(rows):
                inside = np.flatnonzero(sets[at])
                split = "train" if at < n else "test"
                line = {field: inputs[row], "candidates": [classes[j] for j in inside], "label": classes[y[row]],
                        "split": split}  # fmt: skip
                if sets.dtype != bool:
                    line["weight"] = sets[at, inside].tolist()
                stream.write(json.dumps(line) + "\n")
        return path

    return write


def best_inside(sets: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(sets[np.arange(len(y)), y] > 0, y, sets.argmax(axis=1))


def compare(
    args: Namespace,
    network: list[str],
    y: np.ndarray,
    k: int,
    drawn_from: int,
    write: WriteSource,
    sets_of: Draw,
    **about: Any,
) -> None:
    """A line for each draw, method and setting. Draws are from the first `drawn_from`; `about` is in each line."""
    methods, total = chosen(args.methods, METHODS, "--methods"), args.n + args.held_out
    draws = drawn(args, drawn_from)
    grid: list[tuple[float | None, float | None]] = [(None, None)]
    if args.search:
        grid = [(float(lr), float(decay)) for lr in args.lr.split(";") for decay in args.decay.split(";")]
        others = np.arange(drawn_from, len(y))
        if not len(others):
            others = np.setdiff1d(np.arange(len(y)), np.concatenate(draws))
        draws = [np.random.default_rng(300 + draw).permutation(others)[:total] for draw in range(args.search)]
    there = done(args.out, "n", "q", "draw", "method", *(("lr", "weight_decay") if args.search else ()))
    sets_by_draw = {draw: sets_of(rows, draw) for draw, rows in enumerate(draws) if args.draw in (None, draw)}
    for method in methods:
        for draw, sets in sets_by_draw.items():
            rows = draws[draw]
            known = {"true labels": y[rows], "best inside": best_inside(sets, y[rows])}.get(method)
            kind = f"q{args.q:g}" if known is None else method.partition(" ")[0]
            stem = f"{'search' if args.search else 'draw'}{draw}-n{args.n}-{kind}"
            source = write(stem, rows, sets if known is None else np.eye(k, dtype=bool)[known])
            for lr, decay in grid:
                case = {"n": args.n, "q": args.q, "draw": draw, "method": method}
                case |= {} if lr is None else {"lr": lr, "weight_decay": decay}
                if tuple(case.values()) in there:
                    continue
                tried = [] if args.folds is None else [f"train.folds={args.folds}"]
                if lr is not None:
                    tried = [f"train.lr={lr}", f"train.weight_decay={decay}", "train.folds=0"]
                config = build_config(
                    values={"source": str(source), "method": {"name": method if known is None else "cc"}, "seed": draw},
                    settings=[*network, *tried],
                )
                start, used = time.perf_counter(), time.process_time()
                load_data(config)
                read, used_reading = time.perf_counter(), time.process_time()
                name = "-".join([stem, method.replace(" ", "-"), *map(str, () if lr is None else (lr, decay))])
                session = train_run(config, args.work / "runs" / name, torch.device("cpu"), resume=True)
                accuracy, truth = session.progress.rows[-1]["test_accuracy"], session.data.y
                result = {
                    **about, "held_out": args.held_out, "accuracy": accuracy,
                    "sets_with_truth": float((sets[np.arange(args.n), y[rows[: args.n]]] > 0).mean()),
                    "labels_right": float((Result.of(session).labels == truth).mean()),
                    "seconds_reading_and_embedding": read - start, "seconds_training": time.perf_counter() - read,
                    "cpu_seconds_reading_and_embedding": used_reading - used,
                    "cpu_seconds_training": time.process_time() - used_reading,
                    "load_average": os.getloadavg()[0], "epochs": config.train.epochs,
                    "folds": session.config.train.folds, "threads": torch.get_num_threads(),
                }  # fmt: skip
                add({**case, **result, **origin("command", "platform", "cpu_count")}, args.out)
                print(" ".join(f"{key} {value}" for key, value in case.items()), f"{100 * accuracy:.1f} %", flush=True)
