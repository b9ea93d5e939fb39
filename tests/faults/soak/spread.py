"""The same work in several processes, each with a folder and a seed of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def spread(
    work: Callable[[Path, int, int, float], T], folder: Path, number: int, seed: int, workers: int,
    minutes: float | None,
) -> list[T]:  # fmt: skip
    """`work(folder, number, seed, until)` with a part of the number for each worker. Without `minutes` it has all the
    time; with them it stops then, whatever it has done."""
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    parts = [number // workers + (at < number % workers) for at in range(workers)]
    if workers == 1:
        return [work(folder, number, seed, until)]
    folders = [folder / str(at) for at in range(workers)]
    for each in folders:
        each.mkdir()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        seeds = [1000 * seed + at for at in range(workers)]
        return list(pool.map(work, folders, parts, seeds, [until] * workers))
