"""Predicting with a finished run: what a format reads in, csv or jsonl out, chunk by chunk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from crosel.data.formats import Chunk, InputSpec
from crosel.data.sources import open_inputs
from crosel.errors import UserError
from crosel.runs.folder import load_run
from crosel.training.build import open_encoder
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks
from crosel.utils.files import atomic_write_with, new_folder, refuse_overwrite
from crosel.utils.text import csv_line

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
