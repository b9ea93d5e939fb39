"""The lock file for development: hashes for everything, and the same versions as constraints.txt.

When this fails after a change of dependencies, write the lock anew: `make lock`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, set[str]]:
    found = defaultdict(set)
    for name, version in PIN.findall(text):
        found[normal(name)].add(version)
    return dict(found)


@pytest.fixture(scope="module")
def lock() -> str:
    return (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")


def test_every_pin_has_hashes(lock: str) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", lock.strip())
    assert len(entries) > 50
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_versions_are_those_of_the_constraints(lock: str) -> None:
    locked, constrained = pins(lock), pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    shared = locked.keys() & constrained.keys()
    assert len(shared) > 40
    assert {name: (locked[name], constrained[name]) for name in shared if not locked[name] <= constrained[name]} == {}


def test_every_dependency_of_ours_is_locked(lock: str) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml by itself")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    ours = {normal(re.split(r"[\s\[<>=~!;]", item)[0]) for item in wanted} - {"crosel"}
    assert {"torch", "numpy", "typer", "pytest", "ruff"} <= ours
    assert ours - pins(lock).keys() == set()


def test_whoever_lacks_an_extra_is_told_its_name() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml by itself")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"pip install 'crosel\[(\w+)\]'", source)) == project["optional-dependencies"].keys() - {
        "dev",
        "docs",
    }
