"""Disks that are slow, stop short or refuse; checkpoints and configs with a flipped byte. More: test_bad_input.py."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _runs import ENVIRONMENT, ForkServer, assert_same_run, checkpoints, metrics, tree
from _support import CroselCli, TinyRun
from soak import flips

from crosel.errors import UserError
from crosel.utils.files import atomic_write


class ShortWrites(io.FileIO):
    """A raw file that takes at most 1000 bytes at a time, after a moment."""

    calls = 0

    def write(self, data: Any) -> int:
        ShortWrites.calls += 1
        time.sleep(20e-6)
        return super().write(bytes(memoryview(data)[:1000]))


def short_open(path: Any, mode: str = "r", **kwargs: Any) -> Any:
    if "r" in mode:
        return open(path, mode, **kwargs)
    stream = io.BufferedWriter(ShortWrites(path, mode.replace("b", "")), buffer_size=64)
    return stream if "b" in mode else io.TextIOWrapper(stream, **kwargs)


def test_slow_and_short_writes(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosel.utils.files.open", short_open, raising=False)
    monkeypatch.setattr("crosel.runs.folder.open", short_open, raising=False)
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert ShortWrites.calls > 300, "the slow files were not used"
    assert_same_run(tmp_path / "run", tiny_run.path)


def test_a_disk_that_takes_long_to_flush(tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer) -> None:
    slow = {"target": "os:fsync", "seconds": 0.02}
    code, _, err = fork_server.run(*tiny_run.command, "--out", tmp_path / "run", trap=slow)
    assert code == 0, err
    assert_same_run(tmp_path / "run", tiny_run.path)


def test_files_may_not_grow(tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer) -> None:
    """A write that stops short and then fails, in a real process: what is good stays good. Needs no rights."""
    run = tmp_path / "run"
    trap = {"target": "crosel.runs.folder:Recorder.on_epoch", "call": 1, "when": "after"}
    fork_server.run(*tiny_run.command, "--out", run, trap=trap)
    bound = checkpoints(run)[-1].stat().st_size // 2
    before = tree(run)
    refused = subprocess.run(
        [sys.executable, "-m", "crosel", "train", "--resume", "--out", str(run)], capture_output=True, text=True,
        env=ENVIRONMENT, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound)),
    )  # fmt: skip
    assert refused.returncode == 2, refused.stderr
    assert "the file would be larger than this system allows" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
    assert tree(run) == before
    assert fork_server.run("train", "--resume", "--out", run)[0] == 0
    assert_same_run(run, tiny_run.path)


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "kept", []
    fsync, replace, handles = os.fsync, os.replace, len(os.listdir("/dev/fd"))

    def flush(handle: int) -> None:
        about = os.fstat(handle)
        done.append("folder" if stat.S_ISDIR(about.st_mode) else about.st_size)
        fsync(handle)

    def rename(old: Path, new: Path) -> None:
        done.append(new.name)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    atomic_write(path, "123456")
    assert done == [6, "kept", "folder"], "all of it flushed, then named, then the name flushed"
    done.clear()
    atomic_write(path, "what can be made again", durable=False)
    assert done == ["kept"]
    assert len(os.listdir("/dev/fd")) == handles, "a long run writes thousands of times"


def test_the_first_error_is_told_and_not_that_of_the_tidying_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("crosel.utils.files.open", refuse, raising=False)
    with pytest.raises(UserError, match="this file system is read-only; choose another place with --out"):
        atomic_write(tmp_path / "kept", "123456")  # there is no temporary file to remove


# --- flipped bytes --------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_each_region_of_a_checkpoint(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The long form takes every byte: `make soak`."""
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    noticed = flips.flip_all(run / "checkpoints", checkpoints(run)[-1], stride=97)
    assert {"length of the header", "header: config", "header: metrics and progress", "weights and tables", "optimiser",
            "random state", "header: places of tensors"} <= noticed.keys()  # fmt: skip
    assert sum(noticed.values()) > 300


@pytest.fixture(scope="module")
def half_way(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    run = tmp_path_factory.mktemp("half") / "run"
    trap = {"target": "crosel.runs.folder:Recorder.on_epoch", "call": 2, "when": "after"}
    fork_server.run(*tiny_run.command, "--out", run, trap=trap)
    return run


def test_a_flipped_byte_in_the_config(
    half_way: Path, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Either it is said, or it did not matter: never a run with other settings than it was begun with."""
    content = (half_way / "config.yaml").read_bytes()
    noticed = 0
    for number, at in enumerate(range(5, len(content), len(content) // 6)):
        run = Path(shutil.copytree(half_way, tmp_path / str(number)))
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 7)
        (run / "config.yaml").write_bytes(damaged)
        code, _, err = fork_server.run("train", "--resume", "--out", run)
        assert "Traceback" not in err
        assert code in (0, 2), err
        if code == 0:
            assert metrics(run) == metrics(tiny_run.path), f"byte {at} made another run of it"
            noticed += "is damaged; using the settings" in err
        else:
            noticed += 1
            assert len(err.splitlines()) == 1
    assert noticed >= 2


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 900, b"{" * 200, b"source: [\n"], ids=["empty", "zeros", "braces", "cut"]
)
def test_an_unreadable_config_is_taken_from_the_checkpoint(
    damage: bytes, half_way: Path, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    run = Path(shutil.copytree(half_way, tmp_path / "run"))
    good = (run / "config.yaml").read_bytes()
    (run / "config.yaml").write_bytes(damage)
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 0, err
    assert err.splitlines()[0] == f"{run / 'config.yaml'} is damaged; using the settings from the newest checkpoint"
    assert (run / "config.yaml").read_bytes() == good
    assert_same_run(run, tiny_run.path)


def test_metrics_cut_in_half(half_way: Path, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer) -> None:
    run = Path(shutil.copytree(half_way, tmp_path / "run"))
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(content[: len(content) * 3 // 4])
    assert fork_server.run("report", run, "--out", tmp_path / "r.html")[0] == 0
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 0, err
    assert_same_run(run, tiny_run.path)
    assert os.path.getsize(run / "metrics.jsonl") > len(content)
