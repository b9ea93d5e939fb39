"""What a finished run says of every example, beside the labels: probabilities, selection, prediction history.

`selection.npz` and `predictions.npz` of a run folder: written at the end of a run, read by the report and the review
page. Both do without what is not there, so a damaged or missing file is no error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.runs.labels import LabelTable
from crosel.training.session import Session
from crosel.training.trainer import predicted_probabilities
from crosel.utils.files import atomic_write_with

CELLS = 1 << 26  # entries of a table of probabilities that is kept, two bytes each


@dataclass(frozen=True)
class SavedSelection:
    """Last epoch's labels, confidence and mask of each network, [v, n], and what came before."""

    labels: NDArray[np.int32]
    confidence: NDArray[np.float32]
    mask: NDArray[np.bool_]
    epochs: NDArray[np.int32] | None = None  # [v, n]: in how many epochs an example was selected
    past_labels: NDArray[np.int32] | None = None  # [v, t, n], newest last; -1: not seen
    past_confidence: NDArray[np.float32] | None = None

    @property
    def never(self) -> NDArray[np.bool_]:
        """Examples that no network ever selected (in the last epoch, where no more is known)."""
        ever = self.mask if self.epochs is None else self.epochs > 0
        return np.asarray(~ever.any(axis=0))


@dataclass(frozen=True)
class Predictions:
    """Class probabilities, half precision: of the training set, and of the test set with its true labels. And counts of
    predictions on the training set, which tables that are too large do not give."""

    train: NDArray[np.float16] | None = None  # [n, k]
    test: NDArray[np.float16] | None = None
    y_test: NDArray[np.int64] | None = None
    predicted: NDArray[np.int64] | None = None  # [k]: for how many examples whose set holds it, a class is predicted


# --- writing ------------------------------------------------------------------------------------------------------


def write_selection(session: Session, path: Path) -> None:
    """Nothing for methods that do not select."""
    chosen = session.method.training_labels()
    if chosen is None:
        return
    arrays: dict[str, Any] = {
        "labels": chosen.labels.to(torch.int32), "confidence": chosen.confidence, "mask": chosen.selected,
        "epochs": chosen.epochs_selected, "past_labels": chosen.past_labels, "past_confidence": chosen.past_confidence,
    }  # fmt: skip
    kept = {name: tensor.cpu().numpy() for name, tensor in arrays.items() if tensor is not None}
    atomic_write_with(path, lambda stream: np.savez_compressed(stream, **kept))


def write_predictions(session: Session, table: LabelTable, path: Path) -> None:
    """Tables that would be too large are left out."""
    data, arrays = session.data, dict[str, Any](predicted=table.predicted)
    if table.probabilities.size <= CELLS:
        arrays["train"] = table.probabilities.astype(np.float16)
    if data.x_test is not None and data.y_test is not None and len(data.x_test) * len(data.classes) <= CELLS:
        test = predicted_probabilities(session, data.x_test)
        arrays |= {"test": test.half().numpy(), "y_test": data.y_test}
    atomic_write_with(path, lambda stream: np.savez_compressed(stream, **arrays))


# --- reading ------------------------------------------------------------------------------------------------------


def read_archive(path: Path) -> dict[str, Any]:
    """The arrays of an npz file; none where it is not there, or damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception:  # zip, zlib and numpy each have their own errors
        return {}


def read_selection(path: Path, n: int) -> SavedSelection | None:
    found = read_archive(path)
    names = ("labels", "confidence", "mask")
    shapes = {found[name].shape for name in names if name in found}
    if not all(name in found for name in names) or len(shapes) != 1:
        return None
    shape = shapes.pop()
    if len(shape) != 2 or shape[1] != n:
        return None
    epochs, past, sure = (found.get(name) for name in ("epochs", "past_labels", "past_confidence"))
    if epochs is not None and epochs.shape != shape:
        epochs = None
    if past is None or sure is None or past.shape != sure.shape or past.ndim != 3 or past.shape[::2] != shape:
        past = sure = None
    return SavedSelection(found["labels"], found["confidence"], found["mask"], epochs, past, sure)


def read_predictions(path: Path, n: int, classes: int) -> Predictions:
    found = read_archive(path)
    train, test, y_test = found.get("train"), found.get("test"), found.get("y_test")
    if train is not None and train.shape != (n, classes):
        train = None
    if test is None or y_test is None or test.shape != (len(y_test), classes):
        test = y_test = None
    predicted = found.get("predicted")
    if predicted is not None and (predicted.shape != (classes,) or predicted.dtype.kind != "i"):
        predicted = None
    return Predictions(train, test, y_test, predicted)
