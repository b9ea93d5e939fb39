"""Ctrl-C and SIGTERM before a command has begun its work: modules that are being imported swallow what is raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A module's own handling of errors, as numpy and torch have some, in place of the import that it stands for.
SWALLOW = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background have it ignored
import crosel.config
def swallow(**given):
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException:
        pass
    {then}
wanted, crosel.config.build_config = crosel.config.build_config, swallow
sys.argv = ["crosel", "train", "digits", "--preset", "demo/digits", "--candidates", "uniform:q=0.3", "--method", "cc",
            "--out", sys.argv[1]]
from crosel.cli.app import main
main()
"""


@pytest.mark.parametrize(
    ("name", "then", "said"),
    [
        ("SIGINT", "return wanted(**given)", "stopped; the state is saved"),
        ("SIGTERM", "raise AttributeError('matrix')", "crosel: stopped\n"),
    ],
    ids=["and goes on", "and is of no use"],
)
def test_a_signal_that_a_module_swallows_is_not_lost(tmp_path: Path, name: str, then: str, said: str) -> None:
    code, run = SWALLOW.format(name=name, then=then), tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run / "done").exists()


def test_the_exit_code_does_not_depend_on_where_the_signal_comes(tmp_path: Path) -> None:
    """Dataclasses and named tuples are made by `exec`."""
    code = (
        SWALLOW.format(name="SIGTERM", then="").replace("os.kill(", "exec('os.kill(").replace("SIGTERM)", "SIGTERM)')")
    )
    (tmp_path / "early.py").write_text(code.replace("except BaseException", "except ZeroDivisionError"))
    done = subprocess.run([sys.executable, "-m", "early", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "crosel: stopped\n")
