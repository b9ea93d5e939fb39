"""Filter and order: which examples a page of the grid holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from crosel.runs.decisions import CODES, Decisions
from crosel.runs.labels import FLAGS
from crosel.runs.result import Result

State = Literal["all", "undecided", "decided", "changed", "skipped"]
Sort = Literal["least", "most", "row"]  # confidence from below, from above, or as the data stand
STATES: tuple[State, ...] = get_args(State)
REMEMBERED = 32  # filters whose answers are kept: turning pages asks the same again


@dataclass(frozen=True)
class Query:
    """A filter, an order, and the place to go on from: after or before a row (of this order, matching or not)."""

    label: int | None = None
    within: str = "label"  # or "candidates": where `label` must stand
    flag: str | None = None  # None: any; "": none
    low: float = 0.0
    high: float = 1.0
    text: str = ""
    state: State = "all"
    sort: Sort = "least"
    after: int | None = None
    before: int | None = None
    limit: int = 60


@dataclass(frozen=True)
class Answer:
    total: int  # matching examples
    start: int  # how many of them come before the first row given
    rows: NDArray[np.int64]


class Search:
    """Finds pages of a fixed set of examples; only the decisions about them change."""

    def __init__(self, ids: Sequence[str], result: Result) -> None:
        self._result = result
        confidence = result.confidence
        self._orders = {
            "least": np.argsort(confidence, kind="stable"), "most": np.argsort(-confidence, kind="stable"),
            "row": np.arange(len(ids)),
        }  # fmt: skip
        self._ranks = {name: np.argsort(order) for name, order in self._orders.items()}
        # All ids as one text: to look through it once is far quicker than through each of them.
        folded = [f"{name.casefold()}\0" for name in ids]
        self._text = "".join(folded)
        self._ends = np.cumsum([len(name) for name in folded])
        # Caches of the object's own: on the class they would keep it alive.
        self._places = lru_cache(maxsize=REMEMBERED)(self._find_places)
        self._having = lru_cache(maxsize=8)(self._ids_with)

    def find(self, query: Query, decisions: Decisions) -> Answer:
        """One page. It goes on from a row, not from a number: what was decided meanwhile shifts nothing."""
        asked = replace(query, after=None, before=None, limit=0)
        places = self._places(asked, decisions, 0 if query.state == "all" else decisions.version)
        ranks, start, end = self._ranks[query.sort], 0, query.limit
        if query.after is not None:
            start = int(np.searchsorted(places, ranks[query.after], side="right"))
            end = start + query.limit
        elif query.before is not None:
            end = int(np.searchsorted(places, ranks[query.before]))
            start = max(0, end - query.limit)
        return Answer(len(places), start, self._orders[query.sort][places[start:end]])

    def _find_places(self, query: Query, decisions: Decisions, version: int) -> NDArray[np.int64]:
        """Where in the order the matching examples stand; `version` only tells states of the decisions apart."""
        return np.flatnonzero(self._matching(query, decisions)[self._orders[query.sort]])

    def _matching(self, query: Query, decisions: Decisions) -> NDArray[np.bool_]:
        result = self._result
        mask = np.ones(len(result.labels), bool)
        if query.low > 0:
            mask &= result.confidence >= np.float32(query.low)
        if query.high < 1:
            mask &= result.confidence <= np.float32(query.high)
        if query.label is not None:
            given = query.within == "label"
            mask &= result.labels == query.label if given else result.examples.candidates[:, query.label]
        if query.flag is not None:
            mask &= result.flags == FLAGS.index(query.flag)
        kinds = decisions.kinds
        if query.state == "undecided":
            mask &= kinds == 0
        elif query.state == "decided":
            mask &= kinds > 0
        elif query.state == "changed":
            mask &= (kinds == CODES["choose"]) | (kinds == CODES["outside"])
        elif query.state == "skipped":
            mask &= kinds == CODES["skip"]
        if query.text:
            mask &= self._having(query.text.casefold())
        return mask

    def _ids_with(self, text: str) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._ends), bool)
        if "\0" not in text:  # which parts the ids from each other
            found = [match.start() for match in re.finditer(re.escape(text), self._text)]
            mask[np.searchsorted(self._ends, found, side="right")] = True
        return mask
