"""The Python blocks of README and CONTRIBUTING run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosel.methods import base, methods

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("README.md", "CONTRIBUTING.md")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S))
]


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(methods())
    yield
    base._METHODS.clear()
    base._METHODS.update(before)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    names: dict[str, object] = {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    if "clf" in names:
        assert (names["clf"].transduction_ == names["y"]).mean() > 0.5  # type: ignore[attr-defined]
    else:
        assert "average" in methods()


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
