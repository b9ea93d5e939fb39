"""All that the page shows of a run, as arrays in memory, and the questions that the page asks of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data import Dataset, load
from crosel.errors import UserError
from crosel.labels import FLAGS, read_labels
from crosel.methods.base import find_method
from crosel.report.pictures import png
from crosel.review.corrections import saved_ids
from crosel.review.store import Decisions
from crosel.run import RunFolder, load_run
from crosel.session import Session, pick_device
from crosel.train import predict_chunks

STATES = ("all", "undecided", "decided", "changed", "skipped")
SORTS = ("least", "most", "row")  # confidence from below, from above, or as the data stand
SHOWN = 8  # candidates on a card; the others are in the dialogue
FEATURES = 6
SIDE = 128  # pixels of a thumbnail's longer side, at most
KEYS = "123456789" + "qwertyidfghjklzxcvbm"  # the letters left over by the page's own commands
SECONDS = 20.0  # what computing the probabilities may take at the start
CELLS = 1 << 29  # entries of the table of probabilities, two bytes each

Array = NDArray[Any]


@dataclass(frozen=True)
class Query:
    """A filter, an order, and the place to go on from: after or before a row (of this order, matching or not)."""

    label: int | None = None
    within: str = "label"  # or "candidates": where `label` must stand
    flag: str | None = None  # None: any; "": none
    low: float = 0.0
    high: float = 1.0
    text: str = ""
    state: str = "all"
    sort: str = "least"
    after: int | None = None
    before: int | None = None
    limit: int = 60


@dataclass(frozen=True)
class Answer:
    total: int  # matching examples
    start: int  # how many of them come before the first row given
    rows: NDArray[np.int64]


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
    networks: dict[str, Array] | None = None  # selection.npz: labels, confidence, mask, each [v, n]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A method on the object would keep it alive in a shared cache.
        self.picture = lru_cache(maxsize=2048)(self._picture)
        self._having = lru_cache(maxsize=8)(self._ids_with)

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def has_images(self) -> bool:
        return self.x is not None and self.x.ndim == 4

    # --- filter and order -------------------------------------------------------------------------------------

    @cached_property
    def _orders(self) -> dict[str, NDArray[np.int64]]:
        rising = np.argsort(self.confidence, kind="stable")
        falling = np.argsort(-self.confidence, kind="stable")
        return {"least": rising, "most": falling, "row": np.arange(self.n)}

    @cached_property
    def _ranks(self) -> dict[str, NDArray[np.int64]]:
        ranks = {}
        for name, order in self._orders.items():
            ranks[name] = np.empty_like(order)
            ranks[name][order] = np.arange(self.n)
        return ranks

    @cached_property
    def _folded(self) -> list[str]:
        return [name.casefold() for name in self.ids]

    def _ids_with(self, text: str) -> NDArray[np.bool_]:
        return np.fromiter((text in name for name in self._folded), bool, self.n)

    def matching(self, query: Query, decisions: Decisions) -> NDArray[np.bool_]:
        mask = np.ones(self.n, bool)
        if query.low > 0:
            mask &= self.confidence >= np.float32(query.low)
        if query.high < 1:
            mask &= self.confidence <= np.float32(query.high)
        if query.label is not None:
            mask &= self.labels == query.label if query.within == "label" else self.sets[:, query.label]
        if query.flag is not None:
            mask &= self.flags == FLAGS.index(query.flag)
        kinds = decisions.kinds
        if query.state == "undecided":
            mask &= kinds == 0
        elif query.state == "decided":
            mask &= kinds > 0
        elif query.state == "changed":
            mask &= (kinds == 2) | (kinds == 3)
        elif query.state == "skipped":
            mask &= kinds == 4
        if query.text:
            mask &= self._having(query.text.casefold())
        return mask

    def find(self, query: Query, decisions: Decisions) -> Answer:
        """One page. It goes on from a row, not from a number: what was decided meanwhile shifts nothing."""
        order = self._orders[query.sort]
        rows = order[self.matching(query, decisions)[order]]
        ranks = self._ranks[query.sort]
        if query.after is not None:
            start = int(np.searchsorted(ranks[rows], ranks[query.after], side="right"))
        elif query.before is not None:
            start = max(0, int(np.searchsorted(ranks[rows], ranks[query.before])) - query.limit)
            end = int(np.searchsorted(ranks[rows], ranks[query.before]))
            return Answer(len(rows), start, rows[start:end])
        else:
            start = 0
        return Answer(len(rows), start, rows[start : start + query.limit])

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
        names = ("labels", "confidence", "mask")
        networks = None if self.networks is None else [self.networks[name][:, rows].T.tolist() for name in names]
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
                keys = KEYS[: len(shown)]  # type: ignore[assignment]
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
                card["networks"] = [
                    {"label": j, "confidence": round(c, 4), "selected": bool(m)}
                    for j, c, m in zip(networks[0][i], networks[1][i], networks[2][i], strict=True)
                ]
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


# --- reading a run ------------------------------------------------------------------------------------------------


def load_examples(run: Path) -> Examples:
    """Read a finished run. What only helps (pictures, probabilities, history) may be missing; a note says so."""
    folder = RunFolder(run)
    config, saved = folder.read_config(), folder.read_candidates()
    path = folder / "labels.csv"
    if not path.is_file():
        raise UserError(f"{run} has no labels.csv yet; finish the run, or write it: crosel labels {run} --out {path}")
    rows, classes, sets = read_labels(path), tuple(map(str, saved["classes"])), saved["candidates"].astype(bool)
    number = {name: j for j, name in enumerate(classes)}
    labels = np.array([number.get(row.label, -1) for row in rows], np.int64)
    confidence = np.array([row.confidence for row in rows], np.float32)
    if len(rows) != len(sets) or (labels < 0).any() or not np.isfinite(confidence).all():
        raise UserError(f"{path}: not the labels of this run; write them again: crosel labels {run} --out {path}")
    method = find_method(config.method.name).title.partition(":")[0]
    examples = Examples(
        run.resolve().name, f"{method} on {Path(config.source).name}", saved_ids(saved), classes, sets, labels,
        confidence, [row.selected for row in rows], np.array([FLAGS.index(row.flag) for row in rows], np.int8),
        str(saved["data"]), networks=_read_selection(folder / "selection.npz", len(sets)),
    )  # fmt: skip
    session, examples.x = _open_data(run, config, examples)
    examples.probabilities = _saved_probabilities(folder / "labels.npz", examples)
    if examples.probabilities is None and session is not None:
        examples.probabilities = compute_probabilities(session, SECONDS, run, examples.notes)
    return examples


def _read_selection(path: Path, n: int) -> dict[str, Array] | None:
    names = ("labels", "confidence", "mask")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in names}
    except Exception:  # not there (methods that do not select), or damaged: the page goes without
        return None
    shapes = {array.shape for array in arrays.values()}
    return arrays if len(shapes) == 1 and len(shape := shapes.pop()) == 2 and shape[1] == n else None


def _saved_probabilities(path: Path, examples: Examples) -> NDArray[np.float16] | None:
    """`crosel labels RUN --out RUN/labels.npz` leaves them, where it was run."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            probabilities = archive["pred_probs"]
            fits = np.array_equal(archive["candidates"], examples.sets)
    except Exception:  # not there, or damaged
        return None
    return probabilities.astype(np.float16) if fits and probabilities.shape == examples.sets.shape else None


def _open_data(run: Path, config: RunConfig, examples: Examples) -> tuple[Session | None, Array | None]:
    notes = examples.notes
    try:
        session = load_run(run, pick_device("auto"), say=notes.append)
        return session, session.data.x
    except (UserError, OSError) as error:  # moved data, a network of the user's own, no checkpoint left
        notes.append(f"no probabilities: {error}")
    try:
        source: Dataset = load(config.source, Path(config.data_dir) if config.data_dir else None)
    except (UserError, OSError):
        notes.append("the training data are not where they were, so there are no pictures")
        return None, None
    if source.fingerprint() != examples.version:
        notes.append("the training data have changed since, so there are no pictures")
        return None, None
    return None, source.x


@torch.no_grad()
def compute_probabilities(session: Session, seconds: float, run: Path, notes: list[str]) -> NDArray[np.float16] | None:
    """All of them, or None when that would take longer than `seconds`; a note then says how to have them."""
    n, k = session.data.n, len(session.data.classes)
    if n * k > CELLS:
        notes.append(f"no probabilities but the given label's: a table of {n:,} by {k:,} is too large")
        return None
    out = np.empty((n, k), np.float16)
    began = time.monotonic()
    for start, outputs in predict_chunks(session, session.data.x):
        end = start + outputs.shape[1]
        out[start:end] = session.method.combine(outputs).cpu().numpy()
        needed = (time.monotonic() - began) * n / end
        if end < n and needed > seconds:
            notes.append(
                f"no probabilities but the given label's: they would take about {needed / 60:.0f} min here; "
                f"to have them, once: crosel labels {run} --out {run}/labels.npz"
            )
            return None
    return out


def say(line: str) -> None:
    print(line, file=sys.stderr)
