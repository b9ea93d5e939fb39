"""Images per second with one rank and with two on this machine's cores, and the bytes that ranks send each other.

    python benchmarks/ranks.py --out results/ranks/two-cores.json
    python benchmarks/ranks.py --cycles 25            # starts and stops two ranks 25 times; every exit code must be 0

Every rank has one thread. One and two ranks take turns in one run, `--rounds` times, so that other work on the
machine slows both. Besides the clock, the output has a rank's processor time for 1000 images of the whole batch. What
one rank needs, divided by what each of two needs, is the gain on two idle cores if no rank had to wait. Bytes are
counted where they are handed to the backend. For a sum over R ranks in a ring, each rank sends 2(R-1)/R times its
bytes. What it gathers from the others comes once from each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Arguments, count, end_with, save

CASES: dict[str, dict[str, Any]] = {
    "8x8, small-cnn, CC": {"method": "cc", "network": "small-cnn", "side": 8, "batch": 128, "n": 1280},
    "16x16, wrn-16-2, CC": {"method": "cc", "network": "wrn-16-2", "side": 16, "batch": 64, "n": 320},
    "16x16, wrn-16-2, CroSel": {"method": "crosel", "network": "wrn-16-2", "side": 16, "batch": 32, "n": 96},
    "16x16, wrn-16-2, PiCO": {"method": "pico", "network": "wrn-16-2", "side": 16, "batch": 32, "n": 96},
}


def measure(world: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Train three short epochs and measure the last one, in which CroSel selects."""
    import numpy as np
    import torch

    from crosel.config import build_config
    from crosel.data.candidates import uniform
    from crosel.data.dataset import Dataset
    from crosel.training.build import build_session, resolve
    from crosel.training.trainer import fit

    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (case["n"], 3, case["side"], case["side"]), dtype=np.uint8)
    y = draw.integers(0, 10, case["n"])
    data = Dataset(x, tuple("0123456789"), uniform(y, 10, 0.3, 0), y)
    settings = ["train.epochs=3", f"train.batch_size={case['batch']}", f"network.name={case['network']}"]
    if case["method"] == "crosel":
        settings += ["method.warmup=1", "method.bank_length=1", "method.gamma=0.05"]
    values = {"source": "random", "method": {"name": case["method"]}}
    session = build_session(resolve(build_config(settings=settings, values=values), data), data, torch.device("cpu"),
                            world=world)  # fmt: skip
    watch = Watch(world)
    fit(session, (watch,))
    images = session.steps * session.batch_size
    return {
        "images_per_second": session.progress.rows[-1]["images_per_second"],
        "cpu_seconds_per_1000_images": 1000 * watch.cpu / images,  # of one rank
        "steps": session.steps,
        "parameters": sum(p.numel() for p in session.method.parameters() if p.requires_grad),
        "bytes_per_step": {kind: count / session.steps for kind, count in watch.in_steps.items()},
        "bytes_per_epoch": watch.in_epoch,
    }


class Watch:
    """Notes processor time and bytes sent, from the end of the second epoch on."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.cpu = 0.0
        self.in_steps: dict[str, int] = {}
        self.in_epoch: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._cpu, self._before = time.process_time(), dict(getattr(self.world, "sent", {}))

    def _since(self) -> dict[str, int]:
        return {kind: n - self._before.get(kind, 0) for kind, n in getattr(self.world, "sent", {}).items()}

    def on_step(self, session: Any, epoch: int, step: int, loss: float) -> None:
        if step == session.steps:
            self.cpu, self.in_steps = time.process_time() - self._cpu, self._since()

    def on_checkpoint(self, session: Any) -> None:
        pass

    def on_epoch(self, session: Any, row: Any) -> None:
        self.in_epoch = self._since()
        self._begin()


def worker(rank: int, size: int, meet: str, rounds: int) -> None:
    """Run all cases, in turn on rank 0 alone (the others wait) and on all ranks. Rank 0 prints the results."""
    import torch

    from crosel.utils.distributed import SINGLE_PROCESS, process_group

    torch.set_num_threads(1)
    found: dict[str, dict[str, list[Any]]] = {name: {"1": [], str(size): []} for name in CASES}
    with process_group(rank, size, torch.device("cpu"), f"file://{meet}") as world:
        for _ in range(rounds):
            for name, case in CASES.items():
                if rank == 0:
                    found[name]["1"].append({**measure(SINGLE_PROCESS, case), "load": os.getloadavg()[0]})
                world.barrier()
                found[name][str(size)].append({**measure(world, case), "load": os.getloadavg()[0]})
    if rank == 0:
        print(json.dumps(found))


def cycle(rank: int, size: int, meet: str) -> None:
    import torch

    from crosel.utils.distributed import process_group

    with process_group(rank, size, torch.device("cpu"), f"file://{meet}") as world:
        assert int(world.all_reduce(torch.tensor(rank + 1))) == size * (size + 1) // 2


def launch(size: int, *arguments: str) -> tuple[list[int], str]:
    """Start each rank as a process; return the exit codes and what rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *arguments, "--size", str(size), "--meet", f"{folder}/meet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(size)
        ]
        said = [process.communicate()[0] for process in ranks]
        return [process.returncode for process in ranks], said[0]


def benchmark(rounds: int) -> dict[str, Any]:
    codes, said = launch(2, "--worker", "--rounds", str(rounds))
    assert codes == [0, 0], codes
    out = {}
    for name, runs in json.loads(said).items():
        pairs = list(zip(runs["1"], runs["2"], strict=True))
        out[name] = {
            "ratio_of_images_per_second": statistics.median(
                b["images_per_second"] / a["images_per_second"] for a, b in pairs
            ),
            "ratio_by_processor_time": statistics.median(
                a["cpu_seconds_per_1000_images"] / b["cpu_seconds_per_1000_images"] for a, b in pairs
            ),
            "runs": runs,
        }  # fmt: skip
    return out


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--cycles", type=count)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    for name in ("worker", "cycle"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in ("rank", "size"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        worker(a.rank, a.size, a.meet, a.rounds)
    elif a.cycle:
        cycle(a.rank, a.size, a.meet)
    elif a.cycles:
        codes = [launch(2, "--cycle")[0] for _ in range(a.cycles)]
        bad = [pair for pair in codes if pair != [0, 0]]
        print(f"{a.cycles} cycles of 2 ranks, {len(bad)} ended badly {bad or ''}".rstrip())
        raise SystemExit(bool(bad))
    else:
        save({"cases": benchmark(a.rounds), "threads_per_rank": 1}, a.out)


if __name__ == "__main__":
    end_with(main)
