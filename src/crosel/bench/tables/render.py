"""Tables as markdown, csv and LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosel.bench.tables.build import Collection, Estimate, PairedTest, ResultsTable, Row, usual_settings
from crosel.bench.tables.paper import METRICS, PaperFigure, paper, whole_method
from crosel.errors import UserError
from crosel.utils.text import choose_from, csv_line, duration

TITLES = dict(zip(METRICS, ("accuracy", "S-ratio", "S-acc"), strict=True))
FORMATS = ("markdown", "csv", "latex")
ENDINGS = {".md": "markdown", ".txt": "markdown", ".csv": "csv", ".tex": "latex"}


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Row], str]
    right: bool = True
    marks_best: bool = False  # the best row's text is bold


def pick_format(form: str | None, out: Path | None = None) -> str:
    """The format asked for, or that of the file's ending, or markdown."""
    if form is None and out is not None:
        if out.suffix.lower() not in ENDINGS:
            raise UserError(f"{out}: use one of the endings {', '.join(ENDINGS)}, or add --format")
        return ENDINGS[out.suffix.lower()]
    if form is not None and form not in FORMATS:
        raise UserError(f"unknown format '{form}'{choose_from(form, FORMATS)}")
    return form or "markdown"


def render(tables: Sequence[ResultsTable], form: str, notes: Sequence[str] = ()) -> str:
    """All tables in one text. A csv holds nothing but its lines, so notes are left out there."""
    if form == "csv":
        return csv_text(tables)
    if form == "latex":
        below = [f"% {' '.join(note.split())}" for note in (r"For the preamble: \usepackage{booktabs}", *notes)]
    else:
        below = [f"- {escape_markdown(note)}" for note in notes]
    one = latex_table if form == "latex" else markdown_table
    return "\n".join([*map(one, tables), *below, *([""] if below else [])])


def notes_of(tables: Sequence[ResultsTable], collection: Collection) -> list[str]:
    """Lines that belong under the tables: what stands in them, and what was left out."""
    rows = [row for table in tables for row in table.rows]
    lines = []
    if rows:
        lines.append("Last epoch; mean ± standard deviation over n seeds, best accuracy in bold.")
        lines.append("Time covers all epochs; images/s is their median. Runs that shared a device were slower.")
    if any(row.paper for row in rows):
        lines.append(
            f"Paper: {paper()['setting']}; for other networks and numbers of epochs, its figures are only a guide."
        )
    lines += [
        f"The paper's nearest figures are for {data}; "
        f"its whole method reaches {estimate_text(whole_method(data))} there."
        for data in sorted({other_data(row) for row in rows} - {""})
    ]
    if any(table.held_out for table in tables):
        lines.append(
            "Held out: accuracy on held-out training examples, not on the test set; "
            "the paper's figures use the test set."
        )
    if any(row.test for row in rows):
        lines.append(
            "p: two-sided paired t-test of the accuracy against the best row, over common seeds (their number);"
            " –: all differences are equal."
        )
    published = paper()["published"]
    lines += [
        f"Published for {table.dataset}: {published[table.dataset]} ({published['source']})."
        for table in tables
        if table.dataset in published
    ]
    lines += [f"Not finished: {run.path} (epoch {run.epochs_done} of {run.epochs})" for run in collection.unfinished]
    return lines + [f"Left out: {problem}" for problem in collection.problems]


# --- cells --------------------------------------------------------------------------------------------------------


def estimate_text(value: Estimate | PaperFigure | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.2f}" + (f" ± {value.deviation:.2f}" if value.deviation is not None else "")


def test_text(test: PairedTest | None) -> str:
    if test is None:
        return ""
    if math.isnan(test.p):
        return f"– ({test.n})"
    return f"{'< 0.001' if test.p < 0.001 else f'{test.p:.3f}'} ({test.n})"


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('method.')}={value_text(value)}" for name, value in settings.items())


def usual_text(table: ResultsTable) -> str:
    """What holds for the rows that do not say otherwise."""
    usual = usual_settings(table.rows)
    shared = {name: value for found in usual.values() for name, value in found.items()}
    parts = [settings_text({name: value for name, value in shared.items() if not name.startswith("method.")})]
    for method, found in usual.items():
        own = settings_text({name: value for name, value in found.items() if name.startswith("method.")})
        parts.append(f"{method}: {own}" if own and len(usual) > 1 else own)
    said = "; ".join(filter(None, parts))
    return f"Unless stated otherwise: {said}." if said else ""


def value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(value_text, value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _columns(table: ResultsTable) -> list[Column]:
    """Those in which anything stands."""
    usual = usual_settings(table.rows)
    columns = [
        Column("method", lambda row: row.method, right=False),
        Column("settings", lambda row: settings_text(row.departures(usual[row.method])), right=False),
        Column("network", lambda row: row.network, right=False),
        Column("epochs", lambda row: str(row.epochs)),
        Column("n", lambda row: str(len(row.seeds))),
    ]
    for metric in METRICS:

        def ours(row: Row, metric: str = metric) -> str:
            return estimate_text(row.metrics.get(metric))

        def papers(row: Row, metric: str = metric) -> str:
            return estimate_text(row.paper.get(metric))

        if any(metric in row.metrics for row in table.rows):
            columns.append(Column(f"{TITLES[metric]} (%)", ours, marks_best=metric == "accuracy"))
            columns.append(Column("paper", papers))
        if metric == "accuracy":
            columns.append(Column("p", lambda row: test_text(row.test)))
    columns += [
        Column("paper's data, if different", other_data, right=False),
        Column("time", lambda row: duration(row.seconds.mean) if row.seconds else ""),
        Column("images/s", lambda row: f"{row.images_per_second.mean:.0f}" if row.images_per_second else ""),
        Column("memory (MiB)", lambda row: f"{row.peak_memory_mib:.0f}" if row.peak_memory_mib else ""),
        Column("hardware", lambda row: "; ".join(row.hardware), right=False),
    ]
    return [column for column in columns if any(map(column.text, table.rows))]


def _lines(table: ResultsTable, columns: Sequence[Column], escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """The text of every row, column by column; `bold` has a {} for what it makes bold."""

    def cell(row: Row, column: Column) -> str:
        text = escape(column.text(row))
        return bold.replace("{}", text) if text and row.best and column.marks_best else text

    return [[cell(row, column) for column in columns] for row in table.rows]


def other_data(row: Row) -> str:
    return next((figure.other_data for figure in row.paper.values()), "")


def title(table: ResultsTable) -> str:
    held_out = f"accuracy on {table.held_out:g} of the training examples, held out" if table.held_out else ""
    return ", ".join(filter(None, (table.dataset, table.rule, held_out)))


# --- markdown -----------------------------------------------------------------------------------------------------


def escape_markdown(text: str) -> str:
    """Keep text from being read as markup; an underscore within a word is none, and stays legible."""
    text = re.sub(r"([\\`*|<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def markdown_table(table: ResultsTable) -> str:
    columns = _columns(table)
    rule = "|".join("---:" if column.right else "---" for column in columns)
    lines = [[column.title for column in columns], *_lines(table, columns, escape_markdown, "**{}**")]
    head, *rows = (f"| {' | '.join(line)} |" for line in lines)
    usual = usual_text(table)
    below = ["", escape_markdown(usual)] if usual else []
    return "\n".join([f"### {escape_markdown(title(table))}", "", head, f"|{rule}|", *rows, *below, ""])


# --- LaTeX --------------------------------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "–": "--",
    "|": r"\textbar{}", "λ": r"$\lambda$", "γ": r"$\gamma$", "β": r"$\beta$",
}  # fmt: skip


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def latex_table(table: ResultsTable) -> str:
    """A table for the booktabs package."""
    columns = _columns(table)
    lines = [[escape_latex(column.title) for column in columns], *_lines(table, columns, escape_latex, r"\textbf{{}}")]
    head, *rows = (" & ".join(line) + r" \\" for line in lines)
    caption = ". ".join(filter(None, (title(table), usual_text(table))))
    return "\n".join([
        r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(caption)}}}",
        rf"\begin{{tabular}}{{{''.join('r' if column.right else 'l' for column in columns)}}}", r"\toprule",
        head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
    ])  # fmt: skip


# --- csv ----------------------------------------------------------------------------------------------------------


def csv_text(tables: Sequence[ResultsTable]) -> str:
    """One line a row, numbers in full, and the same columns always."""
    numbers = [f"{stem}{metric}{end}" for metric in METRICS for stem in ("", "paper_") for end in ("", "_sd")]
    lines: list[list[Any]] = [[
        "dataset", "candidates", "method", "settings", "network", "epochs", "n", "seeds", *numbers, "best", "p",
        "pairs", "seconds", "images_per_second", "peak_memory_mib", "hardware", "held_out", "paper_data",
    ]]  # fmt: skip
    for within, row in [(table, row) for table in tables for row in table.rows]:
        pairs = [of.get(metric) for metric in METRICS for of in (row.metrics, row.paper)]
        lines.append([
            within.dataset, within.rule, row.method, settings_text(row.settings), row.network, row.epochs,
            len(row.seeds), " ".join(map(str, row.seeds)),
            *(_full(number) for pair in pairs for number in ((pair.mean, pair.deviation) if pair else (None, None))),
            int(row.best), _full(row.test.p if row.test else None), row.test.n if row.test else "",
            _full(row.seconds.mean if row.seconds else None),
            _full(row.images_per_second.mean if row.images_per_second else None), _full(row.peak_memory_mib),
            "; ".join(row.hardware), _full(within.held_out), other_data(row),
        ])  # fmt: skip
    # Names of methods and sources come from outside: csv_line lets no formula through.
    return b"".join(csv_line(map(str, line)) for line in lines).decode("utf-8")


def _full(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.8g}"
