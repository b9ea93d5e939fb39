"""CIFAR-10 and CIFAR-100 as published: `cifar-10-batches-py` and `cifar-100-python` (Krizhevsky, 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import ANY_CLASS, Dataset, as_labels, make_dataset
from crosel.data.pickles import GET_AGAIN, read_pickle
from crosel.data.vocabulary import label_name
from crosel.errors import UserError


def _read(folder: Path, files: Sequence[str], label: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    parts = [read_pickle(folder / name) for name in files]
    for name, part in zip(files, parts, strict=True):
        data = part.get("data")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,) or label not in part:
            raise UserError(f"{folder / name}: no images ('data') or labels ('{label}'); {GET_AGAIN}")
    images = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = [_labels(part, label, folder / name) for name, part in zip(files, parts, strict=True)]
    return images, np.concatenate(labels), parts


def _labels(part: dict[str, Any], key: str, place: Path) -> Any:
    """One whole number for each image; `as_labels` sees to it, later, that it is one of the classes."""
    labels = part[key]
    if not isinstance(labels, list) or len(labels) != len(part["data"]) or not all(type(y) is int for y in labels):
        raise UserError(f"{place}: '{key}' is not a list with one whole number for each image; {GET_AGAIN}")
    return as_labels(labels, ANY_CLASS, f"{place}: {key}")


def _names(folder: Path, file: str, key: str) -> list[str]:
    names = read_pickle(folder / file).get(key)
    try:
        if isinstance(names, list) and names:
            return [label_name(bytes.decode(name)) for name in names]
    except (TypeError, ValueError):
        pass
    raise UserError(f"{folder / file}: no class names ('{key}'); {GET_AGAIN}")


def read_cifar10(folder: Path) -> Dataset:
    x, y, _ = _read(folder, [f"data_batch_{i}" for i in range(1, 6)], "labels")
    x_test, y_test, _ = _read(folder, ["test_batch"], "labels")
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=_names(folder, "batches.meta", "label_names"),
        place=str(folder), mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616),
    )  # fmt: skip


def read_cifar100(folder: Path, coarse: bool = False) -> Dataset:
    """Fine labels, with the coarse ones as the superclass of each class; or the coarse labels as classes."""
    kind = "coarse" if coarse else "fine"
    x, y, parts = _read(folder, ["train"], f"{kind}_labels")
    x_test, y_test, _ = _read(folder, ["test"], f"{kind}_labels")
    hints: dict[str, Any] = {} if coarse else {"groups": _superclasses(folder, parts[0])}
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=_names(folder, "meta", f"{kind}_label_names"),
        place=str(folder), mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761), **hints,
    )  # fmt: skip


def _superclasses(folder: Path, part: dict[str, Any]) -> tuple[int, ...]:
    place = folder / "train"
    if "coarse_labels" not in part:
        raise UserError(f"{place}: no 'coarse_labels'; {GET_AGAIN}")
    fine, coarse = (_labels(part, key, place) for key in ("fine_labels", "coarse_labels"))
    groups = np.zeros(100, dtype=int)
    groups[as_labels(fine, 100, f"{place}: fine_labels")] = as_labels(coarse, 20, f"{place}: coarse_labels")
    return tuple(int(group) for group in groups)
