"""Made-up examples for the page, and the slow way to answer its questions."""

from __future__ import annotations

from typing import Any

import numpy as np

from crosel.review.cards import Cards, Query
from crosel.runs.corrections import KINDS, Decision, Decisions
from crosel.runs.labels import FLAGS
from crosel.runs.result import NetworkLabels, Result, TrainingSet


def made_up(n: int = 200, k: int = 12, seed: int = 0, side: int = 4, x: Any = None, **changes: Any) -> Cards:
    """Random labels, sets and confidences with many ties; ids are not in order.

    `changes` replace fields of the result or of its examples.
    """
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.ones(k) / 2, n).astype(np.float16)
    sets = draw.random((n, k)) < 0.3
    labels = draw.integers(0, k, n)
    sets[np.arange(n), labels] = True
    about: dict[str, Any] = {
        "classes": tuple(f"class {j}" for j in range(k)), "candidates": sets, "shape": (3, side, side),
        "fingerprint": "v1", "given_ids": [f"img/{i:05d}.png" for i in draw.permutation(n)],
    }  # fmt: skip
    values: dict[str, Any] = {
        "labels": labels, "confidence": np.round(draw.random(n), 2).astype(np.float32),
        "selected": draw.integers(0, 3, n), "flags": draw.integers(0, len(FLAGS), n).astype(np.int8),
        "probabilities": p,
        "networks": NetworkLabels(
            draw.integers(-1, k, (2, n)).astype(np.int32), draw.random((2, n)).astype(np.float32),
            draw.random((2, n)) < 0.5, draw.integers(0, 9, (2, n)).astype(np.int32),
            draw.integers(-1, k, (2, 3, n)).astype(np.int32), draw.random((2, 3, n)).astype(np.float32),
        ),
    }  # fmt: skip
    for name, value in changes.items():
        (values if name in values else about)[name] = value
    x = draw.integers(0, 256, (n, 3, side, side), dtype=np.uint8) if x is None else x
    return Cards(Result(TrainingSet(**about), **values), x, "made up", "nothing")


def slow_find(cards: Cards, query: Query, decisions: Decisions) -> tuple[int, int, list[int]]:
    """What Cards.find should give: one example after the other."""

    sets, labels, p = cards.examples.candidates, cards.result.labels, cards.result.probabilities

    def fits(i: int) -> bool:
        kind = decisions.get(i).kind if decisions.get(i) else ""  # type: ignore[union-attr]
        states = {
            "all": True, "undecided": not kind, "decided": bool(kind), "changed": kind in ("choose", "outside"),
            "skipped": kind == "skip",
        }  # fmt: skip
        confidence = cards.result.confidence[i]
        queue = "outside" if FLAGS[cards.result.flags[i]] == "outside" else "labels"
        return (
            query.queue in ("all", queue)
            and np.float32(query.low) <= confidence <= np.float32(query.high)
            and (query.flag is None or FLAGS[cards.result.flags[i]] == query.flag)
            and query.text.lower() in cards.ids[i].lower()
            and states[query.state]
            and (query.label is None or (labels[i] == query.label if query.within == "label" else sets[i, query.label]))
        )

    def doubt(i: int) -> tuple[bool, float, int]:
        """Sets of one last, then by the label's share of what its candidates have."""
        inside = [float(p[i, j]) for j in np.flatnonzero(sets[i])]
        share = float(p[i, labels[i]]) / sum(inside) if sum(inside) else 1 / len(inside)
        return len(inside) == 1, share, i

    surest = query.queue == "outside" and query.sort == "least"
    keys = {
        "least": lambda i: (-float(p[i].max()), i) if surest else doubt(i),
        "most": lambda i: tuple(-value for value in doubt(i)),
        "row": lambda i: (0, i),
    }
    key = keys[query.sort]
    rows = sorted((i for i in range(cards.n) if fits(i)), key=key)
    if query.after is not None:
        page = [i for i in rows if key(i) > key(query.after)][: query.limit]
        start = sum(key(i) <= key(query.after) for i in rows)
    elif query.before is not None:
        page = [i for i in rows if key(i) < key(query.before)][-query.limit :]
        start = sum(key(i) < key(query.before) for i in rows) - len(page)
    else:
        page, start = rows[: query.limit], 0
    return len(rows), start, page


def some_decisions(cards: Cards, count: int, seed: int = 1) -> Decisions:
    draw = np.random.default_rng(seed)
    decisions = Decisions(cards.n)
    for row in draw.integers(0, cards.n, count):
        kind = KINDS[draw.integers(0, len(KINDS))]
        decisions.decide(int(row), Decision(kind, -1 if kind == "skip" else int(draw.integers(0, len(cards.classes)))))
    return decisions
