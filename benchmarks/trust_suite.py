"""All that docs/labels.md, real-world.md, missing-truth.md and methods/index.md measure on features, in one go.

    python benchmarks/trust_suite.py --data DIR --out rows.jsonl [--keep p.npz] [--workers 10] [--minutes 8.5]
    python benchmarks/trust_suite.py split rows.jsonl --to results [--keep p.npz]     # a file for each part

Every cell is one line of the record, `part` says of which script: it runs in a process with one thread. The most
important cells come first, the longest of these before the others; what does not fit into the minutes is left out, and
a second call goes on with it. --keep gets out-of-sample probabilities; from these, `split` measures errors again, as
the present code estimates them. --data is as for review_order.py.
"""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from record import Arguments, add, count, end_with, origin, positive, read

REAL = ("lost", "MSRCv2", "BirdSong")
FIVE = (*REAL, "digits, instance 0.3", "photographs, votes")
SIX = (*FIVE, "digits, votes")  # the method that a run names is chosen on them
FRESH, CHOOSING = range(100, 110), range(200, 205)  # splits
METHODS = ("crosel", "proden", "cc", "crdpll", "lws", "pico", "pop")
UNKNOWN = (*REAL, "ages of 60", "ages of 20", "photographs, instance 0.3", "photographs, votes", "wine, instance 0.3",
           "breast cancer, votes")  # sets whose c is unknown: the estimate of the error is chosen on them  # fmt: skip
PICO_BEFORE = "pico method.phi_start=0.95 method.phi_end=0.8 method.queue=8192"  # as on few rows
BEFORE_AND_NOW = ("proden", "proden before", "crosel", "crosel before")
TRIED = (
    *BEFORE_AND_NOW, "proden standard", "proden noise-0", "proden noise-0.1", "proden noise-0.5", "proden one",
    "proden linear wd-0.01", "proden lr-0.1 wd-0.001", "proden wd-0.001", "proden wd-0.003", "proden ema-0.99",
    "proden epochs-100",
)  # fmt: skip

# Seconds of PRODEN with its defaults on all rows, on an idle core, and how much longer others take: for planning only.
SECONDS = {
    "lost": 0.4, "MSRCv2": 0.9, "BirdSong": 3, "digits": 1.2, "photographs": 2.5, "ages of 60": 1, "ages of 20": 0.5,
    "wine": 0.2, "iris": 0.2, "breast cancer": 0.5,
}  # fmt: skip
TIMES = {"crosel": 4.5, "proden": 1, "cc": 1, "crdpll": 3, "lws": 1.3, "pico": 7, "pop": 2.5}


class Cell(NamedTuple):
    """A line to be: importance (0 first), part, what its script's `measure` needs, and a guess of its seconds."""

    rank: int
    part: str
    asked: tuple[Any, ...]
    seconds: float


def cells() -> list[Cell]:
    from label_error import SETS
    from neighbours import ARMS
    from neighbours import SETS as MISSING
    from review_order import OURS

    def seconds(name: str, arm: str, factor: float = 1) -> float:
        known = next((value for start, value in SECONDS.items() if name.startswith(start)), 1)
        return known * TIMES[arm.split()[0]] * factor

    def arms(rank: int, names: tuple[str, ...], which: tuple[str, ...], splits: range, test: bool) -> list[Cell]:
        return [
            Cell(rank, "feature_defaults", (name, arm, number, test), seconds(name, arm, 2 if "own/" in arm else 1))
            for name in names for arm in which for number in splits
        ]  # fmt: skip

    def slow(name: str, method: str) -> bool:
        return name.startswith("digits") and method == "crosel"  # these digits are images

    presets = tuple(f"{method}{end}" for method in METHODS for end in ("", " own/features", " own/features-linear"))
    own = ("photographs, three people", "photographs, two people", "photographs, uniform 0.3, 10 % missing",
           "digits, uniform 0.3, 10 % missing")  # fmt: skip
    assert all(name in OURS for name in own)
    found = arms(0, REAL, ("crosel", "proden", "pop", "pico"), FRESH, True)
    found += [
        Cell(0, "plench", (name, method, number), 3 if method == "proden" else 6)
        for name in REAL for method in ("proden", "crdpll") for number in FRESH
    ]  # fmt: skip
    found += [
        Cell(8 if slow(name, method) else 1 if name in UNKNOWN else 2, "label_error", (name, method, 0),
             seconds(name, method, 24 if name.startswith("digits") else 6))
        for name in (*SETS, *own) for method in ("proden", "crosel")
    ]  # fmt: skip
    found += [
        Cell(1, "label_error", (name, "pop", 0), seconds(name, "pop", 6)) for name in (*REAL, "photographs, votes")
    ]  # fmt: skip
    found += arms(3, REAL, TRIED, CHOOSING[:3], False) + arms(3, SIX, METHODS, CHOOSING, False)
    found += arms(3, ("MSRCv2", "BirdSong", "digits, instance 0.3"), (PICO_BEFORE,), CHOOSING[:3], False)
    found += [
        Cell(5, "candidate_weights", (name, method, arm, number), seconds(name, method))
        for name in ("digits, votes", "photographs, votes", "digits, top 3", "photographs, top 3")
        for method, arm in (*((m, a) for m in ("cc", "proden", "crosel") for a in ("plain", "shares")), ("cc", "first"))
        for number in range(3 if name.startswith("digits") else 2)
    ]  # fmt: skip
    found += [
        Cell(6, "neighbours", (name, arm, number), seconds(name, ARMS[arm][0]))
        for name in MISSING for arm in ("proden", "crosel drop", "neighbours") for number in range(2)
    ]  # fmt: skip
    found += arms(4, FIVE, presets, FRESH[:1], True) + arms(7, FIVE, presets, FRESH[1:5], True)
    unique = {(cell.part, cell.asked): cell for cell in reversed(found)}.values()  # the most important of equal ones
    return sorted(unique, key=lambda cell: (cell.rank, -cell.seconds))


# --- a worker -----------------------------------------------------------------------------------------------------


def start_worker() -> None:
    import torch

    torch.set_num_threads(1)


def run(part: str, asked: tuple[Any, ...], folder: Path, keep: Path | None) -> dict[str, Any]:
    """The row of a cell; a cell that fails says why."""
    try:
        row = run_judged(asked, folder, keep) if part == "label_error" else run_script(part, asked, folder)
    except Exception as error:  # the others go on
        row = {"error": f"{type(error).__name__}: {error}"}
    return {"part": part, "asked": list(asked), **row}


def run_script(part: str, asked: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    import candidate_weights
    import feature_defaults
    import neighbours
    import plench

    if part == "plench":
        return plench.measure(folder, *asked, steps=3000)
    measure = {"candidate_weights": candidate_weights, "feature_defaults": feature_defaults, "neighbours": neighbours}
    row: dict[str, Any] = measure[part].measure(folder, *asked)  # type: ignore[attr-defined]
    return row


def run_judged(asked: tuple[Any, ...], folder: Path, keep: Path | None) -> dict[str, Any]:
    """What label_error.py and review_order.py say of one run."""
    import label_error
    import review_order

    name, method, seed = asked
    if name in label_error.SETS:
        make, rule = label_error.SETS[name]
        data = make(folder, seed)
    else:
        data, rule = review_order.OURS[name](folder), "real"
    judged = label_error.judge(data, method, seed)
    found = label_error.kept(judged, name, method, rule)
    if keep is not None:
        arrays = {
            what: found[what] for what in ("in_sample", "out_of_sample", "witness", "candidates", "y") if what in found
        }
        keep.mkdir(parents=True, exist_ok=True)
        np.savez(keep / f"{name}|{method}|{seed}.npz", **arrays)
    errors = label_error.rounded(label_error.measure(found))
    return {"seed": seed, **errors, "review": label_error.rounded(review_order.measure(name, method, judged))}


# --- all of them --------------------------------------------------------------------------------------------------


def run_all(args: Any) -> None:
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    begin, end = time.monotonic(), time.monotonic() + 60 * args.minutes
    known = {json.dumps([row["part"], row["asked"]]) for row in read(args.out) if "error" not in row}
    left = [cell for cell in cells() if json.dumps([cell.part, list(cell.asked)]) not in known]
    left = [cell for cell in left if re.fullmatch(args.only, " ".join(map(str, (cell.part, *cell.asked))))]
    folder = None if args.keep is None else args.keep.with_suffix(".parts")
    about, pace, done = origin("platform", "cpu_count", "numpy"), 1.0, 0
    pool = ProcessPoolExecutor(args.workers, get_context("spawn"), start_worker)
    running: dict[Future[dict[str, Any]], tuple[Cell, float]] = {}
    while True:
        for cell in list(left):
            if len(running) == args.workers:
                break
            if time.monotonic() + pace * cell.seconds < end:  # else a shorter one may fit
                left.remove(cell)
                running[pool.submit(run, cell.part, cell.asked, args.data, folder)] = cell, time.monotonic()
        if not running:
            break
        finished, _ = wait(running, timeout=max(0.1, end - time.monotonic()), return_when=FIRST_COMPLETED)
        if not finished:
            break  # the time is up
        for future in finished:
            cell, started = running.pop(future)
            took, row = time.monotonic() - started, future.result()
            add({**row, "seconds_of_cell": round(took, 2), "workers": args.workers, **about}, args.out)
            done += 1
            if cell.seconds > 2 and "error" not in row:
                pace = 0.9 * pace + 0.1 * took / cell.seconds
            if done % 50 == 0 or "error" in row:
                said = row.get("error", f"{len(left)} left, {pace:.2f} times the seconds planned")
                print(f"{time.monotonic() - begin:.0f} s: {done} cells, rank {cell.rank}; {said}", flush=True)
    for process in list((pool._processes or {}).values()):  # of cells that are not finished
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    if folder is not None and folder.exists():
        arrays = {}
        for path in sorted(folder.glob("*.npz")):
            with np.load(path) as found:
                arrays |= {f"{path.stem}|{key}": found[key] for key in found.files}
        np.savez_compressed(args.keep, **arrays)
    print(f"{time.monotonic() - begin:.0f} s: {done} cells, {len(left) + len(running)} not run", flush=True)


def split_record(rows: Path, to: Path, keep: Path | None) -> None:
    """A file for each part, as its script would have written it."""
    import label_error

    kept: dict[str, Any] = {}
    if keep is not None:
        with np.load(keep) as found:
            kept = dict(found)
    places = {
        "label_error": "label-error/features.jsonl", "feature_defaults": "features/arms.jsonl",
        "plench": "features/plench.jsonl", "candidate_weights": "features/candidate-weights.jsonl",
        "neighbours": "features/neighbours.jsonl",
    }  # fmt: skip
    for row in read(rows):
        part, place, review = row.pop("part"), row.pop("asked"), row.pop("review", None)
        if "error" in row:
            print(f"{part} {place}: {row['error']}")
            continue
        if part == "label_error" and (key := "|".join(map(str, place))) + "|y" in kept:
            arrays = {name.rsplit("|", 1)[1]: value for name, value in kept.items() if name.startswith(f"{key}|")}
            row |= label_error.rounded(label_error.measure(row | arrays))
        add(row, to / places[part])
        if review is not None:
            about = {key: row[key] for key in ("seed", "workers", "commit", "started", "torch", "platform")}
            add(review | about, to / "label-error/review.jsonl")


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("rows", nargs="*", metavar="split FILE", help="a file for each part of it")
    parser.add_argument("--to", type=Path, help="split: folder of the results")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, help="jsonl file to add to; what it has is not run again")
    parser.add_argument("--keep", type=Path, help="npz file for out-of-sample probabilities")
    parser.add_argument("--only", default=".*", help="pattern of cells: label_error .* crosel 0")
    parser.add_argument("--workers", type=count, default=10)
    parser.add_argument("--minutes", type=positive, default=8.5)
    args = parser.parse_args()
    if args.rows and args.rows[0] == "split" and len(args.rows) == 2 and args.to is not None:
        split_record(Path(args.rows[1]), args.to, args.keep)
    elif args.rows or args.data is None or args.out is None:
        parser.error("give --data and --out, or split FILE --to DIR")
    else:
        run_all(args)


if __name__ == "__main__":
    end_with(main)
