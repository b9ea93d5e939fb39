"""Labels out: what every row says, four formats, and reading our own csv again."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import CroselCli, TinyRun, small_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from crosel.data import load
from crosel.data.dataset import make_dataset
from crosel.errors import UserError
from crosel.methods.base import TrainingLabels
from crosel.methods.cc import CC, CCSettings
from crosel.runs.folder import load_run
from crosel.runs.labels import (
    COLUMNS,
    FLAGS,
    LabelRow,
    LabelStudioNames,
    label_rows,
    read_labels,
    write_labels,
    write_outside,
)
from crosel.runs.result import Result, TrainingSet, flag_rows, label_shares, review_order

CLASSES = ("=cmd()", "-1", "chien|chat", 'ジ,"q"', "new\nline")  # one of each kind of trouble
IDS = ("@a", "+b.png", "c\rd", "é", "4")


def make_result(
    classes: tuple[str, ...] = CLASSES, ids: tuple[str, ...] | None = IDS, selects: bool = True, features: bool = False
) -> Result:
    sets = np.eye(5, dtype=bool) | np.roll(np.eye(5, dtype=bool), 1, axis=1)
    x = np.zeros((5, 2), np.float32) if features else np.zeros((5, 2, 2), np.uint8)
    data = make_dataset(x, sets, classes=classes, ids=ids)
    p = np.full((5, 5), 0.1, np.float32) + 0.5 * np.eye(5, dtype=np.float32)
    flags = [FLAGS.index(flag) for flag in ("", "", "outside", "unsure", "disputed")]
    return Result(
        TrainingSet.of(data), np.arange(5), np.array([0.6, 0.5, 1.0, 0.25, 1e-7], np.float32),
        np.array(flags, np.int8), np.array([2, 1, 0, 0, 2]) if selects else None, probabilities=p,
        outside_labels=np.array([-1, -1, 0, -1, -1]),
    )  # fmt: skip


def named(flags: np.ndarray) -> list[str]:
    return [FLAGS[flag] for flag in flags]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


# --- flags --------------------------------------------------------------------------------------------------------


def chosen(labels: list[list[int]], stable: list[list[bool]], selected: list[list[bool]]) -> TrainingLabels:
    confidence = torch.full((len(labels), len(labels[0])), 0.95)
    return TrainingLabels(torch.tensor(labels), confidence, torch.tensor(stable), torch.tensor(selected))


def test_every_flag_and_its_precedence():
    sets = np.array([[1, 1, 0]] * 5 + [[0, 1, 0]] * 2, dtype=bool)
    #         clear  outside  only one stable  other labels  disputed now  unsure  no label yet
    labels = [[0, 2, 2, 2, 0, 0, -1], [0, 2, 2, 1, 0, 0, -1]]
    stable = [[True, True, True, True, True, False, True], [True, True, False, True, True, False, True]]
    selected = [[True, False, False, False, True, False, False]] * 2
    guesses = np.array([[0, 2, 2, 2, 0, 0, 0], [0, 1, 2, 1, 1, 0, 0]])
    flags, outside = flag_rows(chosen(labels, stable, selected), sets, guesses, np.ones(7))
    # Row 1 is disputed by the newest guesses, too; that the set misses the truth is the graver matter.
    assert named(flags) == ["", "outside", "unsure", "disputed", "disputed", "unsure", "unsure"]
    assert outside.tolist() == [-1, 2, -1, -1, -1, -1, -1]


def test_selected_by_one_network_is_not_unsure():
    sets = np.ones((1, 2), dtype=bool)
    said = chosen([[0], [0]], [[True], [False]], [[True], [False]])
    assert named(flag_rows(said, sets, np.zeros((2, 1)), np.ones(1))[0]) == [""]


def test_flags_of_methods_that_do_not_select():
    flags, outside = flag_rows(None, np.ones((3, 2), bool), np.array([[0, 0, 0]]), np.array([0.9, 0.49, 0.5]))
    assert named(flags) == ["", "unsure", ""]
    assert (outside == -1).all()


# --- formats ------------------------------------------------------------------------------------------------------


def test_csv_holds_no_formula_and_reads_back(tmp_path):
    result = make_result()
    write_labels(result, tmp_path / "l.csv")
    raw = (tmp_path / "l.csv").read_bytes()
    assert raw.startswith(",".join(COLUMNS).encode() + b"\n")
    with open(tmp_path / "l.csv", newline="", encoding="utf-8") as stream:
        cells = [cell for row in csv.reader(stream, strict=True) for cell in row]
    assert len(cells) == 6 * 6
    assert "'=cmd()" in cells
    assert "-1" in cells  # a number is no formula
    assert not [c for c in cells if c[:1] in ("=", "+", "-", "@", "\t", "\r") and c != "-1"]
    back = read_labels(tmp_path / "l.csv")
    for ours, theirs in zip(label_rows(result), back, strict=True):
        assert theirs._replace(confidence=0, outside_label=None) == ours._replace(confidence=0, outside_label=None)
        assert theirs.confidence == pytest.approx(ours.confidence, abs=5e-7)


names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6)


@settings(max_examples=40)
@given(st.lists(names, min_size=5, max_size=5, unique=True), st.lists(names, min_size=5, max_size=5))
def test_any_names_go_through_csv_and_jsonl(tmp_path_factory, classes, ids):
    folder = tmp_path_factory.mktemp("any")
    result = make_result(tuple(classes), tuple(ids))
    write_labels(result, folder / "l.csv")
    write_labels(result, folder / "l.jsonl")
    ours = [(row.id, row.label, row.candidates) for row in label_rows(result)]
    assert [(row.id, row.label, row.candidates) for row in read_labels(folder / "l.csv")] == ours
    assert [(row["id"], row["label"], row["candidates"]) for row in json_lines(folder / "l.jsonl")] == ours


def test_jsonl_says_what_the_set_misses(tmp_path):
    write_labels(make_result(), tmp_path / "l.jsonl")
    rows = json_lines(tmp_path / "l.jsonl")
    assert all(list(row) == [*COLUMNS, "outside_label"] for row in rows)
    assert [row["outside_label"] for row in rows] == [None, None, "=cmd()", None, None]
    assert [row["selected"] for row in rows] == ["both", "one", "neither", "neither", "both"]
    assert [row["flag"] for row in rows] == ["", "", "outside", "unsure", "disputed"]
    assert rows[2]["candidates"] == ["chien|chat", 'ジ,"q"']
    assert rows[2]["label"] in rows[2]["candidates"]


def test_half_characters_stop_no_format(tmp_path):
    result = make_result(("a\ud800", "b", "c", "d", "e"), ids=None)
    for ending in (".csv", ".jsonl", ".npz", ".json"):
        write_labels(result, tmp_path / f"l{ending}")
    assert json_lines(tmp_path / "l.jsonl")[0]["label"] == "a\ud800"
    assert (tmp_path / "l.csv").read_text(encoding="utf-8").splitlines()[1].startswith("0,a\\ud800,")


def test_npz_is_what_cleanlab_takes(tmp_path):
    write_labels(make_result(), tmp_path / "l.npz")
    with np.load(tmp_path / "l.npz", allow_pickle=False) as saved:
        arrays = {name: saved[name] for name in saved.files}
    labels, p = arrays["labels"], arrays["pred_probs"]
    assert np.issubdtype(labels.dtype, np.integer)
    assert labels.shape == (5,)
    assert p.shape == (5, 5)
    assert np.issubdtype(p.dtype, np.floating)
    assert arrays["outside_label"].tolist() == [-1, -1, 0, -1, -1]
    assert arrays["selected"].tolist() == [2, 1, 0, 0, 2]
    assert tuple(arrays["classes"]) == CLASSES
    assert tuple(arrays["ids"]) == IDS
    assert arrays["candidates"].dtype == bool
    write_labels(make_result(selects=False), tmp_path / "cc.npz")
    with np.load(tmp_path / "cc.npz") as saved:
        assert "selected" not in saved.files


def test_label_studio_predictions(tmp_path):
    write_labels(make_result(), tmp_path / "l.json")
    tasks = json.loads((tmp_path / "l.json").read_text(encoding="utf-8"))
    assert len(tasks) == 5
    assert tasks[3] == {
        "data": {"image": "é"},
        "predictions": [{
            "model_version": "crosel", "score": 0.25,
            "result": [{
                "from_name": "label", "to_name": "image", "type": "choices", "value": {"choices": ['ジ,"q"']},
            }],
        }],
    }  # fmt: skip
    names = LabelStudioNames(from_name="breed", to_name="photo", data_key="url")
    write_labels(make_result(), tmp_path / "n.json", names)
    task = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))[0]
    assert task["data"] == {"url": "@a"}
    assert task["predictions"][0]["result"][0]["from_name"] == "breed"
    assert task["predictions"][0]["result"][0]["to_name"] == "photo"


def test_label_studio_is_given_no_images_where_there_are_none(tmp_path, caplog):
    """Rows of features need a field for their ids; images whose ids are not their files are told of."""
    out, ids = tmp_path / "l.json", ("a.png", "b.png", "c.png", "d.png", "e.png")
    with pytest.raises(
        UserError, match=r"l\.json: the run has rows of features, not images; name the field .*--data-key"
    ):
        write_labels(make_result(features=True), out)
    assert not out.exists()
    write_labels(make_result(features=True), out, LabelStudioNames(data_key="row"))
    assert json.loads(out.read_text(encoding="utf-8"))[0]["data"] == {"row": "@a"}
    for result in (make_result(features=True, ids=ids), make_result(ids=ids)):
        write_labels(result, out)
        assert json.loads(out.read_text(encoding="utf-8"))[0]["data"] == {"image": "a.png"}
    assert caplog.messages == []
    write_labels(make_result(ids=None), out)
    said = (
        f"{out}: Label Studio will look for images named '0' and so on; to keep the tasks of a project, with their ids"
    )
    assert caplog.messages == [f"{said}, give its export: --tasks EXPORT.json"]


def test_label_studio_tasks_are_carried_over(tmp_path):
    """In any order, with tasks that the run does not have; our reader names tasks without an id by their number."""
    export = [{"id": 9, "data": {"x": 1}}, *({"id": i, "data": {"image": f"{i}.png", "z": [i]}} for i in (4, 3, 2, 1))]
    export.append({"data": {"image": "six"}})
    (tmp_path / "export.json").write_text(json.dumps(export))
    result = make_result(ids=("1", "2", "3", "4", "6"))
    write_labels(result, tmp_path / "l.json", LabelStudioNames(tasks=tmp_path / "export.json"))
    tasks = json.loads((tmp_path / "l.json").read_text(encoding="utf-8"))
    assert [task.get("id") for task in tasks] == [1, 2, 3, 4, None]
    assert [task["data"] for task in tasks[3:]] == [{"image": "4.png", "z": [4]}, {"image": "six"}]
    assert [t["predictions"][0]["result"][0]["value"]["choices"] for t in tasks] == [[name] for name in CLASSES]
    posted = json.loads((tmp_path / "l.predictions.json").read_text(encoding="utf-8"))
    assert [entry.pop("task") for entry in posted] == [1, 2, 3, 4]
    assert posted == [task["predictions"][0] for task in tasks[:4]]


def test_label_studio_names_are_those_of_the_project(tmp_path):
    def task(number, *names):
        answers = [{"from_name": f, "to_name": t, "value": {"choices": ["x"]}} for f, t in names]
        return {"id": number, "data": {"photo": "p"}, "annotations": [{"result": [{"value": {"rating": 1}}, *answers]}]}

    export, out = tmp_path / "export.json", tmp_path / "l.json"
    result = make_result(ids=("1", "2", "3", "4", "5"))

    def names(**given):
        write_labels(result, out, LabelStudioNames(tasks=export, **given))
        answer = json.loads(out.read_text(encoding="utf-8"))[0]["predictions"][0]["result"][0]
        return answer["from_name"], answer["to_name"]

    export.write_text(json.dumps([task(i, *([("breed", "photo")] if i == 2 else [])) for i in range(1, 6)]))
    assert names() == ("breed", "photo")
    assert names(to_name="picture") == ("breed", "picture")
    export.write_text(json.dumps([task(i, ("breed", "photo"), ("mood", "photo2")) for i in range(1, 6)]))
    assert names(from_name="mood") == ("mood", "photo2")
    with pytest.raises(UserError, match=r"'breed', 'mood'; say which: --from-name"):
        names()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[", "not valid JSON"), (b"{}", "list of tasks"), (b"[1]", "list of tasks"),
        (b'[{"id": 1}]', "list of tasks"), (b"\xff\xfe\xff", "save it as UTF-8"),
        (b"[" * 100_000, "not (valid|usable) JSON"), (b'[{"id": 1, "data": {}}]', "task '@a' of the run is missing"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_export_is_one_clear_line_and_leaves_no_file(tmp_path, content, said):
    if content is not None:
        (tmp_path / "export.json").write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        write_labels(make_result(), tmp_path / "l.json", LabelStudioNames(tasks=tmp_path / "export.json"))
    assert "export.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "l.json").exists()


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"\.csv, \.jsonl or \.npz"):
        write_labels(make_result(), tmp_path / "l.xlsx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1: expected the columns"), ("id,label\n", "line 1: expected the columns"),
        ("{h}\n0,a,x,both,a,\n", "line 2, column 'confidence'"), ("{h}\n0,a,0.5,both,a,\n1,a\n", "line 3: 2 cells"),
        ("{h}\n0,a,0.5,all,a,\n", "line 2, column 'selected'"), ("{h}\n0,a,0.5,both,a,bad\n", "line 2, column 'flag'"),
        ('{h}\n"0,a', "not a csv file"), ("{h}\n\xff", "not UTF-8 text"), (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_csv_that_is_not_ours_is_one_clear_line(tmp_path, content, said):
    path = tmp_path / "l.csv"
    if content is not None:
        path.write_bytes(content.replace("{h}", ",".join(COLUMNS)).encode("latin-1"))
    with pytest.raises(UserError, match=said) as caught:
        read_labels(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "jsonl", "npz"])
def test_labels_given_as_a_source_are_one_clear_line(tmp_path, ending):
    path = tmp_path / f"labels.{ending}"
    write_labels(make_result(), path)
    with pytest.raises(
        UserError, match=r"labels that crosel wrote.*give the source that the run was trained on"
    ) as told:
        load(str(path))
    assert str(path) in str(told.value)


def test_labels_of_a_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    session = load_run(tiny_run.path, torch.device("cpu"))
    assert (session.progress.epoch, [row["epoch"] for row in session.progress.rows]) == (4, [1, 2, 3, 4])
    result = Result.of(session)
    sets, rows = small_arrays()["candidates"], list(label_rows(result))
    assert all(isinstance(row, LabelRow) and row.label in row.candidates for row in rows)
    said = session.method.training_labels()
    outside = [row.flag == "outside" for row in rows]
    assert [row.outside_label is not None for row in rows] == outside
    for i, row in enumerate(rows):
        if row.flag == "outside":
            label = session.data.classes.index(str(row.outside_label))
            assert not sets[i, label]
            assert said.stable[:, i].all()
            assert (said.labels[:, i] == label).all()
    assert read_labels(tiny_run.path / "labels.csv")[0].id == "0"
    # What is asked of `outside` can be changed without training: nothing is flagged at 1.
    assert any(outside), "the tiny run should flag something, or this tests too little"
    lowest = Result.of(session, outside_gamma=0.0)
    assert lowest.flag_names().count("outside") >= sum(outside)
    np.testing.assert_array_equal(lowest.labels, result.labels)
    assert Result.of(session).flag_names() == result.flag_names(), "the run's own threshold must be back"


def slow_doubt(result: Result, row: int) -> tuple[bool, float, int]:
    """Sets of one last; then by the label's share of what the candidates have together."""
    inside = [float(np.float16(result.probabilities[row, j])) for j in np.flatnonzero(result.examples.candidates[row])]
    own = float(np.float16(result.probabilities[row, result.labels[row]]))
    return len(inside) == 1, own / sum(inside) if sum(inside) else 1 / len(inside), row


@pytest.mark.parametrize("seed", range(5))
def test_how_sure_a_label_is_within_its_set_against_the_slow_way(seed: int) -> None:
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.full(6, 0.1), 60)  # many are 0 in half precision
    sets = draw.random((60, 6)) < 0.4
    sets[np.arange(60), draw.integers(0, 6, 60)] = True
    labels = np.where(sets, p, -1).argmax(axis=1)
    found = label_shares(p, sets, labels)
    for row in range(60):
        inside = [float(np.float16(p[row, j])) for j in range(6) if sets[row, j]]
        expected = max(inside) / sum(inside) if sum(inside) else 1 / len(inside)
        assert found[row] == pytest.approx(expected, abs=1e-6)
    order = review_order(found, sets).tolist()
    assert order == sorted(range(60), key=lambda row: (sets[row].sum() == 1, found[row], row))


@pytest.mark.parametrize("selects", [True, False])
def test_the_doubtful_first(tmp_path: Path, selects: bool) -> None:
    """The same rows, those on top that are least sure of their set; every column and the arrays go along."""
    p = np.full((5, 5), 0.1, np.float32)
    np.fill_diagonal(p, [0.6, 0.5, 0.9, 0.25, 0.15])
    result = replace(make_result(selects=selects), probabilities=p)
    ranked = result.doubtful_first()
    rows = list(label_rows(ranked))
    assert [row.id for row in rows] == ["4", "é", "+b.png", "@a", "c\rd"]
    assert sorted(rows) == sorted(label_rows(result))
    write_labels(ranked, tmp_path / "l.npz")
    saved = np.load(tmp_path / "l.npz")
    assert saved["labels"].tolist() == [4, 3, 1, 0, 2]
    assert saved["pred_probs"].argmax(axis=1).tolist() == [4, 3, 1, 0, 2]
    assert saved["candidates"][np.arange(5), saved["labels"]].all()
    assert (saved["outside_label"].tolist(), saved["flags"][0]) == ([-1, -1, -1, -1, 0], "disputed")


def test_the_doubtful_first_by_the_command_line(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    out, own = tmp_path / "l.csv", tiny_run.path / "labels.csv"
    assert crosel_cli("labels", str(tiny_run.path), "--out", str(out), "--doubtful-first").code == 0
    ids = [row.id for row in read_labels(out)]
    result = Result.of(load_run(tiny_run.path, torch.device("cpu")))
    assert ids == sorted(ids, key=lambda name: slow_doubt(result, int(name)))
    assert ids != [row.id for row in read_labels(own)]
    before = own.read_bytes()
    refused = crosel_cli("labels", str(tiny_run.path), "--out", str(own), "--doubtful-first")
    assert refused.code == 2
    assert "keep the order of the data" in refused.err
    assert own.read_bytes() == before


def test_counts_of_labels_are_easy_to_read(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [FLAGS.index("")] * 1500 + [FLAGS.index("outside")] * 1273 + [FLAGS.index("unsure")] * 2
    many = replace(make_result(), labels=np.zeros(2775, int), flags=np.array(codes, np.int8))
    monkeypatch.setattr(Result, "of", lambda *_, **__: many)
    for name, made in (("write_labels", None), ("write_outside", 1273)):
        monkeypatch.setattr(f"crosel.runs.labels.{name}", lambda *_, made=made: made)
    command = ("labels", str(tiny_run.path), "--out", str(tmp_path / "l.csv"))
    assert crosel_cli(*command).out.startswith("2,775 labels (1,500 clear, 1,273 outside, 2 unsure): ")
    assert crosel_cli(*command, "--only-outside").out.startswith("1,273 of 2,775 sets seem to miss the true label: ")


def test_labels_of_a_run_under_way_are_told_to_be_so(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run.path, folder)
    (folder / "done").unlink()
    newest = max((folder / "checkpoints").iterdir())
    newest.unlink()
    told = crosel_cli("labels", str(folder), "--out", str(tmp_path / "l.csv"))
    assert (told.code, told.err) == (0, f"{folder} is not finished; using its state after 3 of 4 epochs\n")
    finished = crosel_cli("labels", str(tiny_run.path), "--out", str(tmp_path / "l.csv"))
    assert (finished.code, finished.err) == (0, "")


def test_what_sets_miss_is_not_said_to_be_nothing_where_it_is_not_known(tmp_path: Path) -> None:
    assert write_outside(make_result(), tmp_path / "found.csv") == 1
    with pytest.raises(UserError, match="keeps no history, so no label outside a set is known"):
        write_outside(make_result(selects=False), tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()


def test_outside_gamma_needs_a_history(tiny_run: TinyRun) -> None:
    session = load_run(tiny_run.path, torch.device("cpu"))
    with pytest.raises(UserError, match="between 0 and 1"):
        Result.of(session, outside_gamma=1.5)
    session.method = CC(CCSettings(), session.method.problem, lambda: session.method.networks[0])
    with pytest.raises(UserError, match="keeps no history"):
        Result.of(session, outside_gamma=0.5)
