"""Data as people bring them: a npz file with some thousands of published *training* images and their labels.

    python benchmarks/own_data.py cifar10 12000 --data DIR --out cifar10-12000.npz     # for benchmarks/defaults.yaml

The images are the first of a random order that is always the same, so that a smaller file is a part of a larger one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from record import Arguments, count, end_with

from crosel.data import load


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("source", choices=("cifar10", "cifar100", "svhn"))
    parser.add_argument("images", type=count)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published files")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    data = load(given.source, given.data)
    assert data.y is not None
    rows = np.random.default_rng(0).permutation(data.n)[: given.images]
    np.savez_compressed(given.out, x=data.x[rows].transpose(0, 2, 3, 1), y=data.y[rows], classes=np.array(data.classes))


if __name__ == "__main__":
    end_with(main)
