"""Checkpoints that are written while training goes on, as on a GPU. Here a CPU is told to do the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _runs import ENVIRONMENT, ForkServer, assert_same_run, checkpoints, metrics
from _support import CroselCli, TinyRun

from crosel.errors import Diverged, UserError
from crosel.runs import folder as recorder
from crosel.runs.pipeline import StopFlag
from crosel.training import checkpoint
from crosel.training import trainer as train
from crosel.training.callbacks import Row

STATE = {"epoch": 1, "step": 0, "rows": [], "seconds": 0.0, "device": "cpu", "data": "d", "candidates": "c"}
STEPS = 6  # of an epoch of the tiny run


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "writes_behind", lambda device: True)


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.written = threading.Event(), 0
        write = checkpoint.write

        def held(*args: Any) -> Path:
            assert self.open.wait(60)
            self.written += 1
            return write(*args)

        monkeypatch.setattr(checkpoint, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3).T, "generator": torch.Generator().get_state()}


def test_what_is_written_is_what_was_there(tmp_path: Path, gate: Gate) -> None:
    """`save` returns before the write; what changes afterwards does not get in."""
    writer, values, state = checkpoint.AsyncWriter(), tensors(), dict(STATE, rows=[{"epoch": 1}])
    writer.save(tmp_path, values, state, keep=2)
    values["w"].zero_()
    state["rows"].append({"epoch": 2})
    assert not list(tmp_path.iterdir())
    gate.open.set()
    writer.wait()
    found = checkpoint.load_newest(tmp_path).checkpoint
    assert found is not None
    assert torch.equal(found.tensors["w"], tensors()["w"])
    assert found.state["rows"] == [{"epoch": 1}]


def test_one_after_the_other(tmp_path: Path) -> None:
    writer = checkpoint.AsyncWriter()
    for epoch in range(1, 6):
        writer.save(tmp_path, tensors(), dict(STATE, epoch=epoch), keep=2)
        assert len([p for p in tmp_path.iterdir() if p.suffix == ".safetensors"]) <= 3
    writer.wait()
    writer.wait()  # nothing is left to wait for
    assert [path.name[:11] for path in sorted(tmp_path.iterdir())] == ["epoch-00004", "epoch-00005"]


@pytest.mark.parametrize("asks", ["save", "wait"])
def test_an_error_is_told_once_and_in_time(tmp_path: Path, asks: str) -> None:
    writer = checkpoint.AsyncWriter()
    writer.save(tmp_path / "nowhere", tensors(), STATE, keep=2)
    with pytest.raises(UserError, match="the folder does not exist, or was removed"):
        writer.wait() if asks == "wait" else writer.save(tmp_path, tensors(), dict(STATE, epoch=2), keep=2)
    writer.save(tmp_path, tensors(), dict(STATE, epoch=2), keep=2)
    writer.wait()
    assert [path.name[:11] for path in tmp_path.iterdir()] == ["epoch-00002"]


def test_training_goes_on_meanwhile(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, behind: None, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is held until the second epoch has ended; the run is what it would have been anyway."""
    on_epoch, seen = recorder.Recorder.on_epoch, []

    def looking(self: recorder.Recorder, session: Any, row: Row) -> None:
        on_epoch(self, session, row)
        seen.append((row["epoch"], gate.written))
        gate.open.set()

    monkeypatch.setattr(recorder.Recorder, "on_epoch", looking)
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert seen[0] == (1, 0)
    assert gate.written == 4
    assert_same_run(tmp_path / "run", tiny_run.path)


@pytest.mark.parametrize("looks", [9, 14])  # in the middle of the second epoch, and at its end
def test_saved_means_on_the_disk(
    looks: int, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, count = tmp_path / "run", 0

    def stop(flag: StopFlag) -> bool:
        nonlocal count
        count += 1
        return count >= looks

    with monkeypatch.context() as patch:
        patch.setattr(StopFlag, "__call__", stop)
        result = crosel_cli(*tiny_run.command, "--out", out)
    assert result.code == 130
    assert "the state is saved" in result.err
    assert checkpoints(out)[-1].name[:23] == ("epoch-00001-step-000002" if looks == 9 else "epoch-00002-step-000000")
    result = crosel_cli("train", "--resume", "--out", out)
    assert result.code == 0, result.err
    assert_same_run(out, tiny_run.path)


@pytest.mark.parametrize("epoch", [2, 4])
def test_a_disk_that_refuses(
    epoch: int, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a run, and at its very end: one line, and the run is not called done."""
    out, write, count = tmp_path / "run", checkpoint.write, 0

    def full(*args: Any) -> Path:
        nonlocal count
        count += 1
        if count >= epoch:
            raise UserError(f"{args[0]}: no space left on the device")
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        result = crosel_cli(*tiny_run.command, "--out", out)
    assert result.code == 2
    assert result.err.splitlines()[-1] == f"crosel: {out / 'checkpoints'}: no space left on the device"
    assert not (out / "done").exists()
    assert checkpoints(out)[-1].name.startswith(f"epoch-{epoch - 1:05d}")
    result = crosel_cli("train", "--resume", "--out", out)
    assert result.code == 0, result.err
    assert f"continuing after epoch {epoch - 1}" in result.err
    assert metrics(out) == metrics(tiny_run.path)
    assert_same_run(out, tiny_run.path)


# --- signals, kills, and other ends -------------------------------------------------------------------------------


def chosen_moments() -> Iterator[Any]:
    """While a checkpoint is hashed, written and renamed, and while training goes on beside it."""
    for number in (5, 7):  # the four checkpoints come after four other files
        yield pytest.param("os:fsync", number, "half", 0.0, id=f"file {number} half written")
        yield pytest.param("os:replace", number, "before", 0.0, id=f"file {number} written but not renamed")
    for number in (1, 4):
        yield pytest.param(
            "crosel.training.checkpoint:prune", number, "before", 0.0, id=f"before old ones go, {number}"
        )
        yield pytest.param(
            "crosel.runs.folder:Recorder.on_epoch", number, "after", 0.2, id=f"epoch {number} only in metrics"
        )
    yield pytest.param("crosel.training.step:TrainStep.__call__", 15, "before", 0.2, id="in a step")
    yield pytest.param(
        "crosel.training.trainer:training_pass", 3, "after", 0.2, id="after a pass over the training set"
    )
    for name in ("NetworkLabels.save", "write_labels"):
        yield pytest.param(f"crosel.runs.result:{name}", 1, "after", 0.2, id=f"after {name}")
    yield pytest.param("crosel.report:write_run_report", 1, "after", 0.2, id="after write_run_report")
    yield pytest.param("crosel.runs.folder:RunFolder.finish", 1, "before", 0.2, id="before the last wait")


@pytest.mark.parametrize(("target", "call", "when", "seconds"), list(chosen_moments()))
def test_killed_at_a_chosen_moment(
    target: str, call: int, when: str, seconds: float, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    """No epoch in the metrics without its checkpoint; what was under way is done again, and ends with the same bits."""
    out = tmp_path / "run"
    trap = {"target": target, "call": call, "when": when}
    code, _, err = fork_server.run(*tiny_run.command, "--out", out, trap=trap, behind=seconds)
    assert code == -signal.SIGKILL, err
    reported = len(metrics(out))
    code, _, err = fork_server.run("train", "--resume", "--out", out, behind=seconds)
    assert code == 0, err
    going_on = err.splitlines()[0].removeprefix("continuing after epoch ")
    assert (int(going_on) if going_on.isdigit() else 0) >= reported
    if seconds and target.endswith("on_epoch"):
        assert reported == call - 1, "the epoch has ended, and its checkpoint is under way"
        assert f"continuing after epoch {call - 1}\n" in err or call == 1
    assert_same_run(out, tiny_run.path)


def test_signals_do_not_cut_the_last_write_short(tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer) -> None:
    """Launchers send SIGTERM more than once; what was promised is written all the same."""
    out = tmp_path / "run"
    here = "a step of the third epoch\n"
    slow = {"target": "crosel.training.step:TrainStep.__call__", "call": 2 * STEPS + 1, "seconds": 0.05, "tell": here}
    child = fork_server.start(*tiny_run.command, "--out", out, trap=slow, behind=0.7)
    child.wait_for(lambda: here in child.err)
    for _ in range(12):  # in the step, in the wait for the checkpoint before, and in the last wait
        child.signal(signal.SIGTERM)
        time.sleep(0.1)
    assert child.wait() == 130
    assert child.err.splitlines()[-1].startswith("crosel: stopped; the state is saved.")
    assert "epoch-00002-step-00000" in checkpoints(out)[-1].name
    assert "step-000000" not in checkpoints(out)[-1].name
    code, _, err = fork_server.run("train", "--resume", "--out", out)
    assert code == 0, err
    assert_same_run(out, tiny_run.path)


def test_a_second_ctrl_c_does_not_leave_a_writer_behind(
    tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    """It ends the run, but not before the folder is nobody's: the next process must not meet a late file."""
    out = tmp_path / "run"
    # Long enough that both signals come before a second checkpoint may be begun, on a busy machine, too.
    child = fork_server.start(*tiny_run.command, "--out", out, behind=2.5)
    child.wait_for(lambda: "epoch 1/4" in child.err)
    time.sleep(0.3)
    child.signal(signal.SIGINT)
    time.sleep(0.1)
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert child.err.splitlines()[-1] == "crosel: stopped"
    assert [path.name[:11] for path in checkpoints(out)] == ["epoch-00001"]
    code, _, err = fork_server.run("train", "--resume", "--out", out)
    assert code == 0, err
    assert_same_run(out, tiny_run.path)


@pytest.mark.parametrize("ends", ["by itself", "stopped"])
def test_no_memory_for_a_checkpoint(
    ends: str, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Path:
        raise MemoryError

    monkeypatch.setattr(checkpoint, "write", full)
    if ends == "stopped":
        monkeypatch.setattr(StopFlag, "__call__", lambda flag: True)
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("crosel: out of memory for a checkpoint; earlier checkpoints are")
    assert "Traceback" not in result.err


def test_divergence_leaves_the_last_checkpoint(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the last checkpoint is intact; so it must be there, though it was under way."""
    write = checkpoint.write

    def slow(*args: Any) -> Path:
        time.sleep(0.3)
        return write(*args)

    def bad(session: Any, epoch: int) -> None:
        if epoch == 3:
            raise Diverged("the weights are no longer finite; the last checkpoint is intact")

    monkeypatch.setattr(checkpoint, "write", slow)
    monkeypatch.setattr(train, "check_weights", bad)
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run")
    assert result.code == 2
    assert "the last checkpoint is intact" in result.err
    assert [path.name[:11] for path in checkpoints(tmp_path / "run")] == ["epoch-00001", "epoch-00002"]


def test_without_another_thread_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    writer = checkpoint.AsyncWriter()
    writer.save(tmp_path, tensors(), STATE, keep=2)
    writer.wait()
    assert checkpoint.load_newest(tmp_path).checkpoint is not None


def test_a_run_may_outlive_the_main_thread(tmp_path: Path) -> None:
    """As where a program starts a run in a thread and has nothing else to do: Python waits for such threads."""
    program = f"""
import threading
from pathlib import Path
import torch
from crosel.training import checkpoint

def run():
    threading.main_thread().join()
    writer = checkpoint.AsyncWriter()
    for epoch in (1, 2):
        writer.save(Path({str(tmp_path)!r}), {{"w": torch.zeros(2)}}, {{"epoch": epoch, "step": 0}}, keep=2)
    writer.wait()

threading.Thread(target=run).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name[:11] for path in sorted(tmp_path.iterdir())] == ["epoch-00001", "epoch-00002"]
