"""csv and jsonl with candidates or labels: what is read, and the place of everything that cannot be."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pytest
from _files import picture, put, read, refused, sets_of

CSV = "id,candidates,label,weight,split,height,width\n" \
    "a,cat|dog,cat,cat:0.7|dog:0.3,train,1.5,2\n" \
    "b, dog ,dog,1,,-3,4e2\n" \
    "c,,cat,,test,0,0\n"  # fmt: skip


def test_csv_with_features(tmp_path):
    data = read(put(tmp_path / "d.csv", CSV))
    assert data.classes == ("cat", "dog")
    assert sets_of(data) == [{"cat", "dog"}, {"dog"}]
    assert data.x.tolist() == [[1.5, 2.0], [-3.0, 400.0]]
    assert (data.y.tolist(), data.ids) == ([0, 1], ("a", "b"))
    assert (data.x_test.tolist(), data.y_test.tolist()) == ([[0.0, 0.0]], [0])
    np.testing.assert_allclose(data.weights, [[0.7, 0.3], [0, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: text.replace("cat|dog", '"cat|dog"'),
        lambda text: text.replace("\nb,", "\n\nb,") + "\n\n",
        lambda text: text.rstrip("\n"),
        lambda text: text.replace("id,", "Task,").replace("label", "Label"),
    ],
    ids=["mark", "windows", "semicolons", "tabs", "quotes", "blank lines", "no last line end", "other names"],
)
def test_csv_as_programs_write_it(tmp_path, change):
    plain, other = read(put(tmp_path / "a.csv", CSV)), read(put(tmp_path / "b.csv", change(CSV)))
    assert plain.fingerprint == other.fingerprint
    assert np.array_equal(plain.candidates, other.candidates)
    assert (plain.ids, plain.y.tolist()) == (other.ids, other.y.tolist())


@pytest.mark.parametrize(
    ("cell", "settings"),
    [
        ("cat|a, b", {}),
        ("['cat', 'a, b']", {}),
        ('["cat", "a, b"]', {}),
        ("[ 'cat','a, b' ]", {}),
        ("{'cat', 'a, b'}", {}),
        ("('cat', 'a, b')", {}),
        ("frozenset({'cat', 'a, b'})", {}),
        ("cat;a, b", {"separator": ";"}),
        ("cat // a, b", {"separator": "//"}),
    ],
)
def test_sets_as_people_and_pandas_write_them(tmp_path, cell, settings):
    quoted = '"' + cell.replace('"', '""') + '"'
    data = read(put(tmp_path / "d.csv", f"candidates,f\n{quoted},1\ncat,2\n"), **settings)
    assert sets_of(data) == [{"cat", "a, b"}, {"cat"}]
    assert data.notes == ()


@pytest.mark.parametrize(
    "cell", ["[cat]", "['cat'", "[['a'], 'b']", "[007]", "['a' 'b']", "[1, 2, x]", "['\\x']", "(1)"]
)
def test_what_is_not_quite_a_list_is_a_name(tmp_path, cell):
    data = read(put(tmp_path / "d.csv", f'candidates,f\n"{cell}",1\ncat,2\n'))
    assert sets_of(data) == [{cell}, {"cat"}]


@pytest.mark.parametrize("cell", ["['a' 'b']", "{a, b}", "[a; b]"])
def test_what_looks_like_a_list_is_told_of(tmp_path, cell):
    (note,) = read(put(tmp_path / "d.csv", f'candidates,f\n"{cell}",1\ncat,2\n')).notes
    assert "looks like several; write cat|dog, or ['cat', 'dog']" in note


def test_what_looks_like_a_list_is_told_of_beside_sets_of_several_labels_and_votes(tmp_path):
    said = "class \"['a' 'b']\" looks like several; write cat|dog, or ['cat', 'dog']"
    assert read(put(tmp_path / "d.csv", "candidates,f\n['a' 'b'],1\ncat|dog,2\n")).notes == (said,)
    assert said in read(put(tmp_path / "v.csv", "id,f,anna,ben\na,1,['a' 'b'],cat\nb,2,dog,cat\n")).notes


def test_a_column_of_sets_that_is_named_label_is_told_of(tmp_path):
    data = read(put(tmp_path / "d.csv", "label,f\n\"['a', 'b']\",1\n['a'],2\n"))
    assert data.notes == ("class \"['a', 'b']\" looks like several; name a column of sets 'candidates'",)


@pytest.mark.parametrize("cell", ["", "[]", "()", "set()", " {} ", "frozenset()", "[nan]", "{NaN}", "[None]", "[<NA>]"])
def test_an_empty_set_is_one_however_it_is_written(tmp_path, cell):
    path = put(tmp_path / "d.csv", f"candidates,f\n{cell},1\ncat,2\n")
    assert "line 2, column 'candidates': an empty set" in refused(path)
    assert read(path, skip_bad=True).ids == ("1",)


def test_names_of_what_is_not_known_are_told_of(tmp_path):
    path = put(tmp_path / "d.csv", "candidates,label,f\nNA|cat,cat,1\ncat|dog,nan,2\n")
    assert read(path).notes == (
        "taken as classes: 'NA', 'nan'; if this means that the label is unknown, leave such cells blank",
    )
    assert read(path, classes=("NA", "cat", "dog", "nan")).notes == ()
    said = "taken as classes: '-1'; if this means that the label is unknown, leave such cells blank"
    for sets, notes in (("0|-1,1|2", (said,)), ("0|-1,1", (said,)), ("1|-1,1", ()), ("-2|-1,0|1", ())):
        assert read(put(path, "candidates,f\n" + "".join(f"{cell},1\n" for cell in sets.split(",")))).notes == notes


def test_what_is_missing_in_a_list_is_no_label(tmp_path):
    path = put(tmp_path / "d.csv", "candidates;f\n['cat', nan];1\n['dog'];2\n")
    assert "line 2, column 'candidates': 'nan' is not a label" in refused(path)
    assert "'None' is not a label" in refused(put(path, 'candidates;f\n["cat", null];1\n'))
    rows = '{"candidates": [null], "f": 1}\n{"candidates": [NaN], "f": 1}\n{"candidates": ["cat"], "f": 2}\n'
    path = put(tmp_path / "d.jsonl", rows)
    assert "line 1, column 'candidates': an empty set" in refused(path)
    assert read(path, skip_bad=True).ids == ("2",)
    assert sets_of(read(put(tmp_path / "d.csv", "candidates;f\n[1.0, 2];1\n[2.0];2\n"))) == [{"1", "2"}, {"2"}]


def test_true_labels_under_another_name(tmp_path):
    data = read(put(tmp_path / "d.csv", "candidates,Truth,f\ncat|dog,cat,1\ndog,dog,2\n"))
    assert (data.y.tolist(), data.columns) == ([0, 1], ("f",))
    data = read(put(tmp_path / "d.csv", "candidates,Target,f\n0|1,0,1\n1,1,2\n"))
    assert data.notes == ("feature 'Target': if it is the true label, name it 'label'",)
    assert (
        read(put(tmp_path / "d.jsonl", '{"candidates": [0, 1], "f": 1, "y": 1}\n')).notes[0].startswith("feature 'y'")
    )
    assert read(put(tmp_path / "d.csv", "candidates,x,y\n0|1,0,1\n1,1,2\n")).notes == (), "y beside x is a place"
    bad = put(tmp_path / "d.csv", "candidates,truth,split,f\ncat|dog,cat,,1\n,,test,2\n")
    assert "line 3, column 'truth': a test row needs its true label" in refused(bad)
    data = read(put(tmp_path / "d.csv", "candidates,truth,label,f\ncat|dog,cat,dog,1\ndog,dog,dog,2\n"))
    assert data.y.tolist() == [1, 1]
    assert data.notes == ("column 'truth' is not used: true labels are those in 'label'; keep one of the two",)


def test_true_labels_in_jsonl_may_be_missing_or_come_late(tmp_path):
    rows = [{"path": f"{i}.png", "candidates": ["cat", "dog"]} for i in range(3)]
    for row in rows:
        picture(tmp_path / row["path"])
    rows[1]["truth"] = "cat"
    data = read(put(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows))))
    assert data.notes == ("some rows have no label (line 1 is the first); true labels are not used",)
    rows[0]["truth"], rows[2]["truth"], rows[2]["split"] = "dog", "cat", "test"
    data = read(put(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows))))
    assert (data.y.tolist(), data.y_test.tolist()) == ([1, 0], [0])


def test_a_code_with_an_underscore_is_no_number(tmp_path):
    said = "line 3, column 'f': '2_1' is not a number"
    assert said in refused(put(tmp_path / "d.csv", "candidates,f,g\ncat|dog,1,1\ndog,2_1,1\n"))


@pytest.mark.parametrize("mark", [",", ";", "/", " "])
def test_a_forgotten_separator_is_noticed(tmp_path, mark):
    path = put(tmp_path / "d.csv", f'candidates,f\n"cat{mark}dog",1\ncat,2\ndog,3\n')
    (note,) = read(path).notes
    assert f"'cat{mark}dog' looks like several; to split it: --set 'data.separator=\"{mark}\"'" in note
    assert sets_of(read(path, separator=mark)) == [{"cat", "dog"}, {"cat"}, {"dog"}]


def test_a_wrong_separator_is_noticed(tmp_path):
    (note,) = read(put(tmp_path / "d.csv", "candidates,f\ncat|dog,1\ncat,2\ndog,3\n"), separator=";").notes
    assert note.endswith("'cat|dog' looks like several; to split it: --set 'data.separator=\"|\"'")


@pytest.mark.parametrize("mark", [",", ";", "/"])
def test_a_forgotten_separator_is_noticed_where_all_sets_have_several_labels(tmp_path, mark):
    path = put(tmp_path / "d.csv", f'candidates,f\n"cat{mark}dog",1\n"dog{mark}fox",2\n"cat{mark}fox",3\n')
    (note,) = read(path).notes
    assert f"looks like several; to split it: --set 'data.separator=\"{mark}\"'" in note
    assert sets_of(read(path, separator=mark)) == [{"cat", "dog"}, {"dog", "fox"}, {"cat", "fox"}]


def test_names_that_hold_a_comma_are_no_lists(tmp_path):
    assert read(put(tmp_path / "a.csv", 'candidates,f\n"Rome, Italy",1\n"Pisa, Italy",2\n"a/a",3\n')).notes == ()
    assert read(put(tmp_path / "b.csv", "candidates,f\nfox terrier,1\nred fox,2\n")).notes == ()
    assert read(put(tmp_path / "d.csv", 'candidates,f\n"hare, brown",1\n"hare, white",2\n')).notes == ()
    assert read(put(tmp_path / "e.csv", 'candidates,f\n"a,b|c",1\na,2\nb,3\n')).notes == (), "there are sets of two"


@pytest.mark.parametrize(
    ("cells", "pairs"),
    [(("01", "1"), 1), (("1", "1.0"), 1), (("Cat", "cat"), 1), (("1", "2", "10"), 0), (("a", "b"), 0),
     (("New York", "new_york"), 1), (("١", "1"), 0), (("-nan", "inf"), 0), (tuple("abcdeABCDE"), 4)],
)  # fmt: skip
def test_classes_that_may_be_one_are_told(tmp_path, cells, pairs):
    path = put(tmp_path / "d.csv", "candidates,f\n" + "".join(f"{cell},{i}\n" for i, cell in enumerate(cells)))
    notes = read(path).notes
    assert len(notes) == pairs
    if pairs == 4:
        assert notes[-1] == "… and 2 more such pairs"
    elif pairs:
        pair = f"'{min(cells)}' and '{max(cells)}'"
        assert notes[0] == f"classes {pair} are treated as different; if they are the same class, spell them alike"


def test_paths_with_blanks_from_windows_and_from_the_root(tmp_path):
    picture(tmp_path / "my photos" / "a b.png", (0, 0, 255))
    for number, cell in enumerate(
        (
            "my photos/a b.png",
            "my photos\\a b.png",
            f"{tmp_path}/my photos/a b.png",
            f"file://{tmp_path}/my photos/a b.png",
        )
    ):
        data = read(put(tmp_path / f"{number}.csv", f"path,label\n{cell},a\n"))
        assert data.x[0, :, 0, 0].tolist() == [0, 0, 255]
        assert data.ids == (cell,)


def test_an_index_column_of_pandas_is_no_feature(tmp_path):
    data = read(put(tmp_path / "d.csv", ",label,f\n0,a,1\n1,b,2\n"))
    assert data.x.tolist() == [[1.0], [2.0]]
    assert data.candidates is None
    assert data.y.tolist() == [0, 1]


def test_only_the_first_column_can_be_the_index_of_pandas(tmp_path):
    """A frame that went through a file twice has two of them; Unnamed: 3 may be a feature."""
    text = ",Unnamed: 0.1,Unnamed: 0,Unnamed: 3,label\n0,0,0,7,a\n1,1,1,8,b\n"
    data = read(put(tmp_path / "d.csv", text))
    assert (data.x.tolist(), data.columns) == ([[7], [8]], ("Unnamed: 3",))


def test_whole_numbers_as_pandas_writes_them_beside_blanks(tmp_path):
    path = put(tmp_path / "d.csv", "candidates,label,f,split\n1|3,,1,train\n10,,2,train\n3,3.0,3,test\n1,10.0,4,test\n")
    data = read(path)
    assert (data.classes, data.y_test.tolist()) == (("1", "3", "10"), [1, 2])
    named = read(put(tmp_path / "n.csv", "label,f\n3.0,1\n1.0,2\n"), classes=("1.0", "3.0"))
    assert named.y.tolist() == [1, 0], "if classes are named so, they stay"
    lines = '{"candidates": [1, 3.0], "label": 3.0, "f": 1}\n{"candidates": 10.0, "label": 10, "f": 2}\n'
    data = read(put(tmp_path / "d.jsonl", lines))
    assert (data.classes, sets_of(data), data.y.tolist()) == (("1", "3", "10"), [{"1", "3"}, {"10"}], [1, 2])
    assert read(put(tmp_path / "v.csv", "label,f\n3.0,1\n3.1,2\n")).classes == ("3.0", "3.1"), "other numbers, too"


def test_lists_of_long_numbers(tmp_path):
    long = 10**39
    data = read(put(tmp_path / "d.csv", f'candidates,f\n"[{long}, {long + 1}]",1\n"[{long}]",2\n'))
    assert sets_of(data) == [{str(long), str(long + 1)}, {str(long)}]


def test_class_order(tmp_path):
    rows = "".join(f"{name},1\n" for name in ("10", "9", "-2", "b", "a"))
    assert read(put(tmp_path / "d.csv", "label,f\n" + rows)).classes == ("-2", "9", "10", "a", "b")
    given = read(tmp_path / "d.csv", classes=("b", "a", "10", "9", "-2", "unused"))
    assert given.y.tolist() == [2, 3, 4, 0, 1]
    assert "line 2, column 'label': '10' is not one of the 2 classes" in refused(tmp_path / "d.csv", classes=("a", "b"))
    assert "'data.classes': 'b' appears twice" in refused(tmp_path / "d.csv", classes=("a", "b", "b"))


def test_csv_with_images(tmp_path):
    picture(tmp_path / "img" / "red.png", (255, 0, 0))
    picture(tmp_path / "img" / "blue.png", (0, 0, 255))
    path = put(tmp_path / "d.csv", "path,candidates,date\nimg/red.png,a|b,monday\nimg/blue.png,b,tuesday\n")
    data = read(path, image_size=5)
    assert data.x.shape == (2, 3, 5, 5)
    assert data.x[0, :, 2, 2].tolist() == [255, 0, 0]
    assert data.x[1, :, 2, 2].tolist() == [0, 0, 255]
    assert data.ids == ("img/red.png", "img/blue.png")
    other = put(tmp_path / "lists" / "d.csv", path.read_text())
    assert "no such image file" in refused(other)
    assert read(other, image_root=str(tmp_path)).n == 2


def test_inputs_from_elsewhere_are_refused_where_they_would_not_be_used(tmp_path):
    x = str(put(tmp_path / "x.csv", "id,f\na,1\nb,2\n"))
    for name, text in (
        ("d.csv", "id,candidates,f\na,cat|dog,1\nb,dog,2\n"),
        ("d.csv", "id,label\na,cat\nb,dog\n"),
        ("d.jsonl", '{"id": "a", "f": 1, "candidates": ["cat"]}\n'),
    ):
        assert f"{name}, line 1: data.inputs is for votes and scores; rows with" in refused(
            put(tmp_path / name, text), inputs=x
        )
    np.savez(tmp_path / "d.npz", x=np.ones((2, 1)), scores=np.eye(2), ids=["a", "b"])
    assert "d.npz: it has its inputs already" in refused(tmp_path / "d.npz", inputs=x)


def test_jsonl_is_the_same_data(tmp_path):
    rows = [
        {"id": "a", "candidates": ["cat", "dog"], "label": "cat", "weight": {"cat": 0.7, "dog": 0.3}, "h": 1.5, "w": 2},
        {"id": "b", "candidates": "dog", "label": "dog", "weight": [1], "h": -3, "w": 400.0},
        {"id": "c", "candidates": None, "label": "cat", "split": "test", "h": 0, "w": 0},
    ]
    path = put(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)))
    one, other = read(path), read(put(tmp_path / "d.csv", CSV))
    assert one.fingerprint == other.fingerprint
    assert np.array_equal(one.candidates, other.candidates)
    assert np.array_equal(one.weights, other.weights)
    assert (one.ids, one.y.tolist(), one.y_test.tolist()) == (other.ids, other.y.tolist(), other.y_test.tolist())


def test_jsonl_with_a_list_of_features_and_numbers_as_labels(tmp_path):
    data = read(
        put(tmp_path / "d.jsonl", '{"x": [1, 2.5], "candidates": [3, 10]}\n\n{"x": [0, 1], "candidates": [10]}')
    )
    assert data.x.tolist() == [[1.0, 2.5], [0.0, 1.0]]
    assert data.classes == ("3", "10")
    assert data.candidates.tolist() == [[True, True], [False, True]]


def test_long_numbers_are_ids_as_they_are(tmp_path):
    ids = (1234567890123456789, 2**128 - 1)
    rows = "\n".join(f'{{"id": {number}, "f": 1, "candidates": ["a"]}}' for number in ids)
    assert read(put(tmp_path / "d.jsonl", rows)).ids == tuple(map(str, ids))


def test_weights_alone_make_the_sets(tmp_path):
    data = read(put(tmp_path / "d.csv", "weight,f\nice:new:0.5|water:0|first:2,1\n"))
    assert sets_of(data) == [{"ice:new", "first"}]


def test_labels_that_are_not_all_there_are_no_truth(tmp_path):
    data = read(put(tmp_path / "d.csv", "candidates,label,f\na|b,a,1\na,,2\n"))
    assert data.y is None
    assert data.notes == ("some rows have no label (line 3 is the first); true labels are not used",)


def test_an_odd_path_list_keeps_its_rows(tmp_path):
    """The same image twice is no error, but then the paths are no ids, which is told."""
    picture(tmp_path / "a.png")
    path = put(tmp_path / "d.csv", "path,label\na.png,x\na.png,y\n")
    data = read(path)
    assert (data.n, data.ids) == (2, None)
    (note,) = data.notes
    assert note.startswith(f"{path}, line 3, column 'path': the same image as in line 2 (repeated rows: 1)")
    assert "--set data.skip_bad=true" in note


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_bad_rows_are_left_out_where_that_is_asked_for(tmp_path, ending):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    picture(tmp_path / "t.png")
    put(tmp_path / "broken.png", "no picture")
    rows = [
        ("a.png", ["x", "y"], "", "train"), ("broken.png", ["x"], "", "train"), ("b.png", [], "", "train"),
        ("b.png", ["y"], "", "train"), ("a.png", ["x"], "", "train"), ("nowhere.png", ["x"], "", "train"),
        ("t.png", [], "y", "test"),
    ]  # fmt: skip
    names = ("path", "candidates", "label", "split")
    path = tmp_path / f"d.{ending}"
    if ending == "csv":
        lines = [",".join(names), *(f"{p},{'|'.join(sets)},{label},{split}" for p, sets, label, split in rows)]
        first_line = 2
    else:
        lines, first_line = [json.dumps(dict(zip(names, row, strict=True))) for row in rows], 1
    put(path, "\n".join(lines))
    data = read(path, skip_bad=True, image_size=4)
    assert data.ids == ("a.png", "b.png")
    assert sets_of(data) == [{"x", "y"}, {"y"}]
    assert data.x.shape == (2, 3, 4, 4)
    assert (len(data.x_test), data.y_test.tolist()) == (1, [1])
    empty, again, images = data.notes
    assert empty == f"rows with an empty set, left out: 1 ({path}, line {first_line + 2})"
    assert again == f"rows with the path or id of an earlier one, left out: 1 ({path}, line {first_line + 4})"
    assert images.startswith(f"inputs that cannot be read, left out: 2 ({path}, line {first_line + 1}, column 'path'")
    assert refused(path).endswith(
        "an empty set; give it at least one label, or leave such rows out: --set data.skip_bad=true"
    )


def test_skipping_leaves_good_rows_alone_and_all_bad_ones_are_an_error(tmp_path):
    picture(tmp_path / "a.png")
    good = put(tmp_path / "good.csv", "path,candidates\na.png,x|y\n")
    assert read(good, skip_bad=True).notes == ()
    assert "line 2, column 'path'" in refused(put(tmp_path / "bad.csv", "path,candidates\nb.png,x\n"), skip_bad=True)
    assert "no row can be used; all have" in refused(
        put(tmp_path / "e.csv", "path,candidates\na.png,\n"), skip_bad=True
    )
    features = read(put(tmp_path / "f.csv", "id,candidates,f\n1,x,1\n1,y,2\n2,y,3\n3,[],4\n"), skip_bad=True)
    assert (features.ids, features.x.tolist()) == (("1", "2"), [[1.0], [3.0]])


def test_rows_without_a_name_keep_their_numbers_when_others_are_left_out(tmp_path):
    rows = "f,candidates,label,split\n0,x,x,\n1,,x,\n9,,x,test\n2,y,x,\n3,[],x,\n4,x|y,x,\n"
    data = read(put(tmp_path / "d.csv", rows), skip_bad=True)
    assert data.x[:, 0].tolist() == [0, 2, 4]
    assert [data.example_id(row) for row in range(data.n)] == ["0", "2", "4"]
    filled = read(put(tmp_path / "d.csv", rows.replace(",,x,\n", ",y,x,\n").replace("[]", "y")))
    assert [filled.example_id(row) for row in (0, 2, 4)] == ["0", "2", "4"]  # the numbers that they have in any case
    assert filled.x[[0, 2, 4], 0].tolist() == [0, 2, 4]


def test_a_path_that_starts_elsewhere_says_which_setting_helps(tmp_path):
    picture(tmp_path / "photos" / "a.png")
    path = put(tmp_path / "d.csv", "path,label\na.png,x\n")
    assert refused(path).endswith(
        "no such image file; if paths are relative to another folder: --set data.image_root=FOLDER"
    )
    assert read(path, image_root=str(tmp_path / "photos")).ids == ("a.png",)


@pytest.mark.parametrize(("there", "listed"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_of_a_path_may_be_one_character_or_two(tmp_path, there, listed):
    picture(tmp_path / unicodedata.normalize(there, "été.png"))
    cell = unicodedata.normalize(listed, "été.png")
    assert read(put(tmp_path / "d.csv", f"path,label\n{cell},x\n")).ids == (cell,)


@pytest.mark.parametrize("mark", ["\u200b", "\ufeff", "\u00ad"])
def test_characters_without_width_are_told_of(tmp_path, mark):
    (note,) = read(put(tmp_path / "d.csv", f"candidates,f\ncat|dog,1\n{mark}cat,2\nc{mark}at|dog,3\ncat,4\n")).notes[:1]
    assert f"classes 'cat' and {'c' + mark + 'at'!a} are treated as different" in note


def test_names_that_only_look_the_same_are_told_apart_in_ascii(tmp_path):
    cells = [unicodedata.normalize(form, "zéro") for form in ("NFC", "NFD")]
    (note,) = read(put(tmp_path / "d.csv", f"candidates,f\n{cells[0]},1\n{cells[1]},2\n")).notes
    assert note.startswith("classes 'ze\\u0301ro' and 'z\\xe9ro' are treated as different")


H = "id,candidates,f,g\n"
BAD_CSV = {
    "empty": ("", "line 1: cannot read '.csv' without a line of column names"),
    "header only": (H, "line 2: there are no rows below the column names"),
    "no meaning": ("f,g\n1,2\n", "line 1: cannot read '.csv' without a column 'candidates' or 'label'"),
    "nearly": ("candidtes,g\na|b,2\n", "line 1: there is no column 'candidates' (did you mean 'candidtes'?); rename"),
    "word": (H + "a,x,1,2\nb,x,1,two\n", "line 3, column 'g': 'two' is not a number"),
    "decimal comma": ("label;f\na;1,5\n", "line 2, column 'f': '1,5' is not a number; write decimals with a point"),
    "old Mac": ("label,f\ra,1\r", "line 1: not a valid csv row (it has bare CR line ends"),
    "blank": (H + "a,x,,2\n", "line 2, column 'f': empty; fill it in or drop the row"),
    "nan": (H + "a,x,1,2\nb,x,nan,2\n", "line 3, column 'f': NaN; fill it in"),
    "infinite": (H + "a,x,1,-inf\n", "line 2, column 'g': an infinite value"),
    "too large": (H + "a,x,1,1e300\n", "line 2, column 'g': 1e+300 is too large"),
    "after a field of two lines": (H + '"a\nb",x,1,2\n', "line 2, column 'id': name 'a\\nb' holds a character"),
    "line after such a field": (H + 'a,"x\n",1,2\nb,x,1,?\n', "line 4, column 'g': '?' is not a number"),
    "same id": (H + "a,x,1,2\nb,x,1,2\na,y,3,4\n", "line 4, column 'id': id 'a' was already given in line 2"),
    "short row": (H + "a,x,1\n", "line 2, column 3: 3 cells for 4 columns; fill in the rest"),
    "long row": (H + "a,x,1,2,3\n", "line 2, column 5: 5 cells for 4 columns; put a cell that contains"),
    "open quote": (H + 'a,x,1,2\n"b,x,1,2\n', "line 3: not a valid csv row (a quote is opened here"),
    "empty set": (H + "a,,1,2\n", "line 2, column 'candidates': an empty set; give it at least one label"),
    "unseen": (H + "a,x|\u200b,1,2\n", "line 2, column 'candidates': an empty label"),
    "empty part": (H + "a,x||y,1,2\n", "line 2, column 'candidates': an empty label"),
    "label twice": (H + "a,x|y|x,1,2\n", "line 2, column 'candidates': label 'x' appears twice"),
    "huge field": (H + "a," + "x" * 200_000 + ",1,2\n", "line 2: not a valid csv row (field larger"),
    "long label": (H + "a," + "x" * 2000 + ",1,2\n", "column 'candidates': a label of 2000 characters"),
    "same column": ("id,f,candidates,f\n", "line 1: columns 2 and 4 are both named 'f'"),
    "same meaning": ("id,item,candidates\n1,2,3\n", "line 1, column 2: 'id' and 'item' mean the same"),
    "voters": (
        "task,performer,label\nt,w,a\n",
        "column 'performer': 'w' is not a number; correct it, or drop the row or the column; if rows are votes, name "
        "their columns task, worker and label",
    ),
    "photo": ("photo,candidates\n1.JPG,x\n", "column 'photo': '1.JPG' seems to be an image; name the column 'path'"),
    "photo and voters": ("photo,ann,ben\n1.png,x,\n", "line 2, column 'photo': '1.png' seems to be an image; name"),
    "photo, votes in rows": ("photo,worker,label\n1.png,w,x\n", "column 'photo': '1.png' seems to be an image; name"),
    "photo beside an id": ("id,photo,ann,ben\n1,1.png,x,y\n", "column 'photo': '1.png' seems to be an image; name"),
    "one number": ("path,category\na.png,3\n", "line 1: 'category' alone is not a table of scores, which has"),
    "no inputs": ("item,candidates\na,x\n", "columns of numbers; if 'item' holds the names of images, name it 'path'"),
    "split": ("label,split,f\na,val,1\n", "line 2, column 'split': 'val' is neither train nor test"),
    "only tests": ("label,split,f\na,test,1\n", "all rows are for testing"),
    "test without label": (
        "candidates,label,split,f\na,a,,1\n,,test,1\n",
        "line 3, column 'label': a test row needs its true label",
    ),
    "label missing": (
        "label,f\na,1\n,2\n",
        "line 3, column 'label': no label, though other rows have one; fill it in, or leave the row out",
    ),
    "all labels missing": (
        "label,f\n,1\n,2\n",
        "line 2, column 'label': no label, and there is no column 'candidates'; add one of them",
    ),
    "candidate, and no label": (
        "path,label,candidate\na.png,,a|b\n",
        "column 'label': no label, and there is no column 'candidates' (did you mean 'candidate'?); add one of them",
    ),
    "candidate, and a label missing": (
        "path,label,candidate\na.png,a,a|b\nb.png,,a|b\n",
        "line 3, column 'label': no label, and there is no column 'candidates' (did you mean 'candidate'?); add one",
    ),
    "candidate beside features": (
        "candidate,label,f\na|b,,1\n",
        "column 'candidate': 'a|b' is not a number; correct it, or drop the row or the column; there is no column "
        "'candidates' (did you mean 'candidate'?)",
    ),
    "candidate and features alone": ("Candidate,f\na|b,1\n", "no column 'candidates' (did you mean 'Candidate'?)"),
    "weight code": ("candidates,weight,f\na|b,1_0|1,1\n", "line 2, column 'weight': weight '1_0' is not a number"),
    "weight word": ("candidates,weight,f\na|b,a:x|b:1,1\n", "line 2, column 'weight': weight 'x' is not a number"),
    "weight below 0": ("candidates,weight,f\na|b,1|-1,1\n", "line 2, column 'weight': weight -1"),
    "weight count": ("candidates,weight,f\na|b,1,1\n", "line 2, column 'weight': 1 weights for 2 candidates"),
    "weight outside": ("candidates,weight,f\na|b,c:1,1\n", "line 2, column 'weight': a weight for 'c'"),
    "not utf-8": (b"label,f\na,1\nb\xff,2\n", "line 3, column 2: not UTF-8 text"),
    "utf-16": ("label,f\na,1\n".encode("utf-16"), "line 1: this is UTF-16"),
    "no image": ("path,label\nnone.png,a\n", "line 2, column 'path'"),
    "address": ("path,label\nhttps://a.org/b.png,a\n", "line 2, column 'path': 'https://a.org/b.png' is an address"),
    "path of two lines": ('path,label\n"a\nb",a\n', "line 2, column 'path': not a path to an image"),
    "blank path": ("path,label\n ,a\n", "line 2, column 'path': ' ' is not a path"),
}  # fmt: skip


BAD_JSONL = {
    "empty": ("", "line 1: there are no rows"),
    "half a line": ('{"x": [1], "label": "a"}\n{"x": [1', "line 2, column 9: not valid JSON"),
    "half a line and its end": ('{"x": [1\n{"x": [1], "label": "a"}\n', "line 1, column 9: not valid JSON"),
    "a list": ("[1]\n", "line 1, column 1: expected an object"),
    "no labels": ('{"x": [1]}\n', "line 1: there is no 'candidates' and no 'label'"),
    "candidate": ('{"x": [1], "candidate": ["a"]}\n', "line 1: there is no 'candidates' (did you mean 'candidate'?)"),
    "candidate of an image": (
        '{"path": "a.png", "candidate": ["a"]}\n', "no 'candidates' (did you mean 'candidate'?) and no 'label'; add",
    ),
    "other length": ('{"x": [1], "label": "a"}\n{"x": [1, 2], "label": "a"}', "line 2, column 'x': 2 numbers, where"),
    "no list": ('{"x": [1, 2], "label": "a"}\n{"x": 0.5, "label": "a"}', "line 2, column 'x': 1 number, where"),
    "missing": ('{"f": 1, "g": 2, "label": "a"}\n{"f": 1, "label": "a"}', "line 2, column 'g': missing"),
    "one more": ('{"f": 1, "label": "a"}\n{"f": 1, "g": 1, "label": "a"}', "line 2, column 'g': not in the first row"),
    "text": ('{"f": "one", "label": "a"}', "line 1, column 'f': 'one' is not a number"),
    "photo": ('{"photo": "1.png", "label": "a"}', "line 1, column 'photo': '1.png' seems to be an image; name the"),
    "list in list": ('{"x": [[1]], "label": "a"}', "line 1, column 'x': '[1]' is not a number"),
    "large number": ('{"x": [1' + "0" * 400 + '], "label": "a"}', "line 1, column 'x': a number too large"),
    "endless number": ('{"x": [' + "1" * 9000 + '], "label": "a"}', "line 1, column 1: not usable JSON"),
    "nan": ('{"f": NaN, "label": "a"}', "line 1, column 'f': NaN"),
    "deep": ("[" * 100_000, "line 1, column 1: not usable JSON (too deeply nested)"),
    "label is a list": ('{"f": 1, "label": ["a"]}', "line 1, column 'label': \"['a']\" is not a label"),
    "label is true": ('{"f": 1, "label": true}', "line 1, column 'label': 'True' is not a label"),
    "half a character": ('{"f": 1, "label": "\\ud800"}', "line 1, column 'label': label '\\ud800' holds a character"),
    "id is true": ('{"f": 1, "label": "a", "id": true}', "line 1, column 'id': 'True' is not a name; expected text or"),
    "endless id": ('{"f": 1, "label": "a", "id": 1' + "0" * 40 + "}", "a number of more than 40 digits is not a name"),
    "no set": ('{"f": 1, "candidates": []}', "line 1, column 'candidates': an empty set"),
    "set of sets": ('{"f": 1, "candidates": [["a"]]}', "line 1, column 'candidates': \"['a']\" is not a label"),
    "split": ('{"f": 1, "label": "a", "split": 3}', "line 1, column 'split': '3' is neither train nor test"),
    "path is a number": ('{"path": 1, "label": "a"}', "line 1, column 'path': '1' is not a path"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"), [("d.csv", case) for case in BAD_CSV] + [("d.jsonl", case) for case in BAD_JSONL]
)
def test_bad_tables_are_named_with_their_place(tmp_path, name, case):
    content, says = (BAD_CSV if name == "d.csv" else BAD_JSONL)[case]
    path = put(tmp_path / name, content)
    text = refused(path)
    assert text.startswith(str(path))
    assert says in text


def test_an_endless_line_is_not_read_to_its_end(tmp_path):
    path = put(tmp_path / "d.csv", b"label,f\n" + b"a" * (40 << 20))
    assert "line 2: longer than 16 MiB" in refused(path)


def test_too_many_classes_for_the_memory(tmp_path, monkeypatch):
    path = put(tmp_path / "d.csv", "candidates,f\n" + "".join(f"c{i},1\n" for i in range(3000)))
    assert read(path).candidates.shape == (3000, 3000)
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.005")
    assert (
        "a table of 3,000 examples and 3,000 classes would take 8.6 MiB of memory, more than the limit of 5.1 MiB"
        in (refused(path))
    )
