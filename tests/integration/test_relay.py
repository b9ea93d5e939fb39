"""A run handed from machine to machine in parts ends as if it had never been stopped, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _runs import assert_same_run, metrics
from _support import CroselCli, TinyRun

from crosel.errors import UserError
from crosel.runs.pipeline import StopFlag

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from relay import pack, unpack

STEPS = 6  # of an epoch of the tiny run


@pytest.fixture
def stopped(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run stopped in the middle of its second epoch."""
    looks = iter(range(STEPS + 4))
    with monkeypatch.context() as patch:
        patch.setattr(StopFlag, "__call__", lambda flag: next(looks, None) is None)
        assert crosel_cli(*tiny_run.command, "--out", tmp_path / "first").code == 130
    return tmp_path / "first"


def test_a_run_goes_on_from_its_parts(stopped: Path, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    paths = pack(stopped, tmp_path / "parts", 4096)
    assert len(paths) > 3
    assert all(path.stat().st_size <= 4096 for path in paths)
    assert unpack(tmp_path / "parts", tmp_path / "second") == "epoch 1, step 4"
    assert metrics(tmp_path / "second") == metrics(tiny_run.path)[:1]
    result = crosel_cli("train", "--resume", "--out", tmp_path / "second")
    assert result.code == 0, result.err
    assert_same_run(tmp_path / "second", tiny_run.path)


def test_missing_and_damaged_parts_are_named(stopped: Path, tmp_path: Path) -> None:
    paths = pack(stopped, tmp_path / "parts", 4096)
    second, third = paths[1].read_bytes(), bytearray(paths[2].read_bytes())
    third[100] ^= 1
    paths[1].unlink()
    paths[2].write_bytes(third)
    with pytest.raises(UserError, match=rf"of {len(paths)} parts, missing or damaged: 2, 3; send them again"):
        unpack(tmp_path / "parts", tmp_path / "second")
    assert not (tmp_path / "second").exists()
    paths[1].write_bytes(second)
    third[100] ^= 1
    paths[2].write_bytes(third)
    pack(stopped, tmp_path / "parts", 5000)  # a second state among the parts
    with pytest.raises(UserError, match="parts of 2 states"):
        unpack(tmp_path / "parts", tmp_path / "second")
