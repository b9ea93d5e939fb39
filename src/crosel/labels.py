"""The training set's labels, cleaned: one row an example."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.data import Dataset
from crosel.errors import UserError
from crosel.files import atomic_write, atomic_write_with
from crosel.methods.base import Method, TrainingLabels
from crosel.session import Session
from crosel.train import predict_chunks

COLUMNS = ("id", "label", "confidence", "selected", "candidates", "flag")
UNSURE_BELOW = 0.5  # for methods that do not select: a label with less confidence than this is `unsure`


@dataclass(frozen=True)
class LabelTable:
    """Label (always inside the candidate set), confidence, how many networks selected it, and a flag, by row."""

    data: Dataset
    labels: NDArray[np.int64]
    confidence: NDArray[np.float32]
    probabilities: NDArray[np.float32]  # [n, k], unrestricted
    selected: NDArray[np.int64] | None  # number of networks that selected the example; None: method does not select
    networks: int
    flags: list[str]

    def selected_word(self, row: int) -> str:
        if self.selected is None:
            return ""
        count = int(self.selected[row])
        return "neither" if count == 0 else "both" if count == 2 else "one"

    def rows(self) -> Any:
        classes, sets = self.data.classes, self.data.candidates
        assert sets is not None
        for i in range(self.data.n):
            yield (
                self.data.example_id(i), classes[self.labels[i]], float(self.confidence[i]), self.selected_word(i),
                [classes[j] for j in np.flatnonzero(sets[i])], self.flags[i],
            )  # fmt: skip


def flag_rows(chosen: TrainingLabels | None, sets: Any, outputs_argmax: Any, confidence: Any) -> list[str]:
    """`outside`: all networks are stable and confident about one label that is not in the set. `disputed`: the
    networks predict different labels. `unsure`: no network selected the example (or the confidence is low)."""
    n = len(confidence)
    disputed = (outputs_argmax != outputs_argmax[0]).any(axis=0)
    if chosen is None:
        outside, unsure = np.zeros(n, bool), confidence < UNSURE_BELOW
    else:
        labels, stable = chosen.labels.cpu().numpy(), chosen.stable.cpu().numpy()
        inside = sets[np.arange(n), np.maximum(labels[0], 0)]
        outside = stable.all(axis=0) & (labels == labels[0]).all(axis=0) & (labels[0] >= 0) & ~inside
        unsure = ~chosen.selected.cpu().numpy().any(axis=0)
    return [
        "outside" if o else "disputed" if d else "unsure" if u else ""
        for o, d, u in zip(outside, disputed, unsure, strict=True)
    ]


def label_table(session: Session) -> LabelTable:
    """One pass over the training set; the label is the most probable one inside the candidate set."""
    method: Method = session.method
    sets = session.data.candidates
    assert sets is not None
    probabilities, guesses = [], []
    for _, outputs in predict_chunks(session, session.data.x):
        probabilities.append(method.combine(outputs).cpu())
        guesses.append(outputs.argmax(dim=2).cpu())
    p = torch.cat(probabilities)
    inside = p.masked_fill(~torch.from_numpy(sets), -1.0)
    confidence, labels = inside.max(dim=1)
    chosen = method.training_labels()
    flags = flag_rows(chosen, sets, torch.cat(guesses, dim=1).numpy(), confidence.numpy())
    selected = None if chosen is None else chosen.selected.sum(dim=0).cpu().numpy()
    return LabelTable(session.data, labels.numpy(), confidence.numpy(), p.numpy(), selected, len(guesses[0]), flags)


def write_labels(table: LabelTable, path: Path) -> None:
    """Write csv, jsonl or npz, by the file's ending."""
    if path.suffix == ".csv":
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, label, confidence, selected, candidates, flag in table.rows():
            writer.writerow([name, label, f"{confidence:.6f}", selected, "|".join(candidates), flag])
        atomic_write(path, stream.getvalue())
    elif path.suffix == ".jsonl":
        lines = (json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) for row in table.rows())
        atomic_write(path, "".join(line + "\n" for line in lines))
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = {
            "ids": np.array([table.data.example_id(i) for i in range(table.data.n)]), "labels": table.labels,
            "confidence": table.confidence, "pred_probs": table.probabilities, "flags": np.array(table.flags),
            "classes": np.array(table.data.classes), "candidates": table.data.candidates,
        }  # fmt: skip
        if table.selected is not None:
            arrays["selected"] = table.selected
        atomic_write_with(path, lambda stream: np.savez_compressed(stream, **arrays))
    else:
        raise UserError(f"{path}: labels are written as .csv, .jsonl or .npz; give the file one of these endings")


def write_selection(session: Session, path: Path) -> None:
    """Last epoch's selection of each network: labels, confidence and mask, [v, n]."""
    chosen = session.method.training_labels()
    if chosen is not None:
        arrays: dict[str, Any] = {
            "labels": chosen.labels.to(torch.int32).cpu().numpy(), "confidence": chosen.confidence.cpu().numpy(),
            "mask": chosen.selected.cpu().numpy(),
        }  # fmt: skip
        atomic_write_with(path, lambda stream: np.savez_compressed(stream, **arrays))
