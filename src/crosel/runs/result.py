"""What a run says about its training examples: in memory, and as files of the run folder.

A finished run makes its `Result` once; labels, report, review page and estimators use it as it is. Of the files only
`candidates.npz` and `labels.csv` must be there: what else is missing or damaged is left out.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.data import Dataset
from crosel.data.candidates import row_chunks
from crosel.errors import UserError
from crosel.methods.bank import agreed_labels, label_is_candidate
from crosel.methods.base import TrainingLabels
from crosel.runs.folds import drawn_at_random
from crosel.runs.label_error import (
    LabelError,
    OutOfSample,
    answers_outside,
    confidence_temperature,
    estimate_label_error,
    judged_by,
    within_sets,
)
from crosel.runs.labels import FLAGS, SELECTED, read_labels, write_labels
from crosel.runs.missing_truth import missed_labels
from crosel.training.metrics import predictions_per_class, rarely_predicted
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks, predicted_probabilities
from crosel.utils.files import atomic_write, atomic_write_with
from crosel.utils.reading import ArraySpec, load_json, read_arrays, read_run_text
from crosel.utils.system import check_bytes
from crosel.utils.text import one_line, some_of

logger = logging.getLogger(__name__)

RESTORE = "restore the file, or train again with another --out"
_BYTES_PER_EXAMPLE = 1000  # its id, its label, its row of a table or a page
_MOST = {"v": len(SELECTED) - 1, "t": 10_000}  # networks, and epochs that a bank remembers
NAMED = 3  # classes that a line about lost ones names before it counts
UNSURE_BELOW = 0.5  # for methods that do not select: a label with less confidence than this is `unsure`
SAVED_ENTRIES = 1 << 26  # of a table of probabilities, two bytes each; a larger one is not saved


@dataclass(frozen=True)
class TrainingSet:
    """The training examples without their inputs, and what identifies those inputs (`candidates.npz`)."""

    classes: tuple[str, ...]
    candidates: NDArray[np.bool_]  # [n, k]
    shape: tuple[int, ...]  # of an example
    fingerprint: str  # of the inputs
    truth: NDArray[np.int64] | None = None
    given_ids: Sequence[str] | None = None  # None: 0, 1, 2, …
    columns: tuple[str, ...] | None = None  # names of the features, where the data name them
    corrected: NDArray[np.int64] | None = None  # rows whose sets are corrections, not the source's own

    @classmethod
    def of(cls, data: Dataset, corrected: Sequence[int] = ()) -> TrainingSet:
        assert data.candidates is not None
        return cls(
            data.classes, data.candidates, data.shape, data.fingerprint, data.y, data.ids, data.columns,
            np.array(corrected, np.int64),
        )  # fmt: skip

    @property
    def n(self) -> int:
        return len(self.candidates)

    def example_id(self, row: int) -> str:
        return str(row) if self.given_ids is None else self.given_ids[row]

    @property
    def ids(self) -> list[str]:
        return list(map(str, range(self.n))) if self.given_ids is None else list(self.given_ids)

    def take(self, rows: NDArray[np.int64]) -> TrainingSet:
        """The same examples in another order."""
        ids = [self.example_id(row) for row in rows.tolist()]
        return replace(
            self, candidates=self.candidates[rows], truth=_rows(self.truth, rows), given_ids=ids, corrected=None
        )

    def save(self, path: Path) -> None:
        _save_arrays(path, {
            "candidates": self.candidates, "classes": self.classes, "shape": self.shape, "data": self.fingerprint,
            "corrected": self.corrected, "y": self.truth, "ids": self.given_ids, "columns": self.columns,
        })  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> TrainingSet:
        try:
            found = read_arrays(path, _TRAINING_SET)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {RESTORE}") from None
        except UserError as error:
            raise UserError(f"{error}; {RESTORE}") from None
        missing = [name for name in _REQUIRED if name not in found]
        if missing:
            raise UserError(f"{path}: cannot be read (it has no {missing[0]}); {RESTORE}")
        y, ids, columns = (found.get(name) for name in ("y", "ids", "columns"))
        shape = tuple(map(int, found["shape"]))
        if len(shape) not in (1, 3):
            raise UserError(f"{path}: cannot be read (examples of shape {list(shape)}); {RESTORE}")
        check_bytes(4 * math.prod(shape), "an example", path)
        n, k = found["candidates"].shape
        check_bytes(n * (_BYTES_PER_EXAMPLE + 16 * k), f"what is known of {n} examples", path)
        return cls(
            tuple(map(str, found["classes"])), found["candidates"], shape, str(found["data"]),
            truth=None if y is None else y.astype(np.int64),
            given_ids=None if ids is None else tuple(map(str, ids)),
            columns=None if columns is None else tuple(map(str, columns)), corrected=found["corrected"],
        )  # fmt: skip


@dataclass(frozen=True)
class NetworkLabels:
    """What each network says after the last epoch, [v, n], and what came before (`selection.npz`)."""

    labels: NDArray[np.int32]
    confidence: NDArray[np.float32]
    selected: NDArray[np.bool_]
    epochs_selected: NDArray[np.int32] | None = None
    past_labels: NDArray[np.int32] | None = None  # [v, t, n], newest last; -1: not seen
    past_confidence: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, chosen: TrainingLabels) -> NetworkLabels:
        tensors = (
            chosen.labels.to(torch.int32), chosen.confidence, chosen.selected, chosen.epochs_selected,
            chosen.past_labels, chosen.past_confidence,
        )  # fmt: skip
        return cls(*(None if tensor is None else tensor.cpu().numpy() for tensor in tensors))  # type: ignore[arg-type]

    def take(self, rows: NDArray[np.int64]) -> NetworkLabels:
        return NetworkLabels(*(None if a is None else a[..., rows] for a in vars(self).values()))  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        _save_arrays(path, {
            "labels": self.labels, "confidence": self.confidence, "mask": self.selected,
            "epochs": self.epochs_selected, "past_labels": self.past_labels, "past_confidence": self.past_confidence,
        })  # fmt: skip

    @classmethod
    def load(cls, path: Path, n: int, k: int) -> NetworkLabels | None:
        found = load_arrays(path, _SELECTION, {"n": n, "k": k})
        labels, confidence, mask = (found.get(name) for name in ("labels", "confidence", "mask"))
        if labels is None or confidence is None or mask is None or not len(labels):
            return None
        epochs, past, sure = (found.get(name) for name in ("epochs", "past_labels", "past_confidence"))
        if past is None or sure is None:
            past = sure = None
        return cls(labels, confidence, mask, epochs, past, sure)


@dataclass(frozen=True)
class Result:
    """Labels of the training set, one row per example, and how sure they are."""

    examples: TrainingSet
    labels: NDArray[np.int64]  # always a candidate; read from a file, -1 for a name that is not among the classes
    confidence: NDArray[np.float32]
    flags: NDArray[np.int8]  # positions in FLAGS
    selected: NDArray[np.int64] | None = None  # by how many networks; None: the method does not select
    networks: NetworkLabels | None = None  # None: the method does not select, or the file is not there
    probabilities: NDArray[np.floating] | None = None  # [n, k], of all classes
    predicted: NDArray[np.int64] | None = None  # [k]: for how many examples whose set holds it, a class is predicted
    outside_labels: NDArray[np.int64] | None = None  # what the set seems to miss, otherwise -1; labels.csv has no such
    test_probabilities: NDArray[np.float16] | None = None
    test_truth: NDArray[np.int64] | None = None
    error: LabelError | None = None  # what can be said of wrong labels; None: not judged out of sample

    @classmethod
    def of(
        cls,
        session: Session,
        outside_gamma: float | None = None,
        with_test: bool = False,
        out_of_sample: OutOfSample | None = None,
    ) -> Result:
        """Label the training set in one pass; a label is the most probable one inside the candidate set.

        `outside_gamma` replaces the run's own threshold for the flag `outside`. It needs no training: the run keeps its
        history. `with_test` predicts the test set, too, where there is one that is not too large. `out_of_sample` are
        probabilities by networks that did not train on the example (`runs.folds`): if they are there, labels,
        confidence and flags come from them.
        """
        examples, data = TrainingSet.of(session.data), session.data
        chosen = _training_labels(session, outside_gamma, out_of_sample is not None)
        parts, guesses = [], []
        for _, outputs in predict_chunks(session, data.x):
            parts.append(session.method.combine(outputs).cpu())
            guesses.append(outputs.argmax(dim=2).cpu())
        probabilities = torch.cat(parts)
        inside = probabilities.masked_fill(~torch.from_numpy(examples.candidates), -1.0)
        confidence, labels = (found.numpy() for found in inside.max(dim=1))
        flags, outside = flag_rows(chosen, examples.candidates, torch.cat(guesses, dim=1).numpy(), confidence)
        test = None
        if with_test and data.x_test is not None and len(data.x_test) * len(data.classes) <= SAVED_ENTRIES:
            test = predicted_probabilities(session, data.x_test).half().numpy()
        p, error = probabilities.numpy(), None
        if out_of_sample is not None:
            asked = getattr(session.config.method, "outside_gamma", None) if outside_gamma is None else outside_gamma
            judged = judge(out_of_sample, session, labels, [FLAGS[flag] for flag in flags], asked)
            p, labels, confidence, flags, outside, error = out_of_sample.probabilities, *judged
        return cls(
            examples, labels, confidence, flags,
            selected=None if chosen is None else chosen.selected.sum(dim=0).cpu().numpy(),
            networks=None if chosen is None else NetworkLabels.of(chosen),
            probabilities=p, predicted=predictions_per_class(p, examples.candidates), outside_labels=outside,
            test_probabilities=test, test_truth=None if test is None else data.y_test, error=error,
        )  # fmt: skip

    def flag_names(self) -> list[str]:
        return [FLAGS[flag] for flag in self.flags]

    def to_check(self) -> tuple[int, str]:
        """How many labels have a flag, and how many have which: `2 outside, 7 disputed`."""
        counts = np.bincount(self.flags, minlength=len(FLAGS)).tolist()
        named = list(zip(counts, FLAGS, strict=True))[1:]
        return sum(counts[1:]), ", ".join(f"{count:,} {flag}" for count, flag in named if count)

    def selected_words(self) -> list[str]:
        """As labels.csv has them: how many networks selected each example; "" for methods that do not select."""
        if self.selected is None:
            return [""] * len(self.labels)
        return [SELECTED[min(count, 2)] for count in self.selected.tolist()]

    def warnings(self) -> list[str]:
        lines = [self.error.line()] if self.error is not None and self.error.is_serious else []
        if self.predicted is None:
            return lines
        return lines + rarely_predicted_warning(self.predicted, self.examples.candidates, self.examples.classes)

    def notes(self) -> list[str]:
        """What is no warning, but worth knowing."""
        return [self.error.line()] if self.error is not None and not self.error.is_serious else []

    @cached_property
    def within_set(self) -> NDArray[np.float32]:
        """How sure each label is among its candidates: [n]. Calibrated confidence is that already."""
        if self.error is not None or self.probabilities is None:
            return np.round(self.confidence, 6)  # as labels.csv has it
        return label_shares(self.probabilities, self.examples.candidates, self.labels)

    def doubtful_first(self) -> Result:
        """The same examples, ordered as the review page shows them."""
        rows = review_order(self.within_set, self.examples.candidates)
        return replace(
            self, examples=self.examples.take(rows), labels=self.labels[rows], confidence=self.confidence[rows],
            flags=self.flags[rows], selected=_rows(self.selected, rows), probabilities=_rows(self.probabilities, rows),
            networks=None if self.networks is None else self.networks.take(rows),
            outside_labels=_rows(self.outside_labels, rows),
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write labels.csv, selection.npz and predictions.npz; tables that would be too large are left out."""
        if self.networks is not None:
            self.networks.save(folder / "selection.npz")
        p = self.probabilities
        train = None if p is None or p.size > SAVED_ENTRIES else p.astype(np.float16)
        _save_arrays(folder / "predictions.npz", {
            "predicted": self.predicted, "train": train, "test": self.test_probabilities, "y_test": self.test_truth,
        })  # fmt: skip
        if self.error is not None:
            atomic_write(folder / "label_error.json", json.dumps(self.error.to_json(), indent=1) + "\n")
        write_labels(self, folder / "labels.csv")

    @classmethod
    def load(cls, folder: Path, examples: TrainingSet) -> Result | None:
        """None where there is no labels.csv: the run is not finished."""
        path = folder / "labels.csv"
        if not os.path.lexists(path):
            return None
        rows = read_labels(path, examples.n)
        if len(rows) != examples.n:
            raise UserError(
                f"{path}: {len(rows)} labels for {examples.n} examples; write it again with: "
                f"crosel labels RUN --out {path}"
            )
        number = {name: j for j, name in enumerate(examples.classes)}
        counts = {word: count for count, word in enumerate(SELECTED)}
        selects = any(row.selected for row in rows)
        return cls(
            examples,
            np.array([number.get(row.label, -1) for row in rows], np.int64),
            np.array([row.confidence for row in rows], np.float32),
            np.array([FLAGS.index(row.flag) for row in rows], np.int8),
            np.array([counts.get(row.selected, 0) for row in rows], np.int64) if selects else None,
            NetworkLabels.load(folder / "selection.npz", *examples.candidates.shape),
            error=_load_error(folder / "label_error.json"),
            **_load_predictions(folder / "predictions.npz", *examples.candidates.shape),
        )


def label_shares(
    probabilities: NDArray[np.floating], candidates: NDArray[np.bool_], labels: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The label's probability as a share of that of its candidates together: [n].

    Among all classes, sets with few candidates look surer than they are, and one candidate looks doubtful where the
    networks do not like it.
    """
    out = np.empty(len(labels), np.float32)
    for rows in row_chunks(*candidates.shape):
        # As predictions.npz has them, so that a run read back has the same order.
        p = probabilities[rows].astype(np.float16).astype(np.float32)
        sets = candidates[rows]
        total, own = np.where(sets, p, 0).sum(axis=1), p[np.arange(len(p)), labels[rows]]
        out[rows] = np.where(total > 0, own / np.maximum(total, 1e-30), 1 / sets.sum(axis=1))
    return out


def review_order(within_set: NDArray[np.float32], candidates: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rows in the order in which labels are worth a look: the least sure of their set first, sets of one last."""
    return np.lexsort((within_set, candidates.sum(axis=1) == 1))


def _training_labels(session: Session, outside_gamma: float | None, judged: bool) -> TrainingLabels | None:
    method = session.method
    if outside_gamma is None:
        return method.training_labels()
    if not 0 <= outside_gamma <= 1:
        raise UserError(f"--outside-gamma must lie between 0 and 1, not {outside_gamma:g}")
    chosen = method.training_labels(None if judged else outside_gamma)
    if chosen is None and not judged:
        raise UserError(
            f"{method.name} keeps no history, so it cannot find labels outside the sets; leave out --outside-gamma"
        )
    return chosen


def judge(
    found: OutOfSample,
    session: Session,
    trained: NDArray[np.int64],
    flags: list[str],
    gamma: float | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int8], NDArray[np.int64], LabelError]:
    """Labels, confidence, flags, labels outside the sets and what is wrong of all, by out-of-sample probabilities.

    `trained` and `flags` are what the networks say that trained on the examples. `gamma` is how sure an answer outside
    the set must be to be flagged; None: the data decide (`missing_truth`).
    """
    sets = session.data.candidates
    assert sets is not None
    probabilities, selects = found.probabilities, session.method.training_labels() is not None
    labels, confidence, error = judge_labels(found, sets, *drawn_at_random(session))
    if gamma is None:
        outside = missed_labels(probabilities, sets)
    else:
        temperature = confidence_temperature(probabilities, sets, error)
        answers = within_sets(probabilities, np.ones_like(sets), temperature)
        outside = np.where(answers_outside(answers, sets) & (answers.max(axis=1) >= gamma), answers.argmax(axis=1), -1)
    disputed = (np.array(flags) == "disputed") | (labels != trained)
    # Without a history, a low confidence is what makes a label unsure.
    unsure = np.array(flags) == "unsure" if selects else confidence < UNSURE_BELOW
    return labels, confidence, _flags(outside, disputed, unsure), outside, error


def judge_labels(
    found: OutOfSample, sets: NDArray[np.bool_], random_sets: bool = False, possible: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32], LabelError]:
    """Labels, the chance that each is right, and how many are wrong."""
    p, witness = found
    if witness is None:
        witness, error = p, estimate_label_error(p, sets, random_sets, possible)
        temperature = confidence_temperature(p, sets, error)
    else:
        error, temperature = judged_by(witness, p, sets)
    labels = np.where(sets, p, -1.0).argmax(axis=1)
    chances = within_sets(witness, sets, temperature)
    return labels, chances[np.arange(len(labels)), labels].astype(np.float32), error


def flag_rows(
    chosen: TrainingLabels | None,
    sets: NDArray[np.bool_],
    guesses: NDArray[np.int64],  # [v, n]: what each network predicts now
    confidence: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Flags, and the labels outside the sets (-1 where there is none).

    `outside`: all networks are stable and confident about one label that is not in the set. `disputed`: the
    networks predict different labels. `unsure`: no network selected the example (or the confidence is low).
    """
    disputed = (guesses != guesses[0]).any(axis=0)
    if chosen is None:
        outside, unsure = np.full(len(confidence), -1, np.int64), confidence < UNSURE_BELOW
    else:
        agreed = agreed_labels(chosen.labels, chosen.stable).long().cpu()
        outside = agreed.masked_fill(label_is_candidate(agreed, torch.from_numpy(sets)), -1).numpy()
        unsure = ~chosen.selected.any(dim=0).cpu().numpy()
    return _flags(outside, disputed, unsure), outside


def _flags(outside: NDArray[np.int64], disputed: NDArray[np.bool_], unsure: NDArray[np.bool_]) -> NDArray[np.int8]:
    names = np.select([outside >= 0, disputed, unsure], [FLAGS.index(f) for f in ("outside", "disputed", "unsure")])
    return names.astype(np.int8)


def rarely_predicted_warning(
    predicted: NDArray[np.int64], sets: NDArray[np.bool_], classes: Sequence[str]
) -> list[str]:
    """A line about the classes that are hardly predicted, where there are any."""
    found = rarely_predicted(predicted, sets)
    if not found:
        return []
    held = sets.sum(axis=0)
    names = [f"{classes[j]} ({predicted[j]:,} of {held[j]:,})" for j in found]
    names[0] = names[0].removesuffix(")") + " examples whose sets hold it)"
    lost = some_of(names, NAMED)
    return [f"hardly predicted: {lost}: lost in training, not learnt yet, or rare (docs: Lost classes)"]


# --- files --------------------------------------------------------------------------------------------------------


# Probabilities may be a little above 1: float16 rounds.
_TRAINING_SET = {
    "candidates": ArraySpec("b", "nk"), "classes": ArraySpec("U", "k"), "shape": ArraySpec("iu", "s", 1),
    "data": ArraySpec("U", ""), "corrected": ArraySpec("iu", "c", 0, "n"), "y": ArraySpec("iu", "n", 0, "k"),
    "ids": ArraySpec("U", "n"), "columns": ArraySpec("U", "d"),
}  # fmt: skip
_REQUIRED = ("candidates", "classes", "shape", "data", "corrected")
_SELECTION = {
    "labels": ArraySpec("iu", "vn", -1, "k"), "confidence": ArraySpec("f", "vn", 0, 1.001),
    "mask": ArraySpec("b", "vn"), "epochs": ArraySpec("iu", "vn", 0),
    "past_labels": ArraySpec("iu", "vtn", -1, "k"), "past_confidence": ArraySpec("f", "vtn", 0, 1.001),
}  # fmt: skip
_PREDICTIONS = {
    "predicted": ArraySpec("iu", "k", 0), "train": ArraySpec("f", "nk", 0, 1.001),
    "test": ArraySpec("f", "mk", 0, 1.001), "y_test": ArraySpec("iu", "m", 0, "k"),
}  # fmt: skip
EXPORTED = {"pred_probs": ArraySpec("f", "nk", 0, 1.001), "candidates": ArraySpec("b", "nk")}


def _rows(array: Any, rows: NDArray[np.int64]) -> Any:
    return None if array is None else array[rows]


def _save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    present = {name: array for name, array in arrays.items() if array is not None}
    atomic_write_with(path, lambda stream: np.savez_compressed(stream, **present))


def load_arrays(path: Path, specs: Mapping[str, ArraySpec], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The arrays of an npz file; none where it is not there, or cannot be used."""
    try:
        return read_arrays(path, specs, sizes, _MOST, leave_out=True)
    except FileNotFoundError:
        return {}
    except (OSError, UserError) as error:
        logger.warning(f"{one_line(error)}; going on without it")
        return {}


def _load_error(path: Path) -> LabelError | None:
    try:
        return LabelError.from_json(load_json(read_run_text(path)))
    except (OSError, UserError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _load_predictions(path: Path, n: int, k: int) -> dict[str, Any]:
    found = load_arrays(path, _PREDICTIONS, {"n": n, "k": k})
    train, test, truth, predicted = (found.get(name) for name in ("train", "test", "y_test", "predicted"))
    if test is None or truth is None or not len(test):
        test = truth = None
    return {"probabilities": train, "predicted": predicted, "test_probabilities": test, "test_truth": truth}
