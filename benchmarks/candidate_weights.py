"""Whether weights of candidates help: votes of annotators, and a model's three best guesses, with and without them.

    python benchmarks/candidate_weights.py --data DIR --splits 0-4 --out FILE [--sets NAME;NAME] [--methods cc;proden]

Three annotators are right for 85, 75 and 65 % of the rows; what they say otherwise is what a plain model confuses. The
guesses are those of logistic regression that saw a twentieth of the rows, at least fifty, with their labels; these rows
are left out. Then a tenth of the rows is held out for testing. `plain` leaves the weights out, `shares` takes them, and
`first` learns the most voted or most likely label alone; `first_guess_right` is what there is without training.
--data is as for label_error.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_defaults import digits
from label_error import guesses, photographs
from record import Arguments, add, chosen, done, end_with, origin, seeds
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from crosel.config import build_config
from crosel.data import Dataset
from crosel.data.candidates import draw_candidates, with_weights
from crosel.data.dataset import hold_out, only_rows
from crosel.runs.result import Result
from crosel.training.build import build_session, resolve
from crosel.training.trainer import fit, predicted_probabilities

ACCURACIES = (0.85, 0.75, 0.65)


def votes(data: Dataset, seed: int) -> Dataset:
    rng, scores, rows = np.random.default_rng(seed), guesses(data), np.arange(data.n)
    assert data.y is not None
    scores[rows, data.y] = 0
    wrong = (scores / scores.sum(axis=1, keepdims=True)).cumsum(axis=1)
    counts = np.zeros(scores.shape, np.int32)
    for accuracy in ACCURACIES:
        other = (wrong < rng.random((data.n, 1))).sum(axis=1).clip(max=len(data.classes) - 1)
        counts[rows, np.where(rng.random(data.n) < accuracy, data.y, other)] += 1
    return replace(data, votes=counts, candidates=None)


def top_three(data: Dataset, seed: int) -> Dataset:
    order = np.random.default_rng(seed).permutation(data.n)
    few, rest = order[: max(50, data.n // 20)], np.sort(order[max(50, data.n // 20) :])
    assert data.y is not None
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300)).fit(data.x[few], data.y[few])
    scores = np.zeros((data.n, len(data.classes)), np.float32)
    scores[:, model.classes_] = model.predict_proba(data.x)
    return replace(only_rows(replace(data, scores=scores, candidates=None), rest), ids=None)


SETS: dict[str, tuple[Callable[[Path, int], Dataset], str]] = {
    "digits, votes": (lambda folder, seed: votes(digits(), seed), "union"),
    "photographs, votes": (lambda folder, seed: votes(photographs(folder), seed), "union"),
    "digits, top 3": (lambda folder, seed: top_three(digits(), seed), "top-m:m=3"),
    "photographs, top 3": (lambda folder, seed: top_three(photographs(folder), seed), "top-m:m=3"),
}


def run(data: Dataset, method: str, arm: str, seed: int) -> dict[str, Any]:
    settings = ["train.evaluate_every=1000", "train.folds=0", f"train.candidate_weights={arm == 'shares'}"]
    config = build_config(settings=settings, values={"source": "memory", "seed": seed, "method": {"name": method}})
    assert data.weights is not None
    given = replace(data, candidates=np.eye(len(data.classes), dtype=bool)[data.weights.argmax(axis=1)])
    session = build_session(resolve(config, data), given if arm == "first" else data, torch.device("cpu"))
    fit(session)
    assert data.x_test is not None
    assert data.candidates is not None
    p, rows = predicted_probabilities(session, data.x_test).float().numpy(), np.arange(data.n)
    return {
        "accuracy": float((p.argmax(axis=1) == data.y_test).mean()),
        "training_labels_right": float((Result.of(session).labels == data.y).mean()),
        "truth_in_set": float(data.candidates[rows, data.y].mean()),
        "mean_size": float(data.candidates.sum(axis=1).mean()),
        "first_guess_right": float((data.weights.argmax(axis=1) == data.y).mean()),
    }  # fmt: skip


def split(folder: Path, name: str, number: int) -> Dataset:
    make, rule = SETS[name]
    whole = draw_candidates(with_weights(make(folder, number), rule), rule, 0)
    return hold_out(replace(whole, x_test=None, y_test=None), 0.1, number)


def measure(folder: Path, name: str, method: str, arm: str, number: int) -> dict[str, Any]:
    """A line of the record."""
    found = run(split(folder, name, number), method, arm, number)
    return {"set": name, "method": method, "arm": arm, "split": number, **found}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=";".join(SETS))
    parser.add_argument("--methods", default="cc;proden;crosel")
    parser.add_argument("--arms", default="plain;shares")
    parser.add_argument("--splits", type=seeds, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to add to")
    args = parser.parse_args()
    about, known = origin("hardware"), done(args.out, "set", "method", "arm", "split")
    for number in args.splits:
        for name in chosen(args.sets, SETS, "--sets"):
            for method in args.methods.split(";"):
                for arm in args.arms.split(";"):
                    if (name, method, arm, number) in known:
                        continue
                    row = measure(args.data, name, method, arm, number)
                    print(f"{name:22} {method:8} {arm:10} {number} {row['accuracy']:.4f} "
                          f"{row['training_labels_right']:.4f} {row['first_guess_right']:.4f}", flush=True)  # fmt: skip
                    add(row | about, args.out)


if __name__ == "__main__":
    end_with(main)
