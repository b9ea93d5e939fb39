"""How honest confidence and estimates of the error are that need no true labels, beside what true labels say.

    python benchmarks/label_error.py --data DIR --keep DIR [--sets NAME;NAME] [--methods crosel;proden] [--out FILE]

Each method trains with its defaults on each set, once on all rows and once for each of five folds; the probabilities of
both kinds are kept in --keep, and not made again. With --out, a row for each is computed from them and added to a jsonl
file. True labels are used for its columns `true_…`, `truth_…` and `ece_…` only.
--data holds lost.mat, MSRCv2.mat and BirdSong.mat, and photos.npz (`plain` [n, d], `y`) with embedded photographs.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from record import Arguments, add, chosen, end_with

from crosel.config import build_config
from crosel.data import Dataset, DataSettings, load
from crosel.data.candidates import instance_dependent, superclass, uniform
from crosel.data.dataset import make_dataset
from crosel.runs.environment import environment
from crosel.runs.folds import out_of_sample
from crosel.runs.label_error import OutOfSample
from crosel.runs.result import judge_labels
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.trainer import fit, predicted_probabilities

FOLDS = 5
KNOWN_GUESSES: dict[str, NDArray[np.float64]] = {}  # by the inputs that they are about
ANIMALS = [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]  # CIFAR-10's classes: vehicles and animals


def digits() -> Dataset:
    data = load("digits", None, DataSettings())
    return make_dataset(data.x.transpose(0, 2, 3, 1), y=data.y, classes=10, place="digits", flips=False)


def bundled(name: str) -> Dataset:
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    return make_dataset(x, y=y, classes=int(y.max()) + 1, place=name)


def photographs(folder: Path) -> Dataset:
    with np.load(folder / "photos.npz") as found:
        return make_dataset(found["plain"][:2500], y=found["y"][:2500], classes=10, place="photos")


def guesses(data: Dataset) -> NDArray[np.float64]:
    """Scores [n, k] that confuse what a plain model confuses: logistic regression, out of sample."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = data.x.reshape(data.n, -1)
    key = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    if key not in KNOWN_GUESSES:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
        KNOWN_GUESSES[key] = cross_val_predict(model, x.astype(float), data.y, cv=3, method="predict_proba")
    return np.sqrt(KNOWN_GUESSES[key])  # flatter: the third and fourth guess are drawn as well


def voted(data: Dataset, accuracies: tuple[float, ...], seed: int) -> NDArray[np.bool_]:
    """The union of what annotators chose; the wrong answers of one are a plain model's confusions."""
    rng, scores = np.random.default_rng(seed), guesses(data)
    assert data.y is not None
    rows = np.arange(data.n)
    scores[rows, data.y] = 0
    scores /= scores.sum(axis=1, keepdims=True)
    sets = np.zeros((data.n, len(data.classes)), bool)
    for accuracy in accuracies:
        wrong = (scores.cumsum(axis=1) < rng.random((data.n, 1))).sum(axis=1).clip(max=len(data.classes) - 1)
        sets[rows, np.where(rng.random(data.n) < accuracy, data.y, wrong)] = True
    return sets


def ages(n: int, classes: int, width: int, noise: float, seed: int) -> Dataset:
    """Ordinal classes as in FG-NET: many ages, few examples, features that tell the age roughly, neighbours as sets."""
    rng = np.random.default_rng(seed)
    y = np.minimum(rng.gamma(1.6, classes / 8, n), classes - 1).astype(np.int64)  # most are young
    basis = rng.normal(size=(classes, 40)).cumsum(axis=0)  # near ages look alike
    basis = (basis - basis.mean(axis=0)) / basis.std(axis=0)
    x = np.hstack([basis[y] + noise * rng.normal(size=(n, 40)), rng.normal(size=(n, 60))])
    guess = np.clip(np.rint(y[:, None] + rng.normal(size=(n, width)) * (1 + y[:, None] / 8)), 0, classes - 1)
    sets = np.zeros((n, classes), bool)
    sets[np.arange(n)[:, None], guess.astype(np.int64)] = True
    sets[np.arange(n), y] = True
    return make_dataset(x, sets, y, classes=classes, place="ages")


def with_sets(data: Dataset, sets: NDArray[np.bool_]) -> Dataset:
    return replace(data, candidates=sets)


def drawn(data: Dataset, rule: str, seed: int = 0) -> Dataset:
    name, _, value = rule.partition(":")
    k = len(data.classes)
    assert data.y is not None
    if name == "uniform":
        return with_sets(data, uniform(data.y, k, float(value), seed))
    if name == "superclass":
        return with_sets(data, superclass(data.y, ANIMALS, float(value), seed))
    if name == "instance":
        return with_sets(data, instance_dependent(data.y, guesses(data), float(value), seed))
    return with_sets(data, voted(data, (0.85, 0.75, 0.65), seed))


Maker = Callable[[Path, int], Dataset]  # of the folder with the data, and of a seed


def mat(name: str) -> Maker:
    return lambda folder, seed: load(f"{name}.mat", folder, DataSettings())


def sets_of(make: Callable[[Path], Dataset], rule: str) -> Maker:
    return lambda folder, seed: drawn(make(folder), rule, seed)


def of_sklearn(name: str) -> Callable[[Path], Dataset]:
    return lambda folder: bundled(name)


# name -> how it is made, and how its sets came about: "uniform", "superclass" or "real" (what a user could not know)
SETS: dict[str, tuple[Maker, str]] = {
    "lost": (mat("lost"), "real"),
    "MSRCv2": (mat("MSRCv2"), "real"),
    "BirdSong": (mat("BirdSong"), "real"),
    "ages of 60": (lambda folder, seed: ages(900, 60, 6, 1.5, seed), "real"),
    "ages of 20": (lambda folder, seed: ages(600, 20, 4, 1.0, 1 + seed), "real"),
    "photographs, uniform 0.3": (sets_of(photographs, "uniform:0.3"), "uniform"),
    "photographs, uniform 0.5": (sets_of(photographs, "uniform:0.5"), "uniform"),
    "photographs, superclass 0.5": (sets_of(photographs, "superclass:0.5"), "superclass"),
    "photographs, instance 0.3": (sets_of(photographs, "instance:0.3"), "real"),
    "photographs, votes": (sets_of(photographs, "votes"), "real"),
    "wine, uniform 0.3": (sets_of(of_sklearn("wine"), "uniform:0.3"), "uniform"),
    "wine, instance 0.3": (sets_of(of_sklearn("wine"), "instance:0.3"), "real"),
    "iris, uniform 0.3": (sets_of(of_sklearn("iris"), "uniform:0.3"), "uniform"),
    "breast cancer, uniform 0.3": (sets_of(of_sklearn("breast_cancer"), "uniform:0.3"), "uniform"),
    "breast cancer, votes": (sets_of(of_sklearn("breast_cancer"), "votes"), "real"),
    "digits, uniform 0.3": (sets_of(lambda folder: digits(), "uniform:0.3"), "uniform"),
    "digits, uniform 0.5": (sets_of(lambda folder: digits(), "uniform:0.5"), "uniform"),
    "digits, instance 0.3": (sets_of(lambda folder: digits(), "instance:0.3"), "real"),
    "digits, votes": (sets_of(lambda folder: digits(), "votes"), "real"),
}


class Judged(NamedTuple):
    """A run, and what networks say of its examples that had not seen them."""

    session: Session
    found: OutOfSample
    seconds: float
    seconds_folds: float


def judge(data: Dataset, method: str, seed: int) -> Judged:
    """Train with the method's defaults, on all rows and for each fold."""
    settings = ["train.evaluate_every=1000", f"train.folds={FOLDS}"]
    config = build_config(settings=settings, values={"source": "memory", "seed": seed, "method": {"name": method}})
    start = time.perf_counter()
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    fit(session)
    middle = time.perf_counter()
    found = out_of_sample(session)
    assert found is not None
    return Judged(session, found, middle - start, time.perf_counter() - middle)


def kept(run: Judged, name: str, method: str, rule: str) -> dict[str, Any]:
    """What `measure` needs."""
    data = run.session.data
    return {
        "in_sample": predicted_probabilities(run.session, data.x).float().numpy(),
        "out_of_sample": run.found.probabilities,
        "candidates": data.candidates, "y": data.y, "set": name, "method": method, "rule": rule,
        "seconds": run.seconds, "seconds_folds": run.seconds_folds,
        **({} if run.found.witness is None else {"witness": run.found.witness}),
    }  # fmt: skip


def measure(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is said without true labels, and what they say."""
    p, before, sets, y = (found[name] for name in ("out_of_sample", "in_sample", "candidates", "y"))
    rule, rows = str(found["rule"]), np.arange(len(y))
    possible = None
    if rule == "superclass":
        groups = np.array(ANIMALS)
        possible = (sets[:, :, None] & (groups[:, None] == groups[None, :])).any(axis=1)
    labels, confidence, error = judge_labels(OutOfSample(p, found.get("witness")), sets, rule != "real", possible)
    labels_before = np.where(sets, before, -1.0).argmax(axis=1)
    return {
        "set": str(found["set"]), "method": str(found["method"]), "rule": rule, "n": len(y), "classes": sets.shape[1],
        "mean_size": sets.sum(axis=1).mean(), "truth_in_set": sets[rows, y].mean(),
        "true_error_answers": (p.argmax(axis=1) != y).mean(), "true_error_labels": (labels != y).mean(),
        "true_error_labels_in_sample": (labels_before != y).mean(), **{
            f"{name}{end}": value
            for name in ("outside", "answers", "labels")
            for end, value in zip(("", "_low", "_high"), getattr(error, name), strict=True)
        },
        "ece_in_sample": calibration_error(before[rows, labels_before], labels_before == y),
        "ece_out_of_sample_all_classes": calibration_error(p[rows, labels], labels == y),
        "ece_confidence": calibration_error(confidence, labels == y),
        "seconds": float(found["seconds"]), "seconds_folds": float(found["seconds_folds"]),
    }  # fmt: skip


def calibration_error(confidence: NDArray[Any], right: NDArray[np.bool_], bins: int = 15) -> float:
    """Expected calibration error, with bins of equal width."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [np.abs((confidence - right)[place == b].sum()) for b in range(bins)]
    return float(sum(gaps) / len(right))


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers, of few digits."""
    return {k: round(float(v), 4) if isinstance(v, float | np.floating) else v for k, v in row.items()}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--sets", default=";".join(SETS))
    parser.add_argument("--methods", default="proden;crosel")
    parser.add_argument("--kept-only", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=None, help="jsonl file to add to")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    about = environment(["python", *sys.argv])
    for name in chosen(args.sets, SETS, "--sets"):
        for method in args.methods.split(";"):
            path = args.keep / f"{name} {method}.npz".replace(" ", "_").replace(",", "")
            if not path.exists() and not args.kept_only:
                run = judge(SETS[name][0](args.data, 0), method, seed=0)
                np.savez_compressed(path, **kept(run, name, method, SETS[name][1]))
            if path.exists():
                with np.load(path) as found:
                    row = rounded(measure(dict(found)))
                print(row, flush=True)
                if args.out is not None:
                    add({**row, "environment": about}, args.out)


if __name__ == "__main__":
    end_with(main)
