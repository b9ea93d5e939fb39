"""The memory bank at ImageNet's size, and how the time of an epoch grows with the number of examples.

    python benchmarks/bank.py --out results/bank.json

For 1,281,167 examples, 1,000 classes and t = 3, this measures the bank's memory, the time to push an epoch (softmax
outputs, chunk by chunk, as in training) and the time to select. Then it times whole epochs of CroSel with a small
network on 10,000 to 80,000 random examples.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Arguments, count, end_with, save

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.data.dataset import make_dataset
from crosel.methods.bank import MemoryBank
from crosel.training.build import build_session, resolve
from crosel.training.devices import pick_device
from crosel.training.trainer import fit

IMAGENET, CLASSES, CHUNK = 1_281_167, 1000, 8192


def timed(action: Any, device: torch.device, repeats: int = 5) -> float:
    """Seconds of the best repeat, after one that does not count."""
    best = float("inf")
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def bank(device: torch.device, n: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    memory = MemoryBank(3, n).to(device)
    chunk = torch.softmax(5 * torch.randn(CHUNK, CLASSES, generator=generator, device=device), dim=1)
    candidates = torch.rand(n, CLASSES, generator=generator, device=device) < 0.01

    def push() -> None:
        memory.shift()
        for start in range(0, n, CHUNK):
            rows = slice(start, min(n, start + CHUNK))
            memory.write(rows, chunk[: rows.stop - rows.start])

    push_s = timed(push, device)
    select_s = timed(lambda: memory.select(candidates, 0.9), device)
    size = sum(b.numel() * b.element_size() for b in memory.buffers())
    return {"n": n, "k": CLASSES, "bank_mib": size / 2**20, "push_ms": 1e3 * push_s, "select_ms": 1e3 * select_s}


def epoch_seconds(device: torch.device, n: int) -> float:
    """Seconds of the fourth epoch of CroSel, with selection and bank: an MLP on 64 features."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, n)
    x = rng.normal(size=(n, 64)).astype(np.float32) + np.eye(10, 64, dtype=np.float32)[y] * 3
    data = draw_candidates(make_dataset(x, y=y, classes=10), "uniform:q=0.3", 0)
    values = {
        "source": "random", "method": {"name": "crosel", "warmup": 2}, "train": {"epochs": 4, "batch_size": 256},
        "network": {"hidden": [128]},
    }  # fmt: skip
    session = build_session(resolve(build_config(settings=[], values=values), data), data, device)
    return float(fit(session)[-1]["seconds"])


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=count, default=IMAGENET)
    options = parser.parse_args()
    device = pick_device(options.device)
    result: dict[str, Any] = {"bank": bank(device, options.n)}
    print(result["bank"])
    result["epochs"] = [{"n": n, "seconds": epoch_seconds(device, n)} for n in (10_000, 20_000, 40_000, 80_000)]
    print(result["epochs"])
    save(result, options.out)


if __name__ == "__main__":
    end_with(main)
