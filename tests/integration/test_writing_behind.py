"""Checkpoints that are written while training goes on, as on a GPU. Here a CPU is told to do the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from _runs import assert_same_run, checkpoints, metrics
from _support import CroselCli, TinyRun

from crosel import checkpoint, run
from crosel.errors import UserError
from crosel.runner import StopFlag
from crosel.train import Row

STATE = {"epoch": 1, "step": 0, "rows": [], "seconds": 0.0, "device": "cpu", "data": "d", "candidates": "c"}


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "writes_behind", lambda device: True)


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
    writer, values, state = checkpoint.Writer(), tensors(), dict(STATE, rows=[{"epoch": 1}])
    writer.save(tmp_path, 1, 0, values, state, keep=2)
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
    writer = checkpoint.Writer()
    for epoch in range(1, 6):
        writer.save(tmp_path, epoch, 0, tensors(), dict(STATE, epoch=epoch), keep=2)
        assert len([p for p in tmp_path.iterdir() if p.suffix == ".safetensors"]) <= 3
    writer.wait()
    writer.wait()  # nothing is left to wait for
    assert [path.name[:11] for path in sorted(tmp_path.iterdir())] == ["epoch-00004", "epoch-00005"]


@pytest.mark.parametrize("asks", ["save", "wait"])
def test_an_error_is_told_once_and_in_time(tmp_path: Path, asks: str) -> None:
    writer = checkpoint.Writer()
    writer.save(tmp_path / "nowhere", 1, 0, tensors(), STATE, keep=2)
    with pytest.raises(UserError, match="the folder is not there, or was removed"):
        writer.wait() if asks == "wait" else writer.save(tmp_path, 2, 0, tensors(), STATE, keep=2)
    writer.save(tmp_path, 2, 0, tensors(), STATE, keep=2)
    writer.wait()
    assert [path.name[:11] for path in tmp_path.iterdir()] == ["epoch-00002"]


def test_training_goes_on_meanwhile(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, behind: None, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is held until the second epoch has ended; the run is what it would have been anyway."""
    on_epoch, seen = run.RunFolder.on_epoch, []

    def looking(self: run.RunFolder, session: Any, row: Row) -> None:
        on_epoch(self, session, row)
        seen.append((row["epoch"], gate.written))
        gate.open.set()

    monkeypatch.setattr(run.RunFolder, "on_epoch", looking)
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
    assert f"going on after epoch {epoch - 1}" in result.err
    assert metrics(out) == metrics(tiny_run.path)
    assert_same_run(out, tiny_run.path)
