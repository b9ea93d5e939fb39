"""What is built to be published, and `crosel demo` as it runs for somebody who has installed it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from _runs import ENVIRONMENT, arrays, metrics, tree
from _support import CroselCli

import crosel

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, cwd: Path | None = None) -> str:
    """Standard output. Nothing of ours is on the path of modules, or the wheel would not be what is tried."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    process = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, cwd=cwd)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, distributions: Path) -> Path:
    """The scripts of an empty environment with the wheel. It borrows our dependencies, since torch takes minutes.

    A folder named in a .pth file adds its modules, not its own .pth files, through which our `src` would be seen.
    """
    environment = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    (wheel,) = distributions.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    ours = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("\n".join(ours), encoding="utf-8")
    return scripts


def test_distributions(distributions: Path) -> None:
    """PyPI accepts them; the wheel holds the whole package, with presets and pages; neither holds tests or results."""
    files = sorted(distributions.iterdir())
    assert [path.name for path in files] == [
        f"crosel-{crosel.__version__}-py3-none-any.whl",
        f"crosel-{crosel.__version__}.tar.gz",
    ]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    package = ROOT / "src" / "crosel"
    ours = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {Path(name).suffix for name in ours} >= {".py", ".yaml", ".json", ".css", ".js", ".html", ".typed"}
    with zipfile.ZipFile(files[0]) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == ours
        readme = wheel.read(f"crosel-{crosel.__version__}.dist-info/METADATA").decode("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []  # PyPI has no docs/ beside its page
    with tarfile.open(files[1]) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {f"src/{name}" for name in ours} <= inside
    assert {name.partition("/")[0] for name in inside} == {
        "src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO", ".gitignore",
    }  # fmt: skip


@pytest.mark.slow
def test_demo(tmp_path: Path, installed: Path, crosel_cli: CroselCli) -> None:
    """From the wheel, on digits with uniform q = 0.3: accurate, selective, right in what it selects, not below CC."""
    where = "import crosel; print(crosel.__file__)"
    assert installed.parent in Path(run(installed / "python", "-c", where, cwd=tmp_path).strip()).parents
    out = tmp_path / "demo"
    said = run(installed / "crosel", "demo", "--out", out, cwd=tmp_path)
    cc, ours = metrics(out / "cc")[-1], metrics(out / "crosel")[-1]
    assert ours["test_accuracy"] >= 0.98
    assert ours["oracle_selection_accuracy"] >= 0.99
    assert ours["selection_ratio"] >= 0.80
    assert ours["test_accuracy"] >= cc["test_accuracy"]
    # The same sets and the same number of epochs, or the comparison says nothing.
    assert arrays(out / "cc/candidates.npz")["candidates"] == arrays(out / "crosel/candidates.npz")["candidates"]
    assert cc["epoch"] == ours["epoch"]
    assert {"crosel-demo", "report.html", "cc/done", "crosel/done", "crosel/report.html"} <= tree(out)
    for place in ("report.html", "crosel/report.html", "crosel/labels.csv"):
        assert str(out / place) in said
    assert f"{100 * ours['test_accuracy']:.1f} %" in said
    # What the demo made can be used like any run.
    evaluation = json.loads(crosel_cli("eval", out / "crosel", "--json").out)
    assert evaluation["test_accuracy"] == pytest.approx(ours["test_accuracy"], abs=1e-6)
