"""SIGKILL at any moment: the resumed run ends with the same bits as an unbroken one and leaves no stray files.

Random moments, as issue 2 asks for, and chosen ones inside every write of a run: a kill from outside seldom hits
the few microseconds between a flush and a rename.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from _runs import ENVIRONMENT, ForkServer, assert_same_run, metrics, tree
from _support import TinyRun

KILLS = 20
# The files of the tiny run, in the order in which they are flushed. Before `done` come the plots: renamed, too, but
# not waited for.
WRITES = [
    "candidates.npz", "environment.json", "metrics.jsonl", "config.yaml", "checkpoint 1", "checkpoint 2",
    "checkpoint 3", "checkpoint 4", "selection.npz", "predictions.npz", "labels.csv", "report.html", "done",
]  # fmt: skip
PLOTS = 12
EPOCHS = 40
LONG = ("--set", f"train.epochs={EPOCHS}", "--set", "method.warmup=15")


def whole_rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def stray(run: Path) -> list[str]:
    return [name for name in tree(run) if ".writing-" in name]


# --- chosen moments -----------------------------------------------------------------------------------------------


def chosen_moments() -> Iterator[Any]:
    for number, name in enumerate(WRITES, start=1):
        if name in ("checkpoint 2", "checkpoint 4"):  # nothing but the number tells them from 1 and 3
            continue
        yield pytest.param("os:fsync", number, "half", id=f"{name} half written")
        renamed = number + (PLOTS if name == "done" else 0)
        if name in ("config.yaml", "checkpoint 3", "done"):
            yield pytest.param("os:replace", renamed, "before", id=f"{name} written but not renamed")
        if name not in ("checkpoint 3", "selection.npz", "predictions.npz", "report.html"):
            yield pytest.param("os:replace", renamed, "after", id=f"{name} just renamed")
    yield pytest.param("os:replace", len(WRITES) + 5, "before", id="a plot written but not renamed")
    for epoch in (1, 4):
        yield pytest.param(
            "crosel.runs.folder:Recorder.on_epoch", epoch, "before", id=f"epoch {epoch} saved, no metrics yet"
        )
        yield pytest.param("crosel.runs.folder:Recorder.on_epoch", epoch, "after", id=f"epoch {epoch} in the metrics")
        yield pytest.param(
            "crosel.training.checkpoint:prune", epoch, "before", id=f"epoch {epoch} saved, old ones not removed"
        )
    yield pytest.param("crosel.training.step:TrainStep.__call__", 15, "before", id="before a step")
    yield pytest.param("crosel.training.trainer:training_pass", 3, "after", id="after a pass over the training set")


@pytest.mark.parametrize(("target", "call", "when"), list(chosen_moments()))
def test_killed_at_a_chosen_moment(
    target: str, call: int, when: str, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    run = tmp_path / "run"
    trap = {"target": target, "call": call, "when": when}
    code, _, err = fork_server.run(*tiny_run.command, "--out", run, trap=trap)
    assert code == -signal.SIGKILL, err
    assert bool(stray(run)) == (target == "os:fsync" or (target == "os:replace" and when == "before"))
    done = whole_rows(run)
    if target == "crosel.runs.folder:Recorder.on_epoch":
        assert done == call - (when == "before"), "an epoch is in the metrics when it has ended, not one later"
    # Before the config is written there is no run yet, and the same command starts it.
    again = ("--resume",) if (run / "config.yaml").exists() else ()
    assert bool(again) == (target[:3] != "os:" or call > 4 or (call == 4 and when == "after"))
    ended = (run / "done").exists()
    code, _, err = fork_server.run(*tiny_run.command, "--out", run, *again)
    assert code == 0, err
    if ended:
        assert err == f"{run} is already finished\n"
    elif done:
        assert int(err.splitlines()[0].removeprefix("continuing after epoch ")) >= done, (
            "a reported epoch is never lost"
        )
    assert_same_run(run, tiny_run.path)


@pytest.mark.parametrize(
    "trap",
    [
        {"target": "os:fsync", "call": 1, "when": "half"},  # metrics.jsonl, put right from the checkpoint
        {"target": "os:replace", "call": 1, "when": "after"},
        {"target": "os:fsync", "call": 2, "when": "half"},  # the first checkpoint after going on
        {"target": "crosel.runs.folder:remove_temporary_files", "call": 1, "when": "before"},
        {"target": "crosel.training.session:Session.restore", "call": 1, "when": "after"},
    ],
    ids=lambda trap: f"{trap['target']} {trap['call']} {trap['when']}",
)
def test_killed_again_while_going_on(
    trap: dict[str, Any], tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    run = tmp_path / "run"
    first = {"target": "os:fsync", "call": 6, "when": "half"}  # the second checkpoint
    assert fork_server.run(*tiny_run.command, "--out", run, trap=first)[0] == -signal.SIGKILL
    code, _, err = fork_server.run("train", "--resume", "--out", run, trap=trap)
    assert code == -signal.SIGKILL, err
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 0, err
    assert_same_run(run, tiny_run.path)


# --- random moments -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(
    tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> tuple[Path, float]:
    """A longer run, and how long an epoch of it takes."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    child = fork_server.start(*tiny_run.command, *LONG, "--out", run)
    child.wait_for(lambda: "\n" in child.err)
    started = time.monotonic()
    assert child.wait() == 0, child.err
    assert len(metrics(run)) == EPOCHS
    assert metrics(run)[-1]["selection_ratio"] > 0
    return run, (time.monotonic() - started) / (EPOCHS - 1)


def test_killed_at_random_moments(
    tiny_run: TinyRun, unbroken: tuple[Path, float], tmp_path: Path, fork_server: ForkServer
) -> None:
    reference, epoch_seconds = unbroken
    run, moments, done = tmp_path / "run", random.Random(20), 0
    for kill in range(KILLS):
        child = fork_server.start(*tiny_run.command, *LONG, "--out", run, "--resume")
        if kill < 3:  # while it reads, builds and writes its first files
            time.sleep(moments.uniform(0, 0.2))
        else:  # in or after the epoch it resumes in: steps, passes, checkpoint writes, appends
            lines = moments.choice((1, 2))
            child.wait_for(lambda child=child, lines=lines: child.err.count("\n") >= lines)  # type: ignore[misc]
            time.sleep(moments.uniform(0, epoch_seconds))
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, f"over before kill {kill}: {child.err}"
        assert "Traceback" not in child.err
        before, done = done, whole_rows(run)
        assert done >= before, "an epoch that was reported is never lost"
    assert 0 < done < EPOCHS
    code, _, err = fork_server.run(*tiny_run.command, *LONG, "--out", run, "--resume")
    assert code == 0, err
    assert "damaged" not in err
    assert_same_run(run, reference)


def test_kill_of_the_real_thing(
    tiny_run: TinyRun, unbroken: tuple[Path, float], tmp_path: Path, fork_server: ForkServer
) -> None:
    """Once without the fork server."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "crosel", *tiny_run.command, *LONG, "--out", str(run)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stderr is not None
    epochs = (line for line in process.stderr if line.startswith("epoch"))
    assert len([*islice(epochs, 5)]) == 5
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 0, err
    assert_same_run(run, unbroken[0])
