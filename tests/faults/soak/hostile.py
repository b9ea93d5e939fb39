"""What a stranger sends: run folders changed at random, each read by every command, and changed inputs for the readers.

    python tests/faults/soak hostile --workers 10 --minutes 9 --out FOLDER

The workers share the time between folders and inputs, so that both would reach their numbers together. Without
--minutes they end with these numbers. What fails goes to FOLDER/hostile.jsonl at once, with its seed and what was
changed: `python tests/faults/soak hostile --first SEED --folders 1 --inputs 0 --workers 1` repeats a folder.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import queue
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import _inputs
import _mutants

FOLDERS, INPUTS = 10_000, 1_000_000
FEW = 8  # folders in a turn of a worker
BLOCK = 1000  # inputs in a turn


def prepare() -> None:
    """Import what the commands need, so that children have it, bound the memory, and spare what only takes time."""
    import typer.main

    from crosel.runs import environment, label_error
    from crosel.utils import settings

    os.environ["CROSEL_MEMORY_GB"] = str(_mutants.MEMORY_GB)
    label_error.RESAMPLES = 2
    parse = settings.parse_yaml
    parsed = functools.lru_cache(256)(lambda text, as_text: pickle.dumps(parse(text, as_text)))
    settings.parse_yaml = lambda text, as_text=False: pickle.loads(parsed(text, as_text))
    # The command line is put together once, not for every call.
    typer.main.get_command = functools.lru_cache(None)(typer.main.get_command)
    commit = environment._commit()
    environment._commit = lambda: commit  # starts git, which takes longer than all else


class Worker:
    """One process's own folders, and what it found."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.bases = _mutants.make_bases(self.work)
        self.readers = _inputs.Readers(folder / "inputs")

    def folders(self, first: int, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": "folders", "first": first, "folders": 0, "commands": Counter(), "failed": []}
        slowest, grown = 0.0, 0
        for seed in range(first, first + number):
            row = _mutants.attack(self.bases, self.work, seed)
            found["folders"] += 1
            for name, code, took in row["rows"]:
                found["commands"][f"{name}: {code}"] += 1
                slowest = max(slowest, took)
            grown = max(grown, row["grown"])
            if row["failed"]:
                found["failed"].append({key: row[key] for key in ("seed", "base", "changed", "failed")})
        return {**found, "slowest": slowest, "grown": grown}

    def inputs(self, first: int, number: int) -> dict[str, Any]:
        return {"kind": "inputs", "first": first, **self.readers.attack(first, number)}


def _work(folder: Path, turns: Any, found: Any) -> None:
    """The life of a worker: take a turn, tell what was found."""
    try:
        folder.mkdir(parents=True)
        worker = Worker(folder)
        found.put({"kind": "ready"})
        while (turn := turns.get()) is not None:
            kind, first, number = turn
            began = time.monotonic()
            row = getattr(worker, kind)(first, number)
            found.put({**row, "seconds": time.monotonic() - began})
    except BaseException:
        found.put({"kind": "broken", "error": traceback.format_exc()})


class Total:
    def __init__(self) -> None:
        self.folders = self.inputs = 0
        self.commands, self.outcomes = Counter[str](), Counter[str]()
        self.failed: list[dict[str, Any]] = []
        self.slowest = {"folders": 0.0, "inputs": 0.0}
        self.grown = {"folders": 0, "inputs": 0}
        self.seconds = {"folders": 0.0, "inputs": 0.0}

    def add(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        self.folders += row.get("folders", 0)
        self.inputs += row.get("inputs", 0)
        self.commands.update(row.get("commands", {}))
        self.outcomes.update(row.get("outcomes", {}))
        self.slowest[kind] = max(self.slowest[kind], row["slowest"])
        self.grown[kind] = max(self.grown[kind], row["grown"])
        self.seconds[kind] += row["seconds"]
        self.failed += [{"kind": kind, **failure} for failure in row["failed"]]

    def behind(self, folders: int, inputs: int) -> str:
        """The kind that is further from its number."""
        return "folders" if inputs == 0 or self.folders * inputs < self.inputs * folders else "inputs"

    def summary(self) -> dict[str, Any]:
        codes = Counter[str]()
        for name, count in self.commands.items():
            codes[name.rpartition(": ")[2]] += count
        return {
            "folders": self.folders, "inputs": self.inputs, "failed": len(self.failed),
            "commands_by_exit_code": dict(codes), "by_command": dict(sorted(self.commands.items())),
            "inputs_by_outcome": dict(sorted(self.outcomes.items())),
            "slowest_s": {kind: round(value, 2) for kind, value in self.slowest.items()},
            "memory_grown_mib": {kind: value >> 20 for kind, value in self.grown.items()},
            "CROSEL_MEMORY_GB": _mutants.MEMORY_GB,
            "worker_seconds": {kind: round(value) for kind, value in self.seconds.items()},
        }  # fmt: skip


def attack(
    folder: Path, out: Path | None, folders: int, inputs: int, workers: int, minutes: float | None, first: int
) -> Total:
    prepare()
    context = multiprocessing.get_context("fork")
    turns, found, total = context.Queue(), context.Queue(), Total()
    processes = [context.Process(target=_work, args=(folder / str(n), turns, found)) for n in range(workers)]
    until = time.monotonic() + 60 * minutes if minutes else None
    for process in processes:
        process.start()
    given, under_way, next_of = 0, 0, {"folders": first, "inputs": first}
    promised = Total()
    failures = folder / "hostile.jsonl" if out is None else out / "hostile.jsonl"
    failures.write_text("")
    shown = time.monotonic()
    try:
        while True:
            # A turn takes seconds: keep one for each worker under way, and stop giving them before the time is over.
            while under_way < workers and not _over(promised, folders, inputs, until):
                kind = promised.behind(folders, inputs)
                number = min(FEW, max(1, folders)) if kind == "folders" else min(BLOCK, inputs)
                turns.put((kind, next_of[kind], number))
                next_of[kind] += number
                setattr(promised, kind, getattr(promised, kind) + number)
                given, under_way = given + 1, under_way + 1
            if not under_way:
                break
            try:
                row = found.get(timeout=5.0 if until is None else max(0.1, min(5.0, until + 20 - time.monotonic())))
            except queue.Empty:
                if until is not None and time.monotonic() > until + 15:
                    break  # what is still under way is not counted
                if not any(process.is_alive() for process in processes):
                    raise AssertionError("all workers have died") from None
                continue
            if row["kind"] == "ready":
                continue
            if row["kind"] == "broken":
                raise AssertionError(row["error"])
            under_way -= 1
            total.add(row)
            for failure in row["failed"]:
                with open(failures, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps({"kind": row["kind"], **failure}) + "\n")
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                print(f"{total.folders} folders, {total.inputs} inputs, {len(total.failed)} failed", flush=True)
    finally:
        for _ in processes:
            turns.put(None)
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
        turns.cancel_join_thread()
    return total


def _over(promised: Total, folders: int, inputs: int, until: float | None) -> bool:
    if until is None:
        return promised.folders >= folders and promised.inputs >= inputs
    return time.monotonic() > until - 8


def _in_memory() -> str | None:
    """A folder that needs no disk, if there is one with enough room."""
    shm = "/dev/shm"
    return shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1 << 30 else None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def run(
    folder: Path, out: Path | None, workers: int = 2, minutes: float | None = None, folders: int = FOLDERS,
    inputs: int = INPUTS, first: int = 0,
) -> dict[str, Any]:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="crosel-hostile-", dir=_in_memory()) as work:
        total = attack(Path(work), out, folders, inputs, workers, minutes, first)
    left_out = [
        *([] if _mutants.HAS_PAGE else ["review (no fastapi)"]),
        *([] if _inputs.HAS_ARROW else ["parquet, arrow"]),
    ]
    found = {
        "command": " ".join(["python", *sys.argv]),
        "processor": _processor(),
        "left_out": left_out,
        "workers": workers,
        "minutes": minutes,
        "first_seed": first,
        **total.summary(),
    }
    if total.failed:
        for failure in total.failed[:20]:
            print(json.dumps(failure)[:3000], flush=True)
    return {**found, "failures": total.failed[:40], "ok": not total.failed}
