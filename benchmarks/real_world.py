"""The trials that the presets for features are based on: lost, MSRCv2 and BirdSong, on held-out *training* examples.

    python benchmarks/real_world.py --data DIR --trials results/real-world/held-out.jsonl --out again.jsonl

A line of the file is a trial: the set, the split, the method, its settings, and the result. This script repeats them.
A tenth of each set (chosen by the split's seed) is left out and never looked at: it is the test set of `crosel bench
realworld`. Of the rest, 15 % are held out. `accuracy` needs their true labels; `covering_rate` and
`approximated_accuracy` do not. `training_labels_right` says how many of the other 85 % get their true label back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Arguments, add, end_with

from crosel.config import build_config
from crosel.data import Dataset, DataSettings, load
from crosel.data.dataset import hold_out
from crosel.data.text import json_objects
from crosel.errors import UserError
from crosel.runs.result import Result
from crosel.training import metrics
from crosel.training.build import build_session, resolve
from crosel.training.trainer import fit, predicted_probabilities

ASKED = ("set", "split", "method", "settings")  # of a trial; the rest is what came out


def inner_split(name: str, split: int, folder: Path) -> tuple[Dataset, np.ndarray[Any, Any]]:
    """The training part of a split, with 15 % of it as the test set, and the candidate sets of this test set."""
    whole = load(f"{name}.mat", folder, DataSettings(test_share=0.1, split_seed=split))
    whole = dataclasses.replace(whole, x_test=None, y_test=None, ids=None)
    inner = hold_out(whole, 0.15, 1000 + split)
    assert inner.ids is not None
    assert whole.candidates is not None
    held = np.setdiff1d(np.arange(whole.n), np.array(inner.ids, dtype=np.int64))
    return inner, whole.candidates[held]


def run(trial: dict[str, Any], folder: Path) -> dict[str, Any]:
    data, sets = inner_split(trial["set"], trial["split"], folder)
    # What the defaults were when the recorded trials were made.
    then = {"warmup": 10, "ramp": 0, "alpha": 0.75} if trial["method"] == "crosel" else {}
    values = {
        "source": trial["set"], "seed": trial["split"], "method": {"name": trial["method"], **then},
        "network": {"scaling": "standard", "hidden": [512, 256]}, "train": {"weight_decay": 1e-4},
        "augment": {"weak_feature_noise": 0},
    }  # fmt: skip
    config = build_config(settings=[*trial["settings"], "train.evaluate_every=1000"], values=values)
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    last = fit(session)[-1]
    assert data.x_test is not None
    assert data.y_test is not None
    p = predicted_probabilities(session, data.x_test).float()
    candidates = torch.from_numpy(sets)
    labels = Result.of(session).labels
    out = {
        "accuracy": float((p.argmax(1).numpy() == data.y_test).mean()),
        "covering_rate": float(metrics.covering_rate(p, candidates)),
        "approximated_accuracy": float(metrics.approximated_accuracy(p, candidates)),
        "training_labels_right": float((labels == data.y).mean()),
        "selection_ratio": last.get("selection_ratio"),
    }
    asked = {key: trial[key] for key in ASKED}
    return asked | {key: value if value is None else round(value, 4) for key, value in out.items()}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the .mat files")
    parser.add_argument("--trials", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to add to")
    args = parser.parse_args()
    for line, trial in json_objects(args.trials, '{"set": "lost", "split": 0, "method": "cc", "settings": []}'):
        missing = [key for key in ASKED if key not in trial]
        if missing:
            raise UserError(f"{args.trials}, line {line}: a trial without {', '.join(missing)}")
        result = run(trial, args.data)
        print(result, flush=True)
        add(result, args.out)


if __name__ == "__main__":
    end_with(main)
