"""Votes, long and wide, Label Studio's export and score matrices; and the inputs they are joined to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from _files import picture, put, read, refused, sets_of

from crosel.data import DataSettings, draw_candidates, load
from crosel.data.formats.csv import guess_kind
from crosel.data.sources import read_inputs
from crosel.errors import UserError
from crosel.utils.system import MAX_LINE

VOTES = [("t1", "ann", "cat"), ("t2", "ann", "dog"), ("t1", "bob", "dog"), ("t1", "eve", "cat"), ("t2", "bob", "dog")]


def long_csv(header: str = "task,worker,label") -> str:
    return header + "\n" + "".join(",".join(vote) + "\n" for vote in VOTES)


def counted(data) -> dict[tuple[str, str], int]:
    return {
        (data.example_id(i), data.classes[j]): int(data.votes[i, j])
        for i, j in zip(*np.nonzero(data.votes), strict=True)
    }


EXPECTED = Counter((task, label) for task, _, label in VOTES)


@pytest.fixture
def features(tmp_path):
    return str(put(tmp_path / "x.csv", "id,f,g\nt2,3,4\nt1,1,2\nt9,5,6\n"))


@pytest.mark.parametrize("header", ["task,worker,label", "item,annotator,label", "id,worker,label"])
def test_long_votes_with_inputs_joined_by_id(tmp_path, features, header):
    data = read(put(tmp_path / "votes.csv", long_csv(header)), inputs=features)
    assert counted(data) == EXPECTED
    assert data.ids == ("t1", "t2")
    assert data.x.tolist() == [[1, 2], [3, 4]]
    assert data.y is None
    assert sets_of(draw_candidates(data, None, 0)) == [{"cat", "dog"}, {"dog"}]
    assert sets_of(draw_candidates(data, "votes:min=2", 0)) == [{"cat"}, {"dog"}]


@pytest.mark.parametrize("name", ["v.csv", "v.jsonl"])
def test_with_inputs_elsewhere_other_columns_of_long_votes_may_hold_anything(tmp_path, features, name):
    votes = [
        {"task": "t1", "worker": "w1", "label": "cat", "when": 1, "screen": "1.png"},
        {"task": "t1", "worker": "w2", "label": "dog", "when": 2, "screen": "none"},
        {"task": "t2", "worker": "w1", "label": "dog", "when": 3, "screen": ""},
    ]
    if name.endswith("csv"):
        lines = [",".join(votes[0]), *(",".join(map(str, vote.values())) for vote in votes)]
    else:
        lines = [json.dumps(vote) for vote in votes]
        lines[2] = json.dumps({**votes[2], "remark": "late"})
    data = read(put(tmp_path / name, "\n".join(lines)), inputs=features)
    assert (data.votes.tolist(), data.x.tolist(), data.columns) == ([[1, 1], [0, 1]], [[1, 2], [3, 4]], ("f", "g"))


def test_several_labels_in_one_vote_with_another_mark_are_told_of(tmp_path, features):
    votes = put(tmp_path / "v.csv", "id,anna,ben\nt1,cat;dog,cat\nt2,dog,fox terrier\nt9,fox,dog\n")
    note = read(votes, inputs=features).notes[-1]
    assert note == "no vote has two labels, but 'cat;dog' looks like several; to split it: --set 'data.separator=\";\"'"
    assert counted(read(votes, inputs=features, separator=";"))["t1", "dog"] == 1
    votes.write_text("id,anna,ben\nt1,cat|dog,cat\nt2,dog,cat/dog\n")
    assert not any("looks like" in note for note in read(votes, inputs=features).notes)


def test_long_votes_as_jsonl(tmp_path, features):
    rows = [dict(zip(("task", "worker", "label"), vote, strict=True)) for vote in VOTES]
    data = read(put(tmp_path / "votes.jsonl", "\n".join(map(json.dumps, rows))), inputs=features)
    assert counted(data) == EXPECTED


def test_long_votes_with_features_beside(tmp_path):
    x = {"t1": "1,2", "t2": "3,4"}
    rows = "".join(",".join(vote) + f",{x[vote[0]]},{vote[0][1]}\n" for vote in VOTES)
    path = put(tmp_path / "votes.csv", "task,worker,label,f,g,truth\n" + rows.replace("t1", "a").replace("t2", "b"))
    data = read(path)
    assert data.x.tolist() == [[1, 2], [3, 4]]
    assert [data.classes[i] for i in data.y] == ["1", "2"]
    path.write_text(path.read_text().replace("a,eve,cat,1,2", "a,eve,cat,1,9"))
    assert "line 5: the numbers for 'a' differ from those in line 2" in refused(path)


def test_long_votes_on_images(tmp_path):
    for name in ("t1", "t2"):
        picture(tmp_path / f"{name}.png")
    text = long_csv().replace("t1,", "t1.png,").replace("t2,", "t2.png,")
    data = read(put(tmp_path / "votes.csv", text), image_size=4)
    assert data.x.shape == (2, 3, 4, 4)
    assert data.ids == ("t1.png", "t2.png")


def test_a_folder_as_inputs_is_joined_by_name_with_or_without_ending(tmp_path):
    picture(tmp_path / "img" / "t1.png", (255, 0, 0))
    picture(tmp_path / "img" / "t2.png", (0, 255, 0))
    data = read(put(tmp_path / "votes.csv", long_csv()), inputs=str(tmp_path / "img"), image_size=2)
    assert data.x[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0]]


def test_npz_as_inputs_brings_truth_and_test_set(tmp_path):
    np.savez(
        tmp_path / "x.npz", x=np.eye(3), ids=["t2", "t1", "t3"], y=[1, 0, 0], classes=["cat", "dog"],
        x_test=np.ones((2, 3)), y_test=[0, 1],
    )  # fmt: skip
    data = read(put(tmp_path / "votes.csv", long_csv()), inputs=str(tmp_path / "x.npz"))
    assert data.x.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert [data.classes[i] for i in data.y] == ["cat", "dog"]
    assert [data.classes[i] for i in data.y_test] == ["cat", "dog"]


WIDE = "task,annotator_1,annotator_2,annotator_3\nt1,cat,dog,cat\nt2,dog,,dog\nt9,,-1,nan\n"


def test_wide_votes(tmp_path, features):
    data = read(put(tmp_path / "votes.csv", WIDE), inputs=features)
    assert counted(data) == EXPECTED
    assert data.notes == (
        "examples without a vote, left out: 1",
        "no vote: '-1'; if this is a class, name all classes: --set data.classes=[NAME,NAME]",
    )


def test_wide_votes_by_content_or_by_setting(tmp_path, features):
    data = read(put(tmp_path / "a.csv", WIDE.replace("annotator_", "reading")), inputs=features)
    assert counted(data) == EXPECTED
    for none, said in (("", "blank"), ("-1", "-1"), ("nan", "nan")):
        for rows in (f"t1,0,1\nt2,1,{none}\n", f"t2,1,{none}\nt1,0,1\n"):
            numbers = put(tmp_path / "b.csv", "task,r1,r2\n" + rows)
            asked = refused(numbers, inputs=features)
            assert f"b.csv: whole numbers, some of them {said}, may be votes or scores; say which: --set data." in asked
            data = read(numbers, inputs=features, format="wide-votes")
            assert counted(data) == {("t1", "0"): 1, ("t1", "1"): 1, ("t2", "1"): 1}
    assert read(put(tmp_path / "c.csv", "task,r1,r2\nt1,0,2.5\nt2,1,-1\n"), inputs=features).scores is not None


def test_words_that_mean_no_vote_are_told_of_and_may_be_classes(tmp_path, features):
    path = put(tmp_path / "v.csv", "task,annotator_1,annotator_2\nt1,None,cat\nt2,dog,NA\nt9,none,\n")
    data = read(path, inputs=features)
    assert counted(data) == {("t1", "cat"): 1, ("t2", "dog"): 1}
    assert data.notes == (
        "examples without a vote, left out: 1",
        "no vote: 'NA', 'None', 'none'; if this is a class, name all classes: --set data.classes=[NAME,NAME]",
    )
    small = put(tmp_path / "w.csv", path.read_text().replace("None", "none"))
    named = read(small, inputs=features, classes=("cat", "dog", "none"))
    assert counted(named) == {("t1", "none"): 1, ("t1", "cat"): 1, ("t2", "dog"): 1, ("t9", "none"): 1}
    assert named.notes == ("no vote: 'NA'; if this is a class, name all classes: --set data.classes=[NAME,NAME]",)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_no_vote_means_the_same_in_long_votes(tmp_path, features, kind):
    none = [("t1", "dee", "NA"), ("t9", "ann", "none"), ("t9", "bob", "-1"), ("t2", "dee", ""), ("t2", "eve", "nan")]
    votes = [*VOTES, *none]
    rows = [dict(zip(("task", "worker", "label"), vote, strict=True)) for vote in votes]
    text = "task,worker,label\n" + "".join(",".join(vote) + "\n" for vote in votes)
    if kind == "jsonl":
        rows[-3]["label"], rows[-2]["label"], rows[-1]["label"] = -1.0, None, []
        text = "\n".join(map(json.dumps, rows))
    path = put(tmp_path / f"v.{kind}", text)
    data = read(path, inputs=features)
    assert (counted(data), data.ids) == (EXPECTED, ("t1", "t2"))
    number = "-1" if kind == "csv" else "-1.0"
    assert data.notes == (
        f"rows without a vote, left out: 5 ({path}, line {7 if kind == 'csv' else 6}, column 'label')",
        "examples without a vote, left out: 1",
        f"no vote: '{number}', 'NA', 'none'; if this is a class, name all classes: --set data.classes=[NAME,NAME]",
    )
    named = read(path, inputs=features, classes=("cat", "dog", "none", "-1"))
    assert counted(named) == {**EXPECTED, ("t9", "none"): 1, ("t9", "-1"): 1}
    assert named.notes[1:] == ("no vote: 'NA'; if this is a class, name all classes: --set data.classes=[NAME,NAME]",)


@pytest.mark.parametrize("index", ["", "Unnamed: 0"])
def test_the_index_that_pandas_writes(tmp_path, index):
    """Rows that are left of a frame keep their numbers in it, so that votes and inputs are joined by these."""
    x = str(put(tmp_path / "x.csv", f"{index},f,g\n7,1,2\n5,3,4\n1,5,6\n"))
    data = read(put(tmp_path / "v.csv", f"{index},anna,ben\n5,cat,dog\n7,cat,\n"), inputs=x)
    assert (data.ids, data.x.tolist()) == (("5", "7"), [[3, 4], [1, 2]])
    data = read(put(tmp_path / "n.csv", f"{index},0,1\n5,3,4\n7,3,\n"), inputs=x, annotators=("0", "1"))
    assert (data.ids, data.classes) == (("5", "7"), ("3", "4"))
    data = read(put(tmp_path / "s.csv", f"{index},cat,dog\n5,0.5,0.5\n7,1,0\n"), inputs=x)
    assert (data.ids, data.x.tolist()) == (("5", "7"), [[3, 4], [1, 2]])
    table = read(put(tmp_path / "t.csv", f"{index},candidates,f\n0,cat|dog,1\n0,cat,2\n"))
    assert (table.x.tolist(), table.columns, table.ids) == ([[1], [2]], ("f",), None), "no feature, and may repeat"


def test_votes_by_number_with_blanks_are_the_same_classes_in_every_column(tmp_path):
    """pandas writes 3.0 in columns with blanks, and 3 in those without."""
    path = put(tmp_path / "v.csv", "id,rater_1,rater_2,f\na,3.0,3,1\nb,,5,2\nc,-1.0,3,3\n")
    assert counted(read(path)) == {("a", "3"): 2, ("b", "5"): 1, ("c", "3"): 1}
    x = str(put(tmp_path / "x.csv", "id,f,label\na,1,3.0\nb,2,5.0\nc,3,3.0\n"))
    data = read(put(tmp_path / "w.csv", "id,rater_1,rater_2\na,3.0,3\nb,,5\nc,,3\n"), inputs=x)
    assert (data.classes, data.y.tolist()) == (("3", "5"), [0, 1, 0])


MIXED = "id,f,anna,ben,g\nt1,1,cat,dog,2\nt2,3,,dog,4\nt3,5,,,6\n"


@pytest.mark.parametrize("names", ["anna,ben", "annotator_1,annotator_2", "cat,rater_2"])
def test_wide_votes_with_features_beside(tmp_path, names):
    data = read(put(tmp_path / "v.csv", MIXED.replace("anna,ben", names)))
    assert counted(data) == {("t1", "cat"): 1, ("t1", "dog"): 1, ("t2", "dog"): 1}
    assert (data.x.tolist(), data.columns) == ([[1, 2], [3, 4]], ("f", "g"))
    quoted = ", ".join(repr(name) for name in names.split(","))
    assert data.notes == ("examples without a vote, left out: 1", f"votes: {quoted}; features: 'f', 'g'")


def test_numbers_of_named_annotators_are_votes_and_numbers_beside_them_features(tmp_path):
    rows = "id,f,annotator_1,annotator_2\na,1.5,0,1\nb,0,1,\n"
    data = read(put(tmp_path / "v.csv", rows))
    assert counted(data) == {("a", "0"): 1, ("a", "1"): 1, ("b", "1"): 1}
    assert (data.columns, data.x.tolist()) == (("f",), [[1.5], [0.0]])
    classes = read(put(tmp_path / "scores.csv", "path,reader,writer\na.png,0.2,0.8\n"), inputs=str(put_x(tmp_path)))
    assert classes.classes == ("reader", "writer")
    assert classes.scores is not None


def put_x(tmp_path: Path) -> Path:
    return put(tmp_path / "xs.csv", "id,f\na.png,1\nt1,1\nt2,2\nt3,3\n")


def test_numbers_beside_votes_that_are_numbers_are_no_features_by_chance(tmp_path):
    inputs = str(put_x(tmp_path))
    path = put(tmp_path / "v.csv", "id,anna,ben\nt1,1|7,1\nt2,3,3\nt3,1,7\n")  # ben never ticked two
    assert counted(read(path, inputs=inputs))[("t3", "7")] == 1
    for other in ("5", "1.5"):
        path = put(tmp_path / "v.csv", f"id,anna,ben\nt1,1|7,1\nt2,3,{other}\n")
        assert "line 1: 'ben' may hold votes or a feature" in refused(path)
        assert "line 1: 'ben' may hold votes or a feature" in refused(path, inputs=inputs)
    assert read(path, annotators=("anna",)).columns == ("ben",)
    spoilt = put(tmp_path / "s.csv", "id,height,width,anna\nt1,1.5,2,cat\nt2,n/a,3,dog\n")
    assert "'width' may hold votes or a feature" in refused(spoilt)


@pytest.mark.parametrize("header", ["task,seconds,anna,ben", "task,seconds,worker,label"])
def test_images_that_are_passed_over_for_numbers_are_told_of(tmp_path, header):
    picture(tmp_path / "a.png")
    numbers = put(tmp_path / "v.csv", f"{header}\na.png,12,cat,dog\n")
    assert any("images that ids name are not used" in note for note in read(numbers).notes)
    meant = read(put(numbers, f"{header.replace('task', 'path')}\na.png,12,cat,dog\n"))
    assert meant.is_image
    assert not any("not used" in note for note in meant.notes)
    elsewhere = put(tmp_path / "w.csv", f"{header}\nb.png,12,cat,dog\n{'x' * 300}.png,12,cat,dog\n")
    assert not any("not used" in note for note in read(elsewhere).notes)


def test_words_that_are_no_votes_are_told_of(tmp_path):
    rows = "id,f,sex,anna,ben\na,1,m,cat,dog\nb,2,f,dog,cat\n"
    *_, note = read(put(tmp_path / "v.csv", rows)).notes
    assert note.startswith("no label in 'sex' is in another column; if these are not votes, name all that are: --set")
    for clear in (rows.replace("sex,", "").replace("m,", "").replace("2,f,", "2,"), "id,f,anna\na,1,cat\nb,2,dog\n"):
        assert not any("no label in" in note for note in read(put(tmp_path / "v.csv", clear)).notes)


def test_names_that_python_takes_for_numbers_are_votes(tmp_path):
    path = put(tmp_path / "v.csv", "id,anna,ben\nt1,3_1,3_2\nt2,3_2,3_2\n")
    assert read(path, inputs=str(put_x(tmp_path))).classes == ("3_1", "3_2")


@pytest.mark.parametrize("unknown", ["", "NA", "none", "-1"])
@pytest.mark.parametrize(
    ("header", "row"), [("task,worker,label,truth,f", "{0},w,{1},{2},{0}"), ("id,rater_1,truth,f", "{0},{1},{2},{0}")]
)
def test_a_truth_that_is_not_known_is_no_class(tmp_path, header, row, unknown):
    lines = [header, row.format(1, "cat", "cat"), row.format(2, "dog", unknown), row.format(3, "dog", "dog")]
    path = put(tmp_path / "v.csv", "\n".join(lines))
    data = read(path)
    assert (data.classes, data.y) == (("cat", "dog"), None)
    assert f"{path}, line 3, column 'truth': no true label, so this column is not used" in data.notes
    if unknown:
        assert read(path, classes=("cat", "dog", unknown)).y.tolist() == [0, 2, 1]


@pytest.mark.parametrize("name", ["v.csv", "v.jsonl"])
def test_rows_of_one_task_may_not_tell_different_truths(tmp_path, name):
    """But some of them may tell none."""
    votes = [("t1", "a", "cat", " cat"), ("t2", "a", "dog", ""), ("t1", "b", "dog", "NA"), ("t2", "b", "dog", "dog")]

    def file(*more):
        rows = [{"task": t, "worker": w, "label": v, "truth": y, "f": int(t[1])} for t, w, v, y in (*votes, *more)]
        lines = [",".join(map(str, row.values())) for row in rows]
        text = ["task,worker,label,truth,f", *lines] if name == "v.csv" else ["", *map(json.dumps, rows)]
        return put(tmp_path / name, "\n".join(text))

    data = read(file())
    assert (data.ids, data.y.tolist(), data.notes) == (("t1", "t2"), [0, 1], ())
    said = refused(path := file(("t1", "c", "cat", "dog")))
    place = f"{path}, line 6, column 'truth'"
    assert said == f"{place}: 'dog' for 't1', but line 2 has 'cat'; a task must have the same in all its rows"


def test_rows_of_one_task_may_not_name_different_images(tmp_path, features):
    picture(tmp_path / "a.png")
    votes = "id,worker,label,path\nt1,a,cat,a.png\nt1,b,dog,{}\nt2,a,cat,a.png\n"
    path = put(tmp_path / "v.csv", votes.format("b.png"))
    assert "line 3, column 'path': 'b.png' for 't1', but line 2 has 'a.png'" in refused(path)
    assert read(path, inputs=features).n == 2, "where the images are not used, their names may be anything"
    assert read(put(path, votes.format(""))).n == 2
    assert "line 4, column 'path': '' is not a path" in refused(
        put(path, "id,worker,label,path\na,a,c,a.png\n\nb,a,c,\n")
    )


def test_what_may_be_no_class_among_several_votes_and_in_the_inputs_is_told_of(tmp_path):
    path = put(tmp_path / "v.csv", "task,worker,label,f\nt1,w,cat|none,1\nt2,w,dog,2\n")
    assert read(path).notes[-1].startswith("taken as classes: 'none'")
    x = put(tmp_path / "x.csv", "id,truth,f\nt1,NA,1\nt2,dog,2\n")
    data = read(put(tmp_path / "v.csv", "task,worker,label\nt1,w,cat\nt2,w,dog\n"), inputs=str(x))
    assert data.y.tolist() == [0, 2], "the truth of the inputs"
    assert data.notes[-1].startswith("taken as classes: 'NA'")


def test_an_empty_list_is_no_vote(tmp_path):
    assert read(put(tmp_path / "v.csv", "id,f,anna,ben\na,1,[],dog\nb,2,cat,[]\n")).classes == ("cat", "dog")
    assert read(put(tmp_path / "l.csv", "id,worker,label,f\na,w,[],1\nb,w,cat,2\n")).ids == ("b",)
    assert read(put(tmp_path / "m.csv", "id,f,anna,ben\na,1,[nan],dog\nb,2,cat,{None}\n")).classes == ("cat", "dog")
    assert "there are no votes" in refused(put(tmp_path / "n.csv", "id,worker,label,f\na,w,[],1\n"))


@pytest.mark.parametrize("header", ["id,anna,ben,f,split,truth", "id,worker,label,f,split,truth"])
def test_rows_for_testing_among_votes_are_not_trained_on(tmp_path, header):
    path = put(tmp_path / "v.csv", f"{header}\na,cat,dog,1,train,cat\nb,cat,dog,2,test,dog\n")
    assert "line 3, column 'split': votes and scores are for training" in refused(path)
    assert read(put(path, f"{header}\na,cat,dog,1,train,cat\nb,cat,dog,2,,dog\n")).n == 2


def test_a_weight_beside_votes_is_not_passed_over(tmp_path):
    path = put(tmp_path / "v.csv", "id,height,weight,anna\na,1,2,cat\nb,3,4,dog\n")
    assert "votes cannot have a column 'weight'; if it is a feature, rename it" in refused(path, annotators=("anna",))


def test_repeated_rows_of_wide_votes_and_scores_are_left_out_where_that_is_asked_for(tmp_path):
    votes = put(tmp_path / "v.csv", "id,f,anna\na,1,cat\na,2,dog\nb,3,dog\n")
    assert "id 'a' was already given in line 2" in refused(votes)
    data = read(votes, skip_bad=True)
    assert (data.ids, data.x.tolist(), counted(data)) == (
        ("a", "b"), [[1.0], [3.0]], {("a", "cat"): 1, ("b", "dog"): 1},
    )  # fmt: skip
    note = f"rows with the path or id of an earlier one, left out: 1 ({votes}, line 3)"
    assert note in data.notes
    scores = put(tmp_path / "s.csv", "id,cat,dog\nt1,0.1,0.9\nt1,0.2,0.8\nt2,0.3,0.7\n")
    data = read(scores, skip_bad=True, inputs=str(put_x(tmp_path)))
    assert (data.ids, data.scores[1].tolist()) == (("t1", "t2"), pytest.approx([0.3, 0.7]))
    assert data.notes == (f"rows with the path or id of an earlier one, left out: 1 ({scores}, line 3)",)


def test_annotators_by_name(tmp_path, features):
    votes = put(tmp_path / "v.csv", "f,anna,ben,truth,g\n1,0,1,0,2\n3,1,,1,4\n")
    data = read(votes, annotators=("anna", "ben"))
    assert counted(data) == {("0", "0"): 1, ("0", "1"): 1, ("1", "1"): 1}
    assert (data.x.tolist(), data.y.tolist()) == ([[1, 2], [3, 4]], [0, 1])
    assert "no column 'bean' of votes (did you mean 'ben'?)" in refused(votes, annotators=("anna", "bean"))
    words = put(tmp_path / "w.csv", MIXED)
    said = refused(words, annotators=("anna",))
    assert "column 'ben': 'dog' is not a number; correct it" in said
    assert "; if this column holds votes, name all columns with votes" in said
    blank = put(tmp_path / "b.csv", "id,anna,ben,f\na,1,2,0.5\nb,1,,0.2\n")
    assert "line 3, column 'ben': empty; fill it in or drop the row; if this column holds votes, name" in refused(blank)
    assert counted(read(blank, annotators=("anna", "ben"))) == {("a", "1"): 1, ("a", "2"): 1, ("b", "1"): 1}
    data = read(words, annotators=("anna", "ben"), inputs=str(put(tmp_path / "x.csv", "id,h\nt1,7\nt2,8\n")))
    assert (data.x.tolist(), data.columns) == ([[7], [8]], ("h",)), "inputs from elsewhere come first"
    photos = put(tmp_path / "p.csv", "id,photo,anna\nt1,1.png,cat\nt2,2.png,dog\n")
    assert "column 'photo': '1.png' seems to be an image" in refused(photos, annotators=("anna",))
    assert read(photos, annotators=("anna",), inputs=str(tmp_path / "x.csv")).x.tolist() == [[7], [8]]


def test_numbers_beside_votes_on_images_are_no_votes(tmp_path):
    picture(tmp_path / "a.png")
    data = read(put(tmp_path / "v.csv", "path,width,anna,ben\na.png,12,cat,dog\n"), image_size=4)
    assert counted(data) == {("a.png", "cat"): 1, ("a.png", "dog"): 1}
    assert data.is_image
    assert data.notes == ("votes: 'anna', 'ben'",)


def test_names_of_features_come_with_npz_inputs(tmp_path):
    votes = put(tmp_path / "v.csv", long_csv())
    arrays = {"x": np.arange(4.0).reshape(2, 2), "ids": np.array(["t1", "t2"])}
    np.savez(tmp_path / "x.npz", **arrays, columns=np.array(["f", "g"]))
    assert read(votes, inputs=str(tmp_path / "x.npz")).columns == ("f", "g")
    np.savez(tmp_path / "x.npz", **arrays, columns=np.array(["f"]))
    assert "'columns' has 1 names" in refused(votes, inputs=str(tmp_path / "x.npz"))


def test_names_of_features_come_with_the_votes(tmp_path, features):
    assert read(put(tmp_path / "long.csv", long_csv()), inputs=features).columns == ("f", "g")
    assert read(put(tmp_path / "wide.csv", WIDE), inputs=features).columns == ("f", "g")
    beside = put(tmp_path / "beside.csv", "task,worker,label,u,v\nt1,ann,cat,1,2\n")
    assert read(beside).columns == ("u", "v")
    assert read(put(tmp_path / "scores.csv", "id,cat,dog\nt1,0.5,0.5\n"), inputs=features).columns == ("f", "g")


def test_examples_without_inputs_are_left_out_where_that_is_asked_for(tmp_path, features):
    votes = put(tmp_path / "votes.csv", long_csv() + "t7,ann,cat\n")
    data = read(votes, inputs=features, skip_bad=True)
    assert (counted(data), data.x.tolist()) == (EXPECTED, [[1, 2], [3, 4]])
    assert data.notes == (f"inputs that cannot be read, left out: 1 ({votes}, line 7, column 'task': {features} has no "
                          "inputs for id 't7')",)  # fmt: skip
    picture(tmp_path / "img" / "t2.png")
    put(tmp_path / "img" / "t1.png", "no picture")
    folder = str(tmp_path / "img")
    assert "t1.png: not an image that Pillow can read" in refused(put(votes, long_csv()), inputs=folder)
    data = read(votes, inputs=folder, skip_bad=True)
    assert (data.ids, counted(data)) == (("t2",), {("t2", "dog"): 2})
    listed = str(put(tmp_path / "listed.csv", "id,path\nt1,img/t1.png\nt2,img/t2.png\n"))
    assert "t1.png: not an image that Pillow can read" in refused(votes, inputs=listed)
    data = read(votes, inputs=listed, skip_bad=True)
    assert (data.ids, counted(data)) == (("t2",), {("t2", "dog"): 2})
    none = put(tmp_path / "none.csv", "id,f\nt9,1\n")
    assert "has no inputs for id 't1'" in refused(votes, inputs=str(none), skip_bad=True)
    np.savez(tmp_path / "twice.npz", x=np.eye(3), ids=["t1", "t2", "t2"])
    assert "twice.npz: id 't2' appears twice" in refused(votes, inputs=str(tmp_path / "twice.npz"))
    votes = put(tmp_path / "no-task.csv", "worker,label\nann,cat\n")
    assert "votes need the columns task, worker and label; 'task' is missing" in refused(votes, format="votes")
    votes = put(tmp_path / "tasks.csv", "tasks,worker,label\nt1,ann,cat\n")
    assert "'task' is missing (did you mean 'tasks'?)" in refused(votes, format="votes", inputs=folder)
    np.savez(tmp_path / "s.npz", scores=np.eye(2), ids=["t1", "t7"])
    assert "has no inputs for id 't7'" in refused(tmp_path / "s.npz", inputs=features, skip_bad=True)
    np.savez(tmp_path / "s.npz", scores=np.eye(2), ids=["t1", "t2"])
    assert read(tmp_path / "s.npz", inputs=features).columns == ("f", "g")


def test_repeated_votes_and_bad_images_are_left_out_where_that_is_asked_for(tmp_path):
    picture(tmp_path / "t1.png")
    text = long_csv("path,worker,label") + "t1,ann,cat\n"
    path = put(tmp_path / "votes.csv", text.replace("t1,", "t1.png,").replace("t2,", "t2.png,"))
    data = read(path, skip_bad=True)
    assert counted(data) == {("t1.png", "cat"): 2, ("t1.png", "dog"): 1}
    again, images = data.notes
    assert again == "repeated votes, left out: 1"
    assert images.startswith(f"inputs that cannot be read, left out: 1 ({path}, line 3, column 'path'")


def test_a_tick_of_several_labels_is_a_vote_for_each(tmp_path, features):
    data = read(put(tmp_path / "v.csv", "task,worker,label\nt1,ann,cat|dog\nt1,bob,cat\n"), inputs=features)
    assert counted(data) == {("t1", "cat"): 2, ("t1", "dog"): 1}


BAD_VOTES = {
    "same vote": (
        long_csv() + "t1,ann,cat\n",
        "line 7, column 'label': the vote of 'ann' on 't1' for 'cat' was already given in line 2; fix it, or leave out",
    ),
    "no worker": ("task,worker,label\nt1,,cat\n", "line 2, column 'worker': an empty name"),
    "no inputs": (long_csv() + "t7,ann,cat\n", "has no inputs for id 't7'; fix it, or leave out what cannot be used"),
    "same task, wide": (WIDE + "t1,cat,,\n", "line 5, column 'task': id 't1' was already given in line 2"),
    "no labels": ("task,worker,tick\nt1,ann,cat\n", "'worker' says who voted; name the column of the labels 'label'"),
    "no vote at all": ("task,annotator_1\nt1,\n", "there are no votes"),
    "no long vote at all": ("task,worker,label\nt1,ann,\nt1,bob,NA\n", "there are no votes"),
    "odd label": ("task,annotator_1\nt1,a||b\n", "line 2, column 'annotator_1': an empty label"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_VOTES)
def test_bad_votes_are_named_with_their_place(tmp_path, features, case):
    content, says = BAD_VOTES[case]
    assert says in refused(put(tmp_path / "votes.csv", content), inputs=features)


def test_votes_without_inputs_say_what_to_do(tmp_path):
    assert "--set data.inputs=FILE" in refused(put(tmp_path / "votes.csv", long_csv()))


# --- Label Studio -------------------------------------------------------------------------------------------------


def task(number: int, *ticks: list[str] | None, image: str = "a.png", **more: object) -> dict:
    def one(labels):
        value = {"choices": labels or []}
        return {"result": [{"type": "choices", "value": value}], "was_cancelled": labels is None, "completed_by": 1}

    return {"id": number, "data": {"image": image}, "annotations": [one(labels) for labels in ticks], **more}


def export(tmp_path, *tasks: object):
    return put(tmp_path / "export.json", json.dumps(list(tasks)))


def test_label_studio(tmp_path):
    picture(tmp_path / "a.png", (255, 0, 0))
    picture(tmp_path / "pets" / "b c.png", (0, 0, 255))
    picture(tmp_path / "upload" / "1" / "u.png", (0, 255, 0))
    picture(tmp_path / "v.png", (9, 9, 9))
    path = export(
        tmp_path,
        task(11, ["cat"], ["cat", "dog"], None),
        task(12, ["dog"], [], image="/data/local-files/?d=pets/b%20c.png"),
        task(13, None),
        task(14, ["cat"], image="/data/upload/1/u.png"),
        task(15, ["cat"], image="/data/upload/1/v.png"),
    )
    data = read(path, image_size=2)
    assert counted(data) == {
        ("11", "cat"): 2, ("11", "dog"): 1, ("12", "dog"): 1, ("14", "cat"): 1, ("15", "cat"): 1,
    }  # fmt: skip
    assert data.x[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255], [0, 255, 0], [9, 9, 9]]
    assert set(data.notes) == {
        "skipped or cancelled annotations, left out: 2",
        "annotations without a choice, left out: 1",
        "tasks without a choice, left out: 1",
    }


def test_label_studio_with_two_kinds_of_choices(tmp_path):
    """A project that asks for species and quality: which of them are the labels must be said."""
    picture(tmp_path / "a.png")
    both = task(1, ["cat"])
    (annotation,) = both["annotations"]
    annotation["result"][0]["from_name"] = "species"
    annotation["result"].append({"from_name": "quality", "value": {"choices": ["blurred"]}})
    path = export(tmp_path, both)
    assert "with the names 'quality', 'species'; choose the one with the labels: --set data.choices=" in refused(path)
    assert read(path, choices="species").classes == ("cat",)
    assert read(path, choices="quality").classes == ("blurred",)
    assert "none of the 1 tasks has a choice with the name 'sort'" in refused(path, choices="sort")


def test_label_studio_without_images_is_joined_by_id(tmp_path):
    text = task(1, ["cat"])
    text["data"] = {"text": "a sentence"}
    path = export(tmp_path, text)
    assert "task 1: no image in 'data'; give the file with the inputs" in refused(path)
    put(tmp_path / "x.csv", "id,f\n1,5\n")
    assert read(path, inputs=str(tmp_path / "x.csv")).x.tolist() == [[5.0]]


def test_a_large_export_may_be_one_line(tmp_path):
    """As the server itself sends it; only tables of text have lines of their own."""
    picture(tmp_path / "a.png", (255, 0, 0))
    long = task(1, ["cat"])
    long["data"]["text"] = "a" * (MAX_LINE + 1)
    assert read(export(tmp_path, long)).classes == ("cat",)


BAD_EXPORTS = {
    "no list": ('{"1": {"ann": "cat"}}', "column 1: expected Label Studio's JSON export"),
    "and a way out": ("{}", "or put votes from elsewhere in a csv: task,worker,label"),
    "nothing": ("[]", "expected Label Studio's JSON export"),
    "half": ('[{"id": 1,\n "data"', "line 2, column 8: not valid JSON"),
    "a number": ("[1]", "task 1: expected an object with 'data' and 'annotations'"),
    "min": ('[{"image": "a.png", "choice": "cat"}]', "task 1: expected an object"),
    "annotation": ('[{"id": 1, "data": {}, "annotations": [3]}]', "task 1: an annotation is not an object"),
    "result": ('[{"id": 1, "data": {}, "annotations": [{}]}]', "task 1: an annotation has no list 'result'"),
    "choices": ('[{"id": 1, "data": {}, "annotations": [{"result": [{"value": {"choices": "a"}}]}]}]', "is not a list"),
    "choice": (
        '[{"id": 1, "data": {}, "annotations": [{"result": [{"value": {"choices": [{}]}}]}]}]',
        "is not a label",
    ),
    "same id": (json.dumps([task(1, ["a"]), task(1, ["a"])]), "task 2: id '1' was already given to task 1"),
    "skipped": (json.dumps([task(1, None), task(2, None)]), "none of the 2 tasks has a choice"),
    "cloud": (json.dumps([task(1, ["a"], image="s3://b/a.png")]), "task 1: 's3://b/a.png' is an address"),
    "no image": (json.dumps([task(1, ["a"], image="none.png")]), "task 1: "),
    "nul": (json.dumps([task(1, ["a"], image="a\0b")]), "task 1: not a path"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_EXPORTS)
def test_bad_exports_are_named_with_their_place(tmp_path, case):
    content, says = BAD_EXPORTS[case]
    assert says in refused(put(tmp_path / "export.json", content))


# --- scores -------------------------------------------------------------------------------------------------------

SCORES = "id,cat,dog,bird\nt1,0.6,0.3,0.1\nt2,0.2,0.2,0.6\n"


def test_scores_as_csv(tmp_path, features):
    data = read(put(tmp_path / "scores.csv", SCORES), inputs=features)
    assert data.classes == ("cat", "dog", "bird")
    np.testing.assert_allclose(data.scores, [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]], rtol=1e-6)
    assert data.x.tolist() == [[1, 2], [3, 4]]
    assert sets_of(draw_candidates(data, "top-m:m=2", 0)) == [{"cat", "dog"}, {"cat", "bird"}]
    assert sets_of(draw_candidates(data, "top-p:p=0.85", 0)) == [{"cat", "dog"}, {"bird", "cat", "dog"}]
    with pytest.raises(UserError, match="this data has scores; choose how"):
        draw_candidates(data, None, 0)
    with pytest.raises(UserError, match=r"rule 'union' needs votes, .* if they are votes: --set data"):
        draw_candidates(data, "union", 0)
    with pytest.raises(UserError, match="draws sets for plain labels, which this data does not have"):
        draw_candidates(data, "uniform:q=0.5", 0)
    turned = read(tmp_path / "scores.csv", inputs=features, classes=("bird", "cat", "dog"))
    assert turned.scores[0].tolist() == data.scores[0][[2, 0, 1]].tolist()
    text = refused(tmp_path / "scores.csv", inputs=features, classes=("birds", "cat"))
    assert "no column of scores for class 'birds' (did you mean 'bird'?)" in text


@pytest.mark.parametrize(
    ("header", "row", "kind"),
    [
        ("task,worker,label,f", "a,v,x,1", "votes"),
        ("path,worker,label,candidates", "a,v,x,x|y", "table"),
        ("id,weight,f", "a,x:1,1", "table"),
        ("id,label,annotator_1,reader anna", "a,x,x,y", "wide-votes"),
        ("id,label,annotator_1,f", "a,x,1,1", "table"),
        ("truth,f,g", "x,1,0.5", "table"),
        ("id,truth,anna,f", "a,x,y,0.5", "wide-votes"),
        ("id,rater_1,f", "a,1,0.5", "wide-votes"),
        ("id,truth,x,y", "a,x,0.5,1", "scores"),
        ("id,truth,f,g", "a,x,0.5,1", "table"),
        ("path,x,y", "a,0.5,1", "scores"),
    ],
)
def test_the_kind_of_a_csv_file(header, row, kind):
    """The table of docs/data.md, line by line."""
    assert guess_kind(Path("d.csv"), header.split(","), [row.split(",")]) == kind


def test_numbers_beside_the_truth(tmp_path, features):
    """Scores, if a true label has a column of them; else features, unless they may be votes."""
    scores = read(put(tmp_path / "s.csv", "id,truth,0,1\nt1,1.0,0.1,0.9\nt2,0.0,1,0\n"), inputs=features)
    assert (scores.y.tolist(), scores.scores.tolist()[1]) == ([1, 0], [1, 0])
    rows = read(put(tmp_path / "r.csv", "id,truth,h,w\nt1,cat,1,0\nt2,dog,0,1\n"))
    assert (rows.ids, rows.x.tolist(), rows.y.tolist(), rows.classes) == (
        ("t1", "t2"), [[1, 0], [0, 1]], [0, 1], ("cat", "dog"),
    )  # fmt: skip
    below = read(put(tmp_path / "r.csv", "id,truth,h\nt1,cat,-1\nt2,dog,4\n"))
    assert (below.x.tolist(), below.y.tolist()) == ([[-1], [4]], [0, 1])
    unknown = read(put(tmp_path / "u.csv", "id,truth,cat,dog\nt1,,0.1,0.9\nt2,NA,1,0\n"), inputs=features)
    assert (unknown.classes, unknown.y, unknown.notes) == (("cat", "dog"), None, ())
    some = read(path := put(tmp_path / "u.csv", "id,truth,cat,dog\nt1,cat,0,1\nt2,NA,1,0\n"), inputs=features)
    assert some.y is None
    assert some.notes == (f"{path}, line 3, column 'truth': no true label, so this column is not used",)
    path = put(tmp_path / "p.csv", "id,truth,p_cat,p_dog\nt1,cat,0.1,0.9\nt2,,1,0\n")
    assert refused(path).endswith(
        "; fill it in, or leave the row out; if the numbers are scores: --set data.format=scores"
    )
    assert read(path, format="scores", inputs=features).classes == ("p_cat", "p_dog")
    path = put(tmp_path / "p.jsonl", '{"truth": "cat", "f": 1}\n{"truth": null, "f": 2}\n')
    assert refused(path).endswith("; fill it in, or leave the row out"), "there are no scores in jsonl"
    path = put(tmp_path / "v.csv", "id,truth,h,w\nt1,1,1,0\nt2,0,0,1\n")
    assert "v.csv: whole numbers, true labels among them, may be votes or features; say which: --set" in refused(path)
    assert read(path, format="table").x.tolist() == [[1, 0], [0, 1]]
    assert read(path, format="wide-votes", inputs=features).votes.tolist() == [[1, 1], [1, 1]]


def test_scores_as_npz(tmp_path, features):
    scores = np.array([[3.0, -1, 0], [0, 0, 5]])
    np.savez(tmp_path / "own.npz", x=np.eye(2), scores=scores, y=[0, 2])
    data = read(tmp_path / "own.npz")
    assert np.array_equal(data.scores, scores.astype(np.float32))
    with pytest.raises(UserError, match=r"scores are below 0.*temperature=1"):
        draw_candidates(data, "top-p:p=0.9", 0)
    assert sets_of(draw_candidates(data, "top-p:p=0.9,temperature=1", 0)) == [{"0"}, {"2"}]
    assert draw_candidates(data, "instance:rate=0.5,temperature=1", 0).candidates[[0, 1], [0, 2]].all()
    np.savez(tmp_path / "joined.npz", scores=scores, ids=["t2", "t1"])
    assert read(tmp_path / "joined.npz", inputs=features).x.tolist() == [[3, 4], [1, 2]]
    assert "the array 'x' is missing; give the file with the inputs" in refused(tmp_path / "joined.npz")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"votes": [[1, -1], [0, 1]]}, "votes: row 0, column 1 is -1; expected a whole number of 0 or more"),
        ({"votes": [[1, 0.5], [0, 1]]}, "votes: row 0, column 1 is 0.5; expected a whole number"),
        ({"scores": [[1, np.nan], [0, 1]]}, "scores: row 0, column 1 is nan; expected a finite number"),
        ({"scores": [[1, 0]]}, "scores: expected one row for each of 2 examples"),
        ({"scores": [1, 0]}, "votes and scores must be tables"),
        ({"votes": [["a", "b"], ["c", "d"]]}, "votes: expected numbers, found"),
        ({"y": [0, 1], "groups": [0]}, "'groups' has 1 entries for 2 classes"),
        ({"y": [0, 1], "mean": [0.5]}, "'mean' must have 3 numbers"),
        ({"y": [0, 1], "flips": 1}, "'flips' must be one true or false"),
        ({"y": [0, 1], "classes": ["a", "a"]}, "classes: 'a' appears twice"),
    ],
)
def test_bad_tables_in_npz(tmp_path, arrays, says):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3)), **arrays)
    assert says in refused(tmp_path / "d.npz")


@pytest.mark.parametrize(("classes", "labels"), [(None, "10"), (["dog", "cat"], ["cat", "dog"])])
def test_true_labels_beside_the_inputs_of_votes_in_npz(tmp_path, classes, labels):
    inputs = put(tmp_path / "x.csv", f"id,label,f\nb,{labels[0]},2\na,{labels[1]},1\n")
    named = {} if classes is None else {"classes": classes}
    np.savez(tmp_path / "v.npz", votes=[[2, 1], [0, 3]], ids=["a", "b"], **named)
    data = read(tmp_path / "v.npz", inputs=str(inputs))
    assert (data.y.tolist(), data.x.tolist(), data.classes) == ([0, 1], [[1], [2]], tuple(classes or "01"))
    put(inputs, "id,label,f\nb,cow,2\na,cow,1\n")
    assert refused(tmp_path / "v.npz", inputs=str(inputs)).startswith(f"{inputs}: label 'cow' is not one of the 2")


def test_true_labels_and_a_test_set_beside_the_inputs_of_scores(tmp_path):
    inputs = put(tmp_path / "x.csv", "id,label,split,f\nb,dog,train,2\na,cat,train,1\nc,dog,test,3\n")
    scores = put(tmp_path / "s.csv", "id,cat,dog\na,0.7,0.3\nb,0.2,0.8\n")
    data = read(scores, inputs=str(inputs))
    assert (data.y.tolist(), data.x.tolist()) == ([0, 1], [[1], [2]])
    assert (data.y_test.tolist(), data.x_test.tolist()) == ([1], [[3]])
    put(inputs, inputs.read_text().replace("c,dog", "c,cow"))
    assert "label 'cow' is not one of the 2 classes" in refused(scores, inputs=str(inputs))


def test_nobody_voted(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.eye(2), votes=[[1, 0], [0, 0]], ids=["a", "b"])
    with pytest.raises(UserError, match=r"example 'b' has no votes \(1 such\)"):
        draw_candidates(read(tmp_path / "d.npz"), None, 0)


# --- inputs on their own, as prediction takes them ----------------------------------------------------------------


def test_inputs_alone(tmp_path, features):
    assert read_inputs(Path(features)).ids == ("t2", "t1", "t9")
    put(tmp_path / "x.jsonl", '{"id": "a", "x": [1, 2]}\n{"id": "b", "x": [3, 4]}')
    assert read_inputs(tmp_path / "x.jsonl").x.tolist() == [[1, 2], [3, 4]]
    picture(tmp_path / "img" / "deep" / "b.png")
    picture(tmp_path / "img" / "a.JPG")
    put(tmp_path / "img" / "notes.txt", "no image")
    picture(tmp_path / "img" / ".hidden" / "c.png")
    found = read_inputs(tmp_path / "img", DataSettings(image_size=3))
    assert (found.ids, found.x.shape) == (("a.JPG", "deep/b.png"), (2, 3, 3, 3))
    with pytest.raises(UserError, match=r"cannot read inputs from '\.txt'"):
        read_inputs(tmp_path / "img" / "notes.txt")
    with pytest.raises(UserError, match="no such file"):
        read_inputs(tmp_path / "nowhere.csv")


def test_a_column_that_is_nearly_called_candidates_is_no_annotator(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,candidate\n1.png,cat|dog\n2.png,dog\n")
    with pytest.raises(UserError, match="column 'candidate' is not 'candidates'; rename it, or"):
        load(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("a,candidate\n1,cat|dog\n2,dog\n")
    found = load(str(tmp_path / "a.csv"), settings=DataSettings(annotators=("candidate",)))
    assert found.votes is not None
