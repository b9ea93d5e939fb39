"""What the command line tells the library of threads, which reads it when torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SHOW = (
    "import os, sys; sys.argv = ['crosel', '--version']\n"
    "from crosel.cli.app import main\n"
    "main()\n"
    "assert 'torch' not in sys.modules, 'too late'\n"
    "print({name: os.environ.get(name) for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')})\n"
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000", "OMP_WAIT_POLICY": None}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": None}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_waiting_threads_soon_sleep_unless_the_user_said_otherwise(
    given: dict[str, str], expected: dict[str, str | None]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)
