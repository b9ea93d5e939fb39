"""Sessions and data for the tests that need a GPU: small networks, but the parts of the large ones (convolutions in
channels-last, fused kernels, two streams)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _sessions import make_session
from _support import CroselCli, Result

from crosel.data.candidates import uniform
from crosel.data.dataset import Dataset, make_dataset
from crosel.training.session import Session
from crosel.training.trainer import fit

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
GPU = torch.device("cuda")
STEPS = 8  # 256 examples in batches of 32
RECORDED, EAGER = "train.cuda_graphs=true", "train.cuda_graphs=false"


def arrays(n: int = 256, side: int = 16, k: int = 5, seed: int = 0) -> dict[str, Any]:
    """Noisy pictures of k patterns, with candidate sets."""
    draw = np.random.default_rng(seed)
    patterns = draw.integers(0, 256, (k, side, side, 3))
    y = draw.integers(k, size=n + 64)
    x = np.clip(0.6 * patterns[y] + draw.normal(50, 40, (n + 64, side, side, 3)), 0, 255).astype(np.uint8)
    return {"x": x[:n], "candidates": uniform(y[:n], k, 0.3, seed), "y": y[:n], "x_test": x[n:], "y_test": y[n:]}


def pictures(**changes: Any) -> Dataset:
    return make_dataset(**arrays(**changes), classes=5)


def session_of(name: str, *settings: str, data: Dataset | None = None, network: str = "wrn-10-1") -> Session:
    data = pictures() if data is None else data
    named = () if data.x.ndim == 2 else (f"network.name={network}",)
    return make_session(name, *named, *settings, data=data, device=GPU)


def trained(name: str, *settings: str, data: Dataset | None = None) -> Session:
    session = session_of(name, *settings, data=data)
    fit(session)
    return session


def tensors(session: Session) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu() for name, t in session.state()[0].items()}


def assert_same_bits(one: Session, other: Session) -> None:
    """Weights, momentum, tables and random state; and the losses of all epochs."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    apart = {name: float((a[name].double() - b[name].double()).abs().max()) for name in a if not a[name].equal(b[name])}
    assert apart == {}, "names, and by how much they differ"
    assert [row["loss"] for row in one.progress.rows] == [row["loss"] for row in other.progress.rows]


def save(path: Path, **changes: Any) -> Path:
    np.savez(path, **arrays(**changes))
    return path


def train(crosel_cli: CroselCli, source: Path, out: Path, *settings: str, extra: tuple[str, ...] = ()) -> Result:
    flags = [part for item in settings for part in ("--set", item)]
    return crosel_cli("train", source, *flags, "--out", out, "--device", "cuda", *extra)
