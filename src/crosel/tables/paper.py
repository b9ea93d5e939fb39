"""The paper's figures, and which of them belongs beside a row of ours."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
class Figure:
    mean: float
    deviation: float | None = None


@cache
def paper() -> Mapping[str, Any]:
    content = json.loads((resources.files("crosel.tables") / "paper.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def main_figures(dataset: str, rule: str, method: str) -> dict[str, Figure]:
    """Figures of the main and the fine-grained table, by metric."""
    name, q = _paper_setting(dataset, rule)
    out = {}
    values = paper()["accuracy"].get(name, {}).get(q, {}).get(method)
    if values:
        out["accuracy"] = Figure(*values)
    selection = paper()["selection"].get(name, {}).get(q)
    if selection and method == "crosel":
        out |= {metric: Figure(*pair) for metric, pair in zip(METRICS[1:], selection, strict=True)}
    return out


@dataclass(frozen=True)
class Reference:
    """What CroSel's rows of one table are compared with, of the settings that the paper's ablations change.

    A number that no row varies is part of the schedule, whatever its value: a short one may have its own λ_cr and
    still show the ablation of something else. Of one that is varied, `papers` has the paper's value and `common` the
    most frequent. What makes it another method (one network, no co-mix, …) is always compared with the paper's.
    """

    papers: Mapping[str, Any]
    common: Mapping[str, Any]


def reference(dataset: str, rows: Sequence[Mapping[str, Any]]) -> Reference:
    papers, common = {}, {}
    for name, usual in (_USUAL | _USUAL_OF.get(dataset, {})).items():
        papers[name] = common[name] = usual
        counts = Counter(json.dumps(row.get(name)) for row in rows)
        if counts and name in _NUMBERS:
            common[name] = json.loads(counts.most_common(1)[0][0])
            papers[name] = common[name] if len(counts) == 1 else usual
    return Reference(papers, common)


def figures(dataset: str, rule: str, method: str, settings: Mapping[str, Any], beside: Reference) -> dict[str, Figure]:
    """Figures for a row: those of the main table, or, where it departs from the reference, those of the ablation that
    changes just this. Nothing where the paper has no such row.
    """
    if method != "crosel":
        return main_figures(dataset, rule, method)
    changed = {name for name, value in beside.papers.items() if settings.get(name) != value}
    if not changed:
        return main_figures(dataset, rule, method)
    found = _ablation_figures(dataset, rule, settings, changed)
    if not found:
        changed = {name for name, value in beside.common.items() if settings.get(name) != value}
        found = _ablation_figures(dataset, rule, settings, changed) if changed else {}
    return found


def _ablation_figures(dataset: str, rule: str, settings: Mapping[str, Any], changed: set[str]) -> dict[str, Figure]:
    name, q = _paper_setting(dataset, rule)
    for ablation, needed in _ABLATIONS.items():
        if changed <= needed:
            row = paper()["ablation"].get(f"{ablation} {name} q={q}", {}).get(_row_name(ablation, settings))
            if row:
                return {metric: Figure(value) for metric, value in zip(METRICS, row, strict=True)}
    return {}


_ABLATIONS: dict[str, frozenset[str]] = {
    "scope": frozenset({"method.scope"}),
    "components": frozenset({"method.criteria", "method.scope"}),
    "t": frozenset({"method.bank_length"}),
    "gamma": frozenset({"method.gamma"}),
    "networks": frozenset({"method.networks"}),
    "lambda_cr": frozenset({"method.lambda_cr", "method.dynamic_lambda"}),
    "selected-batch augmentation": frozenset({"method.selected_view"}),
}


def _row_name(ablation: str, settings: Mapping[str, Any]) -> str:
    """How the paper's table calls a row with these settings; a name it does not have where it has none."""
    get = settings.get
    if ablation == "components":
        criteria = "+".join(f"b{number}" for number in get("method.criteria") or ())
        return criteria + {"all": ", co-mix", "none": ""}.get(str(get("method.scope")), " (other scope)")
    if ablation == "scope":
        return str(get("method.scope"))
    if ablation == "networks":
        return {1: "one", 2: "two"}.get(get("method.networks"), "")  # type: ignore[arg-type]
    if ablation == "selected-batch augmentation":
        view = str(get("method.selected_view"))
        return "none" if view == "plain" else view
    if ablation == "lambda_cr":
        return _number(get("method.lambda_cr")) + ("" if get("method.dynamic_lambda") else " fixed")
    return _number(get({"t": "method.bank_length", "gamma": "method.gamma"}[ablation]))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


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
