"""Which charts a run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.report.charts import (
    SHOWN_POINTS,
    Reliability,
    Series,
    bar_figure,
    calibration_figure,
    dot_figure,
    line_figure,
    matrix_figure,
    scatter_figure,
)
from crosel.report.html import class_shares, confusions, share_names
from crosel.report.run import Run
from crosel.report.svg import Figure
from crosel.runs.result import Result

DOT_CLASSES = 20  # more would not fit on a screen
MATRIX_CLASSES = 100
NEEDS_NO_TRUTH = (
    "Needs no true labels. Covering rate: share of predictions inside the candidate set. "
    "Approximated accuracy: share of the set's probability on the predicted label."
)
_LOSSES = {"loss": "total", "loss_selected": "selected", "loss_comix": "co-mix"}
_NOT_IN_WARM_UP = ("loss_selected", "loss_comix")  # where metrics.jsonl has 0


def curves(run: Run) -> list[Figure]:
    """Everything over the epochs."""
    warm_up = run.warm_up
    marks = [(warm_up + 0.5, "end of warm-up")] if warm_up else []
    common: dict[str, Any] = {"marks": marks, "epochs": len(run.rows)}

    def series(**names: str) -> list[Series]:
        points = ((run.points(key), name) for key, name in names.items())
        return [Series(name, found, i, quiet=name.startswith("network ")) for i, (found, name) in enumerate(points)]

    def loss_points(key: str) -> list[tuple[float, float]]:
        return [(epoch, loss) for epoch, loss in run.points(key) if key not in _NOT_IN_WARM_UP or epoch > warm_up]

    losses = [key for key in dict.fromkeys(k for row in run.rows for k in row) if key.startswith("loss")]
    both = "both networks" if run.points("test_accuracy_1") else "test accuracy"
    found = [
        line_figure(
            "accuracy", "Test accuracy",
            series(test_accuracy=both, test_accuracy_1="network 1", test_accuracy_2="network 2"),
            percent=True, **common,
        ),
        line_figure(
            "selection", "Selection: S-ratio and S-acc",
            series(selection_ratio="S-ratio", oracle_selection_accuracy="S-acc"),
            percent=True, low=0, high=1, **common,
            note="S-ratio: share of examples selected. S-acc: share of the selected labels that are true.",
        ),
        line_figure(
            "losses", "Losses",
            [Series(_LOSSES.get(key, key.removeprefix("loss_").replace("_", " ")), loss_points(key), i)
             for i, key in enumerate(losses)],
            low=0, **common,
        ),
        line_figure("lambda", "Weight of co-mix, λ_d", series(lambda_d="λ_d"), low=0, **common),
        line_figure(
            "covering", "Covering rate",
            series(covering_rate="covering rate", approximated_accuracy="approximated accuracy"),
            percent=True, **common, note=NEEDS_NO_TRUTH,
        ),
        line_figure("learning-rate", "Learning rate", series(lr="end of epoch"), low=0, **common),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def shared_curves(runs: Sequence[Run]) -> list[Figure]:
    """Several runs in the same charts."""
    ends = dict.fromkeys(run.warm_up for run in runs if run.warm_up)
    marks = [(end + 0.5, "end of warm-up") for end in ends] if len(ends) == 1 else []
    common: dict[str, Any] = {"marks": marks, "epochs": max(len(run.rows) for run in runs)}

    def series(key: str) -> list[Series]:
        return [Series(run.name, run.points(key), i) for i, run in enumerate(runs)]

    found = [
        line_figure("accuracy", "Test accuracy", series("test_accuracy"), percent=True, **common),
        line_figure("selection-ratio", "S-ratio", series("selection_ratio"), percent=True, low=0, high=1, **common),
        line_figure("selection-accuracy", "S-acc", series("oracle_selection_accuracy"), True, **common),
        line_figure("covering", "Covering rate", series("covering_rate"), percent=True, **common, note=NEEDS_NO_TRUTH),
        line_figure(
            "losses", "Loss", series("loss"), low=0, **common,
            note="Methods have different losses: do not compare values.",
        ),
        line_figure("lambda", "Weight of co-mix, λ_d", series("lambda_d"), low=0, **common),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


# --- sets and labels ----------------------------------------------------------------------------------------------


def set_sizes(run: Run) -> Figure:
    sizes = Counter(run.set_sizes.tolist())
    low, high = min(sizes), max(sizes)
    width = -(-(high - low + 1) // 12)
    bars = []
    for start in range(low, high + 1, width):
        stop = min(start + width, high + 1)
        name = str(start) if stop == start + 1 else f"{start}–{stop - 1}"
        bars.append((name, [sum(sizes[s] for s in range(start, stop))]))
    mean = f"{run.set_sizes.mean():.2f} of {len(run.classes)} labels on average."
    return bar_figure("set-sizes", "Sizes of the candidate sets", bars, [("", "c1")], "labels in the set", mean)


def confidence(result: Result) -> Figure:
    """Confidence of the labels; where truth is known, right and wrong ones separately."""
    bins = np.minimum((result.confidence * 10).astype(int), 9)
    truth = result.examples.truth
    right = np.ones(len(bins), bool) if truth is None else result.labels == truth
    parts = [("", "c1")] if truth is None else [("right", "c1"), ("wrong", "c2")]
    bars = []
    for b in range(10):
        counts = [int((right & (bins == b)).sum()), int((~right & (bins == b)).sum())]
        bars.append((f"{10 * b}", counts[: len(parts)]))
    note = "Each bar covers ten percentage points, starting at the number below it."
    return bar_figure("confidence", "Confidence of the labels", bars, parts, "confidence from, %", note)


def calibration(result: Result) -> Figure | None:
    found, truth, test = [], result.examples.truth, result.test_probabilities
    if truth is not None:
        found.append(("training labels", Reliability.of(result.confidence, result.labels == truth)))
    if test is not None:
        sure = test.max(axis=1).astype(np.float64)
        found.append(("test set", Reliability.of(sure, test.argmax(axis=1) == result.test_truth)))
    return calibration_figure(found)


def classes(result: Result) -> Figure:
    """Selection and confidence by class; of many classes, the lowest."""
    rows = class_shares(result)
    title = "Confidence and selection by class" if result.selected is not None else "Confidence by class"
    if len(rows) > DOT_CLASSES:
        worst = sorted((r for r in rows if r[1]), key=lambda r: r[2][-1] or 0.0)[:DOT_CLASSES]
        rows, title = worst, f"{title}: the {len(worst)} lowest"
    return dot_figure("classes", title, [(name, shares) for name, _, shares in rows], share_names(result))


def projection(result: Result, x: NDArray[Any] | None) -> Figure | None:
    """Features on their two principal components, coloured by the label given."""
    if x is None or x.ndim != 2:
        return None
    rows = np.random.default_rng(0).permutation(len(x))[:SHOWN_POINTS]
    rows = rows[result.labels[rows] >= 0]
    if not len(rows):
        return None
    places, kept = principal_components(x[rows])
    note = f"{len(rows):,} of {len(x):,} examples; the two axes cover {100 * kept:.0f}\u202f% of the variance."
    return scatter_figure(places, result.labels[rows], result.examples.classes, note)


def principal_components(x: NDArray[Any]) -> tuple[NDArray[np.float64], float]:
    """Standardised features on their first two principal components [n, 2], and the share of variance they explain."""
    from sklearn.decomposition import PCA  # takes a second to import, and only features need it

    x = x.astype(np.float64)
    x = (x - x.mean(axis=0)) / np.where(x.std(axis=0) > 0, x.std(axis=0), 1.0)
    axes = min(2, *x.shape)
    places = np.zeros((len(x), 2))
    if not x.any():  # all examples are the same
        return places, 1.0
    pca = PCA(axes, svd_solver="randomized", random_state=0)
    places[:, :axes] = pca.fit_transform(x)
    return places, float(pca.explained_variance_ratio_.sum())


def run_figures(run: Run, x: NDArray[Any] | None) -> list[Figure]:
    """All charts of a run, for files."""
    out: list[Figure | None] = [*curves(run), set_sizes(run)]
    if run.result is not None:
        result = run.result
        out += [confidence(result), calibration(result), classes(result), projection(result, x)]
    if len(run.classes) <= MATRIX_CLASSES:
        out += [matrix_figure(name, title, counts, run.classes) for name, title, counts in confusions(run)]
    return [figure for figure in out if figure is not None]
