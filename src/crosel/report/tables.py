"""Tables of the report: bars, classes, confusion, examples. All text from the user is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from crosel.report.charts import number
from crosel.report.gather import Labels, RunData
from crosel.report.pictures import thumbnail

EXAMPLES = 20
SHOWN_CANDIDATES = 8
SHOWN_CLASSES = 100
SHOWN_MEMBERS = 12
CONFUSION_CLASSES = 15  # larger matrices are not legible; the commonest confusions are listed instead


def percent(value: float) -> str:
    return number(value, percent=True)


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02d} min"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", note: str = "") -> str:
    """Cells and captions are html; every first cell is its row's heading."""
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{c}</td>" for c in row[1:])}</tr>' for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}"><table class="{kind}">'
        f"<caption>{caption}</caption>{_head(head)}"
        f"<tbody>{body}</tbody></table>{f'<p class=note>{note}</p>' if note else ''}</div>"
    )


def _head(names: Sequence[str]) -> str:
    cells = (f"<th scope=col>{name}</th>" if name else "<td></td>" for name in names)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span>'


def bar_table(caption: str, what: str, counts: Sequence[tuple[str, int]], total: int, note: str = "") -> str:
    """Counts with their share of the total, and bars in relation to the largest."""
    largest = max((c for _, c in counts), default=0) or 1
    rows = [[escape(name), f"{c:,}", percent(c / total), bar(c / largest)] for name, c in counts]
    return table(escape(caption), (escape(what), "examples", "share", ""), rows, "bars", note)


# --- candidate sets -----------------------------------------------------------------------------------------------


def set_sizes(run: RunData) -> str:
    sizes = Counter(run.set_sizes.tolist())
    low, high = min(sizes), max(sizes)
    width = -(-(high - low + 1) // 12)
    counts = []
    for start in range(low, high + 1, width):
        stop = min(start + width, high + 1)
        name = str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        counts.append((name, sum(sizes[s] for s in range(start, stop))))
    return bar_table("Sizes of the candidate sets", "labels in the set", counts, run.n)


def set_members(run: RunData) -> str:
    """How many sets hold each label: one that is in nearly all of them says little."""
    counts = run.sets.sum(axis=0)
    order = np.argsort(-counts, kind="stable")[:SHOWN_MEMBERS]
    caption = "Labels in the candidate sets"
    if len(order) < len(run.classes):
        caption += f" (the {len(order)} most frequent of {len(run.classes)})"
    return bar_table(caption, "label", [(run.classes[j], int(counts[j])) for j in order], run.n)


# --- labels -------------------------------------------------------------------------------------------------------

_FLAGS = {"": "clear", "unsure": "unsure", "disputed": "disputed", "outside": "outside"}
_FLAG_NOTE = (
    "unsure: selected by no network, or of low confidence. disputed: the networks differ. outside: the networks "
    "insist on a label that is not in the set."
)
_SELECTED = {"both": "both networks", "one": "one network", "neither": "none"}


def flags(labels: Labels) -> str:
    found = Counter(labels.flags)
    names = {**_FLAGS, **{flag: flag for flag in found if flag not in _FLAGS}}
    counts = [(text, found[flag]) for flag, text in names.items()]
    return bar_table("Flags", "flag", counts, len(labels.ids), _FLAG_NOTE)


def selected(labels: Labels) -> str:
    if not labels.selects:
        return ""
    found = Counter(labels.selected)
    counts = [(text, found[word]) for word, text in _SELECTED.items()]
    return bar_table("Selected in the last epoch", "by", counts, len(labels.ids))


def per_class(run: RunData, labels: Labels) -> str:
    """How many examples got each label, how sure, how many selected, how many right."""
    truth = run.truth
    chosen = np.array([word not in ("", "neither") for word in labels.selected])
    head = ["label", "examples", "confidence", *(["selected"] if labels.selects else [])]
    head += ["right"] if truth is not None else []
    rows = []
    for j in range(min(len(run.classes), SHOWN_CLASSES)):
        mask = labels.labels == j
        count = int(mask.sum())
        row = [escape(run.classes[j]), f"{count:,}", percent(float(labels.confidence[mask].mean())) if count else "–"]
        if labels.selects:
            row.append(percent(float(chosen[mask].mean())) if count else "–")
        if truth is not None:
            row.append(percent(float((truth[mask] == j).mean())) if count else "–")
        rows.append(row)
    more = len(run.classes) - len(rows)
    caption = "By label given" + (f" (the first {len(rows)} of {len(run.classes)})" if more else "")
    return table(caption, head, rows, "numbers")


def calibration(run: RunData, labels: Labels) -> str:
    """Whether 80 % confidence means right in 80 % of the cases; needs true labels."""
    if run.truth is None:
        return ""
    right = labels.labels == run.truth
    bins = np.minimum((labels.confidence * 10).astype(int), 9)
    rows, error = [], 0.0
    for b in range(10):
        mask = bins == b
        if not mask.any():
            continue
        sure, good = float(labels.confidence[mask].mean()), float(right[mask].mean())
        error += abs(sure - good) * float(mask.mean())
        rows.append(
            [f"{10 * b}\u2013{10 * b + 10}\u202f%", f"{int(mask.sum()):,}", percent(sure), percent(good), bar(good)]
        )
    caption = f"Confidence and truth (expected calibration error {percent(error)})"
    return table(caption, ("confidence", "examples", "mean", "right", ""), rows, "bars")


def confusion(run: RunData, labels: Labels) -> str:
    """True against given labels of the training set."""
    if run.truth is None:
        return ""
    k = len(run.classes)
    valid = labels.labels >= 0
    counts = np.zeros((k, k), np.int64)
    np.add.at(counts, (run.truth[valid], labels.labels[valid]), 1)
    return _matrix(run, counts) if k <= CONFUSION_CLASSES else _commonest(run, counts)


def _matrix(run: RunData, counts: NDArray[np.int64]) -> str:
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = []
    for i, name in enumerate(run.classes):
        cells = [
            f'<span class="{"hit" if i == j else "miss"}" style="--p:{100 * counts[i, j] / totals[i, 0]:.0f}%">'
            f"{counts[i, j] or ''}</span>"
            for j in range(len(run.classes))
        ]
        rows.append([escape(name), *cells])
    return table("True label (rows) and label given (columns)", ["", *map(escape, run.classes)], rows, "confusion")


def _commonest(run: RunData, counts: NDArray[np.int64]) -> str:
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:EXAMPLES]
    pairs = [(int(p) // len(counts), int(p) % len(counts)) for p in order]
    rows = [[escape(run.classes[i]), escape(run.classes[j]), f"{wrong[i, j]:,}"] for i, j in pairs if wrong[i, j]]
    return table("Commonest confusions", ("true label", "label given", "examples"), rows, "numbers") if rows else ""


# --- examples -----------------------------------------------------------------------------------------------------


def examples(run: RunData, labels: Labels, images: NDArray[np.uint8] | None) -> str:
    """Up to 20 examples each of those that deserve a look."""
    order = np.argsort(labels.confidence, kind="stable")
    flag = np.array(labels.flags)
    groups = (
        ("outside", "Outside: the networks insist on a label that is not in the set", order[flag[order] == "outside"]),
        ("disputed", "Disputed: the networks differ", order[flag[order] == "disputed"]),
        ("least", "Least confident", order),
        ("most", "Most confident", order[::-1]),
    )
    out = []
    for name, title, rows in groups:
        if len(rows):
            shown = [_example(run, labels, images, int(i)) for i in rows[:EXAMPLES]]
            is_open = " open" if name in ("outside", "disputed", "least") else ""
            of = f"{len(shown)} of {len(rows):,}" if name in ("outside", "disputed") else f"{len(shown)}"
            head = [*(["image"] if images is not None else []), "id", "label", "confidence", "candidates"]
            head += ["truth"] if run.truth is not None else []
            out.append(
                f'<details{is_open}><summary>{title} <span class="count">{of}</span></summary>'
                f"{_example_table(title, head, shown)}</details>"
            )
    return "".join(out)


def _example(run: RunData, labels: Labels, images: NDArray[np.uint8] | None, i: int) -> list[str]:
    label = int(labels.labels[i])
    given = escape(run.classes[label]) if label >= 0 else "–"
    cells = [f'<th scope="row">{escape(labels.ids[i])}</th>', f"<td><b>{given}</b></td>"]
    cells.append(f"<td>{percent(float(labels.confidence[i]))}{bar(float(labels.confidence[i]))}</td>")
    members = np.flatnonzero(run.sets[i]).tolist()
    # The label given is always among those shown.
    members.sort(key=lambda j: j != label)
    chips = [f'<span class="chip{" on" if j == label else ""}">{escape(run.classes[j])}</span>' for j in members]
    more = (
        f' <span class="count">and {len(chips) - SHOWN_CANDIDATES} more</span>' if len(chips) > SHOWN_CANDIDATES else ""
    )
    cells.append(f"<td>{' '.join(chips[:SHOWN_CANDIDATES])}{more}</td>")
    if run.truth is not None:
        true = int(run.truth[i])
        wrong = "" if true == label else ' class="wrong"'
        cells.append(f"<td><span{wrong}>{escape(run.classes[true])}</span></td>")
    if images is not None:
        cells.insert(0, f"<td>{thumbnail(images[i], f'example {escape(labels.ids[i])}')}</td>")
    return cells


def _example_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}"><table class="examples">'
        f"{_head(head)}<tbody>{body}</tbody></table></div>"
    )
