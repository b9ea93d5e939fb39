"""scikit-learn's bundled digits: 1,797 images of 8x8, a quarter of them kept for testing."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from crosel.data.dataset import Dataset, make_dataset


def read_digits() -> Dataset:
    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    # Always the same split, whatever the run's seed: raw generator output is stable across numpy versions.
    order = np.random.Philox(key=1797).random_raw(len(pixels)).argsort(kind="stable")
    test, train = order[: len(order) // 4], order[len(order) // 4 :]
    return make_dataset(
        pixels[train], y=labels[train], x_test=pixels[test], y_test=labels[test], classes=10, place="digits",
        flips=False,
    )  # fmt: skip
