"""scikit-learn's bundled digits: 1,797 images of 8x8, a quarter of them kept for testing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import Dataset, make_dataset
from crosel.data.formats.base import Format


class Digits(Format):
    published: Mapping[str, tuple[str, ...]] = {"digits": ()}

    def recognises(self, path: Path) -> bool:
        return False  # they come with a package, under a name

    def read_published(self, name: str, paths: Sequence[Path]) -> Dataset:
        return read_digits()


def read_digits() -> Dataset:
    images, labels = _images_and_labels()
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    # Always the same split, whatever the run's seed: raw generator output is stable across numpy versions.
    order = np.random.Philox(key=1797).random_raw(len(pixels)).argsort(kind="stable")
    test, train = order[: len(order) // 4], order[len(order) // 4 :]
    return make_dataset(
        pixels[train], y=labels[train], x_test=pixels[test], y_test=labels[test], classes=10, place="digits",
        flips=False,
    )  # fmt: skip


def _images_and_labels() -> tuple[Any, Any]:
    """What `load_digits` gives, read from its file: sklearn.datasets takes a second to import, and pandas with it."""
    package = find_spec("sklearn")  # only looked for
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits  # a version that has it elsewhere

    return load_digits(return_X_y=True)  # type: ignore[no-any-return]
