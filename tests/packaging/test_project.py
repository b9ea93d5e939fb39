"""The files that GitHub, PyPI and contributors read fit the project as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import crosel

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow(path: Path) -> None:
    """Rights are read-only but where a job asks for more; what steps call is there."""
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    jobs = workflow["jobs"].values()
    used = [step["uses"] for job in jobs for step in (job, *job.get("steps", [])) if "uses" in step]
    commands = "\n".join(step.get("run", "") for job in jobs for step in job.get("steps", []))
    assert used
    elsewhere = [name for name in used if not name.startswith("./")]
    assert [name for name in elsewhere if not re.fullmatch(r"[\w./-]+@(release/)?v\d+", name)] == []
    targets = re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE)
    assert [name for name in re.findall(r"\bmake (\w+)", commands) if name not in targets] == []
    named = {*re.findall(r"(?<!\S)(?:tests/\S+|\S+\.txt)", commands), *(name for name in used if name not in elsewhere)}
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_one_version_everywhere() -> None:
    assert yaml.safe_load(read("CITATION.cff"))["version"] == crosel.__version__
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest
    assert newest[1] == crosel.__version__
    hooks = {hook["repo"]: hook.get("rev") for hook in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]}
    assert f"ruff=={hooks['https://github.com/astral-sh/ruff-pre-commit'][1:]}\n" in read("constraints.txt")
