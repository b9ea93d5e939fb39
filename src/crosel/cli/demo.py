"""`crosel demo`: CroSel and CC on the same candidate sets of scikit-learn's digits, compared in one report."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from crosel.cli.options import Device, option
from crosel.errors import UserError
from crosel.utils.console import Console
from crosel.utils.files import atomic_write, disk_errors
from crosel.utils.system import child_environment
from crosel.utils.text import percent

if TYPE_CHECKING:
    import torch

PRESET = "demo/digits"
RULE = "uniform:q=0.3"
MARK = "crosel-demo"  # a folder with this file is a demo's, and may be cleared


def demo(
    out: Path = option(Path("demo-run"), "DIR", "folder for the demo's runs and report"),
    device: Device = "cpu",
) -> None:
    """Train CroSel and CC on handwritten digits, and compare them."""
    from crosel.runs.folder import RunFolder
    from crosel.training.devices import pick_device

    chosen = pick_device(device)
    with RunFolder(out).locked():
        with disk_errors(out):
            _clear(out)
        _train_and_compare(out, chosen)


def _clear(out: Path) -> None:
    """Clear the folder of an old demo; refuse any other folder that is not empty."""
    old = list(out.iterdir())
    if old and out / MARK not in old:
        raise UserError(f"{out} exists and is not the folder of a demo; choose another --out")
    atomic_write(out / MARK, "", durable=False)
    for path in old:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _train_and_compare(out: Path, device: torch.device) -> None:
    import torch

    from crosel.config import build_config
    from crosel.report import write_report, write_run_report
    from crosel.runs.folder import RunFolder
    from crosel.runs.pipeline import train_run

    print(
        "1,348 images of handwritten digits, each with a candidate set: its true label and, with probability 0.3\n"
        "each, other labels. CC, which treats all candidates alike, trains in the background. This is CroSel:\n"
    )
    started = time.perf_counter()
    # One core for each run: batches this small gain little from a second one, and the result is the same.
    torch.set_num_threads(1)
    with _in_background("cc", out / "cc", device) as cc:
        values = {"source": "digits", "candidates": RULE, "method": {"name": "crosel"}}
        config = build_config(preset=PRESET, values=values)
        ours = train_run(
            config, out / "crosel", device, console=Console(sys.stdout), write_report=write_run_report
        ).progress.rows[-1]
        said, _ = cc.communicate()
    if cc.returncode:
        raise RuntimeError(f"the run of CC failed: {said.strip().splitlines()[-1]}")
    theirs = RunFolder(out / "cc").read_metrics()[-1]
    seconds = time.perf_counter() - started
    write_report([RunFolder(out / "crosel"), RunFolder(out / "cc")], out / "report.html")
    print(f"\nCC      test accuracy {percent(theirs['test_accuracy'])}")
    print(f"CroSel  test accuracy {percent(ours['test_accuracy'])}")
    print(f"        it selected a label for {percent(ours['selection_ratio'])} of the training images (S-ratio),")
    print(f"        and {percent(ours['oracle_selection_accuracy'])} of these labels are true (S-acc).")
    print(f"Training took {seconds:.0f} s. Results:")
    print(f"  {out / 'report.html'}        both runs compared")
    print(f"  {out / 'crosel' / 'report.html'} the CroSel run")
    print(f"  {out / 'crosel' / 'labels.csv'}  a label for every training image")


@contextmanager
def _in_background(method: str, out: Path, device: torch.device) -> Iterator[subprocess.Popen[str]]:
    """Train with another method in a child process, which ends with the block or with us."""
    words = ["train", "digits", "--preset", PRESET, "--candidates", RULE, "--method", method]
    words += ["--device", str(device), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "crosel", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**child_environment(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()
