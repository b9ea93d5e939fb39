"""crosel with what Windows lacks hidden, and what it refuses refused: the same modules, the same commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _runs import ENVIRONMENT
from _support import TINY, small_arrays

AS_ON_WINDOWS = """
import importlib, os, pkgutil, signal, sys, types
import fcntl, fastapi, numpy, scipy.io, sklearn.datasets, torch, typer, uvicorn  # these may need what is hidden below

HIDDEN = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
sys.modules |= dict.fromkeys(HIDDEN)
for module, names in {
    os: ("O_DIRECTORY", "O_NOFOLLOW", "fork", "geteuid", "getuid", "killpg", "sched_getaffinity", "setsid", "sysconf"),
    signal: ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "pause"),
}.items():
    for name in names:
        delattr(module, name)

open_file = os.open

def open_no_folder(path, *args, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return open_file(path, *args, **options)

def locking(handle, mode, count):
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

os.open = open_no_folder
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=0)

import crosel
from crosel.utils import system

system.WINDOWS = True  # before any module takes it from there
names = [found.name for found in pkgutil.walk_packages(crosel.__path__, "crosel.")]
assert len(names) > 80, names
for name in names:
    if not name.endswith(("__main__", "_kernels")):  # Triton is for Linux: its kernels are imported with CUDA only
        importlib.import_module(name)

from crosel.cli.app import main
from crosel.runs.folder import RunFolder
from crosel.runs.folder import Recorder
from pathlib import Path

run, *train = sys.argv[1:]

def crosel(*arguments):
    sys.argv = ["crosel", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0

with RunFolder(Path(run)).locked():
    assert crosel("train", *train, "--out", run) == 2
assert not os.path.exists(run)

def stop(self, session, row):
    on_epoch(self, session, row)
    system.ask_to_stop()

on_epoch, Recorder.on_epoch = Recorder.on_epoch, stop
assert crosel("train", *train, "--out", run) == 130
Recorder.on_epoch = on_epoch
assert crosel("train", *train, "--out", run, "--resume") == 0
assert crosel("labels", run, "--out", "labels.csv") == 0
"""


def test_as_on_windows(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="this is Windows")
    np.savez(tmp_path / "images.npz", **small_arrays())
    command = [sys.executable, "-c", AS_ON_WINDOWS, "run", "images.npz", *TINY]
    process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "in use by another process" in process.stderr
    assert "continuing after epoch 1" in process.stderr
    assert len((tmp_path / "labels.csv").read_text(encoding="utf-8").splitlines()) == 97
    assert {path.name for path in tmp_path.iterdir()} == {"images.npz", "labels.csv", "run"}
    assert "peak_memory_mib" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
