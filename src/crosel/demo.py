"""The demo: CroSel and CC on the same candidate sets of scikit-learn's digits, compared in one report."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch

from crosel.config import build_config
from crosel.console import Console, percent
from crosel.errors import UserError
from crosel.files import disk_errors
from crosel.report import write_report
from crosel.run import RunFolder
from crosel.runner import train_run
from crosel.session import pick_device

RULE = "uniform:q=0.3"
MARK = "crosel-demo"  # a folder with this file is a demo's, and may be made anew


def run_demo(out: Path, device: str = "cpu") -> None:
    chosen = pick_device(device)
    with RunFolder(out).locked():
        with disk_errors(out):
            _clear(out)
        _train_and_compare(out, chosen)


def _clear(out: Path) -> None:
    """Make room for a new demo in an empty folder or in an old demo's; touch nothing else."""
    old = list(out.iterdir())
    if old and out / MARK not in old:
        raise UserError(f"{out} is there already and not a demo of ours; choose another --out")
    (out / MARK).touch()
    for path in old:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _train_and_compare(out: Path, device: torch.device) -> None:
    print(
        "1,348 images of handwritten digits. Each has its true label hidden in a set of candidates, where every\n"
        "wrong label stands with probability 0.3. First CC, which treats all candidates alike, then CroSel.\n"
    )
    started, rows = time.perf_counter(), {}
    for method in ("cc", "crosel"):
        config = build_config(
            preset="demo/digits", values={"source": "digits", "candidates": RULE, "method": {"name": method}}
        )
        session = train_run(config, out / method, device, console=Console(sys.stdout))
        rows[method] = session.progress.rows[-1]
        print()
    seconds = time.perf_counter() - started
    write_report([RunFolder(out / "crosel"), RunFolder(out / "cc")], out / "report.html")
    ours = rows["crosel"]
    print(f"CC      test accuracy {percent(rows['cc']['test_accuracy'])}")
    print(f"CroSel  test accuracy {percent(ours['test_accuracy'])}")
    print(f"        it picked one label for {percent(ours['selection_ratio'])} of the training images (S-ratio),")
    print(f"        and {percent(ours['oracle_selection_accuracy'])} of these are the true ones (S-acc).")
    print(f"{seconds:.0f} s of training. Look at:")
    print(f"  {out / 'report.html'}        the two runs compared")
    print(f"  {out / 'crosel' / 'report.html'} the CroSel run")
    print(f"  {out / 'crosel' / 'labels.csv'}  a label for every training image")
