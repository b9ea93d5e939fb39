"""The paper's figures, and which of them belongs beside a row of ours."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

METRICS = ("accuracy", "selection_ratio", "selection_accuracy")
# What the paper's ablations change, and to which value it is set otherwise (λ_cr is 1 on CIFAR-100).
_USUAL: dict[str, Any] = {
    "method.criteria": [1, 2, 3], "method.scope": "all", "method.bank_length": 3, "method.gamma": 0.9,
    "method.networks": 2, "method.lambda_cr": 4.0, "method.dynamic_lambda": True, "method.selected_view": "weak",
}  # fmt: skip
_NUMBERS = ("method.bank_length", "method.gamma", "method.lambda_cr")
_USUAL_OF = {"cifar100": {"method.lambda_cr": 1.0}, "svhn": {"method.gamma": 0.85}}


@dataclass(frozen=True)
class PaperFigure:
    mean: float
    deviation: float | None = None
    other_data: str = ""  # dataset and q that the paper has it for, where these are not the row's own


@cache
def paper() -> Mapping[str, Any]:
    content = json.loads((resources.files("crosel.bench.tables") / "paper.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def main_figures(dataset: str, rule: str, method: str) -> dict[str, PaperFigure]:
    """Figures of the main and the fine-grained table, by metric."""
    name, q = _paper_setting(dataset, rule)
    out = {}
    values = paper()["accuracy"].get(name, {}).get(q, {}).get(method)
    if values:
        out["accuracy"] = PaperFigure(*values)
    selection = paper()["selection"].get(name, {}).get(q)
    if selection and method == "crosel":
        out |= {metric: PaperFigure(*pair) for metric, pair in zip(METRICS[1:], selection, strict=True)}
    return out


def whole_method(data: str) -> PaperFigure:
    """The paper's accuracy without any ablation, on the data of an ablation ("cifar100 q=0.1")."""
    dataset, q = data.split()
    return main_figures(dataset, f"uniform:{q}", "crosel")["accuracy"]


@dataclass(frozen=True)
class Reference:
    """What CroSel's rows of one table are compared with, of the settings that the paper's ablations change.

    A number that no row varies is part of the schedule, whatever its value: a short one may have its own λ_cr and
    still show the ablation of something else. Of one that is varied, `papers` has the paper's value and `common` the
    most frequent, where there is one. What makes it another method (one network, no co-mix, …) is always compared with
    the paper's.
    """

    papers: Mapping[str, Any]
    common: Mapping[str, Any]


def reference(dataset: str, rows: Sequence[Mapping[str, Any]]) -> Reference:
    papers, common = {}, {}
    for name, usual in (_USUAL | _USUAL_OF.get(dataset, {})).items():
        papers[name] = common[name] = usual
        counts = Counter(json.dumps(row.get(name)) for row in rows)
        if counts and name in _NUMBERS:
            (value, most), *others = counts.most_common(2)
            if not others or others[0][1] < most:  # else none is the most frequent
                common[name] = json.loads(value)
            papers[name] = usual if others else common[name]
    return Reference(papers, common)


def paper_cells(
    dataset: str, rule: str, method: str, settings: Mapping[str, Any], beside: Reference
) -> dict[str, PaperFigure]:
    """Figures for a row: those of the main table, or, where it departs from the reference, those of the ablation that
    changes just this. The paper has each ablation for one or two kinds of data only: for others, the nearest is taken,
    and named. Nothing where the paper has no such row.
    """
    if method != "crosel":
        return main_figures(dataset, rule, method)
    departures = [
        {name for name, value in usual.items() if settings.get(name) != value}
        for usual in (beside.papers, beside.common)
    ]
    if not departures[0]:
        return main_figures(dataset, rule, method)
    name, q = _paper_setting(dataset, rule)
    own = f"{name} q={q}"
    for data in (own, *_nearest_first(name, q)):
        for changed in filter(None, departures):
            row = _ablation_row(data, settings, changed)
            if row:
                other = "" if data == own else data
                return {metric: PaperFigure(value, None, other) for metric, value in zip(METRICS, row, strict=True)}
    return {}


def _ablation_row(data: str, settings: Mapping[str, Any], changed: set[str]) -> list[float] | None:
    """Of an ablation on these data ("cifar10 q=0.5") that changes no more than this."""
    for ablation, (names, called) in _ABLATIONS.items():
        rows: Mapping[str, list[float]] = paper()["ablation"].get(f"{ablation} {data}", {})
        row = rows.get(called(*map(settings.get, names))) if changed <= set(names) else None
        if row:
            return row
    return None


def _nearest_first(name: str, q: str) -> list[str]:
    """The data that the paper has ablations for: the same images before others, then by q."""
    if not q or name not in paper()["accuracy"]:
        return []
    # A key is the ablation's name, which may have spaces, the dataset and q.
    known = {" ".join(key.split()[-2:]) for key, rows in paper()["ablation"].items() if isinstance(rows, dict)}

    def distance(data: str) -> tuple[bool, float, str]:
        dataset, its_q = data.split(" q=")
        return dataset != name.partition("-")[0], abs(float(its_q) - float(q)), data

    return sorted(known, key=distance)


def _short_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _components(criteria: Any, scope: Any) -> str:
    selected_by = "+".join(f"b{number}" for number in criteria or ())
    return selected_by + {"all": ", co-mix", "none": ""}.get(str(scope), " (other scope)")


# By the name of the paper's table: the settings that it changes, and how it calls a row with these values.
_ABLATIONS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "scope": (("method.scope",), str),
    "components": (("method.criteria", "method.scope"), _components),
    "t": (("method.bank_length",), _short_number),
    "gamma": (("method.gamma",), _short_number),
    "networks": (("method.networks",), lambda number: {1: "one", 2: "two"}.get(number, "")),
    "lambda_cr": (
        ("method.lambda_cr", "method.dynamic_lambda"),
        lambda weight, dynamic: _short_number(weight) + ("" if dynamic else " fixed"),
    ),
    "selected-batch augmentation": (("method.selected_view",), lambda view: "none" if view == "plain" else str(view)),
}


def _paper_setting(dataset: str, rule: str) -> tuple[str, str]:
    """`cifar100` with `superclass:q=0.5` is the paper's "cifar100-superclass" at "0.5"."""
    found = re.fullmatch(r"(uniform|superclass):q=([0-9.eE+-]+)", rule.replace(" ", ""))
    if not found:
        return dataset, ""
    try:
        q = f"{float(found[2]):g}"
    except ValueError:
        return dataset, ""
    return (f"{dataset}-superclass" if found[1] == "superclass" else dataset), q
