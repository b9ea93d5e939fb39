"""Texts on a frozen backbone: CC, PRODEN and CroSel beside the same head with true labels.

    apt-cache dumpavail > packages.txt
    python benchmarks/texts.py --packages packages.txt --weights FOLDER --work FOLDER --out texts.jsonl

A text is the short description of a Debian package, its class the package's section: one of the most frequent. Each
description is there once. Each draw gives `--n` of them candidate sets and holds `--held-out` others out. The backbone
is all-MiniLM-L6-v2; `--weights` is the folder with its model.

For a machine without the weights, `--embed FILE` keeps the embeddings of all draws in a file (float16) and ends; there,
`--embeddings FILE` takes the place of `--weights`, and the same head learns from them.

With `--weak M`, a set is what a weak classifier finds most probable: `--guesses` sections (three), by logistic
regression on the words of M other descriptions. With `--weights-of-guesses probabilities` these are their weights; with
`--weights-of-guesses '0.8;0.15;0.05'`, say, the best guess has the first of these, and so on: only their order counts.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
from pretrained import WriteSource, arguments, compare, drawn, uniform_draw, write_list
from record import count, end_with

from crosel.config import TEXT_HEAD
from crosel.data.dataset import make_dataset
from crosel.data.formats.npz import write_npz
from crosel.errors import UserError
from crosel.nn.backbones import open_backbone

NETWORK = "text/all-MiniLM-L6-v2"
HEAD = [  # what a run on a text backbone has, for rows of numbers
    "network.name=mlp", "network.hidden=[]", "network.scaling=standard", "augment.weak_feature_noise=0",
    *(f"train.{name}={value}" for name, value in TEXT_HEAD.items()),
]  # fmt: skip


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


def best_guesses(args: Namespace, texts: list[str], y: np.ndarray, rows: np.ndarray, draw: int) -> np.ndarray:
    """What logistic regression on words finds most probable after `--weak` texts that are not among the rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    others = np.setdiff1d(np.arange(len(texts)), rows)
    seen = np.random.default_rng(200 + draw).choice(others, args.weak, replace=False)
    words = TfidfVectorizer().fit([texts[row] for row in seen])
    weak = LogisticRegression(max_iter=1000).fit(words.transform([texts[row] for row in seen]), y[seen])
    p = np.zeros((len(rows), int(y.max()) + 1))
    p[:, weak.classes_] = weak.predict_proba(words.transform([texts[row] for row in rows]))
    best, sets = p.argsort(axis=1)[:, : -args.guesses - 1 : -1], np.zeros(p.shape, bool)
    np.put_along_axis(sets, best, True, axis=1)
    if args.weights_of_guesses is None:
        return sets
    if args.weights_of_guesses == "probabilities":
        return np.where(sets, p, 0).round(6)
    weights = np.zeros(p.shape)
    np.put_along_axis(weights, best, [[float(weight) for weight in args.weights_of_guesses.split(";")]], axis=1)
    return weights


def write_rows(args: Namespace, digest: str, y: np.ndarray, classes: list[str]) -> WriteSource:
    """Files of embeddings, for texts whose embeddings were kept."""
    kept = np.load(args.embeddings)
    if str(kept["pool_sha256"]) != digest:
        raise UserError(f"{args.embeddings}: embeddings of other texts than those of {args.packages}")
    x, known = kept["x"].astype(np.float32), kept["rows"]
    args.work.mkdir(parents=True, exist_ok=True)

    def write(stem: str, rows: np.ndarray, sets: np.ndarray) -> Path:
        at, n, path = np.searchsorted(known, rows), args.n, args.work / f"{stem}.npz"
        parts = {"y": y[rows[:n]], "x_test": x[at[n:]], "y_test": y[rows[n:]], "classes": classes}
        weights = None if sets.dtype == bool else sets[:n]
        write_npz(make_dataset(x[at[:n]], sets[:n] > 0, weights=weights, **parts), path)
        return path

    return write


def main() -> None:
    parser = arguments(str(__doc__), n=5000, held_out=1000, draws=3)
    parser.add_argument("--packages", type=Path, required=True, help="what apt-cache dumpavail prints")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", help="folder with all-MiniLM-L6-v2")
    source.add_argument("--embeddings", type=Path, help="what --embed has kept")
    parser.add_argument("--embed", type=Path, help="keep the embeddings of all draws in this file, and end")
    parser.add_argument("--sections", type=count, default=20)
    parser.add_argument("--weak", type=count, help="texts that a weak classifier has seen, whose guesses are the set")
    parser.add_argument("--guesses", type=count, default=3, help="of --weak: labels in a set")
    parser.add_argument("--weights-of-guesses", help="of --weak: probabilities, or a number for each, the best first")
    args = parser.parse_args()
    texts, y, classes = read_packages(args.packages, args.sections)
    sets_of = uniform_draw(args, y, len(classes))
    if args.weak:
        args.q = 0.0  # no rule draws them

        def sets_of(rows: np.ndarray, draw: int) -> np.ndarray:
            return best_guesses(args, texts, y, rows, draw)

    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    about = {"pool": len(texts), "pool_sha256": digest, "sections": args.sections, "weak": args.weak}
    if args.weak:
        about |= {"guesses": args.guesses, "weights_of_guesses": args.weights_of_guesses}
    if args.embed:
        rows = np.unique(np.concatenate(drawn(args, len(y))))
        x = open_backbone(NETWORK, args.weights).encode([texts[row] for row in rows])
        np.savez(args.embed, x=x.astype(np.float16), rows=rows, pool_sha256=digest)
        return
    if args.embeddings:
        network, write = HEAD, write_rows(args, digest, y, classes)
    else:
        network = [f"network.name={NETWORK}", f"network.weights={args.weights}"]
        write = write_list(args.work, "text", texts, y, classes, args.n)
    compare(args, network, y, len(classes), len(y), write, sets_of, **about)


if __name__ == "__main__":
    end_with(main)
