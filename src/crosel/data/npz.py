"""Our own file: npz with x, candidates [n, k] bool or plain labels y, optional x_test, y_test, classes, ids."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from crosel.data.dataset import Dataset, make_dataset
from crosel.errors import UserError, did_you_mean

FIELDS = ("x", "candidates", "y", "x_test", "y_test", "classes", "ids")


def read_npz(path: Path) -> Dataset:
    try:
        # Object arrays are pickles: never from outside.
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise UserError(f"{path}: this is a single array; an npz file with x and candidates is needed")
        with loaded as archive:
            unknown = [name for name in archive.files if name not in FIELDS]
            if unknown:
                near = did_you_mean(unknown[0], FIELDS)
                raise UserError(f"{path}: unknown array '{unknown[0]}'{near}; known are {', '.join(FIELDS)}")
            arrays = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        if isinstance(error, UserError | FileNotFoundError):
            raise
        raise UserError(f"{path}: not a readable npz file ({error})") from None
    if "x" not in arrays:
        raise UserError(f"{path}: the array 'x' is missing")
    classes = arrays.pop("classes", None)
    ids = arrays.pop("ids", None)
    for name, values in (("classes", classes), ("ids", ids)):
        if values is not None and values.ndim != 1:
            raise UserError(f"{path}: '{name}' must be one-dimensional, not of shape {values.shape}")
    return make_dataset(
        **arrays,
        classes=None if classes is None else [str(c) for c in classes],
        ids=None if ids is None else [str(i) for i in ids],
        place=str(path),
    )
