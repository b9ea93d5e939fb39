"""Corrections: out as csv, back in as known labels, also over names that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from _support import TinyRun

from crosel import UserError
from crosel.data.dataset import make_dataset
from crosel.review import apply_corrections, export_corrections, read_corrections
from crosel.runs.corrections import Decision, DecisionLog, Decisions, corrections_csv

CLASSES = ("cat", "dog", "=cmd|' /C calc'!A0")
IDS = ["a", "=1+1", "-5", "'=x", "@b", "two\nlines", "a\rb", "+3 4", "b"]


def data(ids: list[str] = IDS) -> object:
    n = len(ids)
    return make_dataset(np.zeros((n, 2)), candidates=np.ones((n, 3)), classes=CLASSES, ids=ids)


def test_export_and_read_round_trip(tmp_path: Path) -> None:
    decisions = Decisions(len(IDS))
    for row in range(len(IDS) - 1):
        decisions.decide(row, Decision("skip") if row == 3 else Decision("outside", row % 3))
    text = corrections_csv(decisions, IDS, CLASSES)
    for row in csv.reader(io.StringIO(text.decode(), newline="")):
        assert not any(cell.startswith(("=", "+", "@")) for cell in row)
    (tmp_path / "c.csv").write_bytes(text)
    expected = {row: row % 3 for row in range(len(IDS) - 1) if row != 3}
    assert read_corrections(tmp_path / "c.csv", data()) == expected  # type: ignore[arg-type]
    shuffled = IDS[::-1]
    assert read_corrections(tmp_path / "c.csv", data(shuffled)) == {  # type: ignore[arg-type]
        len(IDS) - 1 - row: label for row, label in expected.items()
    }


def test_the_log_itself_is_read_and_half_lines_forgiven(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    log.decide(0, Decision("accept", 1))
    log.decide(1, Decision("choose", 2))
    log.decide(1, Decision("skip"))
    log.decide(4, Decision("choose", 0))
    log.undo()
    log.close()
    assert read_corrections(log.path, data()) == {0: 1}  # type: ignore[arg-type]
    with open(log.path, "a") as stream:
        stream.write('{"time": "20')
    assert read_corrections(log.path, data()) == {0: 1}  # type: ignore[arg-type]
    with open(log.path, "a") as stream:
        stream.write('\n{"id": "nobody", "row": 0, "decision": "skip", "label": ""}\n')
    with pytest.raises(UserError, match=r"review\.jsonl: line 7: "):
        read_corrections(log.path, data())  # type: ignore[arg-type]


def test_a_log_is_about_ids_wherever_they_stand_now(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    log.decide(8, Decision("choose", 0))
    log.decide(2, Decision("accept", 1))
    log.close()
    assert read_corrections(log.path, data(IDS[::-1])) == {0: 0, 6: 1}  # type: ignore[arg-type]
    for row in ("", '"row": null,', '"row": true,', '"row": 9,', '"row": "1",'):  # no rows: the id says it alone
        log.path.write_text(f'{{"id": "=1+1", {row} "decision": "choose", "label": "cat"}}')
        assert read_corrections(log.path, data()) == {1: 0}  # type: ignore[arg-type]


def test_a_decision_about_an_id_that_several_have_is_found_by_its_row_or_not_at_all(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", ["a", "a", "b"], CLASSES)
    log.decide(1, Decision("choose", 2))
    log.close()
    assert read_corrections(log.path, data(["a", "a", "b"])) == {1: 2}  # type: ignore[arg-type]
    with pytest.raises(UserError, match="line 1: this decision is not about this data"):
        read_corrections(log.path, data(["a", "b", "a"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,label\nx,cat\n", "line 2: no example has the id 'x'"),
        ("id,label\na,cta\n", r"line 2: 'cta' is not one of the 3 classes \(did you mean 'cat'"),
        ("id,label\na,cat\na,dog\n", "line 3: example 'a' has two labels"),
        ("id,name\na,cat\n", "line 1: there is no column 'label'"),
        ("id,label\na\n", "line 2, column 1: 1 cell for 2 columns; fill in the rest"),
        ("id,label\na,cat,x,y\n", "line 2, column 3: 4 cells for 2 columns; put a cell that contains the separator"),
        ("", "line 1: cannot read '.csv' without a line of column names"),
        ("id,label\n\udcff,cat\n", "line 2, column 1: not UTF-8 text; save it as UTF-8"),
    ],
)
def test_bad_corrections_are_told_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message):
        read_corrections(path, data())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["\ufeffid;label\r\na;cat\r\nb;\r\n", "id\tnote\tlabel\na\tclear, I think\tcat\n"])
def test_corrections_may_come_from_any_spreadsheet(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(text.encode())
    assert read_corrections(path, data()) == {0: data().classes.index("cat")}  # type: ignore[arg-type]


def test_ids_that_several_have_missing_files_and_other_endings(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("id,label\na,cat\n")
    with pytest.raises(UserError, match="several examples have the id 'a'"):
        read_corrections(tmp_path / "c.csv", data(["a", "a", "b"]))  # type: ignore[arg-type]
    for name in ("none.csv", "none.jsonl"):
        with pytest.raises(UserError, match="no such file"):
            read_corrections(tmp_path / name, data())  # type: ignore[arg-type]
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError, match=r"folder\.csv: cannot be read \(Is a directory\)"):
        read_corrections(tmp_path / "folder.csv", data())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must be a .csv \(exported\) or .jsonl"):
        read_corrections(tmp_path / "c.txt", data())  # type: ignore[arg-type]


def test_corrections_become_sets_of_one(tmp_path: Path) -> None:
    before = data()
    after = apply_corrections(before, {1: 2, 4: 0})  # type: ignore[arg-type]
    assert after.candidates is not None
    assert after.candidates.sum(axis=1).tolist() == [3, 1, 3, 3, 1, 3, 3, 3, 3]
    assert after.candidates[1, 2]
    assert after.candidates[4, 0]
    assert before.candidates.all()  # type: ignore[attr-defined]
    assert apply_corrections(before, {}) is before  # type: ignore[arg-type]


def test_export_of_a_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    log = DecisionLog(run / "review.jsonl", list(map(str, range(96))), tuple("0123456789"))
    log.decide(5, Decision("choose", 3))
    log.undo()
    with pytest.raises(UserError, match="no decisions yet"):  # a page that was only looked at leaves such a log
        export_corrections(run, tmp_path / "new" / "none.csv")
    assert not (tmp_path / "new").exists()
    log.decide(5, Decision("choose", 3))
    log.decide(7, Decision("skip"))
    assert export_corrections(run, tmp_path / "two.csv") == 2
    log.close()
    assert (tmp_path / "two.csv").read_text() == "id,label,decision\n5,3,choose\n7,,skip\n"
    with pytest.raises(UserError, match="no such run folder"):
        export_corrections(tmp_path / "nowhere", tmp_path / "x.csv")
