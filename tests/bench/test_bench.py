"""Running suites: what is done is skipped, what broke is resumed, what fails does not stop the rest."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from _support import run_in_process
from _terminal import Terminal

from crosel.bench import (
    EXECUTORS,
    BenchRun,
    Options,
    RunResult,
    Suite,
    expand,
    parse_suite,
    read_suite,
    run_suite,
)
from crosel.bench.execution import BenchScreen
from crosel.bench.executors import Process, command, devices, last_line, result_of
from crosel.cli.bench import failure_lines, list_lines
from crosel.errors import Interrupted, UserError
from crosel.runs.folder import RunFolder
from crosel.utils.console import log_lines

TINY = {
    "source": "digits", "preset": "demo/digits", "candidates": "uniform:q=0.3", "network.width": 4,
    "train.epochs": 2, "train.batch_size": 256,
}  # fmt: skip
NO_WARMUP_LEFT = {"method": "crosel", "method.warmup": 9}  # of two epochs: refused when the run begins


def tiny(grid: dict[str, Any], base: dict[str, Any] | None = None, seeds: int = 1) -> Suite:
    return parse_suite({"base": {**TINY, **(base or {})}, "grid": grid, "seeds": seeds}, "tiny", "tiny.yaml")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "here", run_in_process)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def epochs_done(folder: Path) -> int:
    return len(RunFolder(folder).read_metrics())


# --- in this process ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_process")
def test_done_is_skipped_broken_resumed_failing_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tiny({"method": {"bad": NO_WARMUP_LEFT, "cc": {"method": "cc"}, "proden": {"method": "proden"}}})
    with log_lines():
        results = run_suite(suite, tmp_path, on="here", device="cpu", quiet=False)
    assert [result.status for result in results] == ["failed", "done", "done"]
    assert failure_lines(results) == [
        "digits-q0.3/crosel-bad-seed0: method.warmup is 9, but the run has only 2 epochs: nothing would ever be "
        "selected; raise train.epochs or lower method.warmup"
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"tiny: 3 runs, in {tmp_path}"
    assert any(re.match(r"done     digits-q0.3/cc-seed0 +2/3  accuracy \d", line) for line in said)

    cc, proden = (RunFolder(tmp_path / "digits-q0.3" / f"{name}-seed0") for name in ("cc", "proden"))
    (proden / "done").unlink()  # as if it had been killed after its first epoch
    newest = max(proden.checkpoints.iterdir())
    newest.unlink()
    before = (cc / "metrics.jsonl").stat().st_mtime_ns
    lines = list_lines(expand(suite), tmp_path)
    assert [line.split()[0] for line in lines] == ["new", "done", "begun"]
    first = proden.read_metrics()[0]
    results = run_suite(suite, tmp_path, on="here", device="cpu")
    assert [result.status for result in results] == ["failed", "skipped", "done"]
    assert (cc / "metrics.jsonl").stat().st_mtime_ns == before
    assert results[1].row["epoch"] == 2
    assert proden.is_done
    assert proden.read_metrics()[0] == first  # kept, not made anew: its time is the same


@pytest.mark.usefixtures("in_process")
def test_a_finished_run_with_other_settings_is_not_taken_for_the_run(tmp_path: Path) -> None:
    suite = tiny({"method": ["cc"]})
    assert run_suite(suite, tmp_path, on="here", device="cpu")[0].status == "done"
    assert run_suite(suite, tmp_path, on="here", settings=["train.log_every=3"])[0].status == "skipped"
    (other,) = run_suite(suite, tmp_path, on="here", device="cpu", settings=["train.lr=0.3"])
    assert other.status == "failed"
    assert other.line == "a finished run with other settings is in this folder: train.lr was 0.05, now 0.3"
    assert list_lines([other.run], tmp_path)[0].startswith("failed ")
    config = tmp_path / other.run.name / "config.yaml"
    old = yaml.safe_load(config.read_text(encoding="utf-8"))
    del old["train"]["ema_decay"]
    old["train"] |= {"average": 0, "refresh": 0, "restart": 0, "restart_lr": None}  # as of 0.1.0
    config.write_text(yaml.safe_dump(old), encoding="utf-8")
    assert run_suite(suite, tmp_path, on="here")[0].status == "skipped"
    config.write_text("nonsense: 1\n", encoding="utf-8")
    assert run_suite(suite, tmp_path, on="here")[0].status == "skipped"  # the checkpoint knows the settings, too
    shutil.rmtree(tmp_path / other.run.name / "checkpoints")
    assert run_suite(suite, tmp_path, on="here")[0].status == "failed"


@pytest.mark.usefixtures("in_process")
def test_an_error_of_ours_in_one_run_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crosel.runs import pipeline

    real = pipeline.finish

    def broken(folder: RunFolder, session: Any, *rest: Any) -> list[str]:
        if session.config.method.name == "cc":
            raise ZeroDivisionError("oh")
        return real(folder, session, *rest)

    monkeypatch.setattr(pipeline, "finish", broken)
    results = run_suite(tiny({"method": ["cc", "proden"]}), tmp_path, on="here", device="cpu")
    assert [(result.status, result.line) for result in results] == [("failed", "ZeroDivisionError: oh"), ("done", "")]


def test_nothing_is_begun_when_something_is_wrong_with_the_call(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for call, says in (
        ({"jobs": 0}, "--jobs 0"), ({"on": "locl"}, "did you mean 'local'"), ({"settings": ["train.lr"]}, "NAME=VALUE"),
        ({"seeds": 0}, "'seeds' must be a number"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            run_suite("digits-tiny", out, **call)  # type: ignore[arg-type]
    assert not out.exists()
    out.write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match="this is a file"):
        run_suite("digits-tiny", out)


# --- in processes -------------------------------------------------------------------------------------------------


def test_two_at_once_and_one_fails(tmp_path: Path) -> None:
    suite = tiny({"method": {"bad": NO_WARMUP_LEFT, "cc": {"method": "cc"}}})
    bad, good = run_suite(suite, tmp_path, jobs=2, device="cpu")
    assert (bad.status, good.status) == ("failed", "done")
    assert bad.line.startswith("method.warmup is 9, but the run has only 2 epochs")
    assert not bad.folder.exists()
    assert RunFolder(good.folder).is_done
    assert good.row["epoch"] == 2
    command = json.loads((good.folder / "environment.json").read_text(encoding="utf-8"))["command"]
    assert command[:5] == ["crosel", "train", "digits", "--method", "cc"]
    # The command alone is the run: the config that the child resolved is the one that was asked for.
    assert run_suite(suite, tmp_path, jobs=2, device="cpu", on="local", settings=())[1].status == "skipped"


@pytest.mark.usefixtures("in_process")
def test_a_network_of_the_users_own(own_network: str, tmp_path: Path) -> None:
    """Code that a suite names is imported only if that is said, also to every run's own process."""
    suite = tiny({"network.name": ["small-cnn", own_network]}, {"method": "cc"})
    out, name = tmp_path / "out", "digits-q0.3/cc-name=net_of_a_user_make-seed0"
    with pytest.raises(UserError) as refused:
        run_suite(suite, out, device="cpu")
    assert str(refused.value) == (
        f"tiny.yaml, run {name}: network '{own_network}' is code from outside crosel; add --trust-code if you trust it"
    )
    assert not out.exists()
    (own,) = run_suite(suite, out, on="here", device="cpu", only="*user*", trust_code=True)
    assert (own.run.name, own.status) == (name, "done")
    words = command(own.run, own.folder, "cpu", trust_code=True)
    assert words == [*command(own.run, own.folder, "cpu"), "--trust-code"]
    _, again = run_suite(suite, out, on="here", device="cpu", only=["*user*", "*small-cnn*"], trust_code=True)
    assert again.status == "skipped"
    # What is done imports nothing.
    assert [result.status for result in run_suite(suite, out, on="here", device="cpu")] == ["skipped", "skipped"]
    plain, trusted = list_lines(expand(suite), trust_code=True)
    assert trusted == f"{list_lines(expand(suite))[1]} --trust-code"
    assert plain == list_lines(expand(suite))[0]


EPOCHS = 16
LONG = {"train.epochs": EPOCHS, "train.batch_size": 16}


def test_ctrl_c_saves_and_the_same_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = tiny({"method": ["cc"]}, LONG, seeds=2)
    folders = [tmp_path / run.name for run in expand(suite)]

    def interrupt() -> None:
        wait_for(lambda: epochs_done(folders[0]) >= 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="stopped with 0 of 2 runs done; run the same command again to continue"):
        run_suite(suite, tmp_path, device="cpu")
    thread.join()
    reached = epochs_done(folders[0])
    assert 1 <= reached < EPOCHS
    assert not folders[1].exists()  # it was not its turn yet
    assert list((folders[0] / "checkpoints").glob("*.safetensors"))
    assert "the state is saved" in last_line(tmp_path / "logs" / "digits-q0.3--cc-seed0.log")

    times = [row["seconds"] for row in RunFolder(folders[0]).read_metrics()]
    monkeypatch.setitem(EXECUTORS, "here", run_in_process)
    assert [result.status for result in run_suite(suite, tmp_path, seeds=1, on="here", device="cpu")] == ["done"]
    rows = RunFolder(folders[0]).read_metrics()
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert [row["seconds"] for row in rows[:reached]] == times  # what was done was not done again


def test_a_killed_bench_takes_its_runs_with_it(tmp_path: Path) -> None:
    (run,) = expand(tiny({"method": ["cc"]}, LONG))
    folder, log = tmp_path / "run", tmp_path / "log"
    # A parent that is nothing but a parent starts sooner than a whole bench would.
    code = (
        "import subprocess, sys; from crosel.utils.system import child_environment; "
        "subprocess.run(sys.argv[2:], stderr=open(sys.argv[1], 'w'), env=child_environment())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(log), *command(run, folder, "cpu")])
    try:
        wait_for(lambda: epochs_done(folder) >= 1)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: "the state is saved" in last_line(log))
    assert 1 <= epochs_done(folder) < EPOCHS
    assert not RunFolder(folder).is_done


def test_how_a_killed_process_is_reported(tmp_path: Path) -> None:
    (run,) = expand(tiny({"method": ["cc"]}))
    log = tmp_path / "a.log"
    log.write_text("epoch 1\n\n", encoding="utf-8")
    popen = subprocess.Popen(["sleep", "60"])
    popen.kill()
    popen.wait()
    result = result_of(Process(run, popen, log, "cpu", time.monotonic()), Options(tmp_path))
    assert (result.status, result.line) == ("failed", "killed by SIGKILL after: epoch 1")
    stopped = result_of(Process(run, popen, tmp_path / "none", "cpu", 0.0), Options(tmp_path), stopping=True)
    assert (stopped.status, stopped.line) == ("stopped", "")
    popen.returncode = -999
    assert "killed by signal 999" in result_of(Process(run, popen, log, "cpu", 0.0), Options(tmp_path)).line


def test_cards_are_filled_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices("auto", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices("cpu", 2) == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices("cuda", 2) == ["cuda", "cuda"]


# --- what is shown ------------------------------------------------------------------------------------------------


def test_live_table_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "60"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    runs = expand(read_suite("digits-tiny"))
    stream, options = Terminal(), Options(tmp_path)
    progress = BenchScreen(runs, options, stream)
    progress.started(runs[0])
    progress.started(runs[1])
    folder = tmp_path / runs[0].name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "test_accuracy": 0.5}\n', encoding="utf-8")
    progress.tick()
    shown = stream.lines()
    assert shown[0].startswith("running  digits-q0.3/crosel-seed0  epoch 1/2  accuracy 50.0")
    assert shown[1].startswith("running  digits-q0.3/crosel-seed1  epoch 0/2")
    assert shown[2:] == ["4 runs: 2 running, 2 waiting"]
    assert max(map(len, shown)) <= 60
    progress.finished(RunResult(runs[0], folder, "done", row={"test_accuracy": 0.75}, seconds=70))
    progress.finished(RunResult(runs[1], folder, "failed", "out of memory"))
    shown = stream.lines()
    assert shown == [
        "done     digits-q0.3/crosel-seed0  1/4  accuracy 75.0 %  1 min 10 s",
        "failed   digits-q0.3/crosel-seed1  2/4  out of memory",
        "4 runs: 1 done, 1 failed, 2 waiting",
    ]
    progress.close()
    assert stream.lines()[2:] == [""]


def test_a_second_ctrl_c_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def sleeper(run: BenchRun, options: Options, device: str) -> Process:
        started.append(subprocess.Popen(["sleep", "60"]))
        return Process(run, started[-1], tmp_path / "log", device, time.monotonic())

    def tick(progress: BenchScreen) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("crosel.bench.executors.start", sleeper)
    monkeypatch.setattr(BenchScreen, "tick", tick)
    with pytest.raises(KeyboardInterrupt):
        run_suite("digits-tiny", tmp_path, jobs=3)
    assert [popen.poll() for popen in started] == [-signal.SIGKILL] * 3


def test_quiet_and_plain(tmp_path: Path) -> None:
    runs = expand(read_suite("digits-tiny"), seeds=1)
    for quiet, expected in ((True, ""), (False, "start    digits-q0.3/crosel-seed0\n")):
        stream = io.StringIO()
        progress = BenchScreen(runs, Options(tmp_path), stream, quiet=quiet)
        progress.started(runs[0])
        progress.tick()
        progress.close()
        assert stream.getvalue() == expected
