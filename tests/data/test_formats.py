"""What is true of every registered format: it recognises its own sample, and all ways of reading it agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from _files import picture, put
from _published import as_published

from crosel.data import DataSettings, load
from crosel.data.formats import FORMATS, Format, InputSpec, find_format, published_formats
from crosel.data.sources import check_there, open_inputs, read_inputs
from crosel.errors import UserError

TASKS = ("read", "read_inputs", "read_chunks")
X = np.arange(15, dtype=np.float32).reshape(5, 3) / 8
SETS = np.eye(5, 2, dtype=bool) | np.array([True, False])
STUDIO = {"id": 1, "data": {"image": "a.png"}, "annotations": [{"result": [{"value": {"choices": ["cat", "dog"]}}]}]}


def _csv(folder: Path) -> Path:
    rows = [f"r{i},x|y,{a},{b},{c}\n" for i, (a, b, c) in enumerate(X)]
    return put(folder / "d.csv", "id,candidates,u,v,w\n" + "".join(rows))


def _jsonl(folder: Path) -> Path:
    rows = [{"id": f"r{i}", "x": list(map(float, row)), "candidates": ["x", "y"]} for i, row in enumerate(X)]
    return put(folder / "d.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _npz(folder: Path) -> Path:
    np.savez(folder / "d.npz", x=X, candidates=SETS, ids=[f"r{i}" for i in range(5)])
    return folder / "d.npz"


def _mat(folder: Path) -> Path:
    scipy.io.savemat(folder / "d.mat", {"data": X.astype(float), "partial_target": SETS.T.astype(float)})
    return folder / "d.mat"


def _images(folder: Path) -> Path:
    for i, name in enumerate(("cat/1.png", "cat/2.png", "dog/1.png")):
        picture(folder / "images" / name, (40 * i, 10, 200))
    return folder / "images"


def _studio(folder: Path) -> Path:
    picture(folder / "a.png")
    return put(folder / "d.json", json.dumps([STUDIO]))


def _cifar(folder: Path) -> Path:
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        put(folder / "cifar" / name, as_published({b"data": pixels, b"labels": [0, 1]}))
    names = [str(j).encode() for j in range(10)]
    put(folder / "cifar" / "batches.meta", as_published({b"label_names": names}))
    return folder / "cifar"


def _arrow(folder: Path) -> Path:
    pq: Any = pytest.importorskip("pyarrow.parquet")
    pq.write_table(_arrow_rows(), folder / "d.parquet")
    return folder / "d.parquet"


def _saved(folder: Path) -> Path:
    """As `datasets` does."""
    pa: Any = pytest.importorskip("pyarrow")
    put(folder / "saved" / "dataset_info.json", "{}")
    put(folder / "saved" / "state.json", '{"_data_files": [{"filename": "data.arrow"}]}')
    with pa.ipc.new_stream(folder / "saved" / "data.arrow", _arrow_rows().schema) as writer:
        writer.write_table(_arrow_rows())
    return folder / "saved"


def _arrow_rows() -> Any:
    pa: Any = pytest.importorskip("pyarrow")
    return pa.table({"id": [f"r{i}" for i in range(5)], "x": list(X), "candidates": [["x", "y"]] * 5})


# A new format needs a sample here: a function that writes one into a folder and returns its path.
SAMPLES: dict[str, Callable[[Path], Path]] = {
    "Arrow": _arrow, "Cifar": _cifar, "Csv": _csv, "ImageFile": lambda folder: picture(folder / "a.png"),
    "ImageFolder": _images, "Jsonl": _jsonl, "LabelStudio": _studio, "Mat": _mat, "Npz": _npz, "SavedDataset": _saved,
}  # fmt: skip
BY_NAME = {type(format).__name__: format for format in FORMATS}
BY_PATH = [name for name in BY_NAME if name != "Digits"]  # which are known by their name only
OWN = DataSettings(cache=False)


def test_every_format_has_a_sample():
    assert sorted(SAMPLES) == sorted(BY_PATH)


@pytest.mark.parametrize("name", BY_PATH)
def test_a_format_recognises_its_own(tmp_path, name):
    format, path = BY_NAME[name], SAMPLES[name](tmp_path)
    assert any(format.can(task) for task in TASKS)
    assert all(find_format(path, task) is format for task in TASKS if format.can(task))
    others = [other for other in FORMATS if other.recognises(path) and other is not format]
    assert [type(other).__name__ for other in others] == (["ImageFolder"] if name in ("Cifar", "SavedDataset") else [])


@pytest.mark.parametrize("name", [name for name in BY_PATH if BY_NAME[name].can("read")])
def test_all_ways_of_reading_agree(tmp_path, monkeypatch, name):
    """On ids and inputs, whole or in chunks that end in the middle."""
    monkeypatch.setattr("crosel.data.formats.base._ROWS", 2)
    format, path = BY_NAME[name], SAMPLES[name](tmp_path)
    data = load(str(path), settings=OWN)
    assert data.n > 0
    ids = [data.example_id(row) for row in range(data.n)]
    if format.can("read_inputs"):
        inputs = read_inputs(path, OWN)
        assert list(inputs.ids) == ids
        np.testing.assert_array_equal(inputs.x, data.x if data.x.ndim == 2 else data.x.transpose(0, 2, 3, 1))
    if format.can("read_chunks"):
        chunks = list(open_inputs(path, InputSpec(data.shape, data.columns)))
        assert [name for chunk in chunks for name in chunk.ids] == ids
        assert [len(chunk.x) for chunk in chunks] == [2] * (data.n // 2) + [1] * (data.n % 2)
        np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in chunks]), data.x)


@pytest.mark.parametrize("name", [name for name in BY_PATH if BY_NAME[name].suffixes])
@pytest.mark.parametrize("task", TASKS)
def test_an_empty_file_is_one_line(tmp_path, name, task):
    spec = InputSpec((3, 4, 4) if name == "ImageFile" else (3,))
    ways = {"read": lambda path: load(str(path)), "read_inputs": read_inputs}
    for suffix in BY_NAME[name].suffixes:
        path = put(tmp_path / f"d{suffix}", "")
        with pytest.raises(UserError, match=r"d\.\w+") as caught:
            ways.get(task, lambda path: list(open_inputs(path, spec)))(path)
        assert "\n" not in str(caught.value)


def test_published_names_are_known_before_anything_is_read(tmp_path):
    assert list(published_formats()) == ["digits", "cifar10", "cifar100", "cifar100-coarse", "svhn"]
    for name, format in published_formats().items():
        if format.published[name]:
            with pytest.raises(UserError, match=f"{format.published[name][0]} does not exist; give the folder"):
                check_there(name, tmp_path)
        else:
            check_there(name, tmp_path)


def test_a_format_from_outside_comes_first(tmp_path, monkeypatch):
    class Mine(Format):
        title, suffixes = "mine", (".mine", ".csv")

        def read(self, path, settings, progress=None):
            return load("digits")

    path = _csv(tmp_path)
    assert load(str(path)).n == 5
    monkeypatch.setattr("crosel.data.formats.FORMATS", [mine := Mine(), *FORMATS])
    assert find_format(path, "read") is mine
    assert load(str(path)).n > 1000
    assert find_format(path, "read_chunks") is BY_NAME["Csv"]
    other = put(tmp_path / "a.other", "?")
    with pytest.raises(UserError, match=r"a\.other: cannot read '\.other'; give mine, a folder of images, csv, "):
        load(str(other))
