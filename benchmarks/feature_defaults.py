"""The trials behind the defaults for features: methods and settings side by side on sets of features.

    python benchmarks/feature_defaults.py --data DIR --sets NAME;NAME --arms NAME;NAME --splits 0-4 --out FILE [--test]

Split s holds out a tenth of the rows as test rows, and 15 % of the others as validation rows. A trial trains on what is
left and measures on the validation rows; with --test it trains on all but the test rows and measures on these. True
labels are used for nothing else. --data is as for label_error.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from label_error import SETS as ERROR_SETS
from label_error import bundled, drawn
from record import Arguments, add, chosen, done, end_with, origin, seeds

from crosel.config import build_config
from crosel.data import Dataset, load
from crosel.data.dataset import hold_out, make_dataset
from crosel.runs.result import Result
from crosel.training import metrics
from crosel.training.build import build_session, resolve
from crosel.training.trainer import fit, predicted_probabilities


def digits() -> Dataset:
    """As 64 features."""
    data = load("digits")
    return make_dataset(data.x.reshape(data.n, -1), y=data.y, classes=10, place="digits")


def from_errors(name: str) -> Callable[[Path], Dataset]:
    return lambda folder: ERROR_SETS[name][0](folder, 0)


SETS: dict[str, Callable[[Path], Dataset]] = {
    **{name: from_errors(name) for name in ("lost", "MSRCv2", "BirdSong", "ages of 60", "ages of 20")},
    **{name: from_errors(name) for name in ("wine, instance 0.3", "breast cancer, votes")},
    "digits, uniform 0.5": lambda folder: drawn(digits(), "uniform:0.5"),
    "digits, instance 0.3": lambda folder: drawn(digits(), "instance:0.3"),
    "digits, votes": lambda folder: drawn(digits(), "votes"),
    "wine, uniform 0.4": lambda folder: drawn(bundled("wine"), "uniform:0.4"),
    "iris, uniform 0.4": lambda folder: drawn(bundled("iris"), "uniform:0.4"),
    **{
        f"photographs, {rule}": from_errors(f"photographs, {rule}") for rule in ("uniform 0.3", "instance 0.3", "votes")
    },
}

# Pieces of an arm, which is named after them: "proden robust noise-0.3".
METHODS = ("crosel", "proden", "cc", "crdpll", "lws", "pico", "pop")
PIECES: dict[str, list[str]] = {
    "before": ["network.scaling=standard", "augment.weak_feature_noise=0", "network.hidden=[512,256]"],
    "standard": ["network.scaling=standard"],
    "robust": ["network.scaling=robust"],
    "linear": ["network.hidden=[]"],
    "one": ["network.hidden=[512]"],
    "two": ["network.hidden=[512,256]"],
    "strong-view": ["method.view=strong"],
    "crosel-strong": ["method.warmup_view=strong", "method.selected_view=strong"],
}
VALUES = {
    "noise": "augment.weak_feature_noise", "strong": "augment.feature_noise", "drop": "augment.feature_drop",
    "wd": "train.weight_decay", "lr": "train.lr", "epochs": "train.epochs", "batch": "train.batch_size",
    "gamma": "method.gamma", "T": "method.temperature", "cr": "method.lambda_cr", "warmup": "method.warmup",
    "ema": "train.ema_decay",
}  # fmt: skip


def arm(name: str) -> dict[str, Any]:
    """The settings that an arm stands for: method, perhaps a preset, and pieces."""
    method, *pieces = name.split()
    preset, settings = None, []
    for piece in pieces:
        key, _, value = piece.rpartition("-")
        if piece.startswith("own/"):
            preset = piece
        elif "=" in piece:
            settings.append(piece)
        else:
            settings += PIECES[piece] if piece in PIECES else [f"{VALUES[key]}={value}"]
    return {"preset": preset, "settings": settings, "method": method}


def split(data: Dataset, number: int, test: bool) -> tuple[Dataset, np.ndarray[Any, Any]]:
    """Rows to train on, with those to measure on as the test set, and the candidate sets of the latter."""
    outer = hold_out(dataclasses.replace(data, x_test=None, y_test=None, ids=None), 0.1, number)
    whole = data if test else dataclasses.replace(outer, x_test=None, y_test=None, ids=None)
    inner = outer if test else hold_out(whole, 0.15, 1000 + number)
    assert inner.ids is not None
    assert whole.candidates is not None
    held = np.setdiff1d(np.arange(whole.n), np.array(inner.ids, dtype=np.int64))
    return inner, whole.candidates[held]


def run(data: Dataset, sets: np.ndarray[Any, Any], asked: dict[str, Any], seed: int) -> dict[str, Any]:
    config = build_config(
        preset=asked["preset"], settings=[*asked["settings"], "train.evaluate_every=1000", "train.folds=0"],
        values={"source": "memory", "seed": seed, "method": {"name": asked["method"]}},
    )  # fmt: skip
    start = time.perf_counter()
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    last = fit(session)[-1]
    seconds = time.perf_counter() - start
    assert data.x_test is not None
    assert data.y_test is not None
    p = predicted_probabilities(session, data.x_test).float()
    candidates = torch.from_numpy(sets)
    return {
        "n": data.n, "held": len(data.x_test), "accuracy": float((p.argmax(1).numpy() == data.y_test).mean()),
        "covering_rate": float(metrics.covering_rate(p, candidates)),
        "approximated_accuracy": float(metrics.approximated_accuracy(p, candidates)),
        "training_labels_right": float((Result.of(session).labels == data.y).mean()),
        "selection_ratio": last.get("selection_ratio"), "seconds": round(seconds, 2),
    }  # fmt: skip


def measure(folder: Path, name: str, each: str, number: int, test: bool) -> dict[str, Any]:
    """A line of the record."""
    data, sets = split(SETS[name](folder), number, test)
    return {"set": name, "arm": each, "split": number, "test": test, **run(data, sets, arm(each), number), **arm(each)}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=";".join(SETS))
    parser.add_argument("--arms", required=True, help="METHOD PIECE PIECE;…, or settings: method.queue=512")
    parser.add_argument("--splits", type=seeds, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to add to; what it has is not run again")
    parser.add_argument("--test", action="store_true", help="train on all but the test rows, and measure on these")
    args = parser.parse_args()
    about = origin("hardware")
    names = chosen(args.sets, SETS, "--sets")
    known = done(args.out, "set", "arm", "split", "test")
    for number in args.splits:
        for name in names:
            for each in args.arms.split(";"):
                if (name, each, number, args.test) in known:
                    continue
                row = measure(args.data, name, each, number, args.test)
                print(f"{name:25} {each:40} {number} {row['accuracy']:.4f} {row['seconds']}", flush=True)
                add(row | about, args.out)


if __name__ == "__main__":
    end_with(main)
