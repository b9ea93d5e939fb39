"""Tables of the report: sets, flags, classes, confusion. All text from the user is escaped here."""

from __future__ import annotations

from collections import Counter
from html import escape

import numpy as np
from numpy.typing import NDArray

from crosel.report.charts import matrix_names
from crosel.report.html import bar_table, pct, stack, table
from crosel.report.run import Run
from crosel.runs.labels import FLAGS
from crosel.runs.result import Result

SHOWN_CLASSES = 100
SHOWN_MEMBERS = 12
SHOWN_CONFUSIONS = 20
COLUMN_ROOM = 3  # characters over a column of a confusion matrix, on a phone
CONFUSION_CLASSES = 15  # larger matrices are illegible; the most common confusions are listed instead


def set_members(run: Run) -> str:
    """How many sets contain each label: a label in nearly all of them says little."""
    counts = run.examples.candidates.sum(axis=0)
    order = np.argsort(-counts, kind="stable")[:SHOWN_MEMBERS]
    caption = "Labels in the candidate sets"
    if len(order) < len(run.classes):
        caption += f" (the {len(order)} most frequent of {len(run.classes)})"
    return bar_table(caption, "label", [(run.classes[j], int(counts[j])) for j in order], run.n)


_FLAGS = {"": ("clear", "c1"), "unsure": ("unsure", "c8"), "disputed": ("disputed", "c5"), "outside": ("outside", "c2")}
_FLAG_NOTE = (
    "unsure: selected by no network, or with low confidence. disputed: the networks predict different labels. "
    "outside: all networks are sure of a label that is not in the set."
)
_SELECTED = {"both": ("both networks", "c1"), "one": ("one network", "c6"), "neither": ("none", "c8")}


def stacks(result: Result) -> str:
    """Flags, and by how many networks the examples are selected."""
    flags = np.bincount(result.flags, minlength=len(FLAGS))
    parts = [(text, int(flags[FLAGS.index(flag)]), ink) for flag, (text, ink) in _FLAGS.items()]
    bars = stack("Flags", parts, _FLAG_NOTE)
    if result.selected is not None:
        words = Counter(result.selected_words())
        parts = [(text, words[word], ink) for word, (text, ink) in _SELECTED.items()]
        bars += stack("Selected in the last epoch", parts)
    return f'<div class="columns">{bars}</div>'


def class_shares(result: Result) -> list[tuple[str, int, list[float | None]]]:
    """Each label's name, how many examples got it, and the shares of `share_names`; None where there is none."""
    truth, out = result.examples.truth, []
    for j, name in enumerate(result.examples.classes):
        mask = result.labels == j
        count = int(mask.sum())
        shares: list[float | None] = [float(result.confidence[mask].mean()) if count else None]
        if result.selected is not None:
            shares.append(float((result.selected[mask] > 0).mean()) if count else None)
        if truth is not None:
            shares.append(float((truth[mask] == j).mean()) if count else None)
        out.append((name, count, shares))
    return out


def share_names(result: Result) -> list[str]:
    present = {"confidence": True, "selected": result.selected is not None, "right": result.examples.truth is not None}
    return [name for name, is_present in present.items() if is_present]


def per_class(result: Result) -> str:
    """How many examples got each label, how sure, how many selected, how many right."""
    rows = [
        [escape(name), f"{count:,}", *("–" if share is None else pct(share) for share in shares)]
        for name, count, shares in class_shares(result)[:SHOWN_CLASSES]
    ]
    k = len(result.examples.classes)
    caption = "By label given" + (f" (the first {len(rows)} of {k})" if k > len(rows) else "")
    return table(caption, ["label", "examples", *share_names(result)], rows, "numbers")


# --- confusion ----------------------------------------------------------------------------------------------------


def confusion_counts(truth: NDArray[np.int64], given: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """True labels by rows, labels given by columns."""
    valid = given >= 0
    counts = np.bincount(truth[valid] * classes + given[valid], minlength=classes * classes)
    return counts.reshape(classes, classes)


def confusions(run: Run) -> list[tuple[str, str, NDArray[np.int64]]]:
    """(name, title, counts) of the training labels and of the test set, as far as truth is known."""
    out, k, result = [], len(run.classes), run.result
    if result is None:
        return []
    if run.truth is not None:
        out.append(("confusion-train", "Training labels", confusion_counts(run.truth, result.labels, k)))
    if result.test_probabilities is not None and result.test_truth is not None:
        counts = confusion_counts(result.test_truth, result.test_probabilities.argmax(axis=1), k)
        out.append(("confusion-test", "Test predictions", counts))
    return out


def confusion(run: Run) -> str:
    show = _confusion_matrix if len(run.classes) <= CONFUSION_CLASSES else _most_common
    return "".join(show(run, title, counts) for _, title, counts in confusions(run))


def _confusion_matrix(run: Run, title: str, counts: NDArray[np.int64]) -> str:
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    columns, names = matrix_names(run.classes, COLUMN_ROOM)
    rows = []
    for i, name in enumerate(names):
        cells = [
            f'<span class="{"hit" if i == j else "miss"}" style="--p:{100 * counts[i, j] / totals[i, 0]:.0f}%">'
            f"{counts[i, j]}</span>"
            if counts[i, j]
            else "<span></span>"
            for j in range(len(run.classes))
        ]
        rows.append([escape(name), *cells])
    wrong = int(counts.sum() - np.trace(counts))
    caption = f"{title}: {wrong:,} of {int(counts.sum()):,} wrong"
    return table(caption, ["true \\ given", *map(escape, columns)], rows, "confusion")


def _most_common(run: Run, title: str, counts: NDArray[np.int64]) -> str:
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:SHOWN_CONFUSIONS]
    pairs = [(int(p) // len(counts), int(p) % len(counts)) for p in order]
    rows = [[escape(run.classes[i]), escape(run.classes[j]), f"{wrong[i, j]:,}"] for i, j in pairs if wrong[i, j]]
    caption = f"{title}: most common confusions"
    return table(caption, ("true label", "label given", "examples"), rows, "numbers") if rows else ""
