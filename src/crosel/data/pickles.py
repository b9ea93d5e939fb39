"""Reads the CIFAR pickles without trusting them: an unpickler that can build arrays and nothing else."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.errors import UserError
from crosel.utils.limits import check_bytes, check_plain, one_line, shown

GET_AGAIN = "remove the folder and get the published files again: crosel data get"


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
            what = shown(f"{module}.{name}")
            raise pickle.UnpicklingError(f"it refers to {what}, unlike any CIFAR file") from None


def _text(key: Any) -> str:
    if not isinstance(key, bytes | str):
        raise ValueError("a key that is not text")
    return key.decode() if isinstance(key, bytes) else key


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a published CIFAR file, with text keys."""
    check_plain(path)
    try:
        check_bytes(2 * path.stat().st_size, "its content", path)
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError("no dictionary inside")
        return {_text(key): value.values if type(value) is _Array else value for key, value in content.items()}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {GET_AGAIN}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"{path}: not a CIFAR file ({one_line(error)}); {GET_AGAIN}") from None
