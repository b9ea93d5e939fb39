"""The methods' pages and the heads of their modules name functions that there are, with the arguments they have."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosel.methods import find_method, methods

PAGES = sorted((Path(__file__).parents[2] / "docs" / "methods").glob("*.md"))
METHODS = [page.stem for page in PAGES if page.stem != "index"]


def found(name: str, method: str) -> Any:
    """What a dotted name means on a method's page: in the method's module, beside it, in the package, or in full."""
    for start in (f"crosel.methods.{method}", "crosel.methods", "crosel"):
        whole = f"{start}.{name}" if not name.startswith("crosel.") else name
        parts = whole.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                thing: Any = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            try:
                for part in parts[cut:]:
                    thing = getattr(thing, part)
            except AttributeError:
                break
            return thing
    raise AssertionError(f"there is no {name}")


def test_every_method_of_ours_has_a_page() -> None:
    ours = {name for name, method in methods().items() if method.__module__.startswith("crosel.")}
    assert set(METHODS) == ours
    assert len(ours) >= 7


@pytest.mark.parametrize("method", METHODS)
def test_functions_on_the_page_are_there(method: str) -> None:
    text = next(page for page in PAGES if page.stem == method).read_text(encoding="utf-8")
    calls = re.findall(r"`([a-z_][\w.]*)\(([\w, ]*)\)`", text)
    for name, arguments in calls:
        if name in ("features", "classify", "forward"):  # what PiCO asks of a network
            continue
        given = [argument.strip() for argument in arguments.split(",")]
        assert list(inspect.signature(found(name, method)).parameters)[: len(given)] == given, name
    paths = re.findall(r"`((?:crosel|bank|losses|nets|contrast)\.[\w.]+)`", text)
    assert all(found(name, method) for name in paths)
    bare = re.findall(r"\| `([a-z]+_[a-z_]+|mix)` \|$", text, flags=re.MULTILINE)
    assert all(callable(found(name, method)) for name in bare)
    assert calls or bare


@pytest.mark.parametrize("method", METHODS)
def test_functions_at_the_head_of_the_module_are_there(method: str) -> None:
    head = importlib.import_module(f"crosel.methods.{method}").__doc__ or ""
    names = re.findall(r"-> `([\w.]+)`", head)
    if method == "crosel":  # a table
        names = [
            name
            for cell in re.findall(r"\| ([^|]*`) \|$", head, re.MULTILINE)
            for name in re.findall(r"`([\w.]+)`", cell)
        ]
        names = [f"bank.{name}" if name.startswith(("label_is", "confidence_is")) else name for name in names]
    assert names
    assert all(found(name, method) for name in names)


@pytest.mark.parametrize("method", METHODS)
def test_the_page_has_every_setting_with_its_default(method: str) -> None:
    text = next(page for page in PAGES if page.stem == method).read_text(encoding="utf-8")
    table = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", table, flags=re.MULTILINE)
    told = {}
    for names, default in rows:
        keys = re.findall(r"`(\w+)`", names)
        values = [yaml.safe_load(default.strip("` ").partition(":")[0])] if default[0] in "`n" else default.split(",")
        told |= dict(zip(keys, values * len(keys) if len(values) == 1 else values, strict=True))
    fields = {name: field for name, field in find_method(method).Settings.model_fields.items() if name != "name"}
    assert set(told) == set(fields)
    for name, field in fields.items():
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if default is None:
            assert told[name] == "none", name
        elif isinstance(default, float | int) and not isinstance(default, bool):
            assert float(told[name]) == default, name
        else:
            assert told[name] == default, name
