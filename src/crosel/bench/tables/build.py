"""From runs to tables: one for each dataset and rule, a row for each group of runs that differ only in the seed.

Accuracies on held-out training examples, by which settings are chosen, never stand beside those on the test set.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from crosel.bench.tables.paper import METRICS, PaperFigure, Reference, paper_cells, reference
from crosel.errors import UserError
from crosel.runs.environment import hardware, read_environment
from crosel.runs.folder import FREE_TO_CHANGE, RunFolder
from crosel.utils.settings import REMOVED, dotted, read_yaml, removed_settings

_KEYS = dict(zip(METRICS, ("test_accuracy", "selection_ratio", "oracle_selection_accuracy"), strict=True))
_ORDER = ("crosel", "pop", "crdpll", "pico", "proden", "lws", "cc")  # as in the paper's tables
_OWN_COLUMN = {"network.name", "train.epochs"}


@dataclass(frozen=True)
class Row:
    """A group of runs. Metrics are percentages of the last epoch; the paper's beside them."""

    method: str
    settings: Mapping[str, Any]  # those in which it differs from other rows of its table
    network: str
    epochs: int
    seeds: tuple[int, ...]
    metrics: Mapping[str, Estimate]
    paper: Mapping[str, PaperFigure] = field(default_factory=dict)
    seconds: Estimate | None = None
    images_per_second: Estimate | None = None
    peak_memory_mib: float | None = None
    hardware: tuple[str, ...] = ()
    accuracies: Mapping[int, float] = field(default_factory=dict)  # by seed
    best: bool = False
    test: PairedTest | None = None  # of the accuracy, against the best row, over the seeds both have

    def departures(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name not in usual or usual[name] != value}


@dataclass(frozen=True)
class ResultsTable:
    dataset: str
    rule: str
    rows: tuple[Row, ...]
    held_out: float = 0.0  # share of the training examples on which accuracies are, in place of the test set


def build(runs: Sequence[RunSummary]) -> list[ResultsTable]:
    """Tables of finished runs."""
    by_setting: dict[tuple[str, str, float], list[RunSummary]] = {}
    for run in runs:
        by_setting.setdefault((run.dataset, run.rule, run.held_out), []).append(run)
    return [_build_table(*setting, by_setting[setting]) for setting in sorted(by_setting)]


def group(runs: Sequence[RunSummary]) -> list[list[RunSummary]]:
    """Runs that differ in nothing but the seed, together, in the order of their seeds."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    return [sorted(members, key=lambda run: run.seed) for members in groups.values()]


def differing(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of settings that are not the same in all of them."""
    names = {name for settings in groups for name in settings}
    return {name for name in names if any(settings.get(name) != groups[0].get(name) for settings in groups)}


def usual_settings(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By method: what more than half of the rows have in common, of the settings in which some differ.

    Settings of a method are compared within its rows, the others within all.
    """
    usual: dict[str, dict[str, Any]] = {row.method: {} for row in rows}
    for method, found in usual.items():
        own = [row for row in rows if row.method == method]
        for name in own[0].settings:
            values = [row.settings.get(name) for row in (own if name.startswith("method.") else rows)]
            for value in values:
                if len(values) / 2 < values.count(value) < len(values):
                    found[name] = value
    return usual


def _build_table(dataset: str, rule: str, held_out: float, runs: Sequence[RunSummary]) -> ResultsTable:
    groups = group(runs)
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for members in groups:
        by_method.setdefault(members[0].method, []).append(members[0].settings)
    # Settings of one method mean nothing to another, so they are compared within a method only.
    shared = [{k: v for k, v in g[0].settings.items() if not k.startswith("method.")} for g in groups]
    shown = {name: differing(shared) - _OWN_COLUMN for name in by_method}
    for method, several in by_method.items():
        shown[method] |= {name for name in differing(several) if name.startswith("method.")}
    ours = by_method.get("crosel", [])
    beside = reference(dataset, ours)
    for settings in ours:  # an ablation is named, even where all rows are the same one
        shown["crosel"] |= {name for name, value in beside.papers.items() if settings.get(name) != value}
    rows = [_build_row(members, shown[members[0].method], beside) for members in groups]
    usual = usual_settings(rows)
    rows.sort(key=lambda row: _sort_key(row, usual[row.method]))
    return ResultsTable(dataset, rule, tuple(_compared(rows)), held_out)


def _build_row(members: Sequence[RunSummary], shown: set[str], beside: Reference) -> Row:
    first = members[0]

    def mean(values: Iterable[float | None]) -> Estimate | None:
        found = [value for value in values if value is not None]
        return estimate(found) if found else None

    def metric(run: RunSummary, key: str) -> float | None:
        value = run.last.get(key)
        return 100 * float(value) if isinstance(value, int | float) else None

    names = sorted(shown, key=lambda name: (not name.startswith("method."), name))  # those of the method first
    metrics = {name: mean(metric(run, key) for run in members) for name, key in _KEYS.items()}
    accuracies = {run.seed: metric(run, _KEYS["accuracy"]) for run in members}
    memory = [run.peak_memory_mib for run in members if run.peak_memory_mib is not None]
    return Row(
        first.method,
        {name: first.settings.get(name, REMOVED.get(name)) for name in names},
        first.network,
        first.epochs,
        tuple(run.seed for run in members),
        {name: value for name, value in metrics.items() if value is not None},
        paper_cells(first.dataset, first.rule, first.method, first.settings, beside),
        mean(run.seconds for run in members),
        mean(run.images_per_second for run in members),
        max(memory) if memory else None,
        tuple(dict.fromkeys(run.hardware for run in members if run.hardware)),
        {seed: value for seed, value in accuracies.items() if value is not None},
    )


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Mark the best row (rows, if they are equal as shown), and test the others against it."""
    scored = [row for row in rows if "accuracy" in row.metrics]
    if len(scored) < 2:
        return list(rows)
    best = max(scored, key=lambda row: row.metrics["accuracy"].mean)
    top = round(best.metrics["accuracy"].mean, 2)
    out = []
    for row in rows:
        is_best = row in scored and round(row.metrics["accuracy"].mean, 2) == top
        both = sorted(row.accuracies.keys() & best.accuracies.keys())
        test = None
        if row is not best and len(both) >= 2:
            test = paired_t_test([row.accuracies[s] for s in both], [best.accuracies[s] for s in both])
        out.append(replace(row, best=is_best, test=test))
    return out


def _sort_key(row: Row, usual: Mapping[str, Any]) -> tuple[Any, ...]:
    """As in the paper's tables; of one method the row from which the others depart first."""
    rank = _ORDER.index(row.method) if row.method in _ORDER else len(_ORDER)
    values = [_sortable(value) for value in row.settings.values()]
    return rank, row.method, row.network, row.epochs, bool(row.departures(usual)), values


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)


# --- means, deviations and the paired t-test ------------------------------------------------------------------------

# Equal differences of accuracies deviate by no more than rounding leaves, and unequal ones by far more.
_ROUNDING = 1e-12


class Estimate(NamedTuple):
    """A mean over seeds, with the standard deviation of a sample. One seed has no deviation."""

    mean: float
    deviation: float | None
    n: int


class PairedTest(NamedTuple):
    """Student's t of paired differences, its two-sided p-value, and the number of pairs."""

    t: float
    p: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Test whether the mean of a - b is 0, pair by pair: NaN where all differences are the same.

    With few seeds and a small test set they often are, by chance: the test would take that for certainty (p = 0).
    """
    from scipy.stats import ttest_rel  # takes a third of a second to import

    if stdev(x - y for x, y in zip(a, b, strict=True)) < _ROUNDING:
        return PairedTest(math.nan, math.nan, len(a))
    result = ttest_rel(a, b)
    return PairedTest(float(result.statistic), float(result.pvalue), len(a))


# --- find runs, and read of each what the tables need ---------------------------------------------------------------
# Only the last epoch counts: nothing is chosen by the test set.

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
        " ".join(Path(source).name.encode("utf-8", "backslashreplace").decode().split()),  # one line of UTF-8
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
