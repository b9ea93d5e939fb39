"""The report of one run: data, settings, training and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

import crosel
from crosel.report import figures, svg, tables
from crosel.report.gallery import galleries
from crosel.report.html import pct, section
from crosel.report.run import Run
from crosel.report.svg import Figure
from crosel.runs.labels import FLAGS
from crosel.runs.result import Result
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
        "Labels", f"{charts(shares, ids)}{tables.stacks(result)}<details><summary>All classes as numbers</summary>"
        f"{tables.per_class(result)}</details>", words, "labels",
    )  # fmt: skip
    body += section(
        "Confusion", f'<div class="columns">{matrices}</div>' if (matrices := tables.confusion(run)) else "",
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
    return section("Candidate sets", f'<div class="columns">{sizes}{tables.set_members(run)}</div>', words, "sets")


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
    flags = Counter(filter(None, run.result.flag_names()))
    kinds = ", ".join(f"{flags[flag]:,} {flag}" for flag in FLAGS if flags[flag])
    what = f" ({kinds})" if kinds else ""
    return (
        f'<p class="start"><a href="#examples">{counted(sum(flags.values()), "label")} to check, start here</a>{what}; '
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


def source_names(runs: Sequence[Run]) -> str:
    return ", ".join(dict.fromkeys(escape(run.source_name) for run in runs))
