"""Find runs, and read of each what the tables need. Only the last epoch counts: nothing is chosen by the test set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from crosel.errors import UserError
from crosel.runs.environment import hardware, read_environment
from crosel.runs.folder import FREE_TO_CHANGE, RunFolder
from crosel.utils.settings import dotted, read_yaml, removed_settings

# Settings that do not decide what is learnt, or that have a place of their own in a RunSummary.
_ASIDE = {
    *FREE_TO_CHANGE,
    "seed",
    "source",
    "candidates",
    "method.name",
    "train.evaluate_every",
    "train.eval_batch_size",
}

_SPLIT = "data.split_seed"


@dataclass(frozen=True)
class RunSummary:
    """One run: what it was asked, and how it ended."""

    path: Path
    dataset: str
    rule: str
    method: str
    seed: int
    settings: Mapping[str, Any] = field(hash=False)  # dotted names; what decides the result, but for the above
    epochs_done: int = 0
    last: Mapping[str, Any] = field(default_factory=dict, hash=False)  # last line of the metrics
    seconds: float | None = None  # all epochs
    images_per_second: float | None = None  # median over epochs: the first one is often slower
    peak_memory_mib: float | None = None
    hardware: str = ""

    @property
    def epochs(self) -> int:
        return int(self.settings.get("train.epochs", 0))

    @property
    def network(self) -> str:
        return str(self.settings.get("network.name", ""))

    @property
    def held_out(self) -> float:
        """Share of the training examples that stood in for the test set, which was left alone; 0 if it was not."""
        return float(self.settings.get("data.test_share") or 0) if self.settings.get("data.own_test") is False else 0.0

    @property
    def finished(self) -> bool:
        return 0 < self.epochs <= self.epochs_done

    @property
    def key(self) -> str:
        """The same for runs that differ in nothing but the seed."""
        return json.dumps([self.dataset, self.rule, self.method, dict(self.settings)], sort_keys=True, default=str)


@dataclass(frozen=True)
class Collection:
    """Runs that came to their end, those that did not, and lines about what could not be used."""

    finished: tuple[RunSummary, ...]
    unfinished: tuple[RunSummary, ...] = ()
    problems: tuple[str, ...] = ()


def collect(folders: Iterable[Path]) -> Collection:
    """All runs in or below these folders; of two with the same settings and seed, the first by its path."""
    paths: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        for path in find_runs(folder):
            paths.setdefault(path.resolve(), path)
    found: list[RunSummary] = []
    unfinished: list[RunSummary] = []
    problems: list[str] = []
    for path in sorted(paths.values()):
        try:
            run = read_run(path)
        except UserError as error:
            problems.append(str(error))
        else:
            (found if run.finished else unfinished).append(run)
    runs: dict[tuple[str, int], RunSummary] = {}
    for run in _with_splits_of_seeds(found):
        twin = runs.setdefault((run.key, run.seed), run)
        if twin is not run:
            problems.append(f"{run.path} is a duplicate of {twin.path} (same settings and seed)")
    return Collection(tuple(runs.values()), tuple(unfinished), tuple(problems))


def find_runs(folder: Path) -> list[Path]:
    """Folders that hold a run's config, this one included; what lies inside a run is not searched."""
    found = []
    for here, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        if "config.yaml" in files and "metrics.jsonl" in files:
            found.append(Path(here))
            names.clear()
    return found


def read_run(path: Path) -> RunSummary:
    folder = RunFolder(path)
    settings = _settings(folder)
    rows = folder.read_metrics()
    known = [row for row in rows if isinstance(row, dict) and isinstance(row.get("epoch"), int)]

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in known if isinstance(row.get(name), int | float)]

    rates, memory, seconds = column("images_per_second"), column("peak_memory_mib"), column("seconds")
    try:
        seed, method, source = int(settings["seed"]), str(settings["method.name"]), str(settings["source"])
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{folder / 'config.yaml'}: seed, method.name or source is missing; restore the file, or leave this run out"
        ) from None
    return RunSummary(
        path,
        printable(Path(source).name),
        str(settings.get("candidates") or ""),
        method,
        seed,
        deciding(settings),
        known[-1]["epoch"] if known else 0,
        known[-1] if known else {},
        sum(seconds) if seconds else None,
        median(rates) if rates else None,
        max(memory) if memory else None,
        hardware(read_environment(path / "environment.json")),
    )


def printable(name: str) -> str:
    """A file's name on one line, as UTF-8, whatever its bytes."""
    return " ".join(name.encode("utf-8", "backslashreplace").decode().split())


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of settings by their dotted names, those that decide what is learnt and are no fields of a RunSummary."""
    return {name: value for name, value in settings.items() if name not in _ASIDE}


def _with_splits_of_seeds(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Where nothing was split, or every run of a group by its own seed, the split is no setting to tell runs by."""
    without = [replace(run, settings={k: v for k, v in run.settings.items() if k != _SPLIT}) for run in runs]
    pairs = list(zip(runs, without, strict=True))
    fixed = {
        plain.key
        for run, plain in pairs
        if run.settings.get("data.test_share") and run.settings.get(_SPLIT) != run.seed
    }
    return [run if plain.key in fixed else plain for run, plain in pairs]


def _settings(folder: RunFolder) -> dict[str, Any]:
    written = read_yaml(folder / "config.yaml", links=False)
    try:
        tree = folder.read_config().model_dump(mode="json")  # fills in settings that are younger than the run
    except UserError:
        return dotted(written)  # made by another version, or with a method of the user's own
    return dotted(tree) | removed_settings(written)
