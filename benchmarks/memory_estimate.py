"""How good the estimate of memory before training is: its parts, next to what torch really took.

    python benchmarks/memory_estimate.py --out results/gpu/memory-estimate.json
    python benchmarks/memory_estimate.py --against results/gpu/memory-estimate.json --out results/gpu/estimate-anew.json

In each case the session is built, three steps run eagerly, one is recorded and replayed, and the passes without
gradient follow. `peak` is the most memory that tensors took (torch.cuda.max_memory_allocated). `reserved` is what
torch held of the card for them. `needed` is the peak; if steps are recorded, it is what was reserved, because a
recording does not share its memory. If they are not, torch gives back what it does not use before it runs out.

The first command needs a GPU. The second only estimates again, on any machine, and compares with what an earlier
record has measured.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Arguments, count, end_with, save

from crosel.config import build_config
from crosel.data.candidates import uniform
from crosel.data.dataset import Dataset, make_dataset
from crosel.data.text import read_json
from crosel.errors import UserError
from crosel.training.build import build_session, resolve
from crosel.training.devices import pick_device
from crosel.training.memory import budget, gib, libraries
from crosel.training.session import Session
from crosel.training.step import TrainStep
from crosel.training.trainer import draw_epoch, finish_epoch

FAST: dict[str, Any] = {"bf16": True, "fused": True, "cuda_graphs": True}
PLAIN: dict[str, Any] = {"bf16": False, "fused": False, "cuda_graphs": False}
PATHS = {
    "fast": FAST, "plain": PLAIN, "fast, skipping": FAST | {"bad_batches": "skip"},
    "fast, average": FAST | {"ema_decay": 0.99},
}  # fmt: skip
CASES = [  # network, batch size, method, paths
    ("wrn-28-2", 64, "crosel", ("fast", "plain")),
    ("wrn-28-2", 64, "cc", ("fast",)),
    ("wrn-28-2", 64, "pico", ("fast",)),
    *(("wrn-28-2", 128, method, ("fast", "plain")) for method in ("crosel", "cc", "pico")),
    ("wrn-28-2", 512, "cc", ("fast", "plain")),
    ("wrn-34-10", 64, "crosel", ("fast", "plain", "fast, skipping", "fast, average")),
    ("wrn-34-10", 64, "cc", ("fast",)),
    ("wrn-34-10", 64, "pico", ("fast",)),
    ("wrn-34-10", 256, "crosel", ("fast",)),
    ("small-cnn", 128, "crosel", ("fast", "plain")),
    ("mlp", 128, "crosel", ("fast",)),
    ("wrn-16-8", 128, "crosel", ("fast", "plain")),
    *(("wrn-28-2", 128, method, ("fast",)) for method in ("crdpll", "pop", "lws")),
]
EPOCHS, EPOCH = 40, 20  # CroSel is past its warm-up in epoch 20 of 40


def random_images(n: int) -> Dataset:
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8) for size in (n, n // 5))
    y, y_test = rng.integers(0, 10, n), rng.integers(0, 10, n // 5)
    return make_dataset(x, uniform(y, 10, 0.5, 0), y=y, x_test=x_test, y_test=y_test, classes=10)


def open_session(
    data: Dataset, network: str, batch: int, method: str, path: dict[str, Any], device: torch.device
) -> Session:
    train = {"epochs": EPOCHS, "batch_size": batch, **path}
    values = {"source": "memory", "method": {"name": method}, "network": {"name": network}, "train": train}
    session = build_session(resolve(build_config(values=values), data), data, device)
    selected = getattr(session.method, "selected", None)
    if selected is not None:  # as in the middle of a run: all examples are selected
        selected.fill_(True)
        session.method.labels.zero_()
    session.method.begin_epoch(EPOCH)
    session.method.train()
    return session


def most() -> dict[str, int]:
    found = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    return found


def measure(data: Dataset, network: str, batch: int, method: str, path: str) -> dict[str, Any]:
    gc.collect()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # otherwise only the first case would count them
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base, started = torch.cuda.memory_allocated(), time.perf_counter()
    session = open_session(data, network, batch, method, PATHS[path], torch.device("cuda"))
    estimate = budget(session)
    measured: dict[str, Any] = {"built": torch.cuda.memory_allocated()}
    most()
    streams = session.method.streams()
    order, stepper = draw_epoch(session, streams), TrainStep(session)
    for step in range(5):
        stepper(streams, {name: table[step] for name, table in order.items()}, 0.01)
        session.progress.step += 1
        if step in (2, 4):
            torch.cuda.synchronize()
            measured["steps as they come" if step == 2 else "recorded steps"] = most()
    finish_epoch(session, EPOCH)
    measured["passes"] = most()
    kind = "reserved" if estimate.recorded else "peak"
    needed = max(part[kind] for part in measured.values() if isinstance(part, dict)) - base
    return {
        "network": network, "batch": batch, "method": method, "path": path,
        "estimate": {**vars(estimate), "step": estimate.step, "a_pass": estimate.a_pass, "total": estimate.total},
        "base": base, "measured": measured, "needed": needed, "estimate_by_needed": round(estimate.total / needed, 3),
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def anew(data: Dataset, case: dict[str, Any]) -> dict[str, Any]:
    """Today's estimate for a case that was measured, as if there were a GPU here."""
    path = PATHS[case["path"]]
    session = open_session(data, case["network"], case["batch"], case["method"], path, torch.device("cpu"))
    found, recorded = budget(session), bool(path["cuda_graphs"])
    total = replace(
        found, data=found.data + data.x.nbytes, libraries=libraries(session.method, recorded), recorded=recorded
    ).total
    same = {name: case[name] for name in ("network", "batch", "method", "path", "needed")}
    return same | {"estimate": {"total": total}, "estimate_by_needed": round(total / case["needed"], 3), "seconds": 0}


def show(case: dict[str, Any]) -> None:
    print(
        f"{case['network']:>9} batch {case['batch']:3d} {case['method']:6s} {case['path']:14s} "
        f"estimate {gib(case['estimate']['total']):>9}, needed {gib(case['needed']):>9}: "
        f"{case['estimate_by_needed']:.2f} ({case['seconds']} s)",
        flush=True,
    )


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=count, default=10_000)
    parser.add_argument("--against", type=Path, help="a record: estimate its cases again and measure nothing")
    options = parser.parse_args()
    record = read_json(options.against) if options.against else {"images": options.images, "cases": []}
    if not isinstance(record, dict) or not {"images", "cases"} <= record.keys():
        raise UserError(f"{options.against}: not a record of this benchmark")
    if not options.against:
        pick_device("cuda")  # or there is nothing to measure on
    data = random_images(record["images"])
    result: dict[str, Any] = {"images": record["images"], "cases": []}
    if options.against:
        found = (anew(data, case) for case in record["cases"])
    else:
        found = (measure(data, *case[:3], path) for case in CASES for path in case[3])
    for case in found:
        result["cases"].append(case)
        show(case)
        if options.out:  # after every case: what was measured stays
            save(result, options.out)


if __name__ == "__main__":
    end_with(main)
