"""How many of a model's guesses to keep: digits, with sets made from the scores of a model that has seen 100 images.

    python benchmarks/model_guesses.py --out results/digits-model-guesses/runs.jsonl

The file gets one line for each run: the rule, the mean size of the sets, how many hold the truth, and how many labels
are right before (the model's first guess) and after. `labels_right` counts the labels inside the sets,
`predictions_right` those that the classifier gives when it may leave the set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from record import Arguments, add, end_with, origin

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from crosel import CroSelClassifier, PartialLabelClassifier
from crosel.data.candidates import apply_annotation_rule, parse_rule

N, EPOCHS, WARMUP = 1400, 30, 15
RULES = ("top-p:p=0.5", "top-p:p=0.7", "top-p:p=0.9", "top-m:m=2", "top-m:m=3")
SETTINGS = {
    "epochs": EPOCHS, "batch_size": 32, "network_settings": {"width": 16},
    "augment_settings": {"flip": False, "cutout": 0.25, "strong_ops": 1},
}  # fmt: skip


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    digits = load_digits()
    images, truth = (digits.images * 15).astype("uint8"), digits.target
    model = LogisticRegression(max_iter=200).fit(digits.data[1500:1600] / 16, truth[1500:1600])
    scores = model.predict_proba(digits.data[:N] / 16)
    truth = truth[:N]
    for rule in RULES:
        sets = apply_annotation_rule(parse_rule(rule), None, scores)
        for method in ("crosel", "proden", "cc"):
            started = time.perf_counter()
            if method == "crosel":
                # The defaults of when the recorded runs were made.
                classifier = CroSelClassifier(warmup=WARMUP, alpha=0.75, method_settings={"ramp": 0}, **SETTINGS)
            else:
                classifier = PartialLabelClassifier(method, **SETTINGS)
            classifier.fit(images[:N], sets)
            row = {
                "rule": rule, "method": method, "n": N, "epochs": EPOCHS, "mean_size": float(sets.sum(axis=1).mean()),
                "sets_with_truth": float(sets[np.arange(N), truth].mean()),
                "first_guess_right": float((scores.argmax(axis=1) == truth).mean()),
                "labels_right": float((classifier.transduction_ == truth).mean()),
                "predictions_right": float((classifier.predict(images[:N]) == truth).mean()),
                "seconds": round(time.perf_counter() - started, 1), **origin(),
            }  # fmt: skip
            add(row, out)
            print(*(row[name] for name in ("rule", "method", "labels_right", "seconds")), flush=True)


if __name__ == "__main__":
    end_with(main)
