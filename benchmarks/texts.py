"""Texts on a frozen backbone: CC, PRODEN and CroSel beside the same head with true labels.

    apt-cache dumpavail > packages.txt
    python benchmarks/texts.py --packages packages.txt --weights FOLDER --work FOLDER --out texts.jsonl

A text is the short description of a Debian package, its class the package's section: one of the most frequent. Each
description is there once. Each draw gives `--n` of them candidate sets and holds `--held-out` others out. The backbone
is all-MiniLM-L6-v2; `--weights` is the folder with its model.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from record import Arguments, add, chosen, count, done, end_with, origin, positive

from crosel.candidates import uniform
from crosel.config import build_config
from crosel.runs.folder import load_data
from crosel.runs.pipeline import train_run
from crosel.runs.result import Result

METHODS = ("true labels", "cc", "proden", "crosel")


def read_packages(path: Path, sections: int) -> tuple[list[str], np.ndarray, list[str]]:
    """Descriptions, the numbers of their sections, and the names of these."""
    found: dict[str, str] = {}
    for entry in path.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line and not line.startswith(" "))
        if "Description" in fields and "Section" in fields:
            found.setdefault(fields["Description"], fields["Section"].rpartition("/")[2])
    classes = sorted(name for name, _ in Counter(found.values()).most_common(sections))
    kept = sorted((text, name) for text, name in found.items() if name in classes)
    return [text for text, _ in kept], np.array([classes.index(name) for _, name in kept]), classes


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--packages", type=Path, required=True, help="what apt-cache dumpavail prints")
    parser.add_argument("--weights", required=True, help="folder with all-MiniLM-L6-v2")
    parser.add_argument("--work", type=Path, required=True, help="folder for lists, embeddings and runs")
    parser.add_argument("--out", type=Path, required=True, help="record, which grows run by run")
    parser.add_argument("--n", type=count, default=5000, help="training texts in a draw")
    parser.add_argument("--held-out", type=count, default=1000)
    parser.add_argument("--sections", type=count, default=20)
    parser.add_argument("--q", type=positive, default=0.3)
    parser.add_argument("--draws", type=count, default=3)
    parser.add_argument("--methods", default=";".join(METHODS))
    args = parser.parse_args()
    texts, y, classes = read_packages(args.packages, args.sections)
    pool = {"pool": len(texts), "pool_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]}
    args.work.mkdir(parents=True, exist_ok=True)
    there = done(args.out, "n", "q", "draw", "method")
    for draw in range(args.draws):
        rows = np.random.default_rng(100 + draw).permutation(len(texts))[: args.n + args.held_out]
        sets = uniform(y[rows], classes=len(classes), q=args.q, seed=draw)
        for method in chosen(args.methods, METHODS, "--methods"):
            case = {"n": args.n, "q": args.q, "draw": draw, "method": method}
            if tuple(case.values()) in there:
                continue
            known = method == "true labels"
            source = args.work / f"n{args.n}-q{args.q:g}-draw{draw}{'-true' if known else ''}.jsonl"
            with source.open("w", encoding="utf-8") as stream:
                for at, row in enumerate(rows):
                    label = classes[y[row]]
                    candidates = [label] if known else [classes[j] for j in np.flatnonzero(sets[at])]
                    split = "train" if at < args.n else "test"
                    line = {"text": texts[row], "candidates": candidates, "label": label, "split": split}
                    stream.write(json.dumps(line) + "\n")
            config = build_config(
                values={"source": str(source), "method": {"name": "cc" if known else method}, "seed": draw},
                settings=["network.name=text/all-MiniLM-L6-v2", f"network.weights={args.weights}"],
            )
            start = time.perf_counter()
            load_data(config)
            read = time.perf_counter()
            run = args.work / "runs" / f"{source.stem}-{method.replace(' ', '-')}"
            session = train_run(config, run, torch.device("cpu"), resume=True)
            last, truth_now = session.progress.rows[-1], session.data.y
            result = {
                **pool, "sections": args.sections, "held_out": args.held_out, "accuracy": last["test_accuracy"],
                "labels_right": float((Result.of(session).labels == truth_now).mean()),
                "seconds_reading_and_embedding": read - start, "seconds_training": time.perf_counter() - read,
                "load_average": os.getloadavg()[0], "epochs": config.train.epochs, "threads": torch.get_num_threads(),
            }  # fmt: skip
            add({**case, **result, **origin("command", "platform", "cpu_count")}, args.out)
            print(f"draw {draw}  {method:<12} {100 * last['test_accuracy']:.1f} %", flush=True)


if __name__ == "__main__":
    end_with(main)
