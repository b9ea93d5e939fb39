"""PALM's .mat files, dense or sparse, and SVHN's, as published; and the real ones where they are."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from _files import put, read, refused
from _support import real_data

from crosel.data import load
from crosel.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4))
Y = np.array([0, 2, 1, 2, 2, 0])
TARGET = np.eye(3)[Y].T  # k x n, as PALM has it
PARTIAL = np.maximum(TARGET, RNG.random((3, 6)) < 0.4)


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csc_matrix, lambda a: a.astype(np.uint8), lambda a: a > 0])
@pytest.mark.parametrize("turn", [lambda a: a, np.transpose])
def test_palm(tmp_path, form, turn):
    scipy.io.savemat(
        tmp_path / "d.mat", {"data": X, "partial_target": form(turn(PARTIAL)), "target": form(turn(TARGET))}
    )
    data = read(tmp_path / "d.mat")
    np.testing.assert_allclose(data.x, X, rtol=1e-6)
    assert np.array_equal(data.candidates, PARTIAL.T > 0)
    assert data.y.tolist() == Y.tolist()


def test_palm_without_truth(tmp_path):
    scipy.io.savemat(tmp_path / "a.mat", {"data": X, "partial_target": PARTIAL})
    assert read(tmp_path / "a.mat").y is None
    scipy.io.savemat(tmp_path / "b.mat", {"data": X, "partial_target": PARTIAL, "target": np.zeros((3, 6))})
    data = read(tmp_path / "b.mat")
    assert data.y is None
    assert "true labels are not used" in data.notes[0]


def test_as_many_classes_as_examples_is_taken_as_palm_keeps_it(tmp_path):
    sets = np.array([[1, 1], [0, 1]])  # k x n: the second example has both labels
    scipy.io.savemat(tmp_path / "d.mat", {"data": np.eye(2), "partial_target": sets})
    assert read(tmp_path / "d.mat").candidates.tolist() == [[True, False], [True, True]]


BAD = {
    "other content": ({"a": X, "b": X}, "or SVHN's 'X' and 'y'; found a, b"),
    "other n": ({"data": X, "partial_target": PARTIAL[:, :5]}, "'partial_target' has the shape (3, 5); expected k x 6"),
    "no zero or one": ({"data": X, "partial_target": 2 * PARTIAL}, "only 0 and 1 are allowed"),
    "empty set": ({"data": X, "partial_target": np.zeros((3, 6))}, "the candidate set of example 0 is empty"),
    "nothing": ({"data": np.zeros((0, 0)), "partial_target": np.zeros((0, 0))}, "'partial_target' is empty"),
    "text": ({"data": "hello", "partial_target": PARTIAL}, "'data' is not a table of numbers"),
    "cells": ({"data": np.array([[1], ["a"]], dtype=object), "partial_target": PARTIAL}, "'data' is not a table"),
    "classes": ({"data": X, "partial_target": PARTIAL, "target": np.eye(6)}, "'target' has 6 classes, "),
    "nan": ({"data": X * np.nan, "partial_target": PARTIAL}, "x: NaN in row 0"),
    "complex": ({"data": X * 1j, "partial_target": PARTIAL}, "x: complex numbers cannot be used"),
    "svhn of another size": ({"X": np.zeros((8, 8, 3, 2), np.uint8), "y": [1, 2]}, "not SVHN's file: expected 'X' of"),
    "svhn label": ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [0, 2]}, "a label from 1 to 10"),
    "svhn floats": ({"X": np.zeros((32, 32, 3, 2)), "y": [1, 2]}, "expected bytes in 'X'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_mat_files(tmp_path, case):
    content, says = BAD[case]
    scipy.io.savemat(tmp_path / "d.mat", content)
    text = refused(tmp_path / "d.mat")
    assert text.startswith(str(tmp_path / "d.mat"))
    assert says in text


def test_no_mat_files_at_all(tmp_path):
    for content in (b"", b"no matlab", b"\0" * 200, b"MATLAB 5.0 MAT-file" + b"\0" * 109):
        assert str(tmp_path / "d.mat") in refused(put(tmp_path / "d.mat", content))
    new = put(tmp_path / "d.mat", b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(128) + b"\x89HDF")
    assert "save it again with -v7" in refused(new)


def test_a_table_that_would_not_fit_is_not_unpacked(tmp_path, monkeypatch):
    stream = io.BytesIO()
    scipy.io.savemat(stream, {"data": np.zeros((4000, 500)), "partial_target": np.ones((2, 4000))}, do_compression=True)
    path = put(tmp_path / "d.mat", stream.getvalue())
    assert path.stat().st_size < 50_000
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.01")
    assert "'data' would take" in refused(path)


def write_svhn(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    out = {}
    for part, n in (("train", 5), ("test", 3)):
        pixels = RNG.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        labels = np.array([10, 1, 9, 10, 2][:n], dtype=np.uint8)[:, None]
        scipy.io.savemat(folder / f"{part}_32x32.mat", {"X": pixels, "y": labels}, do_compression=True)
        out[part] = (pixels, labels)
    return out


def test_svhn_as_published(tmp_path):
    written = write_svhn(tmp_path)
    by_name, by_file = load("svhn", tmp_path), read(tmp_path / "train_32x32.mat")
    for data in (by_name, by_file):
        assert data.y.tolist() == [0, 1, 9, 0, 2]
        assert data.y_test.tolist() == [0, 1, 9]
        assert np.array_equal(data.x[3], written["train"][0][:, :, :, 3].transpose(2, 0, 1))
        assert np.array_equal(data.x_test[1], written["test"][0][:, :, :, 1].transpose(2, 0, 1))
        assert not data.flips
        assert (data.mean, data.std) == ((0.5,) * 3, (0.5,) * 3)
    assert read(tmp_path / "test_32x32.mat").x_test is None
    (tmp_path / "test_32x32.mat").unlink()
    with pytest.raises(UserError, match=r"test_32x32\.mat does not exist; give the folder .* --data DIR"):
        load("svhn", tmp_path)


# --- the real files, where the environment says they are ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "d", "k", "mean_size"),
    [("lost", 1122, 108, 16, 2.23), ("MSRCv2", 1758, 48, 23, 3.16), ("BirdSong", 4998, 38, 13, 2.18)],
)
def test_real_palm(name, n, d, k, mean_size):
    data = read(real_data(f"{name}.mat") / f"{name}.mat")
    assert (data.x.shape, len(data.classes)) == ((n, d), k)
    assert data.candidates.sum() / n == pytest.approx(mean_size, abs=0.005)
    assert data.candidates[np.arange(n), data.y].all()


def test_real_svhn():
    data = load("svhn", real_data("test_32x32.mat"))
    assert data.x_test.shape == (26_032, 3, 32, 32)
    assert np.bincount(data.y_test).tolist() == [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]


def test_real_coarse_labels():
    data = load("cifar100-coarse", real_data("cifar-100-python"))
    assert np.bincount(data.y).tolist() == [2500] * 20
    assert (data.classes[0], data.classes[-1]) == ("aquatic_mammals", "vehicles_2")
    fine = load("cifar100", real_data("cifar-100-python"))
    assert np.array_equal(np.array(fine.groups)[fine.y], data.y)


@pytest.mark.parametrize("packed", [False, True])
def test_values_of_unknown_types_are_refused(packed: bool, tmp_path: Path) -> None:
    """Found by changed inputs: SciPy looked the type up outside its table, and the process died."""
    stream = io.BytesIO()
    scipy.io.savemat(stream, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [2]])})
    content = bytearray(stream.getvalue())
    at = content.index(bytes([2, 0, 0, 0]) + (32 * 32 * 3 * 2).to_bytes(4, "little"))  # the type of X's values
    content[at] = 0
    if packed:
        size = int.from_bytes(content[132:136], "little") + 8
        inner = zlib.compress(bytes(content[128 : 128 + size]))
        content[128 : 128 + size] = struct.pack("<II", 15, len(inner)) + inner
    (tmp_path / "a.mat").write_bytes(content)
    assert "values of the unknown type 0" in refused(tmp_path / "a.mat")
