"""Do two trees of this project train the same, bit for bit? After changes that should change nothing a run computes.

    git worktree add ../before COMMIT
    python benchmarks/same_bits.py ../before . --out results.json [--device cuda] [--workers 6]

Every method trains three epochs on small pictures, with each tree's own `crosel train`: on a GPU with recorded steps,
in bfloat16 and float32, and with ResNet-18; on a CPU with one small network. Metrics (timings apart) and the tensors of
the last checkpoint are compared by name. Settings whose defaults have moved since 0.1.0 are given. The exit status is
1 where bits differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from record import Arguments, count, end_with, read, save
from safetensors.numpy import load_file

from crosel.errors import UserError

METHODS = ("crosel", "cc", "proden", "lws", "crdpll", "pico", "pop")
COMMON = (
    "train.epochs=3", "train.batch_size=32", "train.lr=0.05", "train.weight_decay=1e-4", "augment.strong_ops=2",
    "augment.cutout=0.5",
)  # fmt: skip
OWN = {  # so that few epochs reach every part of a method
    "crosel": (
        "method.warmup=1", "method.bank_length=1", "method.gamma=0.2", "method.alpha=0.75", "method.ramp=0",
        "method.temperature_start=null", "method.lambda_cr_start=null",
    ),
    "pop": ("method.warm_up=1",),
}  # fmt: skip
CASES = {
    "cpu": {"wrn-10-1": ("network.name=wrn-10-1",)},
    "cuda": {
        "wrn-10-1 in bfloat16": ("network.name=wrn-10-1", "train.bf16=true"),
        "wrn-10-1 in float32": ("network.name=wrn-10-1", "train.bf16=false"),
        "resnet-18 in bfloat16": ("network.name=resnet-18", "train.bf16=true"),
    },
}
TIMINGS = ("seconds", "images_per_second", "peak_memory_mib")


def pictures(path: Path, n: int = 256, side: int = 16, k: int = 5) -> None:
    """Noisy pictures of k patterns, with candidate sets."""
    draw = np.random.default_rng(0)
    patterns, y = draw.integers(0, 256, (k, side, side, 3)), draw.integers(k, size=n + 64)
    x = np.clip(0.6 * patterns[y] + draw.normal(50, 40, (n + 64, side, side, 3)), 0, 255).astype(np.uint8)
    sets = draw.random((n, k)) < 0.3
    sets[np.arange(n), y[:n]] = True
    np.savez(path, x=x[:n], candidates=sets, y=y[:n], x_test=x[n:], y_test=y[n:])


def train(tree: Path, source: Path, method: str, settings: tuple[str, ...], device: str, out: Path) -> None:
    if not (tree / "src" / "crosel").is_dir():
        raise UserError(f"{tree}: this is no tree of crosel; it has no src/crosel")
    flags = [part for setting in (*COMMON, *OWN.get(method, ()), *settings) for part in ("--set", setting)]
    paths = [str(tree.resolve() / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "crosel", "train", str(source), "--method", method, "--seed", "0", "--device", device,
         *flags, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"{tree}: {method} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")


def compared(old: Path, new: Path) -> dict[str, Any]:
    """What differs between two finished runs."""
    rows = [read(run / "metrics.jsonl") for run in (old, new)]
    values = [load_file(max((run / "checkpoints").glob("*.safetensors"))) for run in (old, new)]
    shared = [name for name in rows[0][0] if name in rows[1][0] and name not in TIMINGS]
    metrics = {name: pairs for name in shared if (pairs := _unequal([[row[name] for row in each] for each in rows]))}
    both = values[0].keys() & values[1].keys()
    apart = {
        name: float(np.abs(values[0][name].astype(float) - values[1][name].astype(float)).max())
        for name in sorted(both) if values[0][name].tobytes() != values[1][name].tobytes()
    }  # fmt: skip
    return {
        "same": len(rows[0]) == len(rows[1]) and not (metrics or apart), "tensors": len(both),
        "in_one_only": sorted(values[0].keys() ^ values[1].keys()), "metrics": metrics, "tensors_apart": apart,
    }  # fmt: skip


def _unequal(values: list[list[Any]]) -> list[tuple[Any, Any]]:
    return [(a, b) for a, b in zip(*values, strict=False) if a != b]


def main() -> int:
    parser = Arguments(__doc__ or "")
    parser.add_argument("old", type=Path, help="a tree")
    parser.add_argument("new", type=Path, help="another tree")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=CASES, default="cuda")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--workers", type=count, default=6, help="runs at once")
    options = parser.parse_args()
    cases, rows = CASES[options.device], []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        root = Path(folder)
        pictures(root / "x.npz")
        runs = {
            (case, method, which): pool.submit(
                train, tree, root / "x.npz", method, settings, options.device, root / f"{case}-{method}-{which}"
            )
            for case, settings in cases.items() for method in options.methods
            for which, tree in (("old", options.old), ("new", options.new))
        }  # fmt: skip
        for case in cases:
            for method in options.methods:
                old, new = (root / f"{case}-{method}-{which}" for which in ("old", "new"))
                try:
                    for which in ("old", "new"):
                        runs[case, method, which].result()
                    found = compared(old, new)
                except UserError as error:  # the others are worth having without it
                    found = {"same": False, "error": str(error)}
                rows.append({"case": case, "method": method, **found})
                most = max(found.get("tensors_apart", {}).values(), default=0.0)
                said = f"{len(found.get('tensors_apart', ()))} tensors differ, by at most {most:.1e}"
                print(case, method, "same bits" if found["same"] else found.get("error", said), sep=", ", flush=True)
    save({"old": options.old.name, "new": options.new.name, "rows": rows}, options.out)
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    end_with(main)
