"""Any source -> one native file with candidate sets, and a summary of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.annotate import draw_candidates, with_weights
from crosel.data.dataset import Array, Dataset
from crosel.data.settings import DataSettings, OnImages
from crosel.data.sources import load
from crosel.data.summary import Summary, summarise
from crosel.errors import UserError
from crosel.utils.files import atomic_write_with, folder_of, keep_apart


def _outside(x: Array) -> Array:
    """Images as the file has them, [n, h, w, c]: a view, written block by block."""
    return x.transpose(0, 2, 3, 1) if x.ndim == 4 else x


def write_npz(data: Dataset, out: Path) -> None:
    """Write everything that training needs; votes and scores have become candidate sets and weights."""
    values: dict[str, Any] = {
        "x": _outside(data.x), "candidates": data.candidates, "classes": data.classes, "y": data.y,
        "x_test": None if data.x_test is None else _outside(data.x_test), "y_test": data.y_test, "ids": data.ids,
        "weights": data.weights, "columns": data.columns, "groups": data.groups, "mean": data.mean, "std": data.std,
        "flips": data.flips,
    }  # fmt: skip
    present = {name: value for name, value in values.items() if value is not None}
    atomic_write_with(out, lambda stream: np.savez(stream, **present))


def convert(
    source: str,
    out: Path,
    rule: str | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
    settings: DataSettings | None = None,
    progress: OnImages | None = None,
) -> Summary:
    """Read a source, make its candidate sets by the rule, write it to `out` (npz), and return a summary of the sets."""
    if out.suffix.lower() != ".npz":
        raise UserError(f"{out}: the output is an .npz file; use this ending")
    keep_apart(out, source, settings.inputs if settings else None)
    data = draw_candidates(with_weights(load(source, data_dir, settings, progress), rule), rule, seed)
    summary = summarise(data)
    with folder_of(out):
        write_npz(data, out)
    return summary
