"""Memory that must stay flat: 500 epochs of training, and a million predictions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _support import small_arrays

EPOCHS = 500
IMAGES = 256  # of digits
ROWS = 1_000_000
FEATURES = 8
ALLOWED_MIB = 24.0  # what an allocator may keep for itself; a leak of 64 kB an epoch would show


def resident_mib(pid: int | str = "self") -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(samples: list[float]) -> float:
    """By how much the last fifth lies above the second fifth; the first is for warming up."""
    part = max(1, len(samples) // 5)
    return float(np.median(samples[-part:]) - np.median(samples[part : 2 * part]))


def leak(folder: Path, out: Path | None, epochs: int = EPOCHS) -> dict[str, Any]:
    import torch

    from crosel.config import build_config
    from crosel.runs.pipeline import train_run
    from crosel.utils.console import Console

    samples: list[float] = []

    class Sampler(Console):
        def on_epoch(self, session: Any, row: Any) -> None:
            samples.append(resident_mib())

    np.savez(folder / "digits.npz", **small_arrays(IMAGES))
    values = {"source": str(folder / "digits.npz"), "method": {"name": "crosel"}}
    settings = [f"train.epochs={epochs}", "network.width=2", "train.batch_size=64", "method.warmup=20"]
    train_run(build_config(settings=settings, values=values), folder / "run", torch.device("cpu"), console=Sampler())
    assert len(samples) == epochs
    grown = growth(samples)
    assert grown < ALLOWED_MIB, f"{grown:.1f} MiB more after {epochs} epochs: {samples[:: max(1, epochs // 20)]}"
    return {"epochs": epochs, "grown_mib": round(grown, 2), "allowed_mib": ALLOWED_MIB,
            "resident_mib": [round(s, 1) for s in samples[:: max(1, epochs // 10)]]}  # fmt: skip


def feature_run(folder: Path) -> Path:
    """A small run on features, to predict with."""
    import torch

    from crosel.config import build_config
    from crosel.runs.pipeline import train_run

    draw = np.random.default_rng(0)
    y = np.arange(400) % 4
    x = draw.normal(size=(400, FEATURES)) + 2 * np.eye(4, FEATURES)[y]
    sets = np.eye(4, dtype=bool)[y] | (draw.random((400, 4)) < 0.2)
    np.savez(folder / "train.npz", x=x, candidates=sets)
    config = build_config(
        settings=["train.epochs=2"], values={"source": str(folder / "train.npz"), "method": {"name": "cc"}}
    )
    train_run(config, folder / "run", torch.device("cpu"))
    return folder / "run"


def write_rows(path: Path, rows: int) -> None:
    block = np.random.default_rng(1).normal(size=(1000, FEATURES))
    text = "".join(",".join(f"{value:.4f}" for value in row) + "\n" for row in block)
    with open(path, "w", encoding="ascii") as stream:
        stream.write(",".join(f"f{i}" for i in range(FEATURES)) + "\n")
        for _ in range(rows // 1000):
            stream.write(text)


def predict(folder: Path, out: Path | None, rows: int = ROWS) -> dict[str, Any]:
    model = feature_run(folder)
    write_rows(folder / "new.csv", rows)
    answer = folder / "predictions.csv"
    process = subprocess.Popen(
        [sys.executable, "-m", "crosel", "predict", str(model), str(folder / "new.csv"), "--out", str(answer)],
        stdout=subprocess.DEVNULL,
    )
    samples = []
    while process.poll() is None:
        if any(folder.glob(".writing-*")):  # imports are over: rows are on their way
            samples.append(resident_mib(process.pid))
        time.sleep(0.1)
    assert process.returncode == 0
    with open(answer, encoding="utf-8") as stream:
        lines = sum(1 for _ in stream)
    assert lines == rows + 1
    samples = samples[:-1]  # the last one may be of a process that is already on its way out
    grown = growth(samples)
    assert grown < ALLOWED_MIB, f"{grown:.1f} MiB more: {samples[:: max(1, len(samples) // 20)]}"
    return {
        "rows": rows, "input_mib": round((folder / "new.csv").stat().st_size / 2**20, 1), "grown_mib": round(grown, 2),
        "allowed_mib": ALLOWED_MIB, "peak_mib": round(max(samples), 1), "samples": len(samples),
    }  # fmt: skip
