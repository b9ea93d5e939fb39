"""Measuring a finished run, on its own data or on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crosel.config import build_config
from crosel.data import load
from crosel.data.dataset import LABELS_UNUSED, Array, brightest
from crosel.data.formats import InputSpec
from crosel.data.settings import MAX_SIDE
from crosel.data.sources import settings_to_evaluate
from crosel.data.store import Examples
from crosel.errors import UserError
from crosel.runs.folder import load_run
from crosel.runs.predict import warn_of_dark
from crosel.training import metrics
from crosel.training.build import open_encoder
from crosel.training.session import Session
from crosel.training.trainer import accuracies, predicted_probabilities, selection_accuracy
from crosel.utils.text import some_of


def evaluate_run(
    run: Path,
    source: str | None,
    data_dir: Path | None,
    device: torch.device,
    trust_code: bool = False,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Accuracy on the run's test set, and what its training set tells; or accuracy on another source's examples, which
    are read by the run's settings and, over these, by `settings` (NAME=VALUE)."""
    _check_settings(settings, source)
    session = load_run(run, device, trust_code, data_dir=data_dir, needs_data=source is None)
    result: dict[str, Any] = {"epoch": session.progress.epoch, "method": session.config.method.name}
    if source is not None:
        x, y = _examples_of(source, session, data_dir, settings)
        return result | {"examples": len(x)} | accuracies(session, x, y)
    if session.data.x_test is not None and session.data.y_test is not None:
        result |= {"examples": len(session.data.x_test)}
        result |= accuracies(session, session.data.x_test, session.data.y_test)
    return result | training_metrics(session)


def _check_settings(settings: Sequence[str], source: str | None) -> None:
    for setting in settings:
        if source is None:
            raise UserError(f"--set {setting}: says how to read another source; give that source")
        if not setting.strip().startswith("data."):
            raise UserError(f"--set {setting}: the run is as it was trained; set only how {source} is read (data.…)")


def _examples_of(
    source: str, session: Session, data_dir: Path | None, settings: Sequence[str]
) -> tuple[Examples, Array]:
    """Examples of another source, with true labels, that the run can be asked about: its test set, if it has one."""
    same: dict[str, Any] = {"test_share": 0.0, "own_test": True, "inputs": None, "classes": session.data.classes}
    if session.data.is_image:  # files of images are brought to the run's size and mode, whatever it was trained from
        channels, height, _ = session.data.shape
        same |= {"image_size": min(height, MAX_SIDE), "image_mode": "L" if channels == 1 else "RGB"}
    encoder = open_encoder(session.config, session.device)
    spec = InputSpec(session.data.shape, session.data.columns, encoder=encoder)
    own = settings_to_evaluate(source, data_dir, session.config.data.model_copy(update=same), spec)
    base = session.config.model_copy(update={"data": own})
    other = load(source, data_dir, build_config(base=base.model_dump(), settings=settings).data, encoder=encoder)
    if other.columns is not None:  # features in the order of training, where both have names for them
        order = spec.order(other.columns, source)
        other = replace(other, x=other.x[:, order], x_test=None if other.x_test is None else other.x_test[:, order])
    if other.shape != session.data.shape:
        raise UserError(
            f"{source} has examples of shape {other.shape}, but the run was trained on {session.data.shape}; "
            "give examples of that shape"
        )
    x, y = (other.x_test, other.y_test) if other.x_test is not None else (other.x, other.y)
    if x is None or y is None:
        why = next((note for note in other.notes if note.endswith(LABELS_UNUSED)), None)
        if why is not None:
            raise UserError(f"{source}: {why.removesuffix(LABELS_UNUSED)}fill them in, or leave these examples out")
        what = "for every example (a column 'label', or an array y)"
        raise UserError(f"{source} has no true labels {what}; to get labels for it, use crosel predict")
    # A file may have the classes in another order, or lack some.
    ours = {name: j for j, name in enumerate(session.data.classes)}
    unknown = [name for name in other.classes if name not in ours]
    if unknown:
        raise UserError(
            f"{source} has classes that the run does not know: {some_of(unknown, 8)}; "
            f"it knows {some_of(session.data.classes, 8)}; give the names of training (in an npz file: 'classes')"
        )
    warn_of_dark(session, brightest(x), source)
    return x, np.array([ours[name] for name in other.classes])[y]


def training_metrics(session: Session) -> dict[str, float | int]:
    """What the training set itself says, with the method's selection where it has one."""
    p, sets = predicted_probabilities(session, session.data.x), session.method.candidates.cpu()
    predicted = metrics.predictions_per_class(p.numpy(), sets.numpy())
    out: dict[str, float | int] = {
        "covering_rate": float(metrics.covering_rate(p, sets)),
        "approximated_accuracy": float(metrics.approximated_accuracy(p, sets)),
        "classes_hardly_predicted": len(metrics.rarely_predicted(predicted, sets.numpy())),
    }
    chosen = session.method.training_labels()
    if chosen is not None:
        out["selection_ratio"] = float(chosen.selected.float().mean())
    return out | selection_accuracy(session, chosen)
