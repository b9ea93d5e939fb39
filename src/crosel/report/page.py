"""The page: what was trained on what, how it went, and what became of the labels."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import crosel
from crosel.data import Dataset
from crosel.files import atomic_write
from crosel.report import tables
from crosel.report.charts import Chart, Series, line_chart
from crosel.report.gather import Labels, RunData, gather, training_images
from crosel.report.tables import duration, percent
from crosel.run import RunFolder

# metric, name in tiles and tables, what it means
RESULTS = (
    ("test_accuracy", "test accuracy", "share of test examples predicted right, last epoch"),
    ("selection_ratio", "S-ratio", "share of training examples selected"),
    ("oracle_selection_accuracy", "S-acc", "share of the selected labels that are true"),
    ("covering_rate", "covering rate", "share of predictions inside the candidate set"),
)
_NEEDS_NO_TRUTH = (
    "Needs no true labels: predictions inside the candidate set, and how much of the set's probability they hold."
)


def write_report(folders: list[RunFolder], out: Path, *, data: Dataset | None = None) -> None:
    """Write one html file about one run, or about several compared.

    `data` is the run's training set, if it is in memory already; otherwise it is looked for, for thumbnails.
    """
    runs = gather(folders)
    ids = count(1)
    atomic_write(out, _single(runs[0], data, ids) if len(runs) == 1 else _comparison(runs, ids))


def _page(title: str, subtitle: str, body: str, foot: str) -> str:
    style = (resources.files("crosel.report") / "style.css").read_text(encoding="utf-8")
    # The policy lets the page load nothing, whatever a class is called.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>\n{style}</style></head>\n"
        f'<body><header><h1>{title}</h1><p class="lead">{subtitle}</p></header>\n<main>{body}</main>\n'
        f"<footer>{foot}</footer></body></html>\n"
    )


def _section(title: str, body: str, intro: str = "") -> str:
    if not body:
        return ""
    lead = f"<p>{intro}</p>" if intro else ""
    return f"<section><h2>{title}</h2>{lead}{body}</section>\n"


# --- one run ------------------------------------------------------------------------------------------------------


def _single(run: RunData, data: Dataset | None, ids: count[int]) -> str:
    config = run.config
    parts = [
        f"{run.n:,} examples with {escape(config.candidates or 'given')} candidate sets",
        escape(config.network.name), f"{config.train.epochs} epochs", f"seed {config.seed}",
    ]  # fmt: skip
    charts = "".join(line_chart(chart, ids) for chart in _run_charts(run))
    body = _notice(run) + _tiles(run)
    body += _section("Over the epochs", f'<div class="charts">{charts}</div>' if charts else "")
    body += _section("What was trained on what", _facts(run))
    body += _section("Candidate sets", f'<div class="columns">{tables.set_sizes(run)}{tables.set_members(run)}</div>')
    if run.labels is not None:
        body += _labels(run, run.labels)
        images = training_images(run, data)
        intro = "The label given is the most probable one of the candidate set; it comes first and stands out."
        body += _section("Examples to look at", tables.examples(run, run.labels, images), intro)
    title = f"{escape(run.method_title)} on {escape(_source(run))}"
    return _page(title, " · ".join(parts), body, _foot([run]))


def _source(run: RunData) -> str:
    source = run.config.source
    return Path(source).name if "/" in source or "\\" in source else source


def _notice(run: RunData) -> str:
    if run.is_complete:
        return ""
    done, epochs = len(run.rows), run.config.train.epochs
    state = "no epoch is finished yet" if not done else f"epoch {done} of {epochs} is done"
    what = state if done < epochs else "the labels are not written yet"
    return f'<p class="notice" role="status">This run is not finished: {what}.</p>\n'


def _tiles(run: RunData) -> str:
    tiles = [(name, percent(value), what) for key, name, what in RESULTS if (value := run.last(key)) is not None]
    if run.truth is not None and run.labels is not None:
        right = float((run.labels.labels == run.truth).mean())
        tiles.append(("labels right", percent(right), "share of training examples whose label given is true"))
    if run.rows:
        tiles.append(("training time", duration(run.seconds), f"{_device(run)}, {len(run.rows)} epochs"))
    items = "".join(
        f'<li><span class="name">{name}</span><b>{value}</b><small>{what}</small></li>' for name, value, what in tiles
    )
    return f'<ul class="tiles" aria-label="Results">{items}</ul>\n' if items else ""


def _device(run: RunData) -> str:
    gpu = run.environment.get("gpu")
    threads = run.environment.get("threads", "?")
    return escape(str(gpu)) if gpu else f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def _facts(run: RunData) -> str:
    c, sizes, environment = run.config, run.set_sizes, run.environment
    singles, full = int((sizes == 1).sum()), int((sizes == len(run.classes)).sum())
    facts: list[tuple[str, Any]] = [
        ("source", c.source), ("candidate rule", c.candidates or "sets come with the data"),
        ("method", f"{run.method_title} ({c.method.name})"), ("network", c.network.name),
        ("epochs", c.train.epochs), ("batch size", c.train.batch_size), ("learning rate", f"{c.train.lr:g}"),
        ("seed", c.seed), ("examples", f"{run.n:,}"), ("classes", len(run.classes)),
        ("mean set size", f"{sizes.mean():.2f}"), ("sets of one", f"{singles:,} ({percent(singles / run.n)})"),
        ("full sets", f"{full:,} ({percent(full / run.n)})"),
        ("true labels", "known, never used to train" if run.truth is not None else "not known"),
        ("crosel, torch", f"{environment.get('crosel', '?')}, {environment.get('torch', '?')}"),
        ("started", environment.get("started", "?")), ("run folder", run.path),
    ]  # fmt: skip
    if run.truth is not None:
        outside = float((~run.sets[np.arange(run.n), run.truth]).mean())
        facts.insert(13, ("true label outside its set", percent(outside)))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _run_charts(run: RunData) -> list[Chart]:
    marks = [(run.warm_up + 0.5, "end of warm-up")] if run.warm_up else []
    common: dict[str, Any] = {"marks": marks, "epochs": len(run.rows)}

    def series(*wanted: tuple[str, str, bool]) -> list[Series]:
        return [Series(name, run.points(key), i, quiet) for i, (key, name, quiet) in enumerate(wanted)]

    losses = [key for key in dict.fromkeys(k for row in run.rows for k in row) if key.startswith("loss")]
    loss_names = {"loss": "total", "loss_selected": "selected", "loss_comix": "co-mix"}
    both = "both networks" if run.points("test_accuracy_1") else "test accuracy"
    return [
        Chart(
            "Test accuracy",
            series(("test_accuracy", both, False), ("test_accuracy_1", "network 1", True),
                   ("test_accuracy_2", "network 2", True)),
            percent=True, **common,
        ),
        Chart(
            "Selection: S-ratio and S-acc",
            series(("selection_ratio", "S-ratio", False), ("oracle_selection_accuracy", "S-acc", False)),
            percent=True, low=0, high=1, **common,
            note="S-ratio: share of examples selected. S-acc: share of the selected labels that are true.",
        ),
        Chart(
            "Losses",
            [Series(loss_names.get(key, key.removeprefix("loss_").replace("_", " ")), run.points(key), i)
             for i, key in enumerate(losses)],
            low=0, **common,
        ),
        Chart("Weight of co-mix, λ_d", series(("lambda_d", "λ_d", False)), low=0, **common),
        Chart(
            "Covering rate",
            series(("covering_rate", "covering rate", False),
                   ("approximated_accuracy", "approximated accuracy", False)),
            percent=True, **common, note=_NEEDS_NO_TRUTH,
        ),
    ]  # fmt: skip


def _labels(run: RunData, labels: Labels) -> str:
    left = tables.flags(labels) + tables.selected(labels) + tables.calibration(run, labels)
    right = tables.per_class(run, labels) + tables.confusion(run, labels)
    body = f'<div class="columns"><div>{left}</div><div>{right}</div></div>'
    return _section("The training set's labels", body)


# --- several runs -------------------------------------------------------------------------------------------------


def _comparison(runs: Sequence[RunData], ids: count[int]) -> str:
    charts = "".join(line_chart(chart, ids) for chart in _shared_charts(runs))
    body = "".join(_notice(run).replace("This run", escape(run.name)) for run in runs)
    body += _section("Results", _comparison_table(runs) + _differences(runs))
    body += _section("Over the epochs", f'<div class="charts">{charts}</div>' if charts else "")
    for run in runs:
        labels = "" if run.labels is None else tables.flags(run.labels) + tables.selected(run.labels)
        columns = f'<div class="columns"><div>{tables.set_sizes(run)}</div><div>{labels}</div></div>'
        body += f"<section><h2>{escape(run.name)}</h2>{_facts(run)}{columns}</section>\n"
    sources = ", ".join(dict.fromkeys(escape(_source(run)) for run in runs))
    return _page(f"{len(runs)} runs on {sources}", " · ".join(escape(run.name) for run in runs), body, _foot(runs))


def _shared_charts(runs: Sequence[RunData]) -> list[Chart]:
    ends = dict.fromkeys(run.warm_up for run in runs if run.warm_up)
    marks = [(end + 0.5, "end of warm-up") for end in ends] if len(ends) == 1 else []
    common: dict[str, Any] = {"marks": marks, "epochs": max(len(run.rows) for run in runs)}

    def series(key: str) -> list[Series]:
        return [Series(run.name, run.points(key), i) for i, run in enumerate(runs)]

    return [
        Chart("Test accuracy", series("test_accuracy"), percent=True, **common),
        Chart("S-ratio", series("selection_ratio"), percent=True, low=0, high=1, **common),
        Chart("S-acc", series("oracle_selection_accuracy"), True, **common),
        Chart("Covering rate", series("covering_rate"), percent=True, **common, note=_NEEDS_NO_TRUTH),
        Chart("Loss", series("loss"), low=0, **common, note="Each method's own: not to be compared in size."),
        Chart("Weight of co-mix, λ_d", series("lambda_d"), low=0, **common),
    ]


def _comparison_table(runs: Sequence[RunData]) -> str:
    results = [(key, name) for key, name, _ in RESULTS if any(run.last(key) is not None for run in runs)]
    best = {key: max((v for run in runs if (v := run.last(key)) is not None), default=None) for key, _ in results}
    rows = []
    for run in runs:
        row = [escape(run.name), escape(run.method_title), escape(run.config.network.name)]
        row += [str(run.config.seed), f"{len(run.rows)} of {run.config.train.epochs}"]
        for key, _ in results:
            value = run.last(key)
            text = "–" if value is None else percent(value)
            row.append(f"<b>{text}</b>" if key == "test_accuracy" and value == best[key] else text)
        rows.append([*row, f"{run.set_sizes.mean():.2f}", duration(run.seconds)])
    head = ("run", "method", "network", "seed", "epochs", *(name for _, name in results), "mean set size", "time")
    return tables.table("Last epoch of each run", head, rows, "numbers")


def _differences(runs: Sequence[RunData]) -> str:
    """Settings in which the runs differ, out of those that all of them have."""
    flat = [dict(_flat(run.config.model_dump(mode="json"))) for run in runs]
    names = [name for name in flat[0] if all(name in f for f in flat) and len({repr(f[name]) for f in flat}) > 1]
    rows = [[escape(name), *(escape(str(f[name])) for f in flat)] for name in names]
    if not rows:
        return "<p>All settings that they share are the same.</p>"
    return tables.table("Settings that differ", ("setting", *(escape(run.name) for run in runs)), rows, "settings")


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in tree.items():
        out += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return out


def _foot(runs: Sequence[RunData]) -> str:
    commands = []
    for run in runs:
        command = run.environment.get("command")
        if isinstance(command, list):
            commands.append(f"<p><code>{escape(' '.join(map(str, command)))}</code></p>")
    return f"<p>Written by crosel {escape(crosel.__version__)}.</p>{''.join(commands)}"
