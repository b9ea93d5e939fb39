"""What a report needs of a run folder, finished or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data import Dataset, with_classes_of
from crosel.errors import UserError
from crosel.methods.base import find_method
from crosel.runs.environment import hardware, read_environment
from crosel.runs.folder import RunFolder, load_data
from crosel.runs.labels import read_labels
from crosel.runs.outcome import Predictions, SavedSelection, read_predictions, read_selection
from crosel.training.callbacks import Row


@dataclass(frozen=True)
class Labels:
    """labels.csv by columns."""

    ids: list[str]
    labels: NDArray[np.int64]  # class number; -1 for a name that is not among the classes
    confidence: NDArray[np.float64]
    selected: list[str]  # "both", "one", "neither"; "" for methods that do not select
    flags: list[str]

    @property
    def selects(self) -> bool:
        return any(self.selected)


@dataclass(frozen=True)
class RunData:
    name: str
    path: Path
    config: RunConfig
    rows: list[Row]
    environment: dict[str, Any]
    classes: tuple[str, ...]
    sets: NDArray[np.bool_]  # [n, k]
    truth: NDArray[np.int64] | None
    labels: Labels | None  # None: the run is not finished
    selection: SavedSelection | None  # None: the method does not select, or the run is not finished
    predictions: Predictions
    fingerprint: str  # of the training inputs
    columns: tuple[str, ...]  # names of the features, where the run knows them

    @property
    def n(self) -> int:
        return len(self.sets)

    @property
    def set_sizes(self) -> NDArray[np.int64]:
        sizes: NDArray[np.int64] = self.sets.sum(axis=1)
        return sizes

    @property
    def method_title(self) -> str:
        return find_method(self.config.method.name).title

    @property
    def seconds(self) -> float:
        return sum(float(row.get("seconds", 0.0)) for row in self.rows)

    @property
    def is_complete(self) -> bool:
        return len(self.rows) >= self.config.train.epochs and self.labels is not None

    def last(self, key: str) -> float | None:
        """The newest finite value of a metric."""
        points = self.points(key)
        return points[-1][1] if points else None

    def points(self, key: str) -> list[tuple[float, float]]:
        """(epoch, value) wherever the metric has a finite value."""
        return [
            (float(row["epoch"]), float(row[key]))
            for row in self.rows
            if isinstance(row.get(key), int | float) and math.isfinite(row[key]) and "epoch" in row
        ]

    @property
    def source_name(self) -> str:
        return Path(self.config.source).name

    @property
    def device(self) -> str:
        return hardware(self.environment) or "?"

    @property
    def warm_up(self) -> int:
        """Epochs of warm-up, if something else came after them; otherwise 0."""
        epochs = sum(row.get("phase") == "warm-up" for row in self.rows)
        return epochs if epochs < len(self.rows) else 0


def gather(folders: Sequence[RunFolder]) -> list[RunData]:
    """Read all folders; runs of the same name are told apart by their whole path."""
    if not folders:
        raise UserError("a report needs at least one run folder")
    names = [folder.path.resolve().name for folder in folders]
    return [
        _read(folder, name if names.count(name) == 1 else str(folder.path))
        for folder, name in zip(folders, names, strict=True)
    ]


def _read(folder: RunFolder, name: str) -> RunData:
    config = folder.read_config(removed="tell")
    saved = folder.read_candidates()
    sets = saved.candidates
    return RunData(
        name, folder.path, config, folder.read_metrics(), read_environment(folder / "environment.json"),
        saved.classes, sets, saved.y, labels_by_columns(folder / "labels.csv", saved.classes, len(sets)),
        read_selection(folder / "selection.npz", len(sets)), read_predictions(folder / "predictions.npz", *sets.shape),
        saved.fingerprint, saved.columns or (),
    )  # fmt: skip


def labels_by_columns(path: Path, classes: tuple[str, ...], n: int) -> Labels | None:
    """None where the file is not there."""
    if not path.is_file():
        return None
    number = {name: j for j, name in enumerate(classes)}
    rows = read_labels(path)
    if len(rows) != n:
        raise UserError(
            f"{path}: {len(rows)} labels for {n} examples; write it again with: crosel labels RUN --out {path}"
        )
    return Labels(
        [row.id for row in rows],
        np.array([number.get(row.label, -1) for row in rows], np.int64),
        np.array([row.confidence for row in rows]),
        [row.selected for row in rows],
        [row.flag for row in rows],
    )


def training_inputs(config: RunConfig, fingerprint: str, data: Dataset | None = None) -> NDArray[Any] | None:
    """The training images [n, c, h, w] or features [n, d] of a run; None where they have changed since.

    What cannot be read at all is a UserError or an OSError.
    """
    if data is None:
        data = with_classes_of(load_data(config), config.candidates)
    return data.x if data.fingerprint == fingerprint else None
