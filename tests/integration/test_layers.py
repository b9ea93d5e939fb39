"""Who may know whom, as CONTRIBUTING.md lays it out: what a package imports, read off its source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import crosel

SOURCE = Path(crosel.__file__).parent


def imports(path: Path) -> set[str]:
    """Modules that a file names in its imports, those inside functions too: `crosel.training.trainer`, `torch.nn`, …"""
    out: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import"
            out |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return out


def parts_of_ours(package: str) -> set[str]:
    """First names below `crosel` that the files of a package import, but for the package itself."""
    found = {name for path in (SOURCE / package).glob("*.py") for name in imports(path)}
    assert found
    ours = {name.split(".")[1] for name in found if name.startswith("crosel.")}
    return {name for name in ours if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()} - {package}


@pytest.mark.parametrize(
    ("package", "known"),
    [
        ("data", {"candidates", "errors", "files", "limits", "redact", "settings", "yaml_files"}),
        ("augment", {"settings"}),
        ("compute", {"distributed", "errors"}),
        ("methods", {"bank", "compute", "distributed", "errors", "losses", "nets", "settings"}),
    ],
)
def test_a_package_below_knows_no_more_than_it_needs(package, known):
    assert parts_of_ours(package) == known


def test_data_are_read_without_torch():
    for path in (SOURCE / "data").glob("*.py"):
        assert not any(name.partition(".")[0] == "torch" for name in imports(path)), path


def test_one_file_speaks_of_other_processes():
    speaking = {p.name for p in SOURCE.rglob("*.py") if "torch.distributed." in p.read_text(encoding="utf-8")}
    assert speaking == {"distributed.py"}
