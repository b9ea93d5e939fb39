"""All that the page shows of a run, as arrays in memory, and the questions that the page asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.report.pictures import png
from crosel.review.search import Answer, Query, Search
from crosel.runs.decisions import Decisions
from crosel.runs.labels import FLAGS
from crosel.runs.outcome import SavedSelection

SHOWN = 8  # candidates on a card; the others are in the dialogue
FEATURES = 6
SIDE = 128  # pixels of a thumbnail's longer side, at most
KEYS = "123456789" + "qwertyidfghjklzxcvbm"  # the letters left over by the page's own commands

Array = NDArray[Any]


@dataclass
class Examples:
    name: str
    about: str  # method and source, for people
    ids: list[str]
    classes: tuple[str, ...]
    sets: NDArray[np.bool_]  # [n, k]
    labels: NDArray[np.int64]  # what the run says
    confidence: NDArray[np.float32]
    selected: list[str]  # "both", "one", "neither", or "" for methods that do not select
    flags: NDArray[np.int8]  # places in FLAGS
    version: str  # of the inputs, for the browser's cache
    x: Array | None = None  # images [n, c, h, w] or features [n, d]; None: no longer to be had
    probabilities: NDArray[np.float16] | None = None  # [n, k]
    selection: SavedSelection | None = None  # what each network says, and said before
    columns: tuple[str, ...] = ()  # names of the features, where the run knows them
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A method on the object would keep it alive in a shared cache.
        self.picture = lru_cache(maxsize=2048)(self._picture)
        self._search = Search(self.ids, self.labels, self.sets, self.confidence, self.flags)

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def has_images(self) -> bool:
        return self.x is not None and self.x.ndim == 4

    def find(self, query: Query, decisions: Decisions) -> Answer:
        return self._search.find(query, decisions)

    # --- one example ------------------------------------------------------------------------------------------

    @cached_property
    def fixed_keys(self) -> list[str] | None:
        """With few classes each has its own key; otherwise keys go by the place on the card."""
        if all(len(name) == 1 and name in "0123456789" for name in self.classes):
            return list(self.classes)
        return list("1234567890"[: len(self.classes)]) if len(self.classes) <= 10 else None

    def card(self, row: int) -> dict[str, Any]:
        return self.cards(np.array([row]))[0]

    def cards(self, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        """All that the page shows of these examples. Arrays are cut once for all rows: that is most of the time."""
        sets, labels = self.sets[rows], self.labels[rows].tolist()
        confidence = self.confidence[rows].tolist()
        p = None if self.probabilities is None else self.probabilities[rows]
        chances = [None] * len(rows) if p is None else p.tolist()
        tops = [None] * len(rows) if p is None else p.argmax(axis=1).tolist()
        networks = None if self.selection is None else network_cards(self.selection, rows)
        first, column = np.nonzero(sets)  # row by row: the sets as one list, cut at `ends`
        inside_all, ends = column.tolist(), np.searchsorted(first, np.arange(len(rows) + 1)).tolist()
        cards = []
        for i, row in enumerate(rows.tolist()):
            inside, label, own = inside_all[ends[i] : ends[i + 1]], labels[i], chances[i]
            if self.fixed_keys is not None:  # at most ten, and a steady place is found faster
                shown, keys = inside, [self.fixed_keys[j] for j in inside]
            else:  # the run's label first, then by probability, or by class where there are none
                ranked = inside if own is None else sorted(inside, key=own.__getitem__, reverse=True)
                shown = [label, *(j for j in ranked if j != label)][:SHOWN]
                keys = list(KEYS[: len(shown)])
            sure = round(confidence[i], 4)
            given = [sure if j == label else None for j in shown] if own is None else [round(own[j], 4) for j in shown]
            card: dict[str, Any] = {
                "row": row, "id": self.ids[row], "label": label, "confidence": sure, "flag": FLAGS[self.flags[row]],
                "selected": self.selected[row], "more": len(inside) - len(shown),
                "candidates": [{"label": j, "key": key, "p": c} for j, key, c in zip(shown, keys, given, strict=True)],
            }  # fmt: skip
            if own is not None and tops[i] not in inside:
                card["outside"] = {"label": tops[i], "p": round(own[tops[i]], 4)}
            if networks is not None:
                card["networks"] = networks[i]
            if self.x is not None and not self.has_images:
                values = self.x[row].reshape(-1)
                card["features"] = [f"{value:.4g}" for value in values[:FEATURES]]
                card["features_more"] = max(0, len(values) - FEATURES)
            cards.append(card)
        return cards

    def _probability(self, row: int, label: int) -> float | None:
        if self.probabilities is not None:
            return round(float(self.probabilities[row, label]), 4)
        return round(float(self.confidence[row]), 4) if label == self.labels[row] else None

    def all_classes(self, row: int) -> list[dict[str, Any]]:
        """Every class for the dialogue: those outside the set first, the most probable on top."""
        keys: Sequence[Any] = (np.arange(len(self.classes)), self.sets[row])
        if self.probabilities is not None:
            keys = (keys[0], -self.probabilities[row].astype(np.float32), self.sets[row])
        return [
            {"label": int(j), "p": self._probability(row, int(j)), "inside": bool(self.sets[row, j])}
            for j in np.lexsort(keys)
        ]

    @property
    def has_small_images(self) -> bool:
        """So small that encoding one takes less time than handing it to a thread."""
        return self.x is not None and self.x[0].size <= 64 * 64

    def _picture(self, row: int) -> bytes:
        assert self.x is not None
        return png(reduced(np.asarray(self.x[row], np.uint8)))


def reduced(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """At most SIDE pixels a side: the mean of each square of pixels, so that fine lines do not vanish."""
    channels, height, width = image.shape
    step = -(-max(height, width) // SIDE)
    if step == 1:
        return image
    # A side shorter than a square keeps what it has.
    tall, wide = min(step, height), min(step, width)
    rows, columns = height // tall, width // wide
    cut = image[:, : rows * tall, : columns * wide].reshape(channels, rows, tall, columns, wide)
    means: NDArray[np.uint8] = np.rint(cut.mean(axis=(2, 4))).astype(np.uint8)
    return means


def network_cards(selection: SavedSelection, rows: NDArray[np.int64]) -> list[list[dict[str, Any]]]:
    """What each network says of each of these examples, in how many epochs it selected it, and its last predictions."""
    values: dict[str, Any] = {
        "label": selection.labels[:, rows], "confidence": selection.confidence[:, rows].round(4).astype(float).round(4),
        "selected": selection.mask[:, rows].astype(bool),
    }  # fmt: skip
    if selection.epochs is not None:
        values["epochs"] = selection.epochs[:, rows]
    if selection.past_labels is not None:
        values["past"] = selection.past_labels[:, :, rows].transpose(0, 2, 1)  # [v, rows, t], oldest first
    lists = {name: array.tolist() for name, array in values.items()}
    networks = range(len(selection.labels))
    return [[{name: found[v][i] for name, found in lists.items()} for v in networks] for i in range(len(rows))]
