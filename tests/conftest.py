"""Fixtures for all tests: the command line in this process, small data, and one tiny run that tests share."""

from __future__ import annotations

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: small batches are slower on several threads

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _browser import chromium
from _runs import ForkServer
from _support import TINY, CroselCli, TinyRun, run_cli, small_arrays
from hypothesis import settings

# A machine with other work on it makes a case slow now and then, which says nothing about the code.
settings.register_profile("crosel", deadline=None)
settings.load_profile("crosel")


@pytest.fixture(scope="session")
def crosel_cli() -> CroselCli:
    return run_cli


@pytest.fixture(scope="session")
def image_npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "images.npz"
    np.savez(path, **small_arrays())
    return path


@pytest.fixture
def own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a network of a user's own, in a file in the working folder; no later test can import it."""
    (tmp_path / "net_of_a_user.py").write_text(
        "import math\n\nfrom torch import nn\n\n\ndef make(classes, shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "net_of_a_user:make"
    sys.modules.pop("net_of_a_user", None)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, image_npz: Path) -> TinyRun:
    """One finished run for tests that only read it. To change something, copy the folder."""
    command = ("train", str(image_npz), *TINY)
    path = tmp_path_factory.mktemp("tiny") / "run"
    result = run_cli(*command, "--out", path)
    assert result.code == 0, result.err
    return TinyRun(path, image_npz, command)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    if not hasattr(os, "fork"):
        pytest.skip("Windows does not fork")
    server = ForkServer(tmp_path_factory.mktemp("children"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for the whole session: while it is open, no other test of the process can run an event loop."""
    with chromium() as found:
        yield found
