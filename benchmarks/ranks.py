"""Images a second with one rank and with two on this machine's cores, and the bytes that ranks send each other.

    python benchmarks/ranks.py --out results/ranks/two-cores.json
    python benchmarks/ranks.py --cycles 25            # start and stop two ranks so often; every exit code must be 0

Every rank has one thread. One and two ranks take turns in one run, `--rounds` times, so that whatever else the machine
does falls on both; beside the clock stands the processor time that ranks used, which depends less on the company.
Bytes are counted where they are handed to the backend. For a sum over R ranks in a ring each rank sends 2(R-1)/R times
its bytes; what it gathers from the others comes once from each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "8x8, small-cnn, CC": {"method": "cc", "network": "small-cnn", "side": 8, "batch": 128, "n": 1280},
    "16x16, wrn-16-2, CC": {"method": "cc", "network": "wrn-16-2", "side": 16, "batch": 64, "n": 320},
    "16x16, wrn-16-2, CroSel": {"method": "crosel", "network": "wrn-16-2", "side": 16, "batch": 32, "n": 96},
    "16x16, wrn-16-2, PiCO": {"method": "pico", "network": "wrn-16-2", "side": 16, "batch": 32, "n": 96},
}


def worker(rank: int, size: int, meet: str, name: str) -> None:
    """Train three short epochs; the last one is measured (by then CroSel selects). Rank 0 prints what it found."""
    import numpy as np
    import torch

    from crosel.candidates import uniform
    from crosel.config import build_config
    from crosel.data.dataset import Dataset
    from crosel.distributed import ONE, connected
    from crosel.session import build_session, resolve
    from crosel.train import fit

    torch.set_num_threads(1)
    case, draw = CASES[name], np.random.default_rng(0)
    x = draw.integers(0, 256, (case["n"], 3, case["side"], case["side"]), dtype=np.uint8)
    y = draw.integers(0, 10, case["n"])
    data = Dataset(x, tuple("0123456789"), uniform(y, 10, 0.3, 0), y)
    settings = ["train.epochs=3", f"train.batch_size={case['batch']}", f"network.name={case['network']}"]
    if case["method"] == "crosel":
        settings += ["method.warmup=1", "method.bank_length=1", "method.gamma=0.05"]
    values = {"source": "random", "method": {"name": case["method"]}}
    config = resolve(build_config(settings=settings, values=values), data)
    cpu = torch.device("cpu")

    def measure(world: Any) -> dict[str, Any]:
        session = build_session(config, data, cpu, world=world)
        found: dict[str, Any] = {}

        class Watch:
            def on_step(self, session: Any, epoch: int, step: int, loss: float) -> None:
                if epoch == 3 and step == session.steps:
                    found["step"] = {kind: (count - self.sent.get(kind, 0)) for kind, count in sent().items()}
                    found["training_cpu"] = time.process_time() - self.cpu

            def on_state(self, session: Any) -> None:
                pass

            def on_epoch(self, session: Any, row: Any) -> None:
                self.sent, self.cpu = sent(), time.process_time()  # as the next epoch begins
                if row["epoch"] == 2:
                    self.before = sent()
                if row["epoch"] == 3:
                    found["images_per_second"] = row["images_per_second"]
                    found["epoch"] = {kind: count - self.before.get(kind, 0) for kind, count in sent().items()}

        def sent() -> dict[str, int]:
            return dict(getattr(world, "sent", {}))

        fit(session, (Watch(),))
        steps = session.steps
        return {
            "images_per_second": found["images_per_second"],
            "cpu_seconds_per_1000_images": 1000 * found["training_cpu"] / (steps * session.batch_size),
            "steps": steps,
            "parameters": sum(p.numel() for p in session.method.parameters() if p.requires_grad),
            "bytes_per_step": {kind: count / steps for kind, count in found["step"].items()},
            "bytes_per_epoch": found["epoch"],
        }

    if size == 1:
        result = measure(ONE)
    else:
        with connected(rank, size, cpu, f"file://{meet}") as world:
            result = measure(world)
    if rank == 0:
        print(json.dumps(result))


def cycle(rank: int, size: int, meet: str) -> None:
    import torch

    from crosel.distributed import connected

    with connected(rank, size, torch.device("cpu"), f"file://{meet}") as world:
        assert int(world.sum(torch.tensor(rank + 1))) == size * (size + 1) // 2


def launch(size: int, *arguments: str) -> tuple[list[int], str]:
    """Start ranks as processes of their own; their exit codes, and what rank 0 printed."""
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
    out: dict[str, Any] = {}
    for name in CASES:
        runs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for _ in range(rounds):
            for size in (1, 2):
                codes, said = launch(size, "--worker", name)
                assert codes == [0] * size, codes
                runs[size].append({**json.loads(said), "load": os.getloadavg()[0]})
        ratios = [two["images_per_second"] / one["images_per_second"] for one, two in zip(*runs.values(), strict=True)]
        out[name] = {"ratio_of_images_per_second": round(statistics.median(ratios), 3), "runs": runs}
        print(
            f"{name}: 2 ranks give {out[name]['ratio_of_images_per_second']} times the images/s of 1", file=sys.stderr
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int)
    for name in ("worker", "meet"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--cycle", action="store_true", help=argparse.SUPPRESS)
    for name in ("rank", "size"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        worker(a.rank, a.size, a.meet, a.worker)
    elif a.cycle:
        cycle(a.rank, a.size, a.meet)
    elif a.cycles:
        codes = [launch(2, "--cycle")[0] for _ in range(a.cycles)]
        bad = [pair for pair in codes if pair != [0, 0]]
        print(f"{a.cycles} cycles of 2 ranks, {len(bad)} ended badly {bad or ''}".rstrip())
        raise SystemExit(bool(bad))
    else:
        from crosel.run import environment

        result = {
            "cases": benchmark(a.rounds), "cores": os.cpu_count(), "machine": platform.machine(),
            "threads_per_rank": 1, **environment(["python", "benchmarks/ranks.py", *sys.argv[1:]]),
        }  # fmt: skip
        text = json.dumps(result, indent=1)
        if a.out:
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(text + "\n", encoding="utf-8")
        else:
            print(text)


if __name__ == "__main__":
    main()
