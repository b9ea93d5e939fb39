"""Tables of the report: sets, flags, classes, confusion. All text from the user is escaped here."""

from __future__ import annotations

from collections import Counter
from html import escape

import numpy as np
from numpy.typing import NDArray

from crosel.report.gather import Labels, RunData
from crosel.report.parts import bar_table, percent, stack, table

SHOWN_CLASSES = 100
SHOWN_MEMBERS = 12
SHOWN_CONFUSIONS = 20
CONFUSION_CLASSES = 15  # larger matrices are not legible; the commonest confusions are listed instead


def set_members(run: RunData) -> str:
    """How many sets hold each label: one that is in nearly all of them says little."""
    counts = run.sets.sum(axis=0)
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


def stacks(labels: Labels) -> str:
    return f'<div class="columns">{flags(labels)}{selected(labels)}</div>'


def flags(labels: Labels) -> str:
    found = Counter(labels.flags)
    return stack("Flags", [(text, found[flag], ink) for flag, (text, ink) in _FLAGS.items()], _FLAG_NOTE)


def selected(labels: Labels) -> str:
    if not labels.selects:
        return ""
    found = Counter(labels.selected)
    return stack("Selected in the last epoch", [(text, found[word], ink) for word, (text, ink) in _SELECTED.items()])


def class_shares(run: RunData, labels: Labels) -> list[tuple[str, int, list[float | None]]]:
    """Each label's name, how many examples got it, and the shares of `share_names`; None where there is none."""
    chosen = np.array([word not in ("", "neither") for word in labels.selected])
    out = []
    for j, name in enumerate(run.classes):
        mask = labels.labels == j
        count = int(mask.sum())
        shares: list[float | None] = [float(labels.confidence[mask].mean()) if count else None]
        if labels.selects:
            shares.append(float(chosen[mask].mean()) if count else None)
        if run.truth is not None:
            shares.append(float((run.truth[mask] == j).mean()) if count else None)
        out.append((name, count, shares))
    return out


def share_names(run: RunData, labels: Labels) -> list[str]:
    return ["confidence", *(["selected"] if labels.selects else []), *(["right"] if run.truth is not None else [])]


def per_class(run: RunData, labels: Labels) -> str:
    """How many examples got each label, how sure, how many selected, how many right."""
    rows = [
        [escape(name), f"{count:,}", *("–" if share is None else percent(share) for share in shares)]
        for name, count, shares in class_shares(run, labels)[:SHOWN_CLASSES]
    ]
    more = len(run.classes) - len(rows)
    caption = "By label given" + (f" (the first {len(rows)} of {len(run.classes)})" if more else "")
    return table(caption, ["label", "examples", *share_names(run, labels)], rows, "numbers")


# --- confusion ----------------------------------------------------------------------------------------------------


def confusion_counts(truth: NDArray[np.int64], given: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """True labels by rows, labels given by columns."""
    valid = given >= 0
    counts = np.bincount(truth[valid] * classes + given[valid], minlength=classes * classes)
    return counts.reshape(classes, classes)


def confusions(run: RunData) -> list[tuple[str, str, NDArray[np.int64]]]:
    """(name, title, counts) of the training labels and of the test set, as far as truth is known."""
    out, k = [], len(run.classes)
    if run.truth is not None and run.labels is not None:
        out.append(("confusion-train", "Training labels", confusion_counts(run.truth, run.labels.labels, k)))
    p = run.predictions
    if p.test is not None and p.y_test is not None:
        counts = confusion_counts(p.y_test, p.test.argmax(axis=1).astype(np.int64), k)
        out.append(("confusion-test", "Test predictions", counts))
    return out


def confusion(run: RunData) -> str:
    show = _matrix if len(run.classes) <= CONFUSION_CLASSES else _commonest
    return "".join(show(run, title, counts) for _, title, counts in confusions(run))


def _matrix(run: RunData, title: str, counts: NDArray[np.int64]) -> str:
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = []
    for i, name in enumerate(run.classes):
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
    return table(caption, ["true \\ given", *map(escape, run.classes)], rows, "confusion")


def _commonest(run: RunData, title: str, counts: NDArray[np.int64]) -> str:
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:SHOWN_CONFUSIONS]
    pairs = [(int(p) // len(counts), int(p) % len(counts)) for p in order]
    rows = [[escape(run.classes[i]), escape(run.classes[j]), f"{wrong[i, j]:,}"] for i, j in pairs if wrong[i, j]]
    caption = f"{title}: most common confusions"
    return table(caption, ("true label", "label given", "examples"), rows, "numbers") if rows else ""
