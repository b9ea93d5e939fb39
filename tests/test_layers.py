"""The layers of the package: the contract in pyproject.toml holds, and notices an import that points the wrong way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("data/dataset.py", "from crosel.training import session"),
        ("methods/cc.py", "from crosel import config"),
        ("runs/folder.py", "from crosel.report import write_report"),
        ("training/trainer.py", "from crosel.runs.folder import RunFolder"),
    ],
)
def test_a_planted_import_is_noticed(module: str, planted: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "src" / "crosel" / module
    file.write_text(file.read_text(encoding="utf-8") + f"\n{planted}\n", encoding="utf-8")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Layers BROKEN" in result.stdout


def test_the_root_stays_small() -> None:
    modules = sorted(path.stem for path in (ROOT / "src" / "crosel").glob("*.py"))
    assert modules == ["__init__", "__main__", "bank", "candidates", "config", "errors", "losses", "nets"]


def sources(folder: str = "") -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / "src" / "crosel" / folder).rglob("*.py")}


def test_data_are_read_without_torch() -> None:
    for path, text in sources("data").items():
        assert not re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE), path


def test_one_file_speaks_of_other_processes() -> None:
    assert [path.name for path, text in sources().items() if "torch.distributed." in text] == ["distributed.py"]
