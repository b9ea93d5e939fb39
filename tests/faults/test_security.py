"""Files from a stranger: settings, run folders, checkpoints. Nothing runs, nothing is written elsewhere, memory holds.

Readers of data have their own tests: tests/data/test_fuzz.py, tests/data/test_images.py (bombs),
tests/data/test_dataset.py (pickles), tests/download/test_download.py (archives). Review: tests/review/test_api.py.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import struct
import webbrowser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _runs import checkpoints
from _support import CroselCli, TinyRun
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from crosel.bench.search import Trial, _save
from crosel.bench.tables.build import ResultsTable, Row
from crosel.bench.tables.render import csv_text
from crosel.config import build_config
from crosel.errors import UserError
from crosel.runs.corrections import Decision, Decisions, corrections_csv
from crosel.runs.folder import RunFolder
from crosel.runs.result import load_arrays
from crosel.training import checkpoint
from crosel.utils.reading import ArraySpec
from crosel.utils.settings import read_yaml
from crosel.utils.text import unescape_formula, without_secrets

# --- settings -------------------------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
HOSTILE_YAML = {
    "a billion laughs": (LAUGHS, "line 2, column 10: not valid YAML (aliases (*name) are not allowed in settings"),
    "itself": ("source: &a [*a]\n", "aliases (*name) are not allowed"),
    "merged": ("x: &x {a: 1}\n<<: *x\n", "aliases (*name) are not allowed"),
    "a Python object": ("source: !!python/object/apply:os.system ['touch HERE']\n", "not valid YAML"),
    "a Python name": ("source: !!python/name:os.system\n", "not valid YAML"),
    "deep lists": ("source: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    "deep maps": ("{a: " * 5000, "nested too deeply"),
    "no such day": ("source: 2024-99-99\n", "not valid YAML"),
    "a long number": ("seed: " + "9" * 5000 + "\n", "not valid YAML"),
    "a long list": ("train: {epochs: [" + "1, " * 20000 + "1]}\n", "setting 'train.epochs'"),
    "too large": ("# " + "x" * (1 << 20) + "\n", "larger than 1 MiB"),
}


@pytest.mark.parametrize("case", HOSTILE_YAML)
def test_hostile_settings_are_one_clear_line(case: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    text, says = HOSTILE_YAML[case]
    path = tmp_path / "settings.yaml"
    path.write_text(text.replace("HERE", str(tmp_path / "ran")))
    result = crosel_cli("train", "digits", "--candidates", "uniform:q=0.3", "--config", path, "--out", tmp_path / "run")
    assert result.code == 2, result.err
    assert says in result.err
    assert len(result.err.splitlines()) == 1
    assert len(result.err) < 1000
    assert {p.name for p in tmp_path.iterdir()} == {"settings.yaml"}, "nothing ran, nothing was written"


@pytest.mark.parametrize(
    "text", ["train.epochs=" + "[" * 3000, "seed=" + "9" * 5000, "train=*a", "train.lr=2024-99-99"]
)
def test_hostile_values_on_the_command_line(text: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    result = crosel_cli("train", "digits", "--set", text, "--out", tmp_path / "run")
    assert result.code == 2, result.err
    assert len(result.err.splitlines()) == 1


@given(st.one_of(st.binary(max_size=200), st.text("ab:- \n[]{}&*!<'\"0123456789.~|>%@", max_size=80).map(str.encode)))
@settings(max_examples=60)
def test_settings_of_anything(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_bytes(content)
        said = ""
        try:
            assert isinstance(read_yaml(path), dict)
            build_config(file=path, values={"source": "digits"})
        except UserError as error:
            said = str(error)
    assert "\n" not in said


# --- checkpoints ----------------------------------------------------------------------------------------------------


def with_name(content: bytes) -> str:
    """A stranger can make the hash right."""
    return f"epoch-00009-step-000000-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def state(**changes: Any) -> dict[str, Any]:
    plain = {"epoch": 9, "step": 0, "rows": [], "seconds": 0.0, "device": "cpu", "data": "x", "candidates": "y"}
    return {**plain, **changes}


def saved(**changes: Any) -> bytes:
    return save({"generator": np.zeros(4, np.uint8)}, metadata={"state": json.dumps(state(**changes))})


HOSTILE_CHECKPOINTS = {
    "an endless header": header(b"{}", 2**62),
    "a header longer than the file": header(b"{}", 10**6),
    "a tensor of terabytes": header(b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}') + b"1234",
    "a shape that overflows": header(
        b'{"a":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,4]}}'
    ) + b"1234",
    "offsets outside": header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[900,904]}}') + b"1234",
    "offsets that overlap": header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    ) + b"1234",
    "a good state beside a bad tensor": header(
        json.dumps({
            "__metadata__": {"state": json.dumps(state())},
            "generator": {"dtype": "U8", "shape": [4], "data_offsets": [900, 904]},
        }).encode()
    ) + b"1234",
    "a deep header": header(b'{"__metadata__":' + b"[" * 200_000),
    "a deep state": save({}, metadata={"state": "[" * 200_000}),
    "no state": save({"a": np.zeros(2)}),
    "a state of another kind": save({}, metadata={"state": "[1, 2]"}),
    "a pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n(S'touch ran'\ntR.",
    "half an epoch": saved(epoch=0.5),
    "an epoch before the first": saved(epoch=-1),
    "rows that are none": saved(rows=[1, 2]),
    "no random state": save({"a": np.zeros(2)}, metadata={"state": json.dumps(state())}),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_CHECKPOINTS)
def test_hostile_checkpoints_are_passed_over(case: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run.path / "checkpoints", tmp_path / "checkpoints"))
    content = HOSTILE_CHECKPOINTS[case]
    (folder / with_name(content)).write_bytes(content)
    found = checkpoint.load_newest(folder)
    assert [path.name for path in found.damaged] == [with_name(content)]
    assert found.checkpoint is not None
    assert found.checkpoint.state["epoch"] == 4


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "huge"])
def test_checkpoints_that_are_no_plain_files(kind: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run.path / "checkpoints", tmp_path / "checkpoints"))
    path = folder / with_name(b"")
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as stream:
            stream.truncate(1 << 42)  # takes no room on the disk, but 4 TiB in memory
    found = checkpoint.load_newest(folder)
    assert found.damaged == [path]
    assert found.checkpoint is not None


@pytest.mark.parametrize("what", ["shapes", "names", "types", "numbers"])
def test_a_forged_checkpoint_is_one_clear_line(
    what: str, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    """A whole, well-formed checkpoint of something else: told, and nothing in the folder is touched."""
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    (run / "done").unlink()
    newest = checkpoints(run)[-1]
    arrays = load_file(newest)
    kept = checkpoint.load_newest(run / "checkpoints").checkpoint
    assert kept is not None
    if what == "shapes":
        arrays = {name: np.zeros(3, np.float32) if name.startswith("method") else a for name, a in arrays.items()}
    elif what == "types":
        arrays = {name: a.astype(np.int64) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    elif what == "names":
        arrays = {name.replace("networks", "elsewhere"): a for name, a in arrays.items()}
    else:
        arrays["generator"] = np.full(7, 9, np.uint8)
    content = save(arrays, metadata={"state": json.dumps({**kept.state, "epoch": 3})})
    (run / "checkpoints" / with_name(content)).write_bytes(content)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    result = crosel_cli("train", "--resume", "--out", run)
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 1
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before


def test_objects_in_a_run_folder_are_never_unpickled(tiny_run: TinyRun, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    for name in ("candidates.npz", "selection.npz", "predictions.npz"):
        with np.load(run / name) as archive:
            names = archive.files
        np.savez(run / name, **{name: np.array([Payload()], dtype=object) for name in names})
    with pytest.raises(UserError, match=r"candidates\.npz: cannot be read \(Object arrays cannot be loaded"):
        RunFolder(run).training_set()
    one = {"labels": ArraySpec("iu", "n"), "predicted": ArraySpec("iu", "n")}
    assert load_arrays(run / "selection.npz", one, {}) == load_arrays(run / "predictions.npz", one, {}) == {}
    assert not (tmp_path / "ran").exists()


def test_candidate_sets_that_unfold_without_end(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    with np.load(run / "candidates.npz") as archive:
        arrays = dict(archive)
    np.savez_compressed(run / "candidates.npz", **{**arrays, "ids": np.zeros(3_000_000, np.int64)})
    assert (run / "candidates.npz").stat().st_size < 100_000
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.01")
    result = crosel_cli("labels", run, "--out", tmp_path / "l.csv")
    assert result.code == 2
    assert "its content would take" in result.err


# --- what is written ------------------------------------------------------------------------------------------------


def test_no_formula_in_tables_as_csv() -> None:
    """labels.csv and predictions: tests/labels. All go through one function."""
    row = Row(method="=cmd|' /C calc'!A0", settings={"+x": "@y"}, network="-2+3", epochs=3, seeds=(0,), metrics={})
    text = csv_text([ResultsTable("=HYPERLINK(1)", "@SUM(A1)", (row,))])
    first, second = list(csv.reader(io.StringIO(text)))
    for cell in second:
        assert not cell or cell[0] not in "=+-@\t\r", cell
    found = dict(zip(first, map(unescape_formula, second), strict=True))
    assert found["method"] == "=cmd|' /C calc'!A0"
    assert found["dataset"] == "=HYPERLINK(1)"


def test_no_formula_in_corrections_and_trials(tmp_path: Path) -> None:
    decisions = Decisions(1)
    decisions.decide(0, Decision("choose", 0))
    text = corrections_csv(decisions, ["=1+1"], ["@SUM(A1)"]).decode()
    assert text.splitlines()[1] == "'=1+1,'@SUM(A1),choose"
    search: Any = SimpleNamespace(space={"-x": None})
    _save([Trial(0, 0.5, {"-x": "+y"}, "")], search, "score", None, tmp_path)
    [table] = tmp_path.iterdir()
    assert table.read_text().splitlines() == ["trial,score,'-x", "0,0.500000,'+y"]


def test_the_token_goes_to_the_browser_in_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users can read command lines."""
    pytest.importorskip("fastapi")
    from crosel.review.app import _browser

    opened: list[Path] = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: opened.append(Path(uri.removeprefix("file://"))))
    with _browser("http://127.0.0.1:1/?token=secret", True):
        assert "secret" in opened[0].read_text()
        assert "secret" not in str(opened[0])
        assert opened[0].parent.stat().st_mode & 0o077 == 0
    assert not opened[0].exists()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["train", "x.csv", "--token", "abc"], ["train", "x.csv", "--token", "***"]),
        (["--token=abc", "--seed", "3"], ["--token=***", "--seed", "3"]),
        (["--set", "logger.api_key=abc"], ["--set", "logger.api_key=***"]),
        (["--mirror", "https://me:pw@host/x"], ["--mirror", "https://***@host/x"]),
        (["secret.csv", "--out", "tokens"], ["secret.csv", "--out", "tokens"]),
    ],
)
def test_secrets_are_not_written_down(typed: list[str], kept: list[str]) -> None:
    assert without_secrets(typed) == kept


def test_environment_json_holds_nothing_of_the_environment(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    run = tmp_path / "run"
    settings_ = ("--method", "cc", "--set", "train.epochs=1", "--set", "network.width=4")
    assert crosel_cli("train", image_npz, *settings_, "--out", run).code == 0
    for path in run.rglob("*"):
        if path.is_file():
            assert b"very-secret-value" not in path.read_bytes(), path


def test_a_login_in_a_mirror_is_neither_used_nor_shown(tmp_path: Path, crosel_cli: CroselCli) -> None:
    result = crosel_cli("data", "get", "cifar10", "--to", tmp_path, "--mirror", "https://me:hidden@localhost/x")
    assert result.code == 2
    assert "hidden" not in result.err
