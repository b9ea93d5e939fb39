"""Texts on a frozen backbone: CC, PRODEN and CroSel beside the same head with true labels.

    apt-cache dumpavail > packages.txt
    python benchmarks/texts.py --packages packages.txt --weights FOLDER --work FOLDER --out texts.jsonl

A text is the short description of a Debian package, its class the package's section: one of the most frequent. Each
description is there once. Each draw gives `--n` of them candidate sets and holds `--held-out` others out. The backbone
is all-MiniLM-L6-v2; `--weights` is the folder with its model.

With `--weak M`, a set is what a weak classifier finds most probable: three sections, by logistic regression on the
words of M other descriptions.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
from pretrained import arguments, compare, uniform_draw
from record import count, end_with


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


def top_three(texts: list[str], y: np.ndarray, known: int, rows: np.ndarray, draw: int) -> np.ndarray:
    """What logistic regression on words finds most probable after `known` texts that are not among the rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    others = np.setdiff1d(np.arange(len(texts)), rows)
    seen = np.random.default_rng(200 + draw).choice(others, known, replace=False)
    words = TfidfVectorizer().fit([texts[row] for row in seen])
    weak = LogisticRegression(max_iter=1000).fit(words.transform([texts[row] for row in seen]), y[seen])
    p = np.zeros((len(rows), int(y.max()) + 1))
    p[:, weak.classes_] = weak.predict_proba(words.transform([texts[row] for row in rows]))
    sets = np.zeros(p.shape, bool)
    np.put_along_axis(sets, p.argsort(axis=1)[:, -3:], True, axis=1)
    return sets


def main() -> None:
    parser = arguments(str(__doc__), n=5000, held_out=1000, draws=3)
    parser.add_argument("--packages", type=Path, required=True, help="what apt-cache dumpavail prints")
    parser.add_argument("--weights", required=True, help="folder with all-MiniLM-L6-v2")
    parser.add_argument("--sections", type=count, default=20)
    parser.add_argument("--weak", type=count, help="texts that a weak classifier has seen, whose top three are the set")
    args = parser.parse_args()
    texts, y, classes = read_packages(args.packages, args.sections)
    args.work.mkdir(parents=True, exist_ok=True)

    def write(stem: str, rows: np.ndarray, sets: np.ndarray) -> Path:
        path = args.work / f"{stem}{'-weak' if args.weak else ''}.jsonl"
        with path.open("w", encoding="utf-8") as stream:
            for at, row in enumerate(rows):
                line = {
                    "text": texts[row], "candidates": [classes[j] for j in np.flatnonzero(sets[at])],
                    "label": classes[y[row]], "split": "train" if at < args.n else "test",
                }  # fmt: skip
                stream.write(json.dumps(line) + "\n")
        return path

    sets_of = uniform_draw(args, y, len(classes))
    if args.weak:
        args.q = 0.0  # no rule draws them

        def sets_of(rows: np.ndarray, draw: int) -> np.ndarray:
            return top_three(texts, y, args.weak, rows, draw)

    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    about = {"pool": len(texts), "pool_sha256": digest, "sections": args.sections, "weak": args.weak}
    network = ["network.name=text/all-MiniLM-L6-v2", f"network.weights={args.weights}"]
    compare(args, network, y, len(classes), len(y), write, sets_of, **about)


if __name__ == "__main__":
    end_with(main)
