"""Loading a finished run for the page."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data.images import ImageFiles, ends_as_image
from crosel.data.sources import locate
from crosel.data.table import image_root
from crosel.errors import UserError
from crosel.methods.base import find_method
from crosel.review.cards import Cards
from crosel.runs.folder import RunFolder, load_run, training_inputs
from crosel.runs.result import EXPORTED, Result, TrainingSet, load_arrays
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks

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
    except (UserError, OSError):
        notes.append("the training data have been moved or removed, so there are no images")
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
