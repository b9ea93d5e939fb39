"""Same seed: the same bits with the same number of threads; with 1, 2 and 4 as close as rounding allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _support import small_arrays

EPOCHS = 2
TOLERANCE = 1e-4  # largest difference of a probability on the test set after EPOCHS epochs, between thread counts
METHODS = ("crosel", "cc", "proden", "lws", "crdpll", "pico", "pop")
PROGRAM = """
import sys, numpy as np, torch
from pathlib import Path
from crosel.config import build_config
from crosel.runs.pipeline import train_run
from crosel.training.trainer import predict_chunks
torch.set_num_threads(int(sys.argv[2]))
tables = {}
for name in sys.argv[3:]:
    values = {"source": str(Path(sys.argv[1]).parent / "digits.npz"), "method": {"name": name}, "seed": 5}
    config = build_config(settings=["train.epochs=EPOCHS", "network.width=16", "train.batch_size=128"], values=values)
    s = train_run(config, Path(sys.argv[1]) / name, torch.device("cpu"))
    p = [s.method.combine(o) for _, o in predict_chunks(s, s.data.x_test)]
    tables[name] = torch.cat(p).numpy()
    tables[name + " weights"] = torch.cat([v.flatten() for v in s.method.parameters()]).detach().numpy()
np.savez(sys.argv[1] + "/out.npz", **tables)
"""


def train_all(folder: Path, threads: int) -> dict[str, np.ndarray[Any, Any]]:
    folder.mkdir(parents=True)
    program = PROGRAM.replace("EPOCHS", str(EPOCHS))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(threads), *METHODS],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "out.npz") as archive:
        return dict(archive)


def run(folder: Path, out: Path | None) -> dict[str, Any]:
    np.savez(folder / "digits.npz", **small_arrays(512))
    one, again = train_all(folder / "1", 1), train_all(folder / "1-again", 1)
    for name in one:
        assert one[name].tobytes() == again[name].tobytes(), f"{name}: not the same bits"
    apart = {}
    for threads in (2, 4):
        other = train_all(folder / str(threads), threads)
        same = train_all(folder / f"{threads}-again", threads)
        for name in METHODS:
            assert other[name].tobytes() == same[name].tobytes(), f"{name}, {threads} threads: not the same bits"
            apart[f"{name}, {threads} threads"] = float(np.abs(one[name] - other[name]).max())
    worst = max(apart.values())
    if out is not None:
        (out / "threads.json").write_text(json.dumps(apart, indent=1) + "\n")
    assert worst <= TOLERANCE, apart
    return {"methods": len(METHODS), "epochs": EPOCHS, "same_bits_repeated": True, "largest_difference": worst,
            "allowed": TOLERANCE}  # fmt: skip
