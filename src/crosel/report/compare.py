"""The report of several runs: a table, shared curves, labels that differ, and the galleries of each run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.report import figures, tables
from crosel.report.gallery import galleries
from crosel.report.html import pct, section, table, thumbnail
from crosel.report.page import RESULTS, charts, contents, facts, notice, page, source_names
from crosel.report.run import Run
from crosel.utils.settings import dotted
from crosel.utils.text import duration

DISAGREEMENTS = 24
EXAMPLES = 8  # of each gallery: there are several runs

Inputs = NDArray[Any] | None


def comparison_page(runs: Sequence[Run], inputs: Sequence[Inputs], ids: count[int]) -> str:
    body = section("Results", results(runs) + _differences(runs), "The last epoch of each run.", "results")
    shared = charts(figures.shared_curves(runs), ids)
    body += section("Training", shared, "The same curves for every run.", "training")
    body += section(
        "Differences", _disagreements(runs, inputs[0]),
        "Training examples to which the runs give different labels, the most confident first.", "differ",
    )  # fmt: skip
    names = [("results", "Results"), ("training", "Training"), ("differ", "Differences")]
    for i, (run, x) in enumerate(zip(runs, inputs, strict=True)):
        body += section(escape(run.name), _details(run, x, ids), escape(run.method_title), f"run-{i + 1}")
        names.append((f"run-{i + 1}", escape(run.name)))
    notices = "".join(notice(run, run.name) for run in runs)
    title = f"{len(runs)} runs on {source_names(runs)}"
    return page(title, " · ".join(escape(run.name) for run in runs), notices + contents(body, names) + body, runs)


def results(runs: Sequence[Run]) -> str:
    found = [(key, name) for key, name, _ in RESULTS if any(run.last(key) is not None for run in runs)]
    best = max((v for run in runs if (v := run.last("test_accuracy")) is not None), default=None)
    rows = []
    for run in runs:
        row = [escape(run.name), escape(run.method_title), escape(run.config.network.name)]
        row += [str(run.config.seed), f"{len(run.rows)} of {run.config.train.epochs}"]
        for key, _ in found:
            value = run.last(key)
            text = "–" if value is None else pct(value)
            row.append(f"<b>{text}</b>" if key == "test_accuracy" and value == best else text)
        rows.append([*row, f"{run.set_sizes.mean():.2f}", duration(run.seconds)])
    head = ("run", "method", "network", "seed", "epochs", *(name for _, name in found), "mean set size", "time")
    return table("Last epoch of each run", head, rows, "numbers results")


def _differences(runs: Sequence[Run]) -> str:
    """Of the settings that all runs have, those that differ."""
    settings = [dotted(run.config.model_dump(mode="json")) for run in runs]
    shared = [name for name in settings[0] if all(name in own for own in settings)]
    names = [name for name in shared if len({repr(own[name]) for own in settings}) > 1]
    rows = [[escape(name), *(escape(str(own[name])) for own in settings)] for name in names]
    if not rows:
        return "<p>All settings that the runs have in common are equal.</p>"
    return table("Settings that differ", ("setting", *(escape(run.name) for run in runs)), rows, "settings")


def _disagreements(runs: Sequence[Run], x: Inputs) -> str:
    """Only for finished runs on the same examples."""
    first, found = runs[0], [run.result for run in runs if run.result is not None]
    if len(found) < len(runs) or len({(run.examples.fingerprint, run.n) for run in runs}) > 1:
        return ""
    labels = np.stack([result.labels for result in found])
    sure = np.stack([result.confidence for result in found])
    rows = np.flatnonzero((labels != labels[0]).any(axis=0))
    rows = rows[np.argsort(-sure.min(axis=0)[rows], kind="stable")]
    if not len(rows):
        return "<p>All runs give the same labels.</p>"
    images = x is not None and x.ndim == 4
    head = [*(["image"] if images else []), "id", *(escape(run.name) for run in runs)]
    head += ["truth"] if first.truth is not None else []
    body = []
    for i in rows[:DISAGREEMENTS].tolist():
        cells = [escape(first.examples.example_id(i))]
        for own, p in zip(labels[:, i], sure[:, i], strict=True):
            text = escape(first.classes[own]) if own >= 0 else "–"
            wrong = first.truth is not None and own != first.truth[i]
            cells.append(f'<span class="{"wrong" if wrong else ""}">{text}</span> <small>{pct(p)}</small>')
        if first.truth is not None:
            cells.append(escape(first.classes[int(first.truth[i])]))
        if images and x is not None:
            cells.insert(0, thumbnail(x[i], f"example {escape(first.examples.example_id(i))}"))
        body.append(cells)
    share = f"{len(rows):,} of {first.n:,} examples"
    return table(f"{len(body)} of {len(rows):,} on which the runs differ", head, body, "differ", share)


def _details(run: Run, x: Inputs, ids: count[int]) -> str:
    own = f"<details><summary>Settings</summary>{facts(run)}</details>"
    if run.result is None:
        return own
    found = [figures.classes(run.result), figures.calibration(run.result), figures.set_sizes(run)]
    return charts(found, ids) + tables.stacks(run.result) + own + galleries(run.result, x, EXAMPLES)
