"""A run folder from a stranger: links, pipes, bombs and forged content. One line, nothing elsewhere is touched."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _confined import time_limit
from _mutants import member, outside, state_of, unfolding, zip_of
from _runs import ForkServer, checkpoints
from _support import CroselCli, TinyRun, small_arrays
from safetensors.numpy import load_file, save

from crosel.errors import UserError
from crosel.runs.corrections import Decision, DecisionLog
from crosel.training.callbacks import LOGGERS

SECONDS = 10


@pytest.fixture
def run(tiny_run: TinyRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run.path, tmp_path / "run"))


@pytest.mark.slow
def test_changed_folders_and_inputs(tmp_path: Path) -> None:
    """`make soak` tries 10,000 and 1,000,000."""
    soak = [sys.executable, Path(__file__).with_name("soak"), "hostile", "--workers", "1", "--out", tmp_path]
    done = subprocess.run([*soak, "--folders", "12", "--inputs", "2000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    [part] = json.loads((tmp_path / "soak.json").read_text())["parts"]
    assert part["folders"] >= 12
    assert part["inputs"] >= 2_000
    assert part["failed"] == 0


@pytest.mark.parametrize("dangling", [False, True])
def test_decisions_are_not_written_through_a_link(run: Path, tmp_path: Path, dangling: bool) -> None:
    elsewhere = outside(tmp_path / "elsewhere")
    before = state_of(elsewhere)
    (run / "review.jsonl").unlink(missing_ok=True)
    (run / "review.jsonl").symlink_to(elsewhere / ("new" if dangling else "profile"))
    with pytest.raises(UserError, match="symbolic link"):
        DecisionLog(run / "review.jsonl", ["a"], ["x"])
    assert state_of(elsewhere) == before


@pytest.mark.parametrize("name", ["plots", "checkpoints"])
def test_no_folder_of_a_run_is_a_link(run: Path, tmp_path: Path, crosel_cli: CroselCli, name: str) -> None:
    elsewhere = outside(tmp_path / "elsewhere")
    before = state_of(elsewhere)
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(elsewhere)
    for command in (["report", run, "--out", run / "report.html", "--plots", run / "plots"],
                    ["train", "--resume", "--out", run]):  # fmt: skip
        result = crosel_cli(*command)
        assert result.code in (0, 2), result.err
    assert state_of(elsewhere) == before


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_the_folder_of_a_logger_is_no_link(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).symlink_to(outside(tmp_path / "elsewhere"))
    session: Any = None
    with pytest.raises(UserError, match="symbolic link"):
        LOGGERS[name](run, session)


def test_the_folder_of_decoded_images_is_no_link(tmp_path: Path, crosel_cli: CroselCli) -> None:
    from PIL import Image

    elsewhere = outside(tmp_path / "elsewhere")
    before = state_of(elsewhere)
    for i, name in enumerate("abab"):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (9 * i, 0, 0)).save(tmp_path / "images" / name / f"{i}.png")
    (tmp_path / "images" / ".crosel-cache").symlink_to(elsewhere)
    small = ["--set", "data.image_size=8", "--set", "network.width=2", "--set", "train.epochs=1"]
    result = crosel_cli("train", tmp_path / "images", "--candidates", "uniform:q=0.5", "--method", "cc", *small,
                        "--out", tmp_path / "run")  # fmt: skip
    assert result.code == 0, result.err
    assert state_of(elsewhere) == before


LIMIT = 1 << 28  # bytes; CROSEL_MEMORY_GB is as much
FILES = ("selection.npz", "predictions.npz", "candidates.npz", "environment.json", "review.jsonl", "metrics.jsonl",
         "labels.csv", "config.yaml")  # fmt: skip
KINDS = {"pipe": FILES, "device": FILES, "sparse": FILES, "bomb": FILES[:3], "long": FILES[3:], "wide": FILES[:3]}


@pytest.fixture(scope="module")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("limited"), CROSEL_MEMORY_GB="0.25")
    yield server
    server.close()


READING = {"report": ("--out", "r.html"), "labels": ("--out", "l.csv"), "review": ("--export", "c.csv")}


def peak_of(command: str, run: Path, out: Path, server: ForkServer) -> int:
    """Bytes of memory that a command takes for a run; it must not wait, nor end with a traceback."""
    option, file = READING[command]
    child = server.start(command, run, option, out / file)
    code = child.wait(SECONDS)
    assert code in (0, 2), (command, code, child.err)
    assert "Traceback" not in child.err, child.err
    return child.peak


@pytest.fixture(scope="module")
def good_peaks(tmp_path_factory: pytest.TempPathFactory, limited_server: ForkServer, tiny_run: TinyRun) -> list[int]:
    out = tmp_path_factory.mktemp("good")
    return [peak_of(command, tiny_run.path, out, limited_server) for command in READING]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_pipes_devices_and_bombs(
    run: Path, tmp_path: Path, limited_server: ForkServer, good_peaks: list[int], name: str, kind: str
) -> None:
    """No command waits, and none takes more memory than it may, beside what it takes for a good run."""
    put(run / name, kind)
    for command, good in zip(READING, good_peaks, strict=True):
        assert peak_of(command, run, tmp_path, limited_server) - good < LIMIT, command


def put(path: Path, kind: str) -> None:
    """Something else in the place of a run's file."""
    content = path.read_bytes() if path.exists() else b'{"a": 1}\n'
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 36)
    elif kind == "long":  # 200 MB of lines
        path.write_bytes(content * (200_000_000 // len(content)))
    else:
        with np.load(io.BytesIO(content)) as archive:
            arrays = {f"{key}.npy": archive[key] for key in archive.files}
        packed = {key: member(a) for key, a in arrays.items()}
        key, a = max(arrays.items(), key=lambda item: item[1].nbytes)
        rows = (6 if kind == "bomb" else 1) * LIMIT // max(1, a.nbytes // max(1, len(a)))
        packed[key] = unfolding(a.dtype.str, (rows * 9 // 10, *a.shape[1:]))
        path.write_bytes(zip_of(packed))


def test_pipes_and_devices_on_the_command_line(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, run: Path
) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    jsonl = tmp_path / "pipe.jsonl"
    os.mkfifo(jsonl)
    tasks = tmp_path / "tasks.json"
    os.mkfifo(tasks)
    out = ["--out", tmp_path / "new"]
    with time_limit(SECONDS):
        for command in (
            ["train", image_npz, "--config", pipe, *out], ["train", image_npz, "--corrections", jsonl, *out],
            ["train", image_npz, "--candidates", f"tree:file={pipe}", *out], ["bench", pipe, *out],
            ["labels", run, "--tasks", tasks, "--out", tmp_path / "l.json"],
            ["train", image_npz, "--candidates", "tree:file=/dev/zero", *out],
        ):  # fmt: skip
            result = crosel_cli(*command)
            assert result.code == 2, (command, result.err)
            assert len(result.err.splitlines()) == 1, result.err


@pytest.mark.parametrize(
    "row", ["[1]", '"x"', '{"epoch": "1"}', '{"epoch": 1e400}', '{"epoch": 1, "loss": {}}', '{"epoch": null}',
            '{"epoch": 1, "loss": ' + "9" * 400 + "}", '{"epoch": 1, "seconds": "x"}', "{}"],
)  # fmt: skip
def test_forged_metrics(run: Path, tmp_path: Path, crosel_cli: CroselCli, row: str) -> None:
    (run / "metrics.jsonl").write_text(row + "\n")
    result = crosel_cli("report", run, "--out", tmp_path / "r.html")
    assert result.code == 2, result.err
    assert "metrics.jsonl, line 1: not a row of metrics" in result.err
    assert len(result.err.splitlines()) == 1


def test_forged_arrays(run: Path, tmp_path: Path, crosel_cli: CroselCli) -> None:
    with np.load(run / "candidates.npz") as archive:
        arrays = dict(archive)
    for name, array in {"y": np.full_like(arrays["y"], 99), "corrected": np.array([10**6]), "shape": np.array([2**40]),
                        "candidates": np.zeros((0, 3), bool), "classes": np.array("x")}.items():  # fmt: skip
        np.savez(run / "candidates.npz", **{**arrays, name: array})
        result = crosel_cli("report", run, "--out", tmp_path / "r.html")
        assert result.code == 2, (name, result.err)
        assert len(result.err.splitlines()) == 1, result.err


def test_a_log_that_is_deleted_under_an_open_page(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", ["a"], ["x"])
    (tmp_path / "review.jsonl").unlink()
    with pytest.raises(UserError, match="was removed while this page was open"):
        log.decide(0, Decision("skip"))
    log.close()


def test_a_name_that_is_no_utf8(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    result = crosel_cli("train", image_npz, "--out", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert result.code == 2
    assert "is not UTF-8" in result.err


@pytest.mark.parametrize("source", ['"/a/\\uDCFF.npz"', '"/a/b\\nc.npz"'])
def test_a_source_that_is_no_utf8_and_one_with_a_newline(run: Path, crosel_cli: CroselCli, source: str) -> None:
    """One such run must not spoil the table of a whole folder, nor an error its one line."""
    text = (run / "config.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("source:"))
    (run / "config.yaml").write_text(text.replace(line, f"source: {source}"))
    result = crosel_cli("tables", run.parent, "--out", run.parent / "t.md")
    assert result.code == 0, result.err
    assert not any(line.startswith("c.npz") for line in (run.parent / "t.md").read_text(encoding="utf-8").splitlines())
    result = crosel_cli("eval", run)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1, result.err


def test_training_from_a_source_that_is_no_utf8(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    """In one line before it trains, or to the end; not an error when all is done."""
    source = shutil.copy(image_npz, os.fsdecode(os.fsencode(tmp_path) + b"/\xff.npz"))
    tiny = ["--method", "cc", "--set", "train.epochs=1", "--set", "network.width=4"]
    result = crosel_cli("train", source, *tiny, "--out", tmp_path / "run")
    assert result.code == 2, result.err
    assert "is not UTF-8" in result.err


def test_tables_are_not_written_over_a_run(run: Path, crosel_cli: CroselCli) -> None:
    before = state_of(run)
    for name in ("config.yaml", "metrics.jsonl", "done"):
        assert crosel_cli("tables", run, "--format", "markdown", "--out", run / name).code == 2
    assert state_of(run) == before


@pytest.mark.parametrize("mode", ["I;16", "RGBA"])
def test_large_images_within_the_limit(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    from crosel.data.images import decode
    from crosel.data.settings import DataSettings

    Image.new(mode, (4000, 4000)).save(tmp_path / "a.png")
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.1")
    with pytest.raises(ValueError, match="more than the memory limit"):
        decode(tmp_path / "a.png", DataSettings(image_size=32, image_mode="RGB"))


def test_swapped_ids_do_not_pass_resume(tmp_path: Path, crosel_cli: CroselCli) -> None:
    arrays = small_arrays()
    ids = np.array([f"id-{i}" for i in range(len(arrays["x"]))])
    np.savez(tmp_path / "data.npz", **arrays, ids=ids)
    tiny = ["--method", "cc", "--set", "train.epochs=1", "--set", "network.width=4"]
    command = ["train", tmp_path / "data.npz", *tiny, "--out", tmp_path / "run"]
    assert crosel_cli(*command).code == 0
    assert crosel_cli(*command, "--resume").code == 0
    ids[[0, 1]] = ids[[1, 0]]
    np.savez(tmp_path / "data.npz", **arrays, ids=ids)
    result = crosel_cli(*command, "--resume")
    assert result.code == 2, result.err
    assert "the id of example 0 has changed" in result.err


def test_weights_that_are_not_finite_are_refused(run: Path, crosel_cli: CroselCli) -> None:
    for path in checkpoints(run):
        state = json.loads(path.read_bytes()[8:][: int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
        tensors = {name: a * np.nan if "networks" in name and a.dtype.kind == "f" else a
                   for name, a in load_file(path).items()}  # fmt: skip
        content = save(tensors, metadata=state)
        path.unlink()
        stage = path.name.rpartition("-")[0]
        (path.parent / f"{stage}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors").write_bytes(content)
    result = crosel_cli("eval", run)
    assert result.code == 2, result.err
    assert "nan" not in result.out


def test_control_characters_in_names_leave_svg_whole() -> None:
    import xml.etree.ElementTree as ET

    from crosel.report.svg import escape

    drawn = f"<text>{escape('a' + chr(8) + chr(0xFFFE) + chr(0xD800) + '<')}</text>"
    assert ET.fromstring(drawn).text == "a\ufffd\ufffd\ufffd<"


def test_an_eps_named_png_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    from crosel.data.images import decode
    from crosel.data.settings import DataSettings

    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    monkeypatch.setattr(subprocess, "check_call", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(OSError, match="cannot identify"):
        decode(tmp_path / "a.png", DataSettings(image_size=32, image_mode="RGB"))
