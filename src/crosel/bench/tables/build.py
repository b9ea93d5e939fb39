"""From runs to tables: one for each dataset and rule, a row for each group of runs that differ only in the seed.

Accuracies on held-out training examples, by which settings are chosen, never stand beside those on the test set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from crosel.bench.tables.collect import RunSummary
from crosel.bench.tables.paper import METRICS, PaperFigure, Reference, paper_cells, reference
from crosel.utils.settings import REMOVED

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

    metrics = {name: mean(metric(run, key) for run in members) for name, key in _KEYS.items()}
    accuracies = {run.seed: metric(run, _KEYS["accuracy"]) for run in members}
    memory = [run.peak_memory_mib for run in members if run.peak_memory_mib is not None]
    return Row(
        first.method,
        {name: first.settings.get(name, REMOVED.get(name)) for name in sorted(shown, key=_settings_order)},
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


def _settings_order(name: str) -> tuple[bool, str]:
    return not name.startswith("method."), name


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
