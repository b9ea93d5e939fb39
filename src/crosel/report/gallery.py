"""Examples worth checking: images as cards, features as a table. All text from the user is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosel.report.html import bar, table_head, thumbnail
from crosel.runs.labels import FLAGS
from crosel.runs.result import Result, review_order
from crosel.utils.text import counted

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
