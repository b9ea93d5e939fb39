"""Rules from raw annotation to candidate sets, against slow versions; class trees; the one entry point."""

from __future__ import annotations

import numpy as np
import pytest
from _files import put, read, sets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from crosel.data import candidates, draw_candidates, full_rule, load, with_classes_of
from crosel.data.candidates import at_least, parse_rule, top_m, top_p
from crosel.data.dataset import hold_out, make_dataset
from crosel.data.settings import DataSettings
from crosel.data.tree import read_tree
from crosel.errors import UserError

SHAPE = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6)


@given(hnp.arrays(np.int32, SHAPE, elements=st.integers(0, 4)), st.integers(1, 5))
@settings(max_examples=60)
def test_at_least_by_hand(votes, least):
    for row, found in zip(votes.tolist(), at_least(votes, least).tolist(), strict=True):
        enough = [v >= least for v in row]
        most = [v == max(row) and v > 0 for v in row]
        assert found == (enough if any(enough) else most)


@given(hnp.arrays(np.float64, SHAPE, elements=st.sampled_from([-1.0, 0.0, 0.25, 0.5, 2.0])), st.integers(1, 7))
@settings(max_examples=60)
def test_top_m_by_hand(scores, m):
    for row, found in zip(scores.tolist(), top_m(scores, m).tolist(), strict=True):
        best = sorted(range(len(row)), key=lambda j: (-row[j], j))[:m]
        assert found == [j in best for j in range(len(row))]


@given(
    hnp.arrays(np.float64, SHAPE, elements=st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0])),
    st.sampled_from([0, 0.5, 0.9, 1]),
)
@settings(max_examples=60)
def test_top_p_by_hand(scores, p):
    for row, found in zip(scores.tolist(), top_p(scores, p).tolist(), strict=True):
        total, mass, best = sum(row) or 1.0, 0.0, []
        for j in sorted(range(len(row)), key=lambda j: (-row[j], j)):
            if best and mass >= p - 1e-9:
                break
            best.append(j)
            mass += row[j] / total
        assert found == [j in best for j in range(len(row))] or sum(row) == 0


def test_top_p_with_a_temperature_is_a_softmax():
    scores = np.log([[0.7, 0.2, 0.1]])
    assert top_p(scores, 0.85, temperature=1).tolist() == [[True, True, False]]
    assert top_p(scores, 0.85, temperature=0.1).tolist() == [[True, False, False]]
    assert top_p(scores, 0.85, temperature=100).tolist() == [[True, True, True]]
    assert top_p([[1e4, -1e4]], 0.9, temperature=1).tolist() == [[True, False]]


@pytest.mark.parametrize("chunk", [1, 10, 1 << 22])
def test_rules_do_not_depend_on_chunks(chunk, monkeypatch):
    scores = np.random.default_rng(0).random((50, 7))
    votes = np.random.default_rng(0).integers(0, 3, (50, 7))
    expected = [top_m(scores, 3), top_p(scores, 0.6), at_least(votes, 2)]
    monkeypatch.setattr(candidates, "_CHUNK", chunk)
    for one, other in zip(expected, [top_m(scores, 3), top_p(scores, 0.6), at_least(votes, 2)], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    "text", ["union", "votes:min=2", "top-m:m=3", "top-p:p=0.9,temperature=0", "instance:rate=0.4,temperature=0,eta=0",
             "tree:file=a, b=c.yaml"],
)  # fmt: skip
def test_rules_are_parsed_and_written(text):
    assert str(parse_rule(text)) == text
    assert parse_rule(str(parse_rule(text))) == parse_rule(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("votes", "needs min, as in 'votes:min=2'"),
        ("votes:min=1.5", "'min=1.5' needs a whole number of at least 1, as in 'min=2'"),
        ("votes:min=0", "needs a whole number of at least 1"),
        ("top-m:m=inf", "needs a whole number"),
        ("top-m:m=nan", "needs a whole number"),
        ("top-p", "needs p, as in 'top-p:p=0.5'"),
        ("union:x=1", "unknown value 'x'; 'union' takes no values"),
        ("tree", "needs the file with the class tree, as in 'tree:file=classes.yaml'"),
        ("tree:file=", "needs the file with the class tree"),
        ("top-k:k=3", "unknown candidate rule 'top-k'"),
    ],
)
def test_bad_rules(text, says):
    with pytest.raises(UserError) as caught:
        parse_rule(text)
    assert says in str(caught.value)


X = np.eye(3)


def test_every_rule_through_the_one_entry_point():
    y, scores = [0, 1, 2], np.array([[8.0, 1, 1], [0, 5, 5], [1, 1, 8]])
    data = make_dataset(X, y=y, votes=[[2, 1, 0], [0, 1, 1], [0, 0, 3]], scores=scores, groups=(0, 0, 1))
    assert draw_candidates(data, None, 0).candidates.tolist() == (data.votes > 0).tolist()
    assert draw_candidates(data, "union", 0).candidates.tolist() == (data.votes > 0).tolist()
    assert sets_of(draw_candidates(data, "votes:min=2", 0)) == [{"0"}, {"1", "2"}, {"2"}]
    assert sets_of(draw_candidates(data, "top-m:m=1", 0)) == [{"0"}, {"1"}, {"2"}]
    assert sets_of(draw_candidates(data, "top-p:p=0.75", 0)) == [{"0"}, {"1", "2"}, {"2"}]
    assert sets_of(draw_candidates(data, "superclass:q=1", 0)) == [{"0", "1"}, {"0", "1"}, {"2"}]
    assert draw_candidates(data, "instance:rate=9", 0).candidates.tolist() == [[1, 1, 1], [0, 1, 1], [1, 1, 1]]
    dropped = draw_candidates(data, "instance:rate=9,eta=1", 0)
    assert not dropped.candidates[[0, 1, 2], y].any()
    for rule in ("votes:min=1", "uniform:q=0.5", "instance:rate=1", "uniform-sets"):
        assert draw_candidates(data, rule, 3).candidates.any(axis=1).all()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("union", "needs votes"),
        ("votes:min=2", "needs votes"),
        ("top-m:m=1", "needs scores or votes, .* choose another rule; if a csv file holds them, say so: --set data.fo"),
        ("instance:rate=1", "needs scores"),
    ],
)
def test_rules_say_what_they_miss(rule, says):
    with pytest.raises(UserError, match=says):
        draw_candidates(make_dataset(X, y=[0, 1, 2]), rule, 0)


@pytest.mark.parametrize("rule", ["top-p:p=1.5", "top-p:p=nan", "top-p:p=0.5,temperature=-1", "instance:rate=-1"])
def test_values_out_of_range(rule):
    with pytest.raises(UserError, match="must "):
        draw_candidates(make_dataset(X, y=[0, 1, 2], scores=np.ones((3, 3))), rule, 0)


# --- trees --------------------------------------------------------------------------------------------------------

TREE = "animal: [cat, dog]\nvehicle:\n  car: [saloon, van]\n  lorry:\nno: yes\n"


def leaves(path, name):
    tree = read_tree(path)
    return {tree.leaves[i] for i in tree.below[name]}


@pytest.mark.parametrize(
    "text",
    [
        TREE,
        "vehicle: [car, lorry]\ncar: [saloon, van]\nanimal:\n- cat\n- dog\n'no': 'yes'\n",
        "vehicle: [{car: [saloon, van]}, lorry]\nanimal: &a [cat, dog]\n'no': 'yes'\n",
    ],
    ids=["nested", "by name", "lists"],
)
def test_trees(tmp_path, text):
    path = put(tmp_path / "t.yaml", text)
    assert set(read_tree(path).leaves) == {"cat", "dog", "saloon", "van", "lorry", "yes"}
    assert leaves(path, "vehicle") == {"saloon", "van", "lorry"}
    assert leaves(path, "car") == {"saloon", "van"}
    assert leaves(path, "cat") == {"cat"}
    assert leaves(path, "no") == {"yes"}


BAD_TREES = {
    "cycle": ("a: [b]\nb: [c]\nc: [a]\n", "line 1, column 1: 'a' is below itself (a > b > c > a)"),
    "itself": ("a: [a]\n", "'a' is below itself (a > a)"),
    "alias to itself": ("a: &x [b, {c: *x}]\n", "is below itself"),
    "a list": ("[a, b]\n", "line 1, column 1: expected a class tree"),
    "nothing": ("", "line 1, column 1: expected a class tree"),
    "no yaml": ("a: [b\nc: d\n", "not valid YAML"),
    "a list as a name": ("? [a]\n: b\n", "line 1, column 3: expected the name of a class"),
    "list in list": ("a:\n- [b, c]\n", "line 2, column 3: expected the name of a class"),
    "empty name": ("a: ['', b]\n", "line 1, column 5: an empty label"),
    "deep": ("a: " + "[" * 1000, "t.yaml, line 1: too deeply nested"),
    "not utf-8": (b"a: [\xff]", "not UTF-8 text"),
    "control": (b"a: [\x01]", "not valid YAML"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TREES)
def test_bad_trees(tmp_path, case):
    content, says = BAD_TREES[case]
    path = put(tmp_path / "t.yaml", content)
    with pytest.raises(UserError) as caught:
        read_tree(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no such file"):
        read_tree(tmp_path / "nowhere.yaml")


def test_a_tree_that_unfolds_without_end_is_walked_once(tmp_path):
    """Aliases of aliases: thirty lines that stand for a billion names."""
    text = "a0: &a0 [x, y]\n" + "".join(f"a{i}: &a{i} {{p{i}: *a{i - 1}, q{i}: *a{i - 1}}}\n" for i in range(1, 40))
    assert leaves(put(tmp_path / "t.yaml", text), "a39") == {"x", "y"}


def test_many_classes_below_many_names_are_refused(tmp_path, monkeypatch):
    text = "".join(f"n{i}: [n{i + 1}, leaf{i}]\n" for i in range(100))
    assert len(read_tree(put(tmp_path / "t.yaml", text)).leaves) == 101
    monkeypatch.setattr("crosel.data.tree._MAX_HELD", 1000)
    with pytest.raises(UserError, match="too many classes below too many names"):
        read_tree(put(tmp_path / "t.yaml", text))


def test_coarse_candidates_become_leaves(tmp_path):
    rows = "candidates,label,weight,split,f\nanimal,cat,2,,1\ncar|dog,van,1|1,,2\n,lorry,,test,3\n"
    data = read(put(tmp_path / "d.csv", rows))
    fine = draw_candidates(data, f"tree:file={put(tmp_path / 't.yaml', TREE)}", 0)
    assert fine.classes == ("cat", "dog", "saloon", "van", "lorry", "yes")
    assert sets_of(fine) == [{"cat", "dog"}, {"saloon", "van", "dog"}]
    assert [fine.classes[i] for i in fine.y] == ["cat", "van"]
    assert [fine.classes[i] for i in fine.y_test] == ["lorry"]
    np.testing.assert_allclose(fine.weights, [[1, 1, 0, 0, 0, 0], [0, 1, 0.5, 0.5, 0, 0]])


def test_coarse_labels_and_votes_become_leaves(tmp_path):
    tree = put(tmp_path / "t.yaml", TREE)
    labels = make_dataset(np.eye(2), y=[0, 1], x_test=np.eye(2), y_test=[0, 1], classes=["animal", "lorry"])
    fine = draw_candidates(labels, f"tree:file={tree}", 0)
    assert sets_of(fine) == [{"cat", "dog"}, {"lorry"}]
    assert fine.y is None
    assert fine.x_test is None
    assert len(fine.notes) == 2
    votes = make_dataset(np.eye(2), votes=[[1, 0], [2, 1]], classes=["animal", "van"])
    assert sets_of(draw_candidates(votes, f"tree:file={tree}", 0)) == [{"cat", "dog"}, {"cat", "dog", "van"}]
    other = make_dataset(np.eye(2), y=[0, 1], classes=["animals", "van"])
    with pytest.raises(UserError, match=r"class 'animals' of the data is not in the tree \(did you mean 'animal'\?\)"):
        draw_candidates(other, f"tree:file={tree}", 0)


def test_a_run_read_again_has_the_classes_of_its_rule(tmp_path, monkeypatch):
    """Saved sets are set beside the data: their classes must be the ones that were drawn for."""
    put(tmp_path / "t.yaml", TREE)
    monkeypatch.chdir(tmp_path)
    rule = full_rule("tree:file=t.yaml")
    assert rule == f"tree:file={tmp_path / 't.yaml'}"
    monkeypatch.chdir("/")
    data = make_dataset(np.eye(2), y=[0, 1], classes=["animal", "lorry"])
    drawn, again = draw_candidates(data, rule, 0), with_classes_of(data, rule)
    assert (drawn.classes, drawn.fingerprint) == (again.classes, again.fingerprint)
    assert np.array_equal(drawn.candidates, again.candidates)
    for other in (None, "uniform:q=0.3"):
        assert with_classes_of(data, other) is data
        assert full_rule(other) == other


# --- a share held out ---------------------------------------------------------------------------------------------


def test_hold_out():
    data = make_dataset(np.arange(40.0).reshape(20, 2), np.ones((20, 2)), y=np.arange(20) % 2, weights=np.ones((20, 2)))
    split = hold_out(data, 0.1, 0)
    assert (split.n, len(split.x_test)) == (18, 2)
    rows = [int(i) for i in split.ids]
    assert np.array_equal(split.x, data.x[rows])
    assert np.array_equal(split.y, data.y[rows])
    assert split.candidates.shape == split.weights.shape == (18, 2)
    assert sorted([*split.x[:, 0], *split.x_test[:, 0]]) == data.x[:, 0].tolist()
    assert split.ids != hold_out(data, 0.1, 1).ids
    assert split.ids == hold_out(data, 0.1, 0).ids
    for share, wrong in ((0.01, data), (0.1, split), (0.1, make_dataset(X, np.ones((3, 2))))):
        with pytest.raises(UserError, match=r"setting 'data\.test_share'"):
            hold_out(wrong, share, 0)


def test_training_examples_in_the_place_of_the_test_set():
    """The test set is out of sight while settings are chosen, and what is held out comes from the training set."""
    own, without = load("digits"), load("digits", settings=DataSettings(own_test=False))
    assert without.x_test is None
    assert without.y_test is None
    assert np.array_equal(without.x, own.x)
    chosen_by = load("digits", settings=DataSettings(own_test=False, test_share=0.25))
    assert len(chosen_by.x) + len(chosen_by.x_test) == len(own.x)
    known = {image.tobytes() for image in own.x}
    assert all(image.tobytes() in known for image in chosen_by.x_test)
    with pytest.raises(UserError, match=r"its own test set; to hold out .* add --set data\.own_test=false"):
        load("digits", settings=DataSettings(test_share=0.25))
