"""Run folders changed at random, each read by one command, in one process with a limit of 1 GiB."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from _mutants import attack
from _support import run_cli, small_arrays

SECONDS = 300.0


def run(folder: Path, out: Path | None = None, seconds: float = SECONDS, first: int = 1000) -> dict[str, Any]:
    import numpy as np

    os.environ["CROSEL_MEMORY_GB"] = "1"
    source = folder / "data.npz"
    arrays = small_arrays()
    np.savez(source, **arrays)
    good = folder / "good"
    tiny = ("--set", "train.epochs=2", "--set", "network.width=4", "--set", "method.warm_up_epochs=1")
    result = run_cli("train", source, *tiny, "--out", good)
    if result.code:
        result = run_cli("train", source, *tiny[:4], "--out", good)
    assert result.code == 0, result.err
    from crosel.utils.system import peak_memory

    start = peak_memory() or 0
    began, seed, slowest, failed, counts = time.monotonic(), first, 0.0, [], dict[str, int]()
    while time.monotonic() - began < seconds:
        try:
            said, took = attack(good, folder / "work", source, seed)
            slowest = max(slowest, took)
            name = said.split(": ")[1].split(" after")[0]
            counts[name] = counts.get(name, 0) + 1
        except AssertionError as error:
            failed.append(str(error))
            print(f"seed {seed}: {str(error)[-1500:]}", flush=True)
        except Exception as error:
            failed.append(repr(error))
            print(f"seed {seed}: {error!r}", flush=True)
        seed += 1
    grown = ((peak_memory() or 0) - start) / 2**20
    assert not failed, failed[:3]
    return {
        "folders": seed - first, "failed": len(failed), "slowest_s": round(slowest, 2), "peak_grown_mib": round(grown),
        "by_command": counts,
    }  # fmt: skip
