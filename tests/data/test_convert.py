"""Any source to one native file and back, and the summary against a slow version."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from _files import picture, put, read, sets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from crosel.data import DataSettings, draw_candidates, load
from crosel.data import convert as summary_module
from crosel.data.convert import convert, summarise, write_npz
from crosel.data.dataset import make_dataset
from crosel.errors import UserError


@given(hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=20)), st.integers(1, 30))
@settings(max_examples=60)
def test_summary_by_hand(sets, cells):
    sets[~sets.any(axis=1), 0] = True
    n, k = sets.shape
    y = np.arange(n) * 7 % k
    data = make_dataset(np.zeros((n, 2)), sets, y=y)
    old = summary_module._CELLS
    summary_module._CELLS = cells  # blocks of a few rows give the same
    try:
        found = summarise(data)
    finally:
        summary_module._CELLS = old
    sizes = [int(row.sum()) for row in sets]
    assert (found.n, found.k, found.sizes) == (n, k, dict(sorted(Counter(sizes).items())))
    assert found.mean_size == pytest.approx(sum(sizes) / n)
    assert (found.singletons, found.full) == (sizes.count(1), sizes.count(k))
    assert found.missing == sum(not sets[i, y[i]] for i in range(n))
    columns = {str(j): tuple(sets[:, j]) for j in range(k)}
    assert set(found.never) == {name for name, column in columns.items() if not any(column)}
    expected = {tuple(sorted(b for b in columns if columns[b] == columns[a])) for a in columns if any(columns[a])}
    assert {tuple(sorted(group)) for group in found.together} == {group for group in expected if len(group) > 1}


def test_summary_for_people():
    sets = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0]]
    data = make_dataset(
        np.zeros((4, 2)), sets, y=[0, 1, 0, 1], classes=["cat", "dog", "bird", "fish"], notes=("a note",)
    )
    assert summarise(data).lines() == [
        "4 examples (2 features), 4 classes",
        "candidates: 2.00 on average; sizes 1: 1, 2: 2, 3: 1",
        "sets with one label: 1 (25.0 %); with all labels: 0 (0.0 %)",
        "labels in no set: fish",
        "always in the same sets, so nothing tells them apart: cat, dog",
        "sets without the true label: 1 (25.0 %)",
        "a note",
    ]
    many = make_dataset(np.zeros((40, 8, 8)), np.tri(40, dtype=bool), x_test=np.ones((3, 8, 8)), y_test=[0, 1, 2])
    lines = summarise(many).lines()
    assert lines[0] == "40 examples (images of 8 x 8 x 1), 40 classes, 3 to test"
    assert lines[1] == "candidates: 20.50 on average; sizes from 1 to 40, most often 1"
    assert len(lines) == 3  # truth is not known
    alone = make_dataset(np.zeros((2, 1)), np.ones((2, 1), dtype=bool))
    assert summarise(alone).remarks() == ["there is only one class, so there is nothing to learn"]


def test_summary_in_bounded_memory():
    sets = np.zeros((200_000, 200), dtype=bool)
    sets[:, :3] = True
    data = make_dataset(np.zeros((200_000, 1), np.float32), sets)
    tracemalloc.start()
    try:
        found = summarise(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.together == (("0", "1", "2"),)
    assert peak < sets.nbytes  # a block and what is made of it, whatever the number of examples


def assert_same(one, other) -> None:
    for name in ("x", "candidates", "y", "x_test", "y_test", "weights"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or (np.array_equal(a, b) and a.dtype == b.dtype), name
    for name in ("classes", "ids", "groups", "mean", "std", "flips", "columns"):
        assert getattr(one, name) == getattr(other, name), name


def test_everything_survives_the_file(tmp_path):
    rng = np.random.default_rng(0)
    data = make_dataset(
        rng.integers(0, 256, (5, 4, 6, 3), dtype=np.uint8), rng.random((5, 3)) < 2, y=[0, 1, 2, 0, 1],
        x_test=rng.integers(0, 256, (2, 4, 6, 3), dtype=np.uint8), y_test=[1, 2], classes=["a", "ß", "日本"],
        ids=["1", "zwei", "三", "4", "5"], weights=rng.random((5, 3)), groups=(0, 0, 1), mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.5, 0.5), flips=False,
    )  # fmt: skip
    write_npz(data, tmp_path / "d.npz")
    assert_same(read(tmp_path / "d.npz"), data)


def test_names_of_features_survive_the_file(tmp_path):
    rows = put(tmp_path / "rows.csv", "candidates,length,width\na|b,1,2\nb,3,4\n")
    convert(str(rows), tmp_path / "d.npz")
    assert_same(read(tmp_path / "d.npz"), read(rows))
    assert read(tmp_path / "d.npz").columns == ("length", "width")
    np.savez(tmp_path / "e.npz", x=np.zeros((2, 3)), y=[0, 1], columns=["u", "v"])
    with pytest.raises(UserError, match="'columns' has 2 names, but there must be one for each feature"):
        read(tmp_path / "e.npz")


def test_convert_is_what_training_on_the_source_sees(tmp_path):
    found = convert("digits", tmp_path / "d.npz", "uniform:q=0.3", seed=5)
    direct = draw_candidates(load("digits"), "uniform:q=0.3", 5)
    assert_same(read(tmp_path / "d.npz"), direct)
    assert found == summarise(direct)
    assert draw_candidates(read(tmp_path / "d.npz"), None, 9).candidates.tolist() == direct.candidates.tolist()
    convert("digits", tmp_path / "d.npz", "uniform:q=0.3", seed=6)  # again: digits is no file that could be `out`
    assert_same(read(tmp_path / "d.npz"), draw_candidates(load("digits"), "uniform:q=0.3", 6))


def test_convert_votes_on_images(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    votes = put(tmp_path / "v.csv", "task,worker,label\na.png,x,cat\na.png,y,dog\nb.png,x,cat\n")
    seen = []
    convert(
        str(votes), tmp_path / "d.npz", "union", settings=DataSettings(image_size=6),
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    data = read(tmp_path / "d.npz")
    assert sets_of(data) == [{"cat", "dog"}, {"cat"}]
    assert (data.shape, data.ids, data.votes) == ((3, 6, 6), ("a.png", "b.png"), None)
    assert seen == [(2, 2)]


@pytest.mark.parametrize("share", [0.25])
def test_convert_with_a_share_held_out(tmp_path, share):
    put(tmp_path / "d.csv", "candidates,label,f\n" + "a|b,a,1\nb,b,2\n" * 10)
    found = convert(str(tmp_path / "d.csv"), tmp_path / "d.npz", settings=DataSettings(test_share=share))
    assert (found.n, found.n_test) == (15, 5)
    assert len(read(tmp_path / "d.npz").x_test) == 5


VOTES = "task,worker,label,f\na,x,cat,1\na,y,dog,1\na,z,cat,1\na,w,fox,1\nb,x,dog,2\n"
SCORES = "id,cat,dog,fox\na,5,3,2\nb,0,4,0\n"
TREE = "pet: [cat, dog]\nwild: [fox]\n"


@pytest.mark.parametrize(
    ("content", "rule", "weights"),
    [
        (VOTES, None, [[0.5, 0.25, 0.25], [0, 1, 0]]),
        (VOTES, "votes:min=2", [[0.5, 0, 0], [0, 1, 0]]),
        (VOTES, "top-m:m=2", [[0.5, 0.25, 0], [0.0, 1, 0]]),
        (SCORES, "top-p:p=0.8", [[0.5, 0.3, 0], [0, 1, 0]]),
        (SCORES.replace("5,3,2", "-5,3,2"), "top-m:m=1", None),
        (VOTES.replace("dog", "pet"), "tree:file=t.yaml", [[0.625, 0.125, 0.25], [0.5, 0.5, 0]]),
    ],
    ids=["union", "at least two", "top of votes", "top of scores", "scores below 0", "coarse votes"],
)
def test_what_votes_and_scores_say_is_kept_as_weights(tmp_path, monkeypatch, content, rule, weights):
    monkeypatch.chdir(tmp_path)
    put(Path("s.csv"), content)
    put(Path("t.yaml"), TREE)
    inputs = put(Path("x.csv"), "id,f\na,1\nb,2\n") if content.startswith("id") else None
    convert("s.csv", Path("d.npz"), rule, settings=DataSettings(inputs=None if inputs is None else str(inputs)))
    data = read(Path("d.npz"))
    assert data.classes == ("cat", "dog", "fox")
    found = None if data.weights is None else data.weights.tolist()
    assert found == (None if weights is None else [pytest.approx(row) for row in weights])


def test_convert_refuses(tmp_path):
    with pytest.raises(UserError, match=r"the output is an \.npz file"):
        convert("digits", tmp_path / "d.csv", "uniform:q=0.3")
    with pytest.raises(UserError, match=r"choose how to draw candidate sets: .*--rule uniform:q=0.3"):
        convert("digits", tmp_path / "d.npz")
    np.savez(tmp_path / "d.npz", x=np.eye(2), candidates=np.eye(2))
    with pytest.raises(UserError, match=r"d\.npz: this is a file; give a folder"):
        convert("digits", tmp_path / "d.npz" / "d.npz", "uniform:q=0.3")
    with pytest.raises(UserError, match="this is the source itself"):
        convert(str(tmp_path / "d.npz"), tmp_path / "d.npz")
    assert list(tmp_path.iterdir()) == [tmp_path / "d.npz"]
