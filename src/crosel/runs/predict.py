"""A finished run in use: predictions (what a format reads in, csv or jsonl out, chunk by chunk) and measuring."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from crosel.config import build_config
from crosel.data import load
from crosel.data.dataset import LABELS_UNUSED, Array, brightest
from crosel.data.formats import Chunk, InputSpec
from crosel.data.settings import MAX_SIDE
from crosel.data.sources import open_inputs, settings_to_evaluate
from crosel.data.store import Examples
from crosel.errors import UserError
from crosel.runs.folder import load_run
from crosel.training import metrics
from crosel.training.build import open_encoder
from crosel.training.session import Session
from crosel.training.trainer import accuracies, predict_chunks, predicted_probabilities, selection_accuracy
from crosel.utils.files import atomic_write_with, new_folder, refuse_overwrite
from crosel.utils.text import csv_line, some_of

logger = logging.getLogger(__name__)
OnPredictions = Callable[[int], None]  # called with the number of predictions so far


def predict_file(
    run: Path,
    source: Path,
    out: Path,
    top: int,
    device: torch.device,
    trust_code: bool = False,
    progress: OnPredictions | None = None,
) -> int:
    """Write the `top` labels of each example, with their probabilities, to csv or jsonl; return how many examples."""
    suffix = out.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise UserError(f"{out}: predictions are written as .csv or .jsonl; use one of these endings")
    refuse_overwrite(out, source)
    session = load_run(run, device, trust_code, needs_data=False)
    refuse_overwrite(out, session.config.source, session.config.data.inputs)
    top = min(top, len(session.data.classes))
    line = _csv_row if suffix == ".csv" else _json_row
    count, brightest = 0, 0

    def write(stream: IO[bytes]) -> None:
        nonlocal count, brightest
        if suffix == ".csv":
            more = [f"{word}_{rank}" for rank in range(2, top + 1) for word in ("label", "confidence")]
            stream.write(csv_line(["id", "label", "confidence", *more]))
        data, root = session.data, session.config.data.image_root
        spec = InputSpec(
            data.shape, data.columns, Path(root) if root else None, session.config.data.resize,
            open_encoder(session.config, device),
        )  # fmt: skip
        for chunk in open_inputs(source, spec):
            for name, pairs in _predictions(session, chunk, top):
                stream.write(line(name, pairs))
            count += len(chunk.x)
            brightest = max(brightest, int(chunk.x.max())) if session.data.is_image else 0
            if progress is not None:
                progress(count)

    with new_folder(out.parent):
        atomic_write_with(out, write)
    if source.suffix.lower() == ".npz":
        warn_of_dark(session, brightest, source)
    return count


def warn_of_dark(session: Session, brightest: int, source: object) -> None:
    """Numbers of images are on one of two scales. Digits in 0..16, say, are on neither: black to the networks."""
    usual = 255 * float(session.normalise.mean.max())
    if session.data.is_image and brightest < usual / 2:
        logger.warning(
            f"{source}: no pixel is above {brightest} of 255, and those of training are {usual:.0f} on average; "
            "unless these images really are dark, scale x to 0..255 or 0..1"
        )


def _predictions(session: Session, chunk: Chunk, top: int) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    classes = session.data.classes
    for start, outputs in predict_chunks(session, chunk.x):
        best, order = session.method.combine(outputs).topk(top, dim=1)
        for row, (values, labels) in enumerate(zip(best.tolist(), order.tolist(), strict=True)):
            yield chunk.ids[start + row], [(classes[j], p) for j, p in zip(labels, values, strict=True)]


def _csv_row(name: str, pairs: list[tuple[str, float]]) -> bytes:
    return csv_line([name, *(cell for label, p in pairs for cell in (label, f"{p:.6f}"))])


def _json_row(name: str, pairs: list[tuple[str, float]]) -> bytes:
    top = [{"label": label, "probability": p} for label, p in pairs]
    row = {"id": name, "label": pairs[0][0], "confidence": pairs[0][1], "top": top}
    # A file name that is no text has half characters, which JSON can hold as \udXXX but UTF-8 cannot.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


# --- measuring a finished run, on its own data or on others ---------------------------------------------------------


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
