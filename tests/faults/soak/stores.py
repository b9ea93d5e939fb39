"""SIGKILL while images larger than memory are decoded to disk, and while they are read from there.

After each kill the same command goes on; every run ends with the same bits as one in memory.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from _runs import ForkServer, assert_same_run
from PIL import Image

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


def soak(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kills by moment, and runs that were finished."""
    make_images(folder)
    in_memory = ForkServer(folder)
    code, _, err = in_memory.run(*command(folder, folder / "unbroken"))
    in_memory.close()
    assert code == 0, err
    cache = folder / "images" / ".crosel-cache"
    server, draw, score, number = ForkServer(folder, CROSEL_MEMORY_GB=MEMORY), random.Random(seed), Counter[str](), 0
    shutil.rmtree(cache)
    while score["kills"] < kills:
        run, started = folder / f"run-{number}", time.monotonic()
        target, calls = draw.choice(CHOSEN)
        if draw.random() < 0.3:
            child = server.start(*command(folder, run))
            time.sleep(draw.uniform(0, 1.5))
            child.signal(signal.SIGKILL)
            target = "random"
        else:
            when = draw.choice(["before", "after"])
            trap = {"target": target, "call": draw.randint(1, calls), "when": when}
            child = server.start(*command(folder, run), trap=trap)
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
    code, _, err = server.run(*command(folder, folder / f"run-{number}"))
    assert code == 0, err
    assert_same_run(folder / f"run-{number}", folder / "unbroken", same_files=False)
    server.close()
    score["finished"] += 1
    return score


def run(folder: Path, out: Path | None, kills: int = KILLS, seed: int = 5) -> dict[str, Any]:
    score = soak(folder, kills, seed)
    if out is not None:
        (out / "stores.json").write_text(json.dumps(score, indent=1) + "\n")
    assert score["kills"] == kills
    return dict(score)
