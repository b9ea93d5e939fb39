"""Does review find errors? Wrong labels among its first cards, and what the flag `outside` finds of sets without truth.

    python benchmarks/review_order.py --data DIR [--runs "lost:proden;MSRCv2:crosel"] [--out FILE]

Each run trains with a method's defaults, once on all rows and once for each of five folds; a row says what its review
would show with and without folds. True labels are used for the columns `wrong…`, `missing…` and `new_label_right` only.
--data is that of label_error.py; votes.npz (`votes` [n, 3]) holds what three people called the photographs (CIFAR-10N).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import label_error
import numpy as np
from label_error import SETS, Judged, Maker, judge, photographs, rounded
from numpy.typing import NDArray
from record import Arguments, add, chosen, end_with

from crosel.data import Dataset, draw_candidates
from crosel.data.dataset import make_dataset
from crosel.runs.environment import environment
from crosel.runs.missing_truth import fit_missing, missing_odds
from crosel.runs.result import Result, review_order

FIRST = 100  # cards
GAMMAS = (None, 0.9, 0.5)  # outside_gamma; None: the default


def people(folder: Path, voters: int) -> Dataset:
    """Photographs with what real people called them."""
    data = photographs(folder)
    sets = np.zeros((data.n, 10), bool)
    with np.load(folder / "votes.npz") as found:
        for votes in found["votes"][: data.n].T[:voters]:
            sets[np.arange(data.n), votes] = True
    return make_dataset(data.x, sets, data.y, classes=10, place="people")


def first_draw(make: Maker) -> Callable[[Path], Dataset]:
    return lambda folder: make(folder, 0)


OURS: dict[str, Callable[[Path], Dataset]] = {
    "photographs, three people": lambda folder: people(folder, 3),
    "photographs, two people": lambda folder: people(folder, 2),
    "photographs, uniform 0.3, 10 % missing": lambda f: draw_candidates(photographs(f), "uniform:q=0.3,eta=0.1", 0),
    "digits, uniform 0.3, 10 % missing": lambda _: draw_candidates(label_error.digits(), "uniform:q=0.3,eta=0.1", 0),
    **{name: first_draw(make) for name, (make, _) in SETS.items()},
}
RUNS = (
    "lost:proden", "MSRCv2:proden", "BirdSong:proden", "digits, uniform 0.5:proden", "digits, votes:proden",
    "photographs, votes:proden", "photographs, three people:proden", "photographs, two people:proden",
    "photographs, uniform 0.3, 10 % missing:proden", "digits, uniform 0.3, 10 % missing:proden",
    "breast cancer, votes:proden", "lost:crosel", "MSRCv2:crosel", "digits, votes:crosel",
)  # fmt: skip


def in_first(order: NDArray[np.int64], hits: NDArray[np.bool_]) -> int:
    return int(hits[order[:FIRST]].sum())


def shown(result: Result, truth: NDArray[np.int64], end: str) -> dict[str, Any]:
    """Wrong labels among the first cards: in review's order, and in that of confidence among all classes."""
    sets, wrong = result.examples.candidates, result.labels != truth
    assert result.probabilities is not None
    among_all = result.probabilities[np.arange(len(wrong)), result.labels]
    return {
        f"wrong{end}": float(wrong.mean()),
        f"wrong_in_first{end}": in_first(review_order(result.within_set, sets), wrong),
        f"wrong_in_first_by_all_classes{end}": in_first(np.argsort(among_all, kind="stable"), wrong),
    }


def flagged(result: Result, truth: NDArray[np.int64], missing: NDArray[np.bool_], end: str) -> dict[str, Any]:
    assert result.outside_labels is not None
    found = result.outside_labels >= 0
    return {
        f"flagged{end}": int(found.sum()), f"missing_flagged{end}": int((found & missing).sum()),
        f"new_label_right{end}": int((result.outside_labels == truth)[found].sum()),
        f"wrong_flagged{end}": int((result.labels != truth)[found].sum()),
    }  # fmt: skip


def measure(name: str, method: str, run: Judged) -> dict[str, Any]:
    """What a run's review would show, with and without folds."""
    session, judged, data = run.session, run.found, run.session.data
    assert data.candidates is not None
    assert data.y is not None
    missing = ~data.candidates[np.arange(data.n), data.y]
    share, _ = fit_missing(missing_odds(judged.probabilities, data.candidates))
    row = {
        "set": name, "method": method, "n": data.n, "first": FIRST, "missing": int(missing.sum()),
        "missing_estimate": share, **shown(Result.of(session), data.y, "_no_folds"),
    }  # fmt: skip
    for gamma in GAMMAS:
        result = Result.of(session, gamma, out_of_sample=judged)
        row |= shown(result, data.y, "") if gamma is None else {}
        row |= flagged(result, data.y, missing, "" if gamma is None else f"_at_{gamma:g}")
    return row


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", default=";".join(RUNS))
    parser.add_argument("--out", type=Path, default=None, help="jsonl file to add to")
    args = parser.parse_args()
    about = environment(["python", *sys.argv])
    runs = [tuple(run.rsplit(":", 1)) for run in args.runs.split(";")]
    chosen(";".join(name for name, _ in runs), OURS, "--runs")
    for name, method in runs:
        row = rounded(measure(name, method, judge(OURS[name](args.data), method, seed=0)))
        print(row, flush=True)
        if args.out is not None:
            add({**row, "environment": about}, args.out)


if __name__ == "__main__":
    end_with(main)
