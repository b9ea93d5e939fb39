"""Helpers for all tests: the command line in this process, and small data."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Result(NamedTuple):
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


CroselCli = Callable[..., Result]


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def run_cli(*args: object) -> Result:
    """Call the command line as the `crosel` script does. A traceback counts as exit code 1, as in a process."""
    from crosel.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    old = sys.argv
    sys.argv = ["crosel", *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", ResourceWarning)  # Python shows these only on request
            warnings.showwarning = _show_warning  # pytest would keep them; a process puts them on standard error
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception:
                traceback.print_exc()
                code = 1
    finally:
        sys.argv = old
    return Result(code, out.getvalue(), err.getvalue())


def run_in_process(runs: Any, options: Any, progress: Any, stop: Any) -> Iterator[Any]:
    """An executor of `crosel bench` without processes, which are tested in tests/bench/test_bench.py and take time."""
    from crosel.bench import run_one

    for run in runs:
        progress.started(run)
        yield run_one(run, options.folder(run), options.device, options.trust_code)


def small_arrays(n: int = 96, images: bool = True, seed: int = 0, test: int = 64) -> dict[str, Any]:
    """Real digits with candidate sets, few enough for an epoch in milliseconds: x, candidates, y, x_test, y_test."""
    from sklearn.datasets import load_digits

    from crosel.data.candidates import uniform

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[: n + test]
    x, y = x[order], y[order]
    x = np.rint(x.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8) if images else x.astype(np.float32)
    return {
        "x": x[:n], "candidates": uniform(y[:n], 10, 0.3, seed), "y": y[:n], "x_test": x[n:], "y_test": y[n:],
    }  # fmt: skip


def real_data(name: str) -> Path:
    """The folder that holds a published file or folder, where CROSEL_TEST_DATA says it is; else the test is skipped."""
    root = Path(os.environ.get("CROSEL_TEST_DATA", "nowhere"))
    for folder in (root, root / "realworld"):
        if (folder / name).exists():
            return folder
    raise unittest.SkipTest(f"set CROSEL_TEST_DATA to a folder that holds {name}")


class TinyRun(NamedTuple):
    """A run folder, and the command that made it (without --out)."""

    path: Path
    source: Path
    command: tuple[str, ...]


# What the paper has where CroSel's defaults differ. Its equations and its ablations are tested with these.
PAPER: dict[str, Any] = {"ramp": 0, "alpha": 0.75}
PAPER_VIEWS: dict[str, Any] = {"strong_ops": 2, "cutout": 0.5}
# The same as `--set` takes it.
PAPER_SETS = (
    *(f"method.{name}={value}" for name, value in PAPER.items()),
    *(f"augment.{name}={value}" for name, value in PAPER_VIEWS.items()),
)
# Few epochs and a small network, but both phases, and with so low a γ that something is selected. The paper's λ_cr at
# once: with a gentler start these few epochs would select nothing.
TINY = (
    "--set", "train.epochs=4", "--set", "train.batch_size=16", "--set", "train.lr=0.1", "--set", "network.width=4",
    "--set", "method.warmup=2", "--set", "method.bank_length=1", "--set", "method.gamma=0.2",
    *(part for item in PAPER_SETS for part in ("--set", item)),
)  # fmt: skip
