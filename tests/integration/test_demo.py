"""`crosel demo` keeps its promises. How fast it is depends on the machine and is not looked at here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _runs import ENVIRONMENT, ForkServer, arrays, metrics, tree
from _support import CroselCli

from crosel.errors import UserError
from crosel.runs.folder import RunFolder


@pytest.mark.slow
def test_demo(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """On digits with uniform q = 0.3: accurate, selective, right in what it selects, and not below CC."""
    out = tmp_path / "demo"
    process = subprocess.run(
        [sys.executable, "-m", "crosel", "demo", "--out", str(out)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert process.returncode == 0, process.stderr
    cc, crosel = metrics(out / "cc")[-1], metrics(out / "crosel")[-1]
    assert crosel["test_accuracy"] >= 0.98
    assert crosel["oracle_selection_accuracy"] >= 0.99
    assert crosel["selection_ratio"] >= 0.80
    assert crosel["test_accuracy"] >= cc["test_accuracy"]
    # The same sets and the same number of epochs, or the comparison says nothing.
    assert arrays(out / "cc/candidates.npz")["candidates"] == arrays(out / "crosel/candidates.npz")["candidates"]
    assert cc["epoch"] == crosel["epoch"]
    assert {"crosel-demo", "report.html", "cc/done", "crosel/done", "crosel/report.html"} <= tree(out)
    for place in ("report.html", "crosel/report.html", "crosel/labels.csv"):
        assert str(out / place) in process.stdout
    assert f"{100 * crosel['test_accuracy']:.1f} %" in process.stdout
    # What the demo made can be used like any run.
    evaluation = json.loads(crosel_cli("eval", out / "crosel", "--json").out)
    assert evaluation["test_accuracy"] == pytest.approx(crosel["test_accuracy"], abs=1e-6)


def test_demo_clears_only_its_own(tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old demo makes way for a new one; a folder of the user's does not."""
    monkeypatch.setattr("crosel.cli.demo._train_and_compare", lambda out, device: print("trained"))
    old, users = tmp_path / "old", tmp_path / "users"
    (old / "crosel/checkpoints").mkdir(parents=True)
    (old / "crosel-demo").touch()
    (old / "report.html").touch()
    (old / "link").symlink_to(users)
    users.mkdir()
    (users / "precious").touch()
    assert crosel_cli("demo", "--out", old).code == 0
    assert [path.name for path in old.iterdir()] == ["crosel-demo"]
    assert (users / "precious").exists()
    result = crosel_cli("demo", "--out", users)
    assert (result.code, result.out) == (2, "")
    assert (users / "precious").exists()
    empty = tmp_path / "empty"  # a demo that was killed before it had made its mark
    empty.mkdir()
    assert crosel_cli("demo", "--out", empty).code == 0


def test_a_killed_demo_takes_its_other_run_with_it(tmp_path: Path, fork_server: ForkServer) -> None:
    """Else it would write into the folder that the next demo has cleared."""
    other = RunFolder(tmp_path / "demo" / "cc")

    def is_free() -> bool:
        try:
            with other.locked():
                return True
        except UserError:  # in use
            return False

    child = fork_server.start("demo", "--out", tmp_path / "demo")
    child.wait_for(lambda: bool(other.read_metrics()))
    child.signal(signal.SIGKILL)
    assert child.wait() == -9
    child.wait_for(is_free)
    assert 1 <= len(other.read_metrics()) < 40
    assert not other.is_done
