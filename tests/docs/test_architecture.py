"""The map of the code leads to modules that exist, by a short way, and its picture and table agree with the code."""

from __future__ import annotations

import re

from _blocks import ROOT, docs_script

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_way_of_a_row_is_short_and_its_modules_exist() -> None:
    hops = re.findall(r"^\d+\. \[`([\w/.]+)`\]\(\.\./src/crosel/([\w/.]+)\)", section("The way of a row"), re.MULTILINE)
    assert 5 <= len(hops) <= 15
    assert all(shown == target and (ROOT / "src" / "crosel" / target).is_file() for shown, target in hops)
    picture = docs_script("architecture")
    assert [module for stage in picture.STAGES.values() for module, _ in stage] == [shown for shown, _ in hops]
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw(), "python docs/architecture.py"


def test_every_link_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert len(targets) > 30
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []


def test_every_folder_is_in_the_table_in_the_order_of_its_imports() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r"\w+", re.search(r"^layers = \[(.*?)\]", contract, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
    rows = [re.match(r"\| \[?`(\w+)", line) for line in section("Layers").splitlines()]
    assert [row[1] for row in rows if row] == layers
