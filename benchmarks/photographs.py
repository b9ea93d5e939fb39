"""Photographs on a frozen backbone: CC, PRODEN and CroSel beside the same head with true labels.

    python benchmarks/photographs.py --data DIR --weights FILE --work FOLDER --out photographs.jsonl

Takes images of CIFAR-10's training set alone (DIR holds `cifar-10-batches-py`), writes them as PNG files, and for each
draw gives `--n` of them candidate sets and holds `--held-out` others out. The backbone is timm/tf_efficientnet_lite0 at
its own size, 224 pixels. Embeddings are kept in FOLDER; the first draw's are timed with an empty cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from pretrained import arguments, compare, uniform_draw, write_list
from record import count, end_with

from crosel.data.sources import load


def write_images(data: Path, folder: Path, count: int) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """The first `count` training images in a fixed random order, as files."""
    source = load("cifar10", data)
    assert source.y is not None
    rows = np.random.default_rng(0).permutation(source.n)[:count]
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{row:05d}.png" for row in rows]
    for name, row in zip(names, rows, strict=True):
        if not (folder / name).exists():
            Image.fromarray(source.x[row].transpose(1, 2, 0)).save(folder / name)
    return names, source.y[rows], source.classes


def main() -> None:
    parser = arguments(str(__doc__), n=2500, held_out=500, draws=5)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10-batches-py")
    parser.add_argument("--weights", required=True, help="tensors of timm's tf_efficientnet_lite0")
    parser.add_argument("--pool", type=count, help="images that all draws are from; default: twice as many as in one")
    args = parser.parse_args()
    folder = args.work / "images"
    pool = args.pool or 2 * (args.n + args.held_out)
    names, y, classes = write_images(args.data, folder, pool + (args.n + args.held_out if args.search else 0))

    write = write_list(folder, "path", names, y, classes, args.n)
    network = ["network.name=timm/tf_efficientnet_lite0", f"network.weights={args.weights}"]
    compare(args, network, y, 10, pool, write, uniform_draw(args, y, 10), images=pool)


if __name__ == "__main__":
    end_with(main)
