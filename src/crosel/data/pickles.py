"""Reads the CIFAR pickles without trusting them: an unpickler that can build arrays and nothing else."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from crosel.errors import UserError

# Every name that a published CIFAR file refers to, old and new places of the same functions.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no CIFAR file does") from None


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a published CIFAR file, with text keys."""
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the published folder is not complete") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"{path}: not a CIFAR file ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a CIFAR file (no dictionary inside)")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}
