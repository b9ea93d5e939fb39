"""A run handed from machine to machine in parts ends as if it had never been stopped, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from _runs import assert_same_run, metrics
from _support import CroselCli, TinyRun

from crosel.errors import UserError
from crosel.runs.pipeline import StopFlag

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from relay import leg, main, pack, send, squeeze, unpack, unsqueeze

STEPS = 6  # of an epoch of the tiny run


def stop_in_second_epoch(crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch, *command: object) -> None:
    looks = iter(range(STEPS + 4))
    with monkeypatch.context() as patch:
        patch.setattr(StopFlag, "__call__", lambda flag: next(looks, None) is None)
        assert crosel_cli(*command).code == 130


@pytest.fixture
def stopped(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch) -> Path:
    stop_in_second_epoch(crosel_cli, monkeypatch, *tiny_run.command, "--out", tmp_path / "first")
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


def test_so_does_one_with_muon(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*tiny_run.command, "--set", "train.optimiser=muon")
    assert crosel_cli(*command, "--out", tmp_path / "unbroken").code == 0
    stop_in_second_epoch(crosel_cli, monkeypatch, *command, "--out", tmp_path / "first")
    pack(tmp_path / "first", tmp_path / "parts", 4096)
    unpack(tmp_path / "parts", tmp_path / "second")
    assert crosel_cli("train", "--resume", "--out", tmp_path / "second").code == 0
    assert_same_run(tmp_path / "second", tmp_path / "unbroken")


def test_two_legs_are_one_run(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    """Processes of their own, stopped by a signal; the parts go through the door in several calls."""
    command, first, second = (*tiny_run.command, "--set", "train.epochs=20"), tmp_path / "first", tmp_path / "second"
    assert crosel_cli(*command, "--out", tmp_path / "unbroken").code == 0
    there = leg(first, command[1:], lambda: (first / "metrics.jsonl").is_file() and len(metrics(first)) > 0)
    assert there.startswith("epoch ")
    pack(first, tmp_path / "parts", 10_000)
    calls = send(tmp_path / "parts", tmp_path / "door/1", 1, 25_000)[1]
    for call in range(2, calls + 1):
        send(tmp_path / "parts", tmp_path / f"door/{call}", call, 25_000)
    assert unpack(tmp_path / "door", second) == there
    with pytest.raises(UserError, match="goes on with its own settings"):
        leg(second, command[1:], lambda: False)
    assert leg(second, (), lambda: False) == "the end"
    assert_same_run(second, tmp_path / "unbroken", same_files=False)
    legs = [json.loads(line) for line in (second / "legs.jsonl").read_text().splitlines()]
    assert [(each["from"], each["to"]) for each in legs] == [("epoch 0, step 0", there), (there, "the end")]
    assert all(each["seconds"] > 0 and "commit" in each for each in legs)


def test_a_leg_without_a_run_or_with_one_that_fails(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the first leg needs the arguments"):
        leg(tmp_path / "run", (), lambda: False)
    with pytest.raises(UserError, match="training ended with exit code 2"):
        leg(tmp_path / "run", ("nowhere.npz",), lambda: False)


def test_the_commands(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are typed."""
    monkeypatch.chdir(tmp_path)
    main(["leg", "run", "--seconds", "200", "--", *tiny_run.command[1:]])
    main(["pack", "run", "--to", "parts", "--part-mib", "1"])
    main(["send", "parts", "--to", "door", "--call", "1", "--call-mib", "1"])
    main(["unpack", "door", "--to", "elsewhere"])
    said = capsys.readouterr().out
    assert "run stands after the end" in said
    assert "call 1 of 1: 1 parts in door" in said
    assert f"elsewhere stands after epoch {len(metrics(tiny_run.path))}, step 0" in said
    with pytest.raises(UserError, match="only leg takes arguments"):
        main(["pack", "run", "--to", "parts", "--", "--seed", "1"])


def test_every_part_goes_with_one_call(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for number in range(24):
        (tmp_path / "parts" / f"{number:02}.part").write_bytes(bytes(10 if number < 10 else 1))
    sent = [send(tmp_path / "parts", tmp_path / "door", call, 25)[0] for call in range(1, 8)]
    assert [len(paths) for paths in sent] == [2, 2, 2, 2, 7, 8, 1]
    assert [path.name for paths in sent for path in paths] == [f"{number:02}.part" for number in range(24)]
    with pytest.raises(UserError, match="are sent in 7 calls"):
        send(tmp_path / "parts", tmp_path / "door", 8, 25)
    with pytest.raises(UserError, match="no parts here"):
        send(tmp_path / "door" / "none", tmp_path / "door", 1, 25)


def test_squeezing_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 100_000).astype(np.float32)
    weights[:7] = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38)
    for content in (weights.tobytes(), rng.bytes(40_000), b"", bytes(4096)):
        assert unsqueeze(squeeze(content)) == content
    assert len(squeeze(weights.tobytes())) < 0.85 * weights.nbytes
    with pytest.raises(ValueError, match="no whole number of four"):
        squeeze(b"abcde")


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
