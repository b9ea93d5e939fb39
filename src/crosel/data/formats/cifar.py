"""CIFAR-10 and CIFAR-100 as published: `cifar-10-batches-py` and `cifar-100-python` (Krizhevsky, 2009).

The files are pickles. They are read without trust: by an unpickler that can build arrays and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.data.dataset import ANY_CLASS, Dataset, as_labels, make_dataset
from crosel.data.formats.base import Format
from crosel.data.settings import DataSettings, OnImages
from crosel.data.vocabulary import label_name
from crosel.errors import UserError
from crosel.utils.reading import read_file
from crosel.utils.system import check_bytes, memory_limit
from crosel.utils.text import one_line, quoted

GET_AGAIN = "remove the folder and get the published files again: crosel data get"


class Cifar(Format):
    published: Mapping[str, tuple[str, ...]] = {
        "cifar10": ("cifar-10-batches-py",), "cifar100": ("cifar-100-python",), "cifar100-coarse": ("cifar-100-python",)
    }  # fmt: skip

    def recognises(self, path: Path) -> bool:
        return _is_cifar10(path) or ((path / "train").is_file() and (path / "meta").is_file())

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        return read_cifar10(path) if _is_cifar10(path) else read_cifar100(path)

    def read_published(self, name: str, paths: Sequence[Path]) -> Dataset:
        return read_cifar10(paths[0]) if name == "cifar10" else read_cifar100(paths[0], name == "cifar100-coarse")


def _is_cifar10(folder: Path) -> bool:
    return (folder / "data_batch_1").is_file()


def read_cifar10(folder: Path) -> Dataset:
    x, y, _ = _read_batches(folder, [f"data_batch_{i}" for i in range(1, 6)], "labels")
    x_test, y_test, _ = _read_batches(folder, ["test_batch"], "labels")
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=_pickled_names(folder, "batches.meta", "label_names"),
        place=str(folder), mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616),
    )  # fmt: skip


def read_cifar100(folder: Path, coarse: bool = False) -> Dataset:
    """Fine labels, with the coarse ones as the superclass of each class; or the coarse labels as classes."""
    kind = "coarse" if coarse else "fine"
    x, y, parts = _read_batches(folder, ["train"], f"{kind}_labels")
    x_test, y_test, _ = _read_batches(folder, ["test"], f"{kind}_labels")
    hints: dict[str, Any] = {} if coarse else {"groups": _superclasses(folder, parts[0])}
    return make_dataset(
        x, y=y, x_test=x_test, y_test=y_test, classes=_pickled_names(folder, "meta", f"{kind}_label_names"),
        place=str(folder), mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761), **hints,
    )  # fmt: skip


def _superclasses(folder: Path, part: dict[str, Any]) -> tuple[int, ...]:
    place = folder / "train"
    if "coarse_labels" not in part:
        raise UserError(f"{place}: no 'coarse_labels'; {GET_AGAIN}")
    fine, coarse = (_batch_labels(part, key, place) for key in ("fine_labels", "coarse_labels"))
    groups = np.zeros(100, dtype=int)
    groups[as_labels(fine, 100, f"{place}: fine_labels")] = as_labels(coarse, 20, f"{place}: coarse_labels")
    return tuple(int(group) for group in groups)


def _read_batches(folder: Path, files: Sequence[str], label: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    parts = [read_pickle(folder / name) for name in files]
    for name, part in zip(files, parts, strict=True):
        data = part.get("data")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,) or label not in part:
            raise UserError(f"{folder / name}: no images ('data') or labels ('{label}'); {GET_AGAIN}")
    images = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = [_batch_labels(part, label, folder / name) for name, part in zip(files, parts, strict=True)]
    return images, np.concatenate(labels), parts


def _batch_labels(part: dict[str, Any], key: str, place: Path) -> Any:
    """One whole number for each image; `as_labels` sees to it, later, that it is one of the classes."""
    labels = part[key]
    if not isinstance(labels, list) or len(labels) != len(part["data"]) or not all(type(y) is int for y in labels):
        raise UserError(f"{place}: '{key}' is not a list with one whole number for each image; {GET_AGAIN}")
    return as_labels(labels, ANY_CLASS, f"{place}: {key}")


def _pickled_names(folder: Path, file: str, key: str) -> list[str]:
    names = read_pickle(folder / file).get(key)
    try:
        if isinstance(names, list) and names:
            return [label_name(bytes.decode(name)) for name in names]
    except (TypeError, ValueError):
        pass
    raise UserError(f"{folder / file}: no class names ('{key}'); {GET_AGAIN}")


# --- the pickles ---------------------------------------------------------------------------------------------------


class _Array:
    """Stands for an array of bytes. Numpy's own would take a size or a type from the file, and trust it."""

    values: NDArray[np.uint8]

    def __setstate__(self, state: Any) -> None:
        _, shape, _, columns_first, content = state
        self.values = np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if columns_first else "C")


class _Byte:
    """Stands for the one type that the numbers of a CIFAR file have."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in (b"u1", "u1"):
            raise pickle.UnpicklingError("numbers that are not bytes, unlike any CIFAR file")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: bytes have none."""


def _begin_array(*_: Any) -> _Array:
    return _Array()


# Every name that a published CIFAR file refers to, old and new places of the same functions.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Byte,
    ("numpy.core.multiarray", "_reconstruct"): _begin_array,
    ("numpy._core.multiarray", "_reconstruct"): _begin_array,
}


# The one written in Python: its memo is a dictionary, while that of the other is an array as long as the file says.
class _ArraysOnly(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            what = quoted(f"{module}.{name}")
            raise pickle.UnpicklingError(f"it refers to {what}, unlike any CIFAR file") from None


def _key_text(key: Any) -> str:
    if not isinstance(key, bytes | str):
        raise ValueError("a key that is not text")
    return key.decode() if isinstance(key, bytes) else key


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a published CIFAR file, with text keys."""
    try:
        check_bytes(2 * path.stat().st_size, "its content", path)
        content = _ArraysOnly(io.BytesIO(read_file(path, memory_limit())), encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError("no dictionary inside")
        return {_key_text(key): value.values if type(value) is _Array else value for key, value in content.items()}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {GET_AGAIN}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"{path}: not a CIFAR file ({one_line(error)}); {GET_AGAIN}") from None
