"""What is said of sets before anybody trains on them: misspelt labels, rows in train and test, votes without inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from _support import CroselCli

from crosel.data.convert import summarise
from crosel.data.dataset import make_dataset
from crosel.data.vocabulary import misspelt, one_edit


def slow_one_edit(a: str, b: str) -> bool:
    """All that one edit of a can give."""
    letters = set(b)
    found = {a[:i] + a[i + 1 :] for i in range(len(a))}
    found |= {a[:i] + letter + a[i:] for i in range(len(a) + 1) for letter in letters}
    found |= {a[:i] + letter + a[i + 1 :] for i in range(len(a)) for letter in letters}
    found |= {a[:i] + a[i + 1] + a[i] + a[i + 2 :] for i in range(len(a) - 1)}
    return b in found and a != b


def test_one_edit_against_the_slow_way() -> None:
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abc"), draw.integers(0, 6))) for _ in range(120)]
    assert all(one_edit(a, b) == slow_one_edit(a, b) for a in words for b in words)


def test_a_label_seen_once_beside_another_of_nearly_its_name() -> None:
    counts = {
        "horse": 9,
        "hrose": 1,
        "horses": 1,
        "house": 4,
        "cat": 9,
        "car": 1,
        "class 1": 9,
        "class 2": 1,
        "ship": 1,
    }
    assert misspelt(counts) == [
        "label 'hrose' is there once and 'horse' 9 times; is it misspelt?",
        "label 'horses' is there once and 'horse' 9 times; is it misspelt?",
    ]


def test_rows_in_train_and_test_are_counted() -> None:
    x = np.arange(40.0).reshape(20, 2)
    test = np.vstack([x[[3, 3, 7]], x[:2] + 0.5])
    sets = np.eye(2, dtype=bool)[np.arange(20) % 2]
    data = make_dataset(x, sets, x_test=test, y_test=np.zeros(5, int), classes=2, place="d")
    assert summarise(data).in_both == 3
    assert any("in the training set, too: 3 (60.0 %)" in line for line in summarise(data).remarks())


def test_votes_have_a_summary_before_there_are_inputs(tmp_path: Path, crosel_cli: CroselCli) -> None:
    votes = tmp_path / "votes.csv"
    votes.write_text("id,worker,label\na.png,ann,cat\na.png,bob,dog\nb.png,ann,cat\n")
    result = crosel_cli("candidates", votes)
    assert result.code == 0
    assert result.out.splitlines()[0] == "2 examples (inputs not read), 2 classes"
    assert "candidates: 1.50 on average" in result.out
    assert crosel_cli("candidates", votes, "--out", tmp_path / "o.npz").code == 2


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("photo_id,worker,label\n1,ann,cat\n2,bob,dog", "if that is 'photo_id', call it 'id'"),
        ("name,a,b,c,d,e,f\nx,1,2,3,4,5,6\ny,1,2,3,4,5,6", "If 'name' says which example a row is about, call it 'id'"),
        (",".join(f"column{i}" for i in range(15)) + "\n" + ",".join("1" * 15), "'column11' and 3 more"),
    ],
)
def test_the_column_of_ids_is_named_where_it_has_another_name(
    header: str, said: str, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    (tmp_path / "v.csv").write_text(header + "\n")
    result = crosel_cli("candidates", tmp_path / "v.csv")
    assert (result.code, said in result.err, len(result.err.splitlines())) == (2, True, 1)
