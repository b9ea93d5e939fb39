"""SIGKILL, again and again: another method each time, at random moments and at chosen ones inside every kind of write.

After each kill: no reported epoch is lost, and going on starts from the last whole epoch. After each run: the same bits
as an unbroken one, and no stray files.
"""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Child, ForkServer, assert_same_run, metrics, tree
from _support import PAPER_SETS, small_arrays
from soak.spread import spread

KILLS = 400
EPOCHS = 8
METHODS = ("crosel", "cc", "proden", "lws", "crdpll", "pico", "pop")
IMAGES = 320  # of digits: an epoch in milliseconds, so that most of the time goes into being killed
SETTINGS = ("--set", f"train.epochs={EPOCHS}", "--set", "network.width=2", "--set", "train.batch_size=64")
EXTRA = {
    "crosel": ("method.warmup=3", "method.bank_length=1", "method.gamma=0.2", *PAPER_SETS),
    "pop": ("method.warm_up=2",),
}
# Where a run writes: the calls are counted from the start of the process.
CHOSEN = (
    ("os:fsync", "half"), ("os:replace", "before"), ("os:replace", "after"),
    ("crosel.training.checkpoint:prune", "before"), ("crosel.runs.folder:Recorder.on_epoch", "before"),
    ("crosel.runs.folder:Recorder.on_epoch", "after"),
)  # fmt: skip


@dataclass
class Run:
    """One run under fire."""

    method: str
    path: Path
    kills: int = 0


@dataclass
class Score:
    kills: int = 0
    by_moment: Counter[str] = field(default_factory=Counter)
    by_method: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    half_written: int = 0  # kills that left a file half written, which going on removed
    lost_epochs: int = 0
    damaged: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Score) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def command(method: str, out: Path) -> tuple[str, ...]:
    source = str(out.parent / "digits.npz")
    settings = [part for item in EXTRA.get(method, ()) for part in ("--set", item)]
    return ("train", source, "--method", method, *SETTINGS, *settings, "--out", str(out), "--resume")


def whole_rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def kill_once(server: ForkServer, run: Run, draw: random.Random, seconds: float) -> tuple[Child, str]:
    """Start or go on, and kill; the child may be over before its time has come."""
    if draw.random() < 0.5:
        target, when = draw.choice(CHOSEN)
        call = draw.randint(1, 6)
        trap = {"target": target, "call": call, "when": when}
        child = server.start(*command(run.method, run.path), trap=trap)
        return child, f"{target.partition(':')[2]} {when}"
    child = server.start(*command(run.method, run.path))
    time.sleep(draw.uniform(0, seconds))
    child.signal(signal.SIGKILL)
    return child, "random"


def check_after(child: Child, run: Run, before: int, score: Score) -> None:
    said = child.err
    assert "Traceback" not in said, said
    score.damaged += "damaged" in said
    going_on = [line for line in said.splitlines() if line.startswith("continuing after epoch ")]
    if going_on:  # killed before it could say so, it says nothing
        score.lost_epochs += max(0, before - int(going_on[0].removeprefix("continuing after epoch ")))
    after = whole_rows(run.path)
    score.lost_epochs += max(0, before - after)


def soak(
    folder: Path, kills: int, seed: int, until: float = math.inf, methods: Sequence[str] = METHODS, bound: float = 60.0
) -> Score:
    np.savez(folder / "digits.npz", **small_arrays(IMAGES))
    server = ForkServer(folder)
    draw, score = random.Random(seed), Score()
    references, seconds = {}, {}
    for method in methods:
        started = time.monotonic()
        code, _, err = server.run(*command(method, folder / f"unbroken-{method}"))
        assert code == 0, err
        references[method] = folder / f"unbroken-{method}"
        seconds[method] = min(bound, time.monotonic() - started)
        assert len(metrics(references[method])) == EPOCHS
    runs = {method: Run(method, folder / f"{method}-0") for method in methods}
    number = 0
    while score.kills < kills and time.monotonic() < until:
        method = methods[number % len(methods)]
        number += 1
        run, before = runs[method], whole_rows(runs[method].path)
        child, moment = kill_once(server, run, draw, 0.7 * seconds[method])
        code = child.wait()
        assert code in (0, -signal.SIGKILL), f"{method}, {moment}: exit {code}: {child.err}"
        check_after(child, run, before, score)
        if code == 0:  # over before the kill: a finished run, and a new one begins
            assert_same_run(run.path, references[method])
            score.finished += 1
            runs[method] = Run(method, folder / f"{method}-{number}")
            continue
        run.kills += 1
        score.kills += 1
        score.by_moment[moment] += 1
        score.by_method[method] += 1
        stray = [name for name in tree(run.path) if ".writing-" in name] if run.path.exists() else []
        score.half_written += bool(stray)
        rows = whole_rows(run.path)
        score.lines.append({"kill": score.kills, "method": method, "moment": moment, "epochs_before": before,
                            "epochs_reported": rows, "half_written": len(stray)})  # fmt: skip
    for method, run in runs.items():  # what is left comes to its end
        code, _, err = server.run(*command(method, run.path))
        assert code == 0, err
        assert_same_run(run.path, references[method])
        score.finished += 1
    server.close()
    return score


def run(
    folder: Path, out: Path | None, kills: int = KILLS, seed: int = 9, workers: int = 1, minutes: float | None = None
) -> dict[str, Any]:
    score = Score()
    for part in spread(soak, folder, kills, seed, workers, minutes):
        score.add(part)
    if out is not None:
        (out / "kills.jsonl").write_text("".join(json.dumps(line) + "\n" for line in score.lines))
    assert minutes or score.kills == kills
    assert len(score.by_method) == len(METHODS)
    assert score.half_written > 0, "no kill fell inside a write"
    assert score.lost_epochs == 0, "an epoch that was reported was lost"
    assert score.damaged == 0
    return {
        "kills": score.kills, "seed": seed, "runs_finished_identical": score.finished,
        "half_written_files": score.half_written, "reported_epochs_lost": score.lost_epochs,
        "by_moment": dict(score.by_moment.most_common()), "by_method": dict(score.by_method),
    }  # fmt: skip
