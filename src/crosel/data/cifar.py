"""CIFAR-10 and CIFAR-100 as published: `cifar-10-batches-py` and `cifar-100-python` (Krizhevsky, 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import Dataset, as_labels, make_dataset
from crosel.data.pickles import read_pickle
from crosel.errors import UserError


def _read(folder: Path, files: Sequence[str], label: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    parts = [read_pickle(folder / name) for name in files]
    for name, part in zip(files, parts, strict=True):
        data = part.get("data")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,) or label not in part:
            raise UserError(f"{folder / name}: no images ('data') or labels ('{label}') as in the published file")
    images = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.concatenate([np.asarray(part[label]) for part in parts]), parts


def _names(folder: Path, file: str, key: str) -> list[str]:
    names = read_pickle(folder / file).get(key)
    if not isinstance(names, list) or not all(isinstance(n, bytes) for n in names):
        raise UserError(f"{folder / file}: no class names ('{key}') as in the published file")
    return [name.decode() for name in names]


def read_cifar10(folder: Path) -> Dataset:
    x, y, _ = _read(folder, [f"data_batch_{i}" for i in range(1, 6)], "labels")
    x_test, y_test, _ = _read(folder, ["test_batch"], "labels")
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=_names(folder, "batches.meta", "label_names"),
        place=str(folder), mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616),
    )  # fmt: skip


def read_cifar100(folder: Path) -> Dataset:
    """Fine labels; the coarse ones become the superclass of each class."""
    x, y, parts = _read(folder, ["train"], "fine_labels")
    x_test, y_test, _ = _read(folder, ["test"], "fine_labels")
    coarse = parts[0].get("coarse_labels")
    y = as_labels(y, 100, f"{folder / 'train'}: fine_labels")
    if coarse is None or len(coarse) != len(y):
        raise UserError(f"{folder / 'train'}: no 'coarse_labels' as in the published file")
    groups = np.zeros(100, dtype=int)
    groups[y] = np.asarray(coarse)
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=_names(folder, "meta", "fine_label_names"),
        place=str(folder), groups=tuple(int(g) for g in groups),
        mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761),
    )  # fmt: skip
