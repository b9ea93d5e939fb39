"""Parts of a page: numbers, tables, bars, sections, images. Arguments that are HTML must be escaped already."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from crosel.report.charts import matrix_names, number
from crosel.report.run import Run
from crosel.runs.labels import FLAGS
from crosel.runs.result import Result

SIDE = 64  # pixels of a thumbnail's longer side, at most


def pct(value: float) -> str:
    return number(value, percent=True)


def section(title: str, body: str, intro: str = "", anchor: str = "") -> str:
    """A section with heading and introduction; empty if there is no content."""
    if not body:
        return ""
    lead = f"<p>{intro}</p>" if intro else ""
    name = f' id="{anchor}"' if anchor else ""
    return f'<section{name}><div class="head"><h2>{title}</h2>{lead}</div><div class="body">{body}</div></section>\n'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", note: str = "") -> str:
    """Cells and captions are HTML; the first cell of a row is its heading."""
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{c}</td>" for c in row[1:])}</tr>' for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}"><table class="{kind}">'
        f"<caption>{caption}</caption>{table_head(head)}"
        f"<tbody>{body}</tbody></table>{f'<p class=note>{note}</p>' if note else ''}</div>"
    )


def table_head(names: Sequence[str]) -> str:
    cells = (f"<th scope=col>{name}</th>" if name else "<td></td>" for name in names)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span>'


def bar_table(caption: str, what: str, counts: Sequence[tuple[str, int]], total: int) -> str:
    """Counts with their share of the total and bars relative to the largest."""
    largest = max((c for _, c in counts), default=0) or 1
    rows = [[escape(name), f"{c:,}", pct(c / max(1, total)), bar(c / largest)] for name, c in counts]
    return table(escape(caption), (escape(what), "examples", "share", ""), rows, "bars")


def stack(caption: str, parts: Sequence[tuple[str, int, str]], note: str = "") -> str:
    """A stacked bar of parts (name, count, colour) with a legend."""
    total = sum(count for _, count, _ in parts) or 1
    pieces = "".join(
        f'<i class="b-{ink}" style="flex-grow:{count}"></i>' for _, count, ink in parts if count
    )  # fmt: skip
    items = "".join(
        f'<li><i class="swatch b-{ink}"></i>{escape(name)} <b>{count:,}</b> <span>{pct(count / total)}</span></li>'
        for name, count, ink in parts
    )
    words = f"<p class=note>{note}</p>" if note else ""
    return (
        f'<figure class="chart stack"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="pieces" aria-hidden="true">{pieces}</div><ul class="legend">{items}</ul>{words}</figure>'
    )


def png(image: NDArray[np.uint8], side: int | None = None) -> bytes:
    """A PNG file of an image [c, h, w]: RGB, or grey where it has another number of channels than 3. With `side`, of at
    most so many pixels per side, by the mean of each square of pixels, so that fine lines remain visible."""
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0) if len(image) == 3 else image[0]))
    if side is not None and max(picture.size) > side:
        picture = picture.reduce(-(-max(picture.size) // side))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def thumbnail(image: NDArray[Any], alt: str) -> str:
    """An <img> of an image [c, h, w]; `alt` must be escaped."""
    data = base64.b64encode(png(image, SIDE)).decode()
    return f'<img class="thumb" width="44" height="44" alt="{alt}" src="data:image/png;base64,{data}">'


# --- tables of the report: sets, flags, classes, confusion; text from the user is escaped here ----------------------

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
