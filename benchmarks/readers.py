"""How fast the readers are: CIFAR-10 from its files, a csv of features, small JPEGs.

    python benchmarks/readers.py --data DIR --out results/readers.json --repeats 3

DIR contains cifar-10-batches-py; without --data, this part is left out. The other files are made in a temporary
folder. For each repeat, the machine's load before it is recorded. `best` is the best value of each figure.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from record import Arguments, count, end_with, save

from crosel.data import DataSettings, load
from crosel.data.images import workers


def timed(source: Path | str, data_dir: Path | None = None, **settings: Any) -> tuple[float, int]:
    """Seconds of the better of two readings, so that a cold disk does not count."""
    best, n = float("inf"), 0
    for _ in range(2):
        start = time.perf_counter()
        n = load(str(source), data_dir, DataSettings(**settings)).n
        best = min(best, time.perf_counter() - start)
    return best, n


def features_csv(path: Path, rows: int, features: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features))
    labels = rng.integers(0, 10, (rows, 2))
    with path.open("w", encoding="utf-8") as stream:
        stream.write("id,candidates,label," + ",".join(f"f{i}" for i in range(features)) + "\n")
        for i, (a, b) in enumerate(labels):
            names = f"c{a}|c{b}" if a != b else f"c{a}"
            stream.write(f"{i},{names},c{a}," + ",".join(map("{:.6f}".format, x[i])) + "\n")


def image_folder(folder: Path, count: int, side: int) -> None:
    rng = np.random.default_rng(0)
    for label in range(10):
        (folder / f"class{label}").mkdir(parents=True)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((side, side)).save(folder / f"class{i % 10}" / f"{i}.jpg", quality=90)


def measure(data: Path | None, images: int, side: int) -> dict[str, float]:
    """Measure everything once."""
    result = {"load_average": round(os.getloadavg()[0], 2)}
    if data is not None:
        seconds, _ = timed("cifar10", data)
        result["cifar10_seconds"] = round(seconds, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        features_csv(folder / "rows.csv", 50_000, 64)
        seconds, n = timed(folder / "rows.csv")
        result["csv_50000_rows_64_features_seconds"] = round(seconds, 3)
        assert n == 50_000
        image_folder(folder / "images", images, side)
        seconds, n = timed(folder / "images", cache=False)
        assert n == images
        result[f"jpeg_{side}px_images_per_second"] = round(n / seconds)
        timed(folder / "images")
        seconds, n = timed(folder / "images")
        result[f"jpeg_{side}px_cached_seconds"] = round(seconds, 3)
    return result


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {
        name: (max if name.endswith("per_second") else min)(run[name] for run in runs)
        for name in runs[0]
        if name != "load_average"
    }


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=count, default=10_000)
    parser.add_argument("--side", type=count, default=32)
    parser.add_argument("--repeats", type=count, default=1)
    args = parser.parse_args()
    runs = [measure(args.data, args.images, args.side) for _ in range(args.repeats)]
    save({"cores": workers(), "best": best(runs), "runs": runs}, args.out)


if __name__ == "__main__":
    end_with(main)
