"""Made-up examples for the page, and the slow way to answer its questions."""

from __future__ import annotations

from typing import Any

import numpy as np

from crosel.review.examples import Examples
from crosel.review.search import Query
from crosel.runs.decisions import KINDS, Decision, Decisions
from crosel.runs.labels import FLAGS
from crosel.runs.outcome import SavedSelection


def made_up(n: int = 200, k: int = 12, seed: int = 0, side: int = 4, **changes: Any) -> Examples:
    """Random labels, sets and confidences with many ties; ids are not in order."""
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.ones(k) / 2, n).astype(np.float16)
    sets = draw.random((n, k)) < 0.3
    labels = draw.integers(0, k, n)
    sets[np.arange(n), labels] = True
    values: dict[str, Any] = {
        "name": "made up", "about": "nothing", "ids": [f"img/{i:05d}.png" for i in draw.permutation(n)],
        "classes": tuple(f"class {j}" for j in range(k)), "sets": sets, "labels": labels,
        "confidence": np.round(draw.random(n), 2).astype(np.float32),
        "selected": [("both", "one", "neither")[i] for i in draw.integers(0, 3, n)],
        "flags": draw.integers(0, len(FLAGS), n).astype(np.int8), "version": "v1",
        "x": draw.integers(0, 256, (n, 3, side, side), dtype=np.uint8), "probabilities": p,
        "selection": SavedSelection(
            draw.integers(-1, k, (2, n)).astype(np.int32), draw.random((2, n)).astype(np.float32),
            draw.random((2, n)) < 0.5, draw.integers(0, 9, (2, n)).astype(np.int32),
            draw.integers(-1, k, (2, 3, n)).astype(np.int32), draw.random((2, 3, n)).astype(np.float32),
        ),
    }  # fmt: skip
    return Examples(**{**values, **changes})


def slow_find(examples: Examples, query: Query, decisions: Decisions) -> tuple[int, int, list[int]]:
    """What Examples.find should give: one example after the other."""

    def fits(i: int) -> bool:
        kind = decisions.get(i).kind if decisions.get(i) else ""  # type: ignore[union-attr]
        states = {
            "all": True, "undecided": not kind, "decided": bool(kind), "changed": kind in ("choose", "outside"),
            "skipped": kind == "skip",
        }  # fmt: skip
        confidence = examples.confidence[i]
        return (
            np.float32(query.low) <= confidence <= np.float32(query.high)
            and (query.flag is None or FLAGS[examples.flags[i]] == query.flag)
            and query.text.lower() in examples.ids[i].lower()
            and states[query.state]
            and (
                query.label is None
                or (examples.labels[i] == query.label if query.within == "label" else examples.sets[i, query.label])
            )
        )

    keys = {
        "least": lambda i: (float(examples.confidence[i]), i),
        "most": lambda i: (-float(examples.confidence[i]), i),
        "row": lambda i: (0, i),
    }
    key = keys[query.sort]
    rows = sorted((i for i in range(examples.n) if fits(i)), key=key)
    if query.after is not None:
        page = [i for i in rows if key(i) > key(query.after)][: query.limit]
        start = sum(key(i) <= key(query.after) for i in rows)
    elif query.before is not None:
        page = [i for i in rows if key(i) < key(query.before)][-query.limit :]
        start = sum(key(i) < key(query.before) for i in rows) - len(page)
    else:
        page, start = rows[: query.limit], 0
    return len(rows), start, page


def some_decisions(examples: Examples, count: int, seed: int = 1) -> Decisions:
    draw = np.random.default_rng(seed)
    decisions = Decisions(examples.n)
    for row in draw.integers(0, examples.n, count):
        kind = KINDS[draw.integers(0, len(KINDS))]
        decisions.decide(
            int(row), Decision(kind, -1 if kind == "skip" else int(draw.integers(0, len(examples.classes))))
        )
    return decisions
