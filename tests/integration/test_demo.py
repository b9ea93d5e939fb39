"""`crosel demo` and what was there before it, or is left when it is killed. tests/packaging runs it to the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from _runs import ForkServer
from _support import CroselCli

from crosel.errors import UserError
from crosel.runs.folder import RunFolder


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
