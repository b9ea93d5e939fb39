"""Reading a finished run for the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.errors import UserError
from crosel.methods.base import find_method
from crosel.report.gather import labels_by_columns, training_inputs
from crosel.review.examples import Array, Examples
from crosel.runs.folder import RunFolder, load_run
from crosel.runs.labels import FLAGS
from crosel.runs.outcome import read_archive, read_predictions, read_selection
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks

SECONDS = 20.0  # what computing the probabilities may take at the start
CELLS = 1 << 29  # entries of the table of probabilities, two bytes each


def load_examples(run: Path) -> Examples:
    """Read a finished run. What only helps (pictures, probabilities, history) may be missing; a note says so."""
    folder = RunFolder(run)
    config, saved = folder.read_config(), folder.read_candidates()
    path = folder / "labels.csv"
    labels = labels_by_columns(path, saved.classes, len(saved.candidates))
    if labels is None:
        raise UserError(
            f"{run} has no labels.csv yet; finish the run, or write it with: crosel labels {run} --out {path}"
        )
    if (labels.labels < 0).any() or not np.isfinite(labels.confidence).all():
        raise UserError(f"{path}: not the labels of this run; write them again with: crosel labels {run} --out {path}")
    about = f"{find_method(config.method.name).title} on {Path(config.source).name}"
    flags = np.array([FLAGS.index(flag) for flag in labels.flags], np.int8)
    examples = Examples(
        run.resolve().name, about, saved.ids, saved.classes, saved.candidates, labels.labels,
        labels.confidence.astype(np.float32), labels.selected, flags, saved.fingerprint,
        selection=read_selection(folder / "selection.npz", len(saved.candidates)), columns=saved.columns or (),
    )  # fmt: skip
    examples.probabilities = _saved_probabilities(folder, examples)
    if examples.probabilities is None:
        try:
            session = load_run(run, pick_device("auto"), say=examples.notes.append)
        except (UserError, OSError) as error:  # moved data, a network of the user's own, no checkpoint left
            examples.notes.append(f"no probabilities: {error}")
        else:
            examples.x = session.data.x
            examples.probabilities = compute_probabilities(session, SECONDS, run, examples.notes)
            return examples
    examples.x = _inputs(config, examples)
    return examples


def _inputs(config: RunConfig, examples: Examples) -> Array | None:
    try:
        x = training_inputs(config, examples.version)
    except (UserError, OSError):
        examples.notes.append("the training data are no longer where they were, so there are no pictures")
        return None
    if x is None:
        examples.notes.append("the training data have changed since, so there are no pictures")
    return x


def _saved_probabilities(folder: RunFolder, examples: Examples) -> NDArray[np.float16] | None:
    """A finished run keeps them; so does `crosel labels RUN --out RUN/labels.npz`, for very many classes."""
    kept = read_predictions(folder / "predictions.npz", *examples.sets.shape).train
    if kept is not None:
        return kept
    labels = read_archive(folder / "labels.npz")
    probabilities: NDArray[Any] | None = labels.get("pred_probs")
    if probabilities is None or probabilities.shape != examples.sets.shape:
        return None
    return probabilities.astype(np.float16) if np.array_equal(labels.get("candidates", ()), examples.sets) else None


@torch.no_grad()
def compute_probabilities(session: Session, seconds: float, run: Path, notes: list[str]) -> NDArray[np.float16] | None:
    """All of them, or None when that would take longer than `seconds`; a note then says how to have them."""
    n, k = session.data.n, len(session.data.classes)
    if n * k > CELLS:
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
