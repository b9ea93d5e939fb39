"""A run as reports show it, finished or not: settings, metrics and result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.errors import UserError
from crosel.methods.base import find_method
from crosel.runs.environment import hardware, read_environment
from crosel.runs.folder import RunFolder
from crosel.runs.result import Result, TrainingSet
from crosel.training.callbacks import Row


@dataclass(frozen=True)
class Run:
    name: str
    path: Path
    config: RunConfig
    rows: list[Row]
    environment: dict[str, Any]
    examples: TrainingSet
    result: Result | None  # None: the run is not finished

    @classmethod
    def read(cls, folder: RunFolder, name: str, result: Result | None = None) -> Run:
        """Read a run from its folder; the result only if it is not given."""
        config = folder.read_config(removed="tell")
        examples = folder.training_set() if result is None else result.examples
        result = result or Result.load(folder.path, examples)
        environment = read_environment(folder / "environment.json")
        return cls(name, folder.path, config, folder.read_metrics(), environment, examples, result)

    @property
    def n(self) -> int:
        return self.examples.n

    @property
    def classes(self) -> tuple[str, ...]:
        return self.examples.classes

    @property
    def truth(self) -> NDArray[np.int64] | None:
        return self.examples.truth

    @property
    def set_sizes(self) -> NDArray[np.int64]:
        sizes: NDArray[np.int64] = self.examples.candidates.sum(axis=1)
        return sizes

    @property
    def method_title(self) -> str:
        return find_method(self.config.method.name).title

    @property
    def seconds(self) -> float:
        return sum(float(row.get("seconds", 0.0)) for row in self.rows)

    @property
    def is_complete(self) -> bool:
        return len(self.rows) >= self.config.train.epochs and self.result is not None

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
        """Epochs of warm-up, or 0 if nothing else followed."""
        epochs = sum(row.get("phase") == "warm-up" for row in self.rows)
        return epochs if epochs < len(self.rows) else 0


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """Read all folders; runs with the same name are named by their path."""
    if not folders:
        raise UserError("a report needs at least one run folder")
    names = [folder.path.resolve().name for folder in folders]
    return [
        Run.read(folder, name if names.count(name) == 1 else str(folder.path))
        for folder, name in zip(folders, names, strict=True)
    ]
