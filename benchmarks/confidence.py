"""How sure finished runs are, and how many of their answers are right.

    python benchmarks/confidence.py RUN [RUN …] --out confidence.json

The figures come from `predictions.npz` in each run folder: the mean largest probability for test and for training
examples, and how many training examples get more than 0.9. For CroSel, these are probabilities of the mean of its two
networks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from record import Arguments, end_with, save

from crosel.errors import UserError


def look(run: Path) -> dict[str, float]:
    with np.load(run / "predictions.npz") as found:
        missing = {"train", "test", "y_test"} - set(found)
        if missing:
            raise UserError(f"{run}: its predictions.npz has no {', '.join(sorted(missing))}")
        test, y, train = found["test"].astype(float), found["y_test"], found["train"].astype(float).max(axis=1)
    seen = {
        "test_accuracy": (test.argmax(axis=1) == y).mean(), "mean_confidence_test": test.max(axis=1).mean(),
        "mean_confidence_train": train.mean(), "share_of_train_over_0.9": (train > 0.9).mean(),
    }  # fmt: skip
    return {name: round(float(value), 4) for name, value in seen.items()}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="finished run folders")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    given = parser.parse_args()
    save({"runs": {run.name: look(run) for run in given.runs}}, given.out)


if __name__ == "__main__":
    end_with(main)
