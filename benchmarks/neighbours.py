"""Would a method that asks an example's neighbours be worth an eighth place? Sets that miss the truth, test accuracy.

    python benchmarks/neighbours.py --data DIR --splits 0-2 --out FILE

`neighbours`: candidates, as shares of each set, spread over the graph of nearest neighbours (label propagation with
usual values of α, neighbours and rounds), so that a label outside a set can win; PRODEN's network then learns the most
likely label of each example. `proden`, `crosel` and `crosel drop` (method.outside=drop,
outside_gamma 0) get the sets as they are. --data is as for review_order.py. A tenth of the rows is held out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from feature_defaults import digits, run, split
from label_error import drawn, photographs
from numpy.typing import NDArray
from record import Arguments, add, chosen, done, end_with, origin, seeds
from review_order import people

from crosel.data import Dataset, draw_candidates

NEIGHBOURS, ALPHA, ROUNDS = 10, 0.9, 30
ARMS: dict[str, tuple[str, list[str]]] = {
    "proden": ("proden", []),
    "crosel": ("crosel", []),
    "crosel drop": ("crosel", ["method.outside=drop", "method.outside_gamma=0"]),
    "neighbours": ("proden", []),
}


def missing(data: Dataset, eta: float) -> Dataset:
    return draw_candidates(data, f"uniform:q=0.3,eta={eta}", 0)


SETS: dict[str, Callable[[Path], Dataset]] = {
    "digits, 10 % missing": lambda _: missing(digits(), 0.1),
    "digits, 20 % missing": lambda _: missing(digits(), 0.2),
    "digits, votes": lambda _: drawn(digits(), "votes"),
    "photographs, 10 % missing": lambda folder: missing(photographs(folder), 0.1),
    "photographs, 20 % missing": lambda folder: missing(photographs(folder), 0.2),
    "photographs, two people": lambda folder: people(folder, 2),
}


def propagated(x: NDArray[Any], sets: NDArray[np.bool_]) -> NDArray[np.float64]:
    """F = α W F + (1 - α) F_0, with W the normalised graph of nearest neighbours: shares of labels [n, k]."""
    from scipy.sparse import diags
    from sklearn.neighbors import kneighbors_graph

    x = x.reshape(len(x), -1).astype(float)
    x = (x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-6)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    graph = kneighbors_graph(x, min(NEIGHBOURS, len(x) - 1), mode="connectivity")
    graph = graph.maximum(graph.T)
    scale = diags(1 / np.sqrt(np.maximum(np.asarray(graph.sum(axis=1)).ravel(), 1)))
    graph = scale @ graph @ scale
    first = sets / sets.sum(axis=1, keepdims=True)
    found = first
    for _ in range(ROUNDS):
        found = ALPHA * (graph @ found) + (1 - ALPHA) * first
    shares: NDArray[np.float64] = found / found.sum(axis=1, keepdims=True)
    return shares


def with_neighbours(data: Dataset) -> Dataset:
    """The set of each example is the label that its neighbourhood prefers."""
    assert data.candidates is not None
    labels = propagated(data.x, data.candidates).argmax(axis=1)
    return replace(data, candidates=np.eye(data.candidates.shape[1], dtype=bool)[labels])


def measure(folder: Path, name: str, arm: str, number: int) -> dict[str, Any]:
    start = time.perf_counter()
    data, held = split(SETS[name](folder), number, test=True)
    assert data.candidates is not None
    lost = float((~data.candidates[np.arange(data.n), data.y]).mean())
    if arm == "neighbours":
        data = with_neighbours(data)
    method, settings = ARMS[arm]
    row = run(data, held, {"preset": None, "settings": settings, "method": method}, number)
    return {"set": name, "arm": arm, "split": number, "missing": lost, **row,
            "seconds": round(time.perf_counter() - start, 2)}  # fmt: skip


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=";".join(SETS))
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--splits", type=seeds, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to add to; what it has is not run again")
    args = parser.parse_args()
    about, known = origin("hardware"), done(args.out, "set", "arm", "split")
    for number in args.splits:
        for name in chosen(args.sets, SETS, "--sets"):
            for arm in chosen(args.arms, ARMS, "--arms"):
                if (name, arm, number) not in known:
                    row = measure(args.data, name, arm, number)
                    print(f"{name:28} {arm:12} {number} {row['accuracy']:.4f} {row['seconds']}", flush=True)
                    add(row | about, args.out)


if __name__ == "__main__":
    end_with(main)
