"""The report of one run (data, settings, training, labels), or of several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

import crosel
from crosel.report import figures, html, svg
from crosel.report.html import galleries, pct, section, table, thumbnail
from crosel.report.run import Run
from crosel.report.svg import Figure
from crosel.runs.result import Result
from crosel.utils.settings import dotted
from crosel.utils.text import counted, duration

# metric, name in figures and tables, what it means
RESULTS = (
    ("test_accuracy", "Test accuracy", "share of test examples predicted correctly, last epoch"),
    ("selection_ratio", "S-ratio", "share of training examples selected"),
    ("oracle_selection_accuracy", "S-acc", "share of selected labels that are true"),
    ("covering_rate", "Covering rate", "share of predictions inside the candidate set"),
)


def style() -> str:
    """Colours, shapes and layout, shared with the review page."""
    layout = (resources.files("crosel.report") / "style.css").read_text(encoding="utf-8")
    bars = "".join(f".b-{name}{{background:var(--{name})}}" for name in svg.LIGHT if name[1:].isdigit())
    return f"{svg.css()}{svg.SHAPES}{bars}\n{layout}"


def page(title: str, subtitle: str, body: str, runs: Sequence[Run]) -> str:
    # The policy keeps the page from loading anything, whatever names of classes contain.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>\n{style()}</style></head>\n"
        f'<body class="report"><header><p class="brand">crosel report</p><h1>{title}</h1>'
        f'<p class="lead">{subtitle}</p></header>\n'
        f"<main>{body}</main>\n<footer>{_foot(runs)}</footer></body></html>\n"
    )


def contents(body: str, names: Iterable[tuple[str, str]]) -> str:
    """Links to the sections that the page has."""
    links = [f'<li><a href="#{name}">{title}</a></li>' for name, title in names if f'id="{name}"' in body]
    return f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>\n'


def charts(found: Iterable[Figure | None], ids: count[int]) -> str:
    shown = "".join(figure.html(ids) for figure in found if figure is not None)
    return f'<div class="charts">{shown}</div>' if shown else ""


SECTIONS = (
    ("training", "Training"), ("labels", "Labels"), ("truth", "Confusion"), ("sets", "Candidate sets"),
    ("space", "Projection"), ("examples", "Examples"), ("settings", "Settings"),
)  # fmt: skip


def run_page(run: Run, x: NDArray[Any] | None, ids: count[int]) -> str:
    c, sizes = run.config, run.set_sizes
    subtitle = (
        f"{run.n:,} examples in {len(run.classes)} classes, each with a set of {sizes.mean():.1f} candidate labels on "
        f"average ({escape(c.candidates or 'sets as given')}). {escape(c.network.name)}, {c.train.epochs} epochs, "
        f"seed {c.seed}."
    )
    body = section(
        "Training", charts(figures.curves(run), ids),
        "The course of the run, epoch by epoch. Values next to the names are from the last epoch.", "training",
    )  # fmt: skip
    if run.result is not None:
        body += labels_sections(run, run.result, x, ids)
    else:
        body += _sets_section(run, ids)
    body += section("Settings", facts(run), "", "settings")
    title = f"{escape(run.method_title)} on {escape(run.source_name)}"
    return page(title, subtitle, notice(run) + _to_check(run) + _tiles(run) + contents(body, SECTIONS) + body, [run])


def labels_sections(run: Run, result: Result, x: NDArray[Any] | None, ids: count[int]) -> str:
    shares = [figures.classes(result), figures.confidence(result), figures.calibration(result)]
    words = "The result for the training set: the most probable label of each candidate set, and its confidence."
    body = section(
        "Labels", f"{charts(shares, ids)}{html.stacks(result)}<details><summary>All classes as numbers</summary>"
        f"{html.per_class(result)}</details>", words, "labels",
    )  # fmt: skip
    body += section(
        "Confusion", f'<div class="columns">{matrices}</div>' if (matrices := html.confusion(run)) else "",
        "Rows are true labels, columns are the labels given.", "truth",
    )  # fmt: skip
    body += _sets_section(run, ids)
    body += section(
        "Projection", charts([figures.projection(result, x)], ids),
        "The features on their first two principal components, coloured by the label given.", "space",
    )  # fmt: skip
    return body + section(
        "Examples", galleries(result, x),
        "The label given is on top, followed by the candidates with the networks' probabilities.", "examples",
    )  # fmt: skip


def _sets_section(run: Run, ids: count[int]) -> str:
    words = "The candidate sets that the run learnt from."
    if run.truth is not None:
        outside = float((~run.examples.candidates[np.arange(run.n), run.truth]).mean())
        missing = f"The true label is missing from {pct(outside)} of them."
        words += f" {missing if outside else 'Every set contains the true label.'}"
    sizes = charts([figures.set_sizes(run)], ids)
    return section("Candidate sets", f'<div class="columns">{sizes}{html.set_members(run)}</div>', words, "sets")


def notice(run: Run, name: str = "This run") -> str:
    """What readers must know first: the run is not finished, or it has lost classes."""
    if run.is_complete and run.result is not None:
        lines = [*run.result.warnings(), *run.result.notes()]
        return "".join(f'<p class="notice" role="status">{escape(f"{name}: {line}")}</p>\n' for line in lines)
    done, epochs = len(run.rows), run.config.train.epochs
    state = "no epoch is finished yet" if not done else f"epoch {done} of {epochs} is done"
    what = state if done < epochs else "the labels are not written yet"
    return f'<p class="notice" role="status">{escape(name)} is not finished: {what}.</p>\n'


def _to_check(run: Run) -> str:
    """Where to start: how many labels have a reason to be checked, and what to do about them."""
    if run.result is None:
        return ""
    count, kinds = run.result.to_check()
    what = f" ({kinds})" if kinds else ""
    return (
        f'<p class="start"><a href="#examples">{counted(count, "label")} to check, start here</a>{what}; '
        f"to correct them: <code>crosel review {escape(str(run.path))}</code></p>\n"
    )


def _tiles(run: Run) -> str:
    tiles = [(name, pct(value), what) for key, name, what in RESULTS if (value := run.last(key)) is not None]
    if run.truth is not None and run.result is not None:
        right = float((run.result.labels == run.truth).mean())
        place = min(3, len(tiles))
        tiles.insert(place, ("Labels right", pct(right), "share of training examples that got their true label"))
    if run.rows:
        tiles.append(("Training time", duration(run.seconds), f"{len(run.rows)} epochs, {escape(run.device)}"))
    items = "".join(f"<li><span>{name}</span><b>{value}</b><small>{what}</small></li>" for name, value, what in tiles)
    return f'<ul class="tiles" aria-label="Results">{items}</ul>\n' if items else ""


def facts(run: Run) -> str:
    c, sizes, environment = run.config, run.set_sizes, run.environment
    singles, full = int((sizes == 1).sum()), int((sizes == len(run.classes)).sum())
    values: list[tuple[str, Any]] = [
        ("source", c.source), ("candidate rule", c.candidates or "none: sets come with the data"),
        ("method", f"{run.method_title} ({c.method.name})"), ("network", c.network.name),
        ("epochs", c.train.epochs), ("batch size", c.train.batch_size), ("learning rate", f"{c.train.lr:g}"),
        ("seed", c.seed), ("examples", f"{run.n:,}"), ("classes", len(run.classes)),
        ("mean set size", f"{sizes.mean():.2f}"), ("sets of one", f"{singles:,} ({pct(singles / run.n)})"),
        ("full sets", f"{full:,} ({pct(full / run.n)})"),
        ("true labels", "known, not used for training" if run.truth is not None else "not known"),
        ("device", run.device),
        ("crosel, torch", f"{environment.get('crosel', '?')}, {environment.get('torch', '?')}"),
        ("started", environment.get("started", "?")), ("run folder", run.path),
    ]  # fmt: skip
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in values)
    return f'<dl class="facts">{items}</dl>'


def _foot(runs: Sequence[Run]) -> str:
    commands = []
    for run in runs:
        command = run.environment.get("command")
        if isinstance(command, list):
            commands.append(f"<p><code>{escape(' '.join(map(str, command)))}</code></p>")
    by = f"Written by crosel {escape(crosel.__version__)}. This file is self-contained."
    return f"<p>{by}</p>{''.join(commands)}"


# --- several runs: a table, shared curves, labels that differ, and the galleries of each run ------------------------

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
    title = f"{len(runs)} runs on {', '.join(dict.fromkeys(escape(run.source_name) for run in runs))}"
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
    return charts(found, ids) + html.stacks(run.result) + own + galleries(run.result, x, EXAMPLES)
