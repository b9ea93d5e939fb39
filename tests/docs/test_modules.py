"""The table of CONTRIBUTING that says where things are names every module, and none that has gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "crosel"


def named() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## How the code is laid out")[2].partition("\n## ")[0]
    return set(re.findall(r"`([\w/]+(?:\.py|/))`", table))


def test_every_module_and_folder_has_its_place() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert len(modules) > 20
    assert modules | folders <= named()


def test_what_is_named_is_there() -> None:
    for name in named() - {"tests/"}:
        assert list(PACKAGE.rglob(name.rstrip("/"))), name
