"""Sessions in memory, for every method, small enough for an epoch in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _support import PAPER_SETS, small_arrays

from crosel.config import build_config
from crosel.data.dataset import Dataset, make_dataset
from crosel.data.store import ImageStore, StoredImages
from crosel.methods import methods
from crosel.training.build import build_session, resolve
from crosel.training.session import Session

NAMES = list(methods())
CPU = torch.device("cpu")
# Short runs reach every code path: CroSel selects, PiCO has prototypes, PoP purifies.
EARLY = {
    "crosel": ["method.warmup=1", "method.bank_length=1", "method.gamma=0.2", *PAPER_SETS],
    "pop": ["method.warm_up=1"],
}


def small_data(**changes: Any) -> Dataset:
    return make_dataset(**{**small_arrays(), "classes": 10, **changes})


def on_disk(data: Dataset, folder: Path) -> Dataset:
    """The same data, with its images in a store."""

    def stored(x: Any, name: str) -> StoredImages:
        store = ImageStore(folder, name, x.shape)
        store.put(range(len(x)), x)
        store.finish()
        return store.images()

    test = None if data.x_test is None else stored(data.x_test, "images-test")
    return replace(data, x=stored(data.x, "images-train"), x_test=test)


def make_session(
    name: str,
    *settings: str,
    data: Dataset | None = None,
    epochs: int = 3,
    seed: int = 0,
    device: torch.device = CPU,
) -> Session:
    data = small_data() if data is None else data
    common = [f"train.epochs={epochs}", "train.batch_size=32", "network.width=4"]
    config = build_config(
        settings=[*common, *EARLY.get(name, []), *settings],
        values={"source": "memory", "method": {"name": name}, "seed": seed},
    )
    return build_session(resolve(config, data), data, device)


def bits(session: Session) -> dict[str, bytes]:
    """Every tensor of the session's state, as bytes."""
    tensors, _ = session.state()
    return {name: np.ascontiguousarray(t.detach().cpu().numpy()).tobytes() for name, t in tensors.items()}


def different(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]
