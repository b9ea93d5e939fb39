"""Search: which examples are on a page of the grid, by filter and order."""

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
from crosel.runs.result import Result, review_order

State = Literal["all", "undecided", "decided", "changed", "skipped"]
Queue = Literal["all", "labels", "outside"]  # `outside`: the flag of that name; `labels`: all others
Sort = Literal["least", "most", "row"]  # by how sure labels are within their sets, or in the order of the data
STATES: tuple[State, ...] = get_args(State)
CACHED_FILTERS = 32  # turning pages uses the same filter again


@dataclass(frozen=True)
class Query:
    """A filter, an order, and where to continue: after or before a row, which need not match the filter."""

    queue: Queue = "all"
    label: int | None = None
    within: str = "label"  # or "candidates": where to look for `label`
    flag: str | None = None  # None: any; "": none
    low: float = 0.0
    high: float = 1.0
    text: str = ""
    state: State = "all"
    sort: Sort = "least"
    after: int | None = None
    before: int | None = None
    limit: int = 60

    @property
    def order(self) -> str:
        return "outside" if (self.queue, self.sort) == ("outside", "least") else self.sort


@dataclass(frozen=True)
class Answer:
    total: int  # matching examples
    start: int  # how many of them come before the first row given
    rows: NDArray[np.int64]


class Search:
    """Search in examples that stay the same; only the decisions about them change."""

    def __init__(self, ids: Sequence[str], result: Result) -> None:
        self._result = result
        least = review_order(result.within_set, result.examples.candidates)
        self._orders = {"least": least, "most": least[::-1], "row": np.arange(len(ids)), "outside": least}
        if (p := result.probabilities) is not None:  # of sets that miss the truth, answers say more than labels
            self._orders["outside"] = np.argsort(-p.max(axis=1), kind="stable")
        self._ranks = {name: np.argsort(order) for name, order in self._orders.items()}
        # All ids in one string: searching it once is much faster than searching each id.
        folded = [f"{name.casefold()}\0" for name in ids]
        self._text = "".join(folded)
        self._ends = np.cumsum([len(name) for name in folded])
        # Caches per object: a cache on the class would keep the object alive.
        self._places = lru_cache(maxsize=CACHED_FILTERS)(self._find_places)
        self._having = lru_cache(maxsize=8)(self._ids_with)

    def find(self, query: Query, decisions: Decisions) -> Answer:
        """One page. It continues from a row, not from an offset, so that new decisions shift nothing."""
        asked = replace(query, after=None, before=None, limit=0)
        places = self._places(asked, decisions, 0 if query.state == "all" else decisions.version)
        ranks, start, end = self._ranks[query.order], 0, query.limit
        if query.after is not None:
            start = int(np.searchsorted(places, ranks[query.after], side="right"))
            end = start + query.limit
        elif query.before is not None:
            end = int(np.searchsorted(places, ranks[query.before]))
            start = max(0, end - query.limit)
        return Answer(len(places), start, self._orders[query.order][places[start:end]])

    def _find_places(self, query: Query, decisions: Decisions, version: int) -> NDArray[np.int64]:
        """Positions of the matching examples in the order. `version` of the decisions is part of the cache key."""
        return np.flatnonzero(self._matching(query, decisions)[self._orders[query.order]])

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
        if query.queue != "all":
            mask &= (result.flags == FLAGS.index("outside")) == (query.queue == "outside")
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
        if "\0" not in text:  # the separator of ids
            found = [match.start() for match in re.finditer(re.escape(text), self._text)]
            mask[np.searchsorted(self._ends, found, side="right")] = True
        return mask
