"""How fast training is: a step and a whole epoch, for a list of networks, batch sizes and methods.

    python benchmarks/speed.py --data DIR --out results/speed.json

DIR contains cifar-10-batches-py. Without it, random images of the same shape are used. Each case is timed twice in
one run: on the fast path (bfloat16, fused kernels, recorded steps if the device has them) and on the plain path
(float32, eager). A step is what `crosel train` runs: indices, views, target pass, losses, backward pass and
optimiser. CroSel trains two networks in one step, so the time for one network is half of that.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from record import Arguments, count, end_with, save
from torch.utils.flop_counter import FlopCounterMode

from crosel.config import build_config
from crosel.data import Dataset, draw_candidates, load
from crosel.data.dataset import make_dataset
from crosel.errors import UserError
from crosel.training.build import build_session, resolve
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.step import TrainStep
from crosel.training.trainer import finish_epoch

FAST = {"bf16": True, "fused": True, "cuda_graphs": True}
PLAIN = {"bf16": False, "fused": False, "cuda_graphs": False}
METHODS = ("crosel", "cc", "proden", "lws", "crdpll", "pico", "pop")
CASES = [  # network, batch size, method, whole epoch too
    ("wrn-28-2", 64, "crosel", True),
    ("wrn-16-8", 128, "crosel", True),
    *(("wrn-28-2", 128, method, True) for method in METHODS),
    *(("resnet-18", 128, method, True) for method in METHODS),
    ("wrn-34-10", 64, "crosel", True),
    ("wrn-34-10", 256, "crosel", False),
]
EPOCHS, EPOCH = 40, 20  # CroSel is past its warm-up in epoch 20 of 40


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Any, device: torch.device, repeats: int) -> float:
    wait(device)
    start = time.perf_counter()
    for i in range(repeats):
        action(i)
    wait(device)
    return (time.perf_counter() - start) / repeats


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a large matrix product (in bfloat16 on a GPU), to compare with."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds(lambda _: a @ b, device, 3)
    return 2 * side**3 / seconds(lambda _: a @ b, device, 10) / 1e12


def images(data_dir: Path | None, n: int) -> Dataset:
    if data_dir:
        return load("cifar10", data_dir)
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8) for size in (n, n // 5))
    y, y_test = rng.integers(0, 10, n), rng.integers(0, 10, n // 5)
    return make_dataset(x, y=y, x_test=x_test, y_test=y_test, classes=10)


def open_session(
    data: Dataset, network: str, batch: int, method: str, path: dict[str, bool], device: torch.device
) -> Session:
    train = {"epochs": EPOCHS, "batch_size": batch, "nesterov": True, **on_device(path, device)}
    values = {
        "source": "cifar10", "method": {"name": method}, "network": {"name": network}, "train": train,
        "augment": {"strong_ops": 2, "cutout": 0.5},  # the paper's views, whatever the defaults
    }  # fmt: skip
    config = resolve(build_config(settings=[], values=values), data)
    return begin(build_session(config, draw_candidates(data, "uniform:q=0.5", 0), device), EPOCH)


def on_device(path: dict[str, bool], device: torch.device) -> dict[str, bool]:
    return path | {"bf16": path["bf16"] and device.type == "cuda"}


def begin(session: Session, epoch: int) -> Session:
    """Begin an epoch in the middle of a run: four of five examples are selected, with their true labels."""
    selected = getattr(session.method, "selected", None)
    if selected is not None:
        generator = torch.Generator(session.device).manual_seed(0)
        selected.copy_(torch.rand(selected.shape, generator=generator, device=session.device) < 0.8)
        session.method.labels.copy_(torch.from_numpy(session.data.y))
    session.method.begin_epoch(epoch)
    session.method.train()
    return session


class Steps:
    """Steps of one session, in order."""

    def __init__(self, session: Session) -> None:
        self.session, self.stepper = session, TrainStep(session)
        self.streams = session.method.streams()
        self.index = session.train.draw_epoch_indices(
            self.streams, session.steps, session.batch_size, session.generator
        )

    def rows(self, i: int) -> dict[str, torch.Tensor]:
        return {name: table[i % self.session.steps] for name, table in self.index.items()}

    def __call__(self, i: int, lr: float = 0.01) -> None:
        self.stepper(self.streams, self.rows(i), lr)

    def flops(self) -> float:
        """Count convolutions and matrix products, forward and backward, in the first step, which is never recorded."""
        torchs = mock.patch("crosel.nn.convolution._takes_kernels", return_value=False)  # ours are not counted
        with torchs, FlopCounterMode(display=False) as counter:
            self(0)
        return float(counter.get_total_flops())


def views_seconds(steps: Steps, device: torch.device) -> float:
    """Seconds for the views of a step alone, recorded if steps are."""
    session, index = steps.session, {name: i.clone() for name, i in steps.rows(0).items()}

    def draw(_: int = 0) -> None:
        with torch.no_grad():
            session.train.batches(index, steps.streams, session.generator)

    seconds(draw, device, 3)
    if not steps.stepper.uses_cuda_graphs:
        return seconds(draw, device, 10)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(session.generator)
    with torch.cuda.graph(graph):
        draw()
    return seconds(lambda _: graph.replay(), device, 50)


def time_path(
    data: Dataset, case: tuple[Any, ...], path: dict[str, bool], device: torch.device, repeats: int
) -> dict[str, Any]:
    network, batch, method, whole = case
    session = open_session(data, network, batch, method, path, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps = Steps(session)
    start = time.perf_counter()
    out: dict[str, Any] = {"gflop": steps.flops() / 1e9}
    for i in range(1, 5):  # choice of kernels, compilation, recording
        steps(i)
    wait(device)
    out["first_steps_s"] = time.perf_counter() - start
    out["ms"] = 1e3 * seconds(steps, device, repeats)
    out["views_ms"] = 1e3 * views_seconds(steps, device)
    if device.type == "cuda":
        out["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    if whole and path is FAST:
        out["epoch_train_s"] = seconds(lambda _: [steps(i) for i in range(session.steps)], device, 1)
        finish_epoch(session, EPOCH)
        out["epoch_passes_s"] = seconds(lambda _: finish_epoch(session, EPOCH), device, 1)
        out["epoch_s"] = out["epoch_train_s"] + out["epoch_passes_s"]
        session.forward.use_graph = False
        out["epoch_passes_eager_s"] = seconds(lambda _: finish_epoch(session, EPOCH), device, 1)
    return out


def measure(
    data: Dataset, case: tuple[Any, ...], ceiling: float, device: torch.device, repeats: int, both: bool
) -> dict[str, Any]:
    network, batch, method, _ = case
    compared: dict[str, Any] = {}
    if both:
        compared["plain"] = time_path(data, case, PLAIN, device, max(3, repeats // 5))
    fast = time_path(data, case, FAST, device, repeats)
    if both:
        compared["times_faster"] = compared["plain"]["ms"] / fast["ms"]
    rate = fast["gflop"] / fast["ms"]  # GFLOP / ms = TFLOP/s
    return {
        "network": network, "batch": batch, "method": method, "fast": fast, **compared,
        "images_per_second": 1e3 * batch / fast["ms"],
        "share_of_views": fast["views_ms"] / fast["ms"],
        "tflops": rate, "share_of_matrix_rate": rate / ceiling,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    fast = row["fast"]
    faster = f" ({row['times_faster']:.1f} x plain)" if "times_faster" in row else ""
    epoch = f", epoch {fast['epoch_s']:.1f} s" if "epoch_s" in fast else ""
    print(
        f"{row['network']:>10} batch {row['batch']:3d} {row['method']:7s} {fast['ms']:7.2f} ms a step{faster}, "
        f"{row['images_per_second']:,.0f} images/s, "
        f"views {row['share_of_views']:.1%}, {row['tflops']:.0f} TFLOP/s "
        f"({row['share_of_matrix_rate']:.0%}), {fast.get('peak_mib', math.nan):.0f} MiB{epoch}",
        flush=True,
    )


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder with cifar-10-batches-py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=count, default=30)
    parser.add_argument("--only", help="only cases whose 'network batch method' contains this text")
    parser.add_argument("--no-plain", help="time only the fast path of cases that contain this text")
    parser.add_argument("--no-epoch", help="do not time whole epochs of cases that contain this text")
    parser.add_argument("--images", type=count, default=50_000, help="number of random images without --data")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or options.only in " ".join(map(str, case[:3]))]
    if not cases:
        raise UserError(f"--only {options.only}: no case holds this text; they are named as '{CASES[0][0]} 64 crosel'")
    device = pick_device(options.device)
    data, ceiling = images(options.data, options.images), matrix_rate(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    result: dict[str, Any] = {
        "device": name, "data": "cifar10" if options.data else "random", "matrix_tflops": ceiling, "cases": [],
    }  # fmt: skip
    print(f"{name}: {ceiling:.0f} TFLOP/s in a matrix product")
    for case in cases:
        name = " ".join(map(str, case[:3]))
        if options.no_epoch and options.no_epoch in name:
            case = (*case[:3], False)
        both = not (options.no_plain and options.no_plain in name)
        result["cases"].append(measure(data, case, ceiling, device, options.repeats, both))
        show(result["cases"][-1])
        save(result, options.out)


if __name__ == "__main__":
    end_with(main)
