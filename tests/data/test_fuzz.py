"""Whatever a file holds: a dataset, or one line that names it. Never another error, a hang or endless memory."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import random
import shutil
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from _files import png_bomb
from _good_files import GOOD, STUDIO, X, mat
from _published import as_published
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from crosel.data import Dataset, DataSettings, draw_candidates, load
from crosel.data.formats import InputSpec
from crosel.data.sources import open_inputs
from crosel.data.tree import read_tree
from crosel.errors import UserError
from crosel.utils.system import peak_memory

pytestmark = pytest.mark.filterwarnings("ignore")
FUZZ = settings(max_examples=120, suppress_health_check=list(HealthCheck), derandomize=True)
SECONDS, MEGABYTES = 10, 512  # for a file of a few kilobytes, and for all of them together


def outcome(path: Path, **options: Any) -> str:
    """`dataset`, or the one line; anything else fails the test."""
    start = time.monotonic()
    try:
        data = load(str(path), None, DataSettings(image_size=4, cache=False, **options))
        assert isinstance(data, Dataset)
        assert data.n > 0
        found = "dataset"
    except UserError as error:
        found = str(error)
        assert "\n" not in found
        assert len(found) < 1000
        # The file itself, one that it leads to (inputs, an image), or a setting that does not fit it.
        assert str(path.parent) in found or "setting 'data." in found, found
    assert time.monotonic() - start < SECONDS
    return found


@functools.cache
def folder() -> Path:
    """A folder with one good image and one bomb, which files may refer to."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    Image.new("RGB", (5, 5), (1, 2, 3)).save(root / "a.png")
    (root / "bomb.png").write_bytes(png_bomb(50_000, 50_000))
    (root / "x.csv").write_text("id,f\na.png,1\nb,2\n1,3\n")
    return root


def written(name: str, content: bytes) -> Path:
    path = folder() / name
    path.write_bytes(content)
    return path


@pytest.fixture(autouse=True, scope="module")
def _memory():
    before = peak_memory() or 0
    yield
    grown = ((peak_memory() or 0) - before) / 2**20
    assert grown < MEGABYTES, f"the fuzzed readers took {grown:.0f} MiB"


# --- good files of every kind, to be damaged ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", GOOD)
def test_good_files_are_read(kind):
    assert outcome(written(*GOOD[kind])) == "dataset"


@pytest.mark.parametrize("kind", GOOD)
def test_truncated_files(kind):
    name, content = GOOD[kind]
    found = [outcome(written(name, content[:length])) for length in range(0, len(content), max(1, len(content) // 60))]
    assert any(text != "dataset" for text in found)


@pytest.mark.parametrize("kind", GOOD)
def test_damaged_files(kind):
    name, content = GOOD[kind]
    rng = random.Random(kind)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 3, 10))):
            at = rng.randrange(len(damaged))
            what = rng.randrange(4)
            if what == 0:
                damaged[at] = rng.randrange(256)
            elif what == 1:
                del damaged[at : at + rng.randrange(1, 9)]
            elif what == 2:
                damaged[at:at] = rng.choice(
                    [b"\0", b'"', b"\n", b",", b"|", b"\xff", b"9" * 30, b"\xed\xa0\x80", b"-1e999"]
                )
            else:
                damaged[at:at] = damaged[: rng.randrange(40)]
            if not damaged:
                break
        assert outcome(written(name, bytes(damaged)))


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".json", ".npz", ".mat"])
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda t: t.encode("utf-8", "surrogatepass")))
@FUZZ
def test_random_bytes(ending, content):
    assert outcome(written(f"d{ending}", content)) != ""


# --- tables of anything -------------------------------------------------------------------------------------------

CELL = st.one_of(
    st.sampled_from([
        "", " ", "a", "x|y", "x:0.5|y:1", "1", "-1", "nan", "inf", "1e400", "1_0", "٣", "a.png", "bomb.png", "../..",
        "train", "test", "|", ":", "a\0b", '"', "é|日本", "\u200f", "x" * 5000, "9" * 5000, "/", "~", "http://x/y.png",
    ]),
    st.text(max_size=8),
)  # fmt: skip
NAMES = [
    "id",
    "task",
    "worker",
    "annotator",
    "label",
    "candidates",
    "weight",
    "split",
    "path",
    "truth",
    "f",
    "g",
    "annotator_1",
    "",
]
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "format": st.sampled_from(["auto", "table", "votes", "wide-votes", "scores"]),
        "classes": st.sampled_from([("x", "y"), ("a",), ()]),
        "inputs": st.sampled_from(["x.csv", "d.csv", "nowhere.csv", "."]).map(lambda n: str(folder() / n)),
        "test_share": st.sampled_from([0.0, 0.5]),
    },
)


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(c in cell for c in ',"\n\r') else cell


@given(data=st.data(), options=OPTIONS)
@settings(FUZZ, max_examples=500)
def test_tables_of_anything(data, options):
    header = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    rows = data.draw(st.lists(st.lists(CELL, min_size=len(header), max_size=len(header)), max_size=4))
    text = "\n".join(",".join(map(quoted, row)) for row in [header, *rows])
    assert outcome(written("d.csv", text.encode("utf-8", "surrogatepass")), **options)


KEYS = st.sampled_from(["x", "y", "choices", "value"])
TEXTS = st.sampled_from(["a", "x|y", "a.png", "bomb.png", "\ud800", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(
    st.lists(st.dictionaries(st.sampled_from([*NAMES, "x", "features"]), JSON, max_size=5) | JSON, max_size=4), OPTIONS
)
@settings(FUZZ, max_examples=400)
def test_jsonl_of_anything(rows, options):
    assert outcome(written("d.jsonl", "\n".join(map(json.dumps, rows)).encode()), **options)


RESULTS = st.lists(JSON | st.fixed_dictionaries({"value": JSON}), max_size=2)
TASK = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "data": JSON | st.fixed_dictionaries({"image": JSON | st.text(max_size=8).map(lambda t: f"/data/{t}")}),
        "annotations": JSON | st.lists(JSON | st.fixed_dictionaries({"result": JSON | RESULTS}), max_size=2),
    },
)  # fmt: skip


@given(st.lists(TASK | st.just(STUDIO[0]), max_size=3), OPTIONS)
@settings(FUZZ, max_examples=300)
def test_exports_of_anything(tasks, options):
    assert outcome(written("d.json", json.dumps(tasks).encode()), **options)


ARRAY = st.one_of(
    st.sampled_from([
        np.array(3), np.array([]), np.array(["a", "b"]), np.ones((2, 2)), np.ones((2, 2), bool), np.zeros((2, 0)),
        np.full((2, 2), np.nan), np.array([1, 2]), np.array([0, 1]), np.ones((2, 3, 3), np.uint8), np.array([b"x"]),
        np.ones((2, 2), complex), np.array(["2020-01-01"], "M8[D]"), np.array([(1, 2)], "i4,i4"), np.ones((2, 2), "f2"),
        np.array([-1, 2**62]), np.array([["x"]]), np.ones((2, 1, 1, 1, 1)), np.array(True),
    ]),
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["x", "candidates", "y", "x_test", "y_test", "classes", "ids", "votes", "scores", "weights",
                         "groups", "mean", "std", "flips", "other"]),
        ARRAY, max_size=6,
    ),
    OPTIONS,
)  # fmt: skip
@settings(FUZZ, max_examples=500)
def test_npz_of_anything(arrays, options):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    assert outcome(written("d.npz", stream.getvalue()), **options)


@given(st.dictionaries(st.sampled_from(["data", "partial_target", "target", "X", "y", "a"]), ARRAY, max_size=4))
@settings(FUZZ, max_examples=200)
def test_mat_of_anything(arrays):
    stream = io.BytesIO()
    try:
        scipy.io.savemat(stream, arrays)
    except Exception:
        return  # MATLAB has no such arrays
    assert outcome(written("d.mat", stream.getvalue()))


# --- the pickles of CIFAR -----------------------------------------------------------------------------------------

PIXELS = np.zeros((2, 3072), np.uint8)
BATCH = {b"data": PIXELS, b"labels": [0, 1], b"fine_labels": [0, 1], b"coarse_labels": [0, 1]}
CIFAR_NAMES = {b"label_names": [b"a", b"b"], b"fine_label_names": [b"a", b"b"], b"coarse_label_names": [b"a", b"b"]}
PUBLISHED = {True: as_published(CIFAR_NAMES), False: as_published(BATCH)}
CIFAR = {
    "cifar10": ("batches.meta", [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]),
    "cifar100": ("meta", ["train", "test"]),
}


def cifar(kind: str, file: str | None = None, content: bytes = b"") -> Path:
    """A folder as published, small, with one file of other content."""
    root, (meta, batches) = folder() / kind, CIFAR[kind]
    root.mkdir(exist_ok=True)
    for name in [meta, *batches]:
        (root / name).write_bytes(content if name == file else PUBLISHED["meta" in name])
    return root


CIFAR_FILES = [("cifar10", "data_batch_1"), ("cifar10", "batches.meta"), ("cifar100", "train"), ("cifar100", "meta")]
PICKLED = st.sampled_from([
    PIXELS, np.zeros((1, 3072), np.uint8), np.zeros(3072, np.uint8), np.zeros((2, 0), np.uint8), [0], [0, 1], [0, -1],
    [0, 2**40], [0, 2**80], [0, 1.5], [0, None], [[0], [1, 2]], [True, False], {}, {1: 2}, None, 3, b"a", [b"a", b"b"],
    [b"a", b"a"], [b"\xff", b"b"], [b"a\nb", b"c"], [b"", b"b"], [b"x" * 2000, b"y"], (0, 1), [np.array([1], "u1")] * 2,
])  # fmt: skip
PIECES = st.sampled_from([
    b"(", b"}", b"]", b")", b"t", b"\x85", b"a", b"e", b"s", b"u", b"d", b"l", b"0", b"2", b"N",
    b"K\x02", b"q\x01", b"h\x01",
    b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"R", b"b", b"\x81", b"o", b"i", b"cnumpy\nndarray\n",
    b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"U\x02u1", b"U\x04data", b"U\x06labels",
    b"T\xff\xff\xff\x7f", b"P1\n",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"cos\nsystem\n", b"Q", b"\x8a\x01\x05", b"I5\n", b"F1e999\n", b".",
])  # fmt: skip


@pytest.mark.parametrize("kind", CIFAR)
def test_good_folders_are_read(kind):
    assert outcome(cifar(kind)) == "dataset"


@pytest.mark.parametrize(("kind", "file"), CIFAR_FILES)
@given(st.dictionaries(st.sampled_from([*BATCH, *CIFAR_NAMES, b"\xff", 3]), PICKLED, max_size=4))
@settings(FUZZ, max_examples=60)
def test_pickles_of_anything(kind, file, content):
    assert outcome(cifar(kind, file, as_published({**(CIFAR_NAMES if "meta" in file else BATCH), **content})))


@given(st.binary(max_size=60) | st.lists(PIECES, max_size=25).map(lambda parts: b"\x80\x02" + b"".join(parts) + b"."))
@settings(FUZZ, max_examples=250)
def test_pickles_of_any_bytes(content):
    assert outcome(cifar("cifar100", "meta", content))


@pytest.mark.parametrize("file", ["train", "meta"])
def test_damaged_pickles(file):
    content = PUBLISHED["meta" in file]
    rng = random.Random(file)
    places = [at for at in range(len(content)) if content[at]]  # pixels are zeros; what is to be told is not
    for at in rng.sample(places, min(len(places), 80)):
        found = outcome(cifar("cifar100", file, content[:at]))
        assert found != "dataset"
        assert outcome(cifar("cifar100", file, content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]))


# --- bombs --------------------------------------------------------------------------------------------------------


# --- found by changed inputs (tests/faults/soak hostile) ----------------------------------------------------------


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


def npy(a: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(a))
    return stream.getvalue()


@pytest.mark.parametrize("name", ["ids", "classes", "flips", "x", "y"])
def test_a_member_that_is_no_array(name):
    members = {"x": npy(X), "candidates": npy(np.ones((4, 2), bool)), name: b"text"}
    assert f"'{name}' is not an array" in outcome(written("d.npz", zipped(**members)))


@pytest.mark.parametrize("name", ["ids", "y", "classes"])
def test_texts_that_are_no_characters(name):
    """The labels were found by fuzz.py."""
    array = npy(np.array(["a", "b", "c", "d"])).replace("a".encode("utf-32-le"), b"\xff" * 4)
    members = {"x": npy(X), "y": npy([0, 1, 1, 0]), name: array}
    assert f"'{name}' is not plain text" in outcome(written("d.npz", zipped(**members)))


def test_names_of_arrays_on_several_lines():
    found = outcome(written("d.npz", zipped(**{"x": npy(X), "gro\nps": npy([0])})))
    assert r"unknown array 'gro\nps'" in found


def test_names_in_mat_files_are_not_repeated_without_end():
    content = mat(**{f"{letter}" * 30: np.zeros(1) for letter in "abcdefgh"})
    assert len(outcome(written("d.mat", content))) < 500


@pytest.mark.parametrize("of", ["f8", "i1", "f2 without a number"])
def test_arrays_are_counted_with_what_is_made_of_them(of, monkeypatch):
    """A little less than the limit as they are in the file; more once they are checked and in our form."""
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.1")
    start, size = peak_memory() or 0, int(0.09 * 2**30)
    dtype = np.dtype(of[:2])
    x = np.zeros((size // 4 // dtype.itemsize, 4), dtype)
    if "without" in of:
        x.fill(np.nan)
    content = zipped(x=npy(x), y=npy(np.zeros(len(x), np.int8)))
    made = (peak_memory() or 0) - start
    assert "its content would take" in outcome(written("d.npz", content))
    assert (peak_memory() or 0) - start <= made + (50 << 20)


def test_an_npz_that_unfolds_without_end(monkeypatch):
    """Zeros compress a thousandfold: the size is known before anything is unpacked."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (1 << 15, 1024)})
        for _ in range(256):
            member.write(bytes(1 << 20))
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.1")
    start = peak_memory() or 0
    assert "its content would take 0.4 GiB of memory" in outcome(written("d.npz", stream.getvalue()))
    assert (peak_memory() or 0) - start < 100 << 20


def test_headers_that_claim_too_much():
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 1 << 10)})
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("x.npy", stream.getvalue() + b"12345678")
    assert "not a readable npz file" in outcome(written("d.npz", archive.getvalue()))


def test_bombs_behind_paths():
    for content in ("path,label\nbomb.png,a\n", "task,worker,label\nbomb.png,w,a\n", "path,annotator_1\nbomb.png,a\n"):
        text = outcome(written("d.csv", content.encode()))
        assert "d.csv, line 2, column" in text
        assert "Pillow's limit" in text


@pytest.mark.parametrize("name", ["d.csv", "d.jsonl", "d.json", "d.npz", "d.mat", "inputs", "image", "batch"])
def test_pipes_are_refused_and_not_waited_for(name, tmp_path):
    """Opening a pipe without a writer waits for ever; a list from a stranger may name one."""
    path = tmp_path / "d.csv"
    pipe = {"inputs": "p.csv", "image": "p.png", "batch": "train"}.get(name, name)
    os.mkfifo(tmp_path / pipe)
    if name == "batch":
        shutil.copytree(cifar("cifar100"), tmp_path / "c")
        (tmp_path / "c" / "test").unlink()
        (tmp_path / "c" / "test").symlink_to(tmp_path / pipe)
        path = tmp_path / "c"
    elif name in ("inputs", "image"):
        path.write_text("path,candidates\np.png,a|b\n" if name == "image" else "task,worker,label\n1,w,a\n")
    else:
        path = tmp_path / name
    options = {"inputs": str(tmp_path / pipe)} if name == "inputs" else {}
    assert "not a plain file" in outcome(path, **options)


@pytest.mark.parametrize("name", ["d.csv", "d.jsonl", "d.npz"])
def test_pipes_are_not_predicted(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="not a plain file"):
        next(open_inputs(tmp_path / name, InputSpec((1, 4, 4))))


# --- class trees --------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab:[]{}&*|>-?!#%'\" \n,", max_size=60) | st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), max_size=3), max_size=6,
).map(json.dumps))  # fmt: skip
@settings(FUZZ, max_examples=500)
def test_trees_of_anything(text):
    path = written("t.yaml", text.encode())
    try:
        tree = read_tree(path)
    except UserError as error:
        line = str(error)
        assert "\n" not in line and str(path) in line  # noqa: PT018
        return
    assert all(tree.below[name] for name in tree.below)


def test_a_rule_whose_tree_does_not_fit():
    path = written("d.csv", b"label,f\na,1\nb,2\n")
    written("t.yaml", b"a: [b]\nb: [a]\n")
    with pytest.raises(UserError, match="below itself"):
        draw_candidates(load(str(path)), f"tree:file={folder() / 't.yaml'}", 0)
