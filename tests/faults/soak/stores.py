"""SIGKILL while images larger than memory are decoded to disk, and while they are read from there.

After each kill the same command goes on; every run ends with the same bits as one in memory.
"""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _runs import ForkServer, assert_same_run
from PIL import Image
from soak.spread import spread

KILLS = 200
IMAGES = 300
# The pixels, their checksums, the end of a build, its summary; then batches and passes over all images.
CHOSEN = (
    ("crosel.data.store:write_at", 14), ("crosel.data.store:ImageStore.put", 6), ("os:fsync", 3),
    ("os:replace", 1), ("crosel.data.store:StoreReader.read", 60),
)  # fmt: skip
SETTINGS = ("network.name=small-cnn", "network.width=2", "train.epochs=3", "train.batch_size=32", "data.image_size=64")
MEMORY = "0.012"  # GiB: a quarter of it holds no 3.7 MB of pixels


def command(folder: Path, out: Path) -> tuple[str, ...]:
    settings = [part for item in SETTINGS for part in ("--set", item)]
    return ("train", str(folder / "images"), "--method", "cc", "--candidates", "uniform:q=0.5", *settings,
            "--out", str(out), "--resume")  # fmt: skip


def make_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(IMAGES):
        path = folder / "images" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) // (1 + i % 3)).save(path)


def soak(folder: Path, kills: int, seed: int, until: float = math.inf) -> Counter[str]:
    """Kills by moment, and runs that were finished."""
    make_images(folder)
    in_memory = ForkServer(folder)
    code, _, err = in_memory.run(*command(folder, folder / "unbroken"))
    in_memory.close()
    assert code == 0, err
    return kill_and_go_on(folder, functools.partial(command, folder), CHOSEN, kills, seed, until,
                          CROSEL_MEMORY_GB=MEMORY)  # fmt: skip


def kill_and_go_on(
    folder: Path, command: Callable[[Path], tuple[str, ...]], moments: Sequence[tuple[str, int]], kills: int, seed: int,
    until: float, **environment: str,
) -> Counter[str]:  # fmt: skip
    """Kill a command at those moments (so many calls are possible of each) and at random ones, go on, and compare what
    is there in the end with `unbroken`."""
    cache = folder / "images" / ".crosel-cache"
    server, draw, score, number = ForkServer(folder, **environment), random.Random(seed), Counter[str](), 0
    shutil.rmtree(cache)
    while score["kills"] < kills and time.monotonic() < until:
        run, started = folder / f"run-{number}", time.monotonic()
        target, calls = draw.choice(moments)
        if draw.random() < 0.3:
            child = server.start(*command(run))
            time.sleep(draw.uniform(0, 1.5))
            child.signal(signal.SIGKILL)
            target = "random"
        else:
            when = draw.choice(["before", "after"])
            trap = {"target": target, "call": draw.randint(1, calls), "when": when}
            child = server.start(*command(run), trap=trap)
        code = child.wait()
        assert code in (0, -signal.SIGKILL), f"{target}: exit {code}: {child.err}"
        assert "Traceback" not in child.err
        assert "damaged" not in child.err
        assert time.monotonic() - started < 100
        score["kills"] += code != 0
        score[target.partition(":")[2] or target] += code != 0
        if code == 0:
            assert_same_run(run, folder / "unbroken", same_files=False)
            score["finished"] += 1
            number += 1
            shutil.rmtree(cache)
    code, _, err = server.run(*command(folder / f"run-{number}"))
    assert code == 0, err
    assert_same_run(folder / f"run-{number}", folder / "unbroken", same_files=False)
    server.close()
    score["finished"] += 1
    return score


def run(
    folder: Path, out: Path | None, kills: int = KILLS, seed: int = 5, workers: int = 1, minutes: float | None = None
) -> dict[str, Any]:
    score = sum(spread(soak, folder, kills, seed, workers, minutes), Counter[str]())
    if out is not None:
        (out / "stores.json").write_text(json.dumps(score, indent=1) + "\n")
    assert minutes or score["kills"] == kills
    return dict(score)
