"""Parts of a page: numbers, tables, bars, sections, images, and the tables and galleries of a report.

Arguments that are HTML must be escaped already.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from crosel.report.charts import matrix_names, number
from crosel.report.run import Run
from crosel.runs.labels import FLAGS
from crosel.runs.result import Result, review_order
from crosel.utils.text import counted

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


# --- examples worth checking: images as cards, features as a table --------------------------------------------------

EXAMPLES = 12
CANDIDATES = 5  # shown of a set
FEATURES = 6
MOST_TEXT = 5_000  # characters of a text
NOTABLE = 0.05  # the most probable label, if outside the set, is shown from this probability on


class Group(NamedTuple):
    title: str
    rows: NDArray[np.int64]
    words: str


def groups(result: Result) -> list[Group]:
    """The rows of each gallery, the most informative gallery first; empty ones are left out."""
    rising = review_order(result.within_set, result.examples.candidates)
    flag = result.flags[rising]
    outside, disputed = (rising[flag == FLAGS.index(name)] for name in ("outside", "disputed"))
    # As labels.csv has them, so that a report of the same run written later shows the same examples.
    falling = np.argsort(-result.confidence.round(6), kind="stable")
    surest = _round_robin(falling, result.labels[falling])
    found = [
        Group("Doubtful", rising, "the labels to check first: least sure within their sets"),
        Group("Outside", outside, "all networks are sure of a label that is not in the set"),
        Group("Disputed", disputed, "the networks predict different labels"),
        Group("Most confident", surest, "the most confident examples, from each class in turn"),
    ]
    return [group for group in found if len(group.rows)]


def _round_robin(rows: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first row of each class, then the second of each, and so on, so that a gallery shows all classes."""
    by_class = np.argsort(classes, kind="stable")
    starts = np.searchsorted(classes[by_class], classes[by_class])
    turn = np.empty(len(rows), np.int64)
    turn[by_class] = np.arange(len(rows)) - starts
    return rows[np.argsort(turn, kind="stable")]


def galleries(result: Result, x: NDArray[Any] | None, shown: int = EXAMPLES) -> str:
    out = []
    for title, rows, words in groups(result):
        picked = [int(i) for i in rows[:shown]]
        body = _cards(result, x, picked) if x is not None and x.ndim == 4 else _examples_table(result, x, picked, title)
        of = f"{len(picked)} of {len(rows):,}" if len(rows) > len(picked) else f"{len(rows):,}"
        out.append(
            f'<details open><summary>{title} <span class="count">{of}</span></summary>'
            f'<p class="note">{words}</p>{body}</details>'
        )
    return "".join(out)


class LabelChoice(NamedTuple):
    label: int
    probability: float | None
    inside: bool


def choices(result: Result, i: int) -> tuple[list[LabelChoice], int]:
    """The labels to show for an example, the given one first, and the number of candidates left out."""
    given, inside = int(result.labels[i]), np.flatnonzero(result.examples.candidates[i]).tolist()
    if result.probabilities is None:
        sure = float(result.confidence[i])
        ranked = sorted(inside, key=lambda j: j != given)
        return [LabelChoice(j, sure if j == given else None, True) for j in ranked[:CANDIDATES]], len(
            ranked[CANDIDATES:]
        )
    p = result.probabilities[i].astype(np.float16).astype(float)  # as predictions.npz has them
    ranked = sorted(inside, key=lambda j: (j != given, -p[j]))
    out = [LabelChoice(j, float(p[j]), True) for j in ranked[:CANDIDATES]]
    top = int(p.argmax())
    if top not in inside and p[top] >= NOTABLE:
        out.append(LabelChoice(top, float(p[top]), False))
    return out, len(ranked[CANDIDATES:])


def _bars(result: Result, i: int) -> str:
    """The candidates with their probabilities."""
    found, more = choices(result, i)
    truth = None if result.examples.truth is None else int(result.examples.truth[i])
    items = []
    for label, p, inside in found:
        given = label == int(result.labels[i])
        marks = {"beyond": ("not in the set", not inside), "true": ("true", label == truth and not given)}
        words = "".join(f' <em class="{mark}">{word}</em>' for mark, (word, holds) in marks.items() if holds)
        value = "" if p is None else f'{bar(p)}<span class="p">{_short_percent(p)}</span>'
        kind = " ".join(word for word, holds in (("given", given), ("beyond", not inside)) if holds)
        name = _class_name(result, label)
        items.append(f'<li class="{kind}"><span class="w">{name}{words}</span>{value}</li>')
    if more:
        items.append(f'<li class="more">and {more} more</li>')
    return f'<ul class="chances">{"".join(items)}</ul>'


def _short_percent(p: float) -> str:
    return f"{100 * p:.0f}\u202f%" if p >= 0.995 or p < 0.0005 else f"{100 * p:.1f}\u202f%"


def _verdict(result: Result, i: int) -> str:
    """Whether the given label is right, if the truth is known."""
    if result.examples.truth is None:
        return ""
    true = int(result.examples.truth[i])
    if true == int(result.labels[i]):
        return '<span class="mark right">right</span>'
    return f'<span class="mark wrong">truth: {_class_name(result, true)}</span>'


def _class_name(result: Result, label: int) -> str:
    return escape(result.examples.classes[label]) if label >= 0 else "–"


def _given(result: Result, i: int) -> str:
    return f"<b>{_class_name(result, int(result.labels[i]))}</b> {_short_percent(float(result.confidence[i]))}"


def _cards(result: Result, images: NDArray[Any], rows: Sequence[int]) -> str:
    items = []
    for i in rows:
        name = escape(result.examples.example_id(i))
        items.append(
            f'<li class="example">{thumbnail(images[i], f"example {name}")}<div><p class="said">'
            f'{_given(result, i)}{_verdict(result, i)}</p><p class="id">{name}{_times_selected(result, i)}</p></div>'
            f"{_bars(result, i)}</li>"
        )
    return f'<ul class="gallery">{"".join(items)}</ul>'


def _times_selected(result: Result, i: int) -> str:
    """The number of epochs in which the example was selected, by the network that selected it most often."""
    if result.networks is None or result.networks.epochs_selected is None:
        return ""
    times = int(result.networks.epochs_selected[:, i].max())
    return "" if times == 0 else f" · selected in {counted(times, 'epoch')}"


def _examples_table(result: Result, x: NDArray[Any] | None, rows: Sequence[int], title: str) -> str:
    examples = result.examples
    features = 0 if x is None or x.ndim != 2 else min(FEATURES, x.shape[1])
    texts = x is not None and x.ndim == 1
    head = ["id", "label", "candidates", *(["truth"] if examples.truth is not None else [])]
    head += [escape(name) for name in (examples.columns or ())[:features]] or [f"x{j}" for j in range(features)]
    head += ["text"] if texts else []
    body = []
    for i in rows:
        cells = [f'<th scope="row">{escape(examples.example_id(i))}</th>', f"<td>{_given(result, i)}</td>"]
        cells.append(f"<td>{_bars(result, i)}</td>")
        if examples.truth is not None:
            cells.append(f"<td>{_verdict(result, i)}</td>")
        if x is not None and texts:
            cells.append(f'<td><div class="text" tabindex="0">{escape(str(x[i] or "")[:MOST_TEXT])}</div></td>')
        elif x is not None:
            cells += [f"<td>{value:.4g}</td>" for value in x[i].reshape(-1)[:features]]
        body.append(f"<tr>{''.join(cells)}</tr>")
    more = f'<p class="note">The first {features} of {x.shape[1]} features.</p>' if x is not None and features else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}"><table class="examples">'
        f"{table_head(head)}<tbody>{''.join(body)}</tbody></table></div>{more}"
    )
