"""A result as the page shows it: a card for each example, with search."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data.images import ImageFiles, ends_as_image
from crosel.data.sources import locate
from crosel.data.table import image_root
from crosel.errors import UserError
from crosel.methods.base import find_method
from crosel.report.html import png
from crosel.runs.corrections import CODES, Decisions
from crosel.runs.folder import RunFolder, load_run, training_inputs
from crosel.runs.labels import FLAGS
from crosel.runs.result import EXPORTED, NetworkLabels, Result, TrainingSet, load_arrays, review_order
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks
from crosel.utils.text import one_line

SHOWN = 8  # candidates on a card; the dialogue shows all
FEATURES = 6
MOST_TEXT = 10_000  # characters of a text
SIDE, LARGE = 128, 1600  # pixels of the longer side of a picture on a card, and by itself
KEYS = "12345678"
OUTSIDE_KEY = "9"  # where classes have no keys of their own


class Cards:
    """The examples of a result, with their inputs where these can be had: images [n, c, h, w],
    features [n, d] or texts [n]."""

    def __init__(self, result: Result, x: Any, name: str, about: str, notes: Sequence[str] = ()) -> None:
        self.result, self.examples, self.x = result, result.examples, x
        self.name, self.about, self.notes = name, about, list(notes)  # `about`: method and source, for people
        self.ids, self.classes, self.n = self.examples.ids, self.examples.classes, self.examples.n
        self._selected = result.selected_words()
        self._search = ExampleSearch(self.ids, result)
        # A method on the object would keep it alive in a shared cache.
        self.png_of = lru_cache(maxsize=2048)(self._encode)

    @property
    def has_images(self) -> bool:
        return self.x is not None and self.x.ndim == 4

    def find(self, query: Query, decisions: Decisions) -> Answer:
        return self._search.find(query, decisions)

    # --- one example ------------------------------------------------------------------------------------------

    @cached_property
    def fixed_keys(self) -> list[str] | None:
        """Up to ten classes have a key each; otherwise keys depend on the position on the card."""
        if all(len(name) == 1 and name in "0123456789" for name in self.classes):
            return list(self.classes)
        return list("1234567890"[: len(self.classes)]) if len(self.classes) <= 10 else None

    def card(self, row: int) -> dict[str, Any]:
        return self.cards(np.array([row]))[0]

    def cards(self, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        """What the page shows of these examples. Arrays are sliced once for all rows: that takes most of the time."""
        result = self.result
        sets, labels = self.examples.candidates[rows], result.labels[rows].tolist()
        confidence, within = result.confidence[rows].tolist(), result.within_set[rows].tolist()
        p = None if result.probabilities is None else result.probabilities[rows]
        chances = [None] * len(rows) if p is None else p.tolist()
        tops = [-1] * len(rows) if p is None else p.argmax(axis=1).tolist()
        networks = None if result.networks is None else network_cards(result.networks, rows)
        first, column = np.nonzero(sets)  # all sets as one list, split at `ends`
        inside_all, ends = column.tolist(), np.searchsorted(first, np.arange(len(rows) + 1)).tolist()
        cards = []
        for i, row in enumerate(rows.tolist()):
            inside, label, own = inside_all[ends[i] : ends[i + 1]], labels[i], chances[i]
            if self.fixed_keys is not None:  # a fixed position is found faster
                shown, keys = inside, [self.fixed_keys[j] for j in inside]
            else:  # the run's label first, then by probability, or by class where there are none
                ranked = inside if own is None else sorted(inside, key=own.__getitem__, reverse=True)
                shown = [label, *(j for j in ranked if j != label)][:SHOWN]
                keys = list(KEYS[: len(shown)])
            sure = round(confidence[i], 4)
            given = [sure if j == label else None for j in shown] if own is None else [round(own[j], 4) for j in shown]
            card: dict[str, Any] = {
                "row": row, "id": self.ids[row], "label": label, "confidence": sure,
                "within": round(within[i], 4), "flag": FLAGS[result.flags[row]],
                "selected": self._selected[row], "more": len(inside) - len(shown),
                "candidates": [{"label": j, "key": key, "p": c} for j, key, c in zip(shown, keys, given, strict=True)],
            }  # fmt: skip
            if own is not None and (top := tops[i]) not in inside:
                key = OUTSIDE_KEY if self.fixed_keys is None else self.fixed_keys[top]
                card["outside"] = {"label": top, "key": key, "p": round(own[top], 4)}
            if networks is not None:
                card["networks"] = networks[i]
            if self.x is not None and self.x.ndim == 1:
                card["text"] = str(self.x[row] or "")[:MOST_TEXT]
            elif self.x is not None and not self.has_images:
                values = self.x[row].reshape(-1)
                card["features"] = [f"{value:.4g}" for value in values[:FEATURES]]
                card["features_more"] = max(0, len(values) - FEATURES)
            cards.append(card)
        return cards

    def _probability(self, row: int, label: int) -> float | None:
        result = self.result
        if result.probabilities is not None:
            return round(float(result.probabilities[row, label]), 4)
        return round(float(result.confidence[row]), 4) if label == result.labels[row] else None

    def all_classes(self, row: int) -> list[dict[str, Any]]:
        """All classes for the dialogue: those outside the set first, each group by probability."""
        inside, p = self.examples.candidates[row], self.result.probabilities
        keys: list[NDArray[Any]] = [np.arange(len(self.classes)), inside]
        if p is not None:
            keys.insert(1, -p[row].astype(np.float32))
        return [
            {"label": j, "p": self._probability(row, j), "inside": bool(inside[j])} for j in np.lexsort(keys).tolist()
        ]

    @cached_property
    def has_small_images(self) -> bool:
        """Whether encoding an image takes less time than handing it to a thread."""
        return isinstance(self.x, np.ndarray) and self.x[0].size <= 64 * 64

    def _encode(self, row: int) -> bytes:
        assert self.x is not None
        return png(np.asarray(self.x[row], np.uint8), SIDE)

    def large_png(self, row: int) -> bytes:
        """The picture as large as it is worth."""
        assert self.x is not None
        pixels = self.x.at(row, LARGE) if isinstance(self.x, ImageFiles) else np.asarray(self.x[row], np.uint8)
        return png(pixels, LARGE)


def network_cards(networks: NetworkLabels, rows: NDArray[np.int64]) -> list[list[dict[str, Any]]]:
    """For each of these examples and each network: its label, selection, and last predictions."""
    values: dict[str, Any] = {
        "label": networks.labels[:, rows], "confidence": networks.confidence[:, rows].round(4).astype(float).round(4),
        "selected": networks.selected[:, rows].astype(bool),
    }  # fmt: skip
    if networks.epochs_selected is not None:
        values["epochs"] = networks.epochs_selected[:, rows]
    if networks.past_labels is not None:
        values["past"] = networks.past_labels[:, :, rows].transpose(0, 2, 1)  # [v, rows, t], oldest first
    lists = {name: array.tolist() for name, array in values.items()}
    count = range(len(networks.labels))
    return [[{name: found[v][i] for name, found in lists.items()} for v in count] for i in range(len(rows))]


# --- which examples are on a page of the grid, by filter and order --------------------------------------------------

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


class ExampleSearch:
    """ExampleSearch in examples that stay the same; only the decisions about them change."""

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


# --- loading a finished run -----------------------------------------------------------------------------------------

SECONDS = 20.0  # limit for computing the probabilities at the start
MOST_ENTRIES = 1 << 29  # of the table of probabilities, two bytes each


def load_cards(run: Path) -> Cards:
    """Load a finished run. Images, probabilities and history may be missing; a note says so."""
    folder, path = RunFolder(run), run / "labels.csv"
    config, examples = folder.read_config(), folder.training_set()
    result = Result.load(run, examples)
    if result is None:
        raise UserError(
            f"{run} has no labels.csv yet; finish the run, or write it with: crosel labels {run} --out {path}"
        )
    if (result.labels < 0).any() or not np.isfinite(result.confidence).all():
        raise UserError(f"{path}: not the labels of this run; write them again with: crosel labels {run} --out {path}")
    notes: list[str] = []
    x, p = None, result.probabilities
    if p is None:
        p = _exported_probabilities(run, examples)
    if p is None:
        try:
            session = load_run(run, pick_device("auto"))
        except (UserError, OSError) as error:  # data have moved, the network is custom code, no checkpoint
            notes.append(f"no probabilities: {error}")
        else:
            data = session.data
            x = data.x if data.originals is None else data.originals
            x = _own_files(config, examples) or x
            p = compute_probabilities(session, SECONDS, run, notes)
    if x is None:
        x = _inputs_or_note(config, examples, notes)
    about = f"{find_method(config.method.name).title} on {Path(config.source).name}"
    return Cards(replace(result, probabilities=p), x, run.resolve().name, about, notes)


def _inputs_or_note(config: RunConfig, examples: TrainingSet, notes: list[str]) -> Any:
    try:
        x = training_inputs(config, examples)
    except (UserError, OSError) as error:
        notes.append(f"there are no images: {one_line(error)}")
        return None
    if x is None:
        notes.append("the training data have changed since, so there are no images")
        return None
    return _own_files(config, examples) or x


def _own_files(config: RunConfig, examples: TrainingSet) -> ImageFiles | None:
    """The files of a run on images, where ids are their paths: people see them in their own size and shape."""
    source = Path(locate(config.source, config.data_folder))
    if len(examples.shape) != 3 or examples.given_ids is None or not ends_as_image(examples.given_ids[0]):
        return None
    inputs = Path(config.data.inputs or source)
    root = inputs if inputs.is_dir() else image_root(config.data, inputs)
    paths = [root / name for name in examples.given_ids]
    return ImageFiles(paths) if all(map(os.path.isfile, paths)) else None


def _exported_probabilities(run: Path, examples: TrainingSet) -> NDArray[np.float16] | None:
    """Those that `crosel labels RUN --out RUN/labels.npz` wrote, if the run itself had too many to save."""
    found = load_arrays(run / "labels.npz", EXPORTED, dict(zip("nk", examples.candidates.shape, strict=True)))
    p: NDArray[Any] | None = found.get("pred_probs")
    if p is None:
        return None
    return p.astype(np.float16) if np.array_equal(found.get("candidates", ()), examples.candidates) else None


@torch.no_grad()
def compute_probabilities(session: Session, seconds: float, run: Path, notes: list[str]) -> NDArray[np.float16] | None:
    """All probabilities, or None if that would take longer than `seconds`; a note says how to compute them."""
    n, k = session.data.n, len(session.data.classes)
    if n * k > MOST_ENTRIES:
        notes.append(f"only the given label has its probability: a table of {n:,} by {k:,} is too large")
        return None
    out = np.empty((n, k), np.float16)
    began = time.monotonic()
    for start, outputs in predict_chunks(session, session.data.x):
        end = start + outputs.shape[1]
        out[start:end] = session.method.combine(outputs).cpu().numpy()
        needed = (time.monotonic() - began) * n / end
        if end < n and needed > seconds:
            notes.append(
                f"only the given label has its probability: the others would take about {needed / 60:.0f} min here; "
                f"to compute them once: crosel labels {run} --out {run}/labels.npz"
            )
            return None
    return out
