"""SIGKILL while a pretrained backbone embeds images, and while a head is trained on the embeddings.

A small module stands in for timm. After each kill the same command goes on with the embeddings that are on the disk;
every run ends with the same bits as one that was never killed.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from _runs import ForkServer
from soak.spread import spread
from soak.stores import kill_and_go_on, make_images

KILLS = 200
CHOSEN = (
    ("crosel.data.embeddings:_append", 10), ("crosel.data.embeddings:EmbeddingStore.add", 5), ("os:fsync", 8),
    ("os:ftruncate", 2), ("os:replace", 6), ("crosel.runs.folder:Recorder.on_epoch", 2),
)  # fmt: skip
SETTINGS = ("network.name=timm/tiny", "train.epochs=2", "train.batch_size=32", "train.folds=0")


def command(folder: Path, out: Path) -> tuple[str, ...]:
    settings = [part for item in SETTINGS for part in ("--set", item)]
    return ("train", str(folder / "images"), "--method", "cc", "--candidates", "uniform:q=0.5", *settings,
            "--out", str(out), "--resume")  # fmt: skip


def soak(folder: Path, kills: int, seed: int, until: float = math.inf) -> Counter[str]:
    """Kills by moment, and runs that were finished."""
    make_images(folder)
    server = ForkServer(folder, TIMM_STAND_IN="1")
    code, _, err = server.run(*command(folder, folder / "unbroken"))
    server.close()
    assert code == 0, err
    assert list((folder / "images" / ".crosel-cache").glob("embeddings-*.f32")), "nothing was embedded"
    return kill_and_go_on(folder, functools.partial(command, folder), CHOSEN, kills, seed, until, TIMM_STAND_IN="1")


def run(
    folder: Path, out: Path | None, kills: int = KILLS, seed: int = 6, workers: int = 1, minutes: float | None = None
) -> dict[str, Any]:
    score = sum(spread(soak, folder, kills, seed, workers, minutes), Counter[str]())
    if out is not None:
        (out / "embeddings.json").write_text(json.dumps(score, indent=1) + "\n")
    assert minutes or score["kills"] == kills
    return dict(score)
