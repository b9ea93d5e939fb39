"""Predicting from everything that can be read: the same answers, in bounded memory, or one clear line."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import CroselCli, TinyRun, small_arrays

from crosel.config import build_config
from crosel.data import DataSettings, load
from crosel.data.formats import Chunk, InputSpec, base
from crosel.data.sources import open_inputs as read_chunks
from crosel.errors import UserError
from crosel.runs.predict import predict_file

CPU = torch.device("cpu")
IMAGE, FEATURES = (1, 8, 8), (3,)


def open_inputs(path: Path, shape: tuple[int, ...], columns: Sequence[str] | None = None) -> Iterator[Chunk]:
    return read_chunks(path, InputSpec(shape, columns))


def predicted(run: Path, source: Path, out: Path, top: int = 2) -> list[dict[str, Any]]:
    count = predict_file(run, source, out, top, CPU)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == count
    return rows


def tops(rows: list[dict[str, Any]]) -> list[list[tuple[str, float]]]:
    return [[(t["label"], pytest.approx(t["probability"], abs=1e-5)) for t in row["top"]] for row in rows]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten digits in every form: png files in two folders, csv, jsonl and npz."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("images")
    x = small_arrays()["x_test"][:10]
    names = [f"{'a' if i < 5 else 'b'}/{i}.png" for i in range(10)]
    for name, pixels in zip(names, x, strict=True):
        (folder / "png" / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / "png" / name)
    np.savez(folder / "x.npz", x=x, ids=names)
    np.savez_compressed(folder / "float.npz", x=(x / 255).astype(np.float32)[..., None], ids=names)
    np.savez(folder / "fortran.npz", x=np.asfortranarray(x), ids=names)
    (folder / "list.csv").write_text("path,label\n" + "".join(f"png/{name},7\n" for name in names))
    lines = [json.dumps({"id": name, "image": f"png/{name}"}) + "\n" for name in names]
    (folder / "list.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("rows", [1, 3, 10, 1024])
@pytest.mark.parametrize("source", ["png", "list.csv", "list.jsonl", "float.npz", "fortran.npz", "x.npz"])
def test_all_forms_of_images_give_the_same(tiny_run: TinyRun, images: Path, tmp_path, monkeypatch, source, rows):
    monkeypatch.setattr(base, "_ROWS", rows)  # also where chunks end in the middle of the data
    expected = predicted(tiny_run.path, images / "x.npz", tmp_path / "x.jsonl")
    got = predicted(tiny_run.path, images / source, tmp_path / "p.jsonl")
    assert len(got) == 10
    prefix = "png/" if source == "list.csv" else ""
    assert [row["id"] for row in got] == [prefix + row["id"] for row in expected]
    assert tops(got) == tops(expected)


def test_no_more_is_held_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_BYTES", 3 * 64)
    np.savez(tmp_path / "x.npz", x=np.zeros((10, 8, 8), np.uint8))
    assert [len(chunk.x) for chunk in open_inputs(tmp_path / "x.npz", IMAGE)] == [3, 3, 3, 1]
    assert [len(c.ids) for c in open_inputs(tmp_path / "x.npz", IMAGE)] == [3, 3, 3, 1]


def test_one_scale_for_all_chunks(tmp_path, monkeypatch):
    """A dark chunk of floats in 0..255 must not be taken for one in 0..1."""
    x = np.zeros((4, 8, 8), np.float64)
    x[1], x[3] = 200.0, 1.0
    np.savez(tmp_path / "x.npz", x=x)
    monkeypatch.setattr(base, "_ROWS", 1)
    assert [int(chunk.x.max()) for chunk in open_inputs(tmp_path / "x.npz", IMAGE)] == [0, 200, 0, 1]


def test_features_from_csv_jsonl_and_npz(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_ROWS", 2)
    x = np.arange(15, dtype=np.float32).reshape(5, 3) / 8
    rows = [f"r{i},{a},{b},{c},dog\n" for i, (a, b, c) in enumerate(x)]
    (tmp_path / "x.csv").write_text("id,u,v,w,label\n" + "".join(rows))
    (tmp_path / "no-id.csv").write_text("u,v,w\n" + "".join(f"{a},{b},{c}\n" for a, b, c in x))
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"id": i, "x": list(map(float, r))}) + "\n" for i, r in enumerate(x))
    )
    (tmp_path / "uvw.jsonl").write_text(
        "".join(json.dumps(dict(zip("uvw", map(float, r), strict=True))) + "\n" for r in x)
    )
    np.savez(tmp_path / "x.npz", x=x)
    for name in ("x.csv", "no-id.csv", "x.jsonl", "uvw.jsonl", "x.npz"):
        found = list(open_inputs(tmp_path / name, FEATURES))
        assert [len(chunk.x) for chunk in found] == [2, 2, 1]
        np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in found]), x)
        ids = [i for chunk in found for i in chunk.ids]
        assert ids == ([f"r{i}" for i in range(5)] if name == "x.csv" else [str(i) for i in range(5)])


def test_features_are_found_by_name(tmp_path, monkeypatch, crosel_cli: CroselCli):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(12, 3)) * [1, 10, 100]
    names = ["cat" if row[0] > 0 else "dog" for row in x]
    rows = [(name, *map(float, row)) for name, row in zip(names, x, strict=True)]
    Path("rows.csv").write_text("label,u,v,w\n" + "".join(f"{a},{u},{v},{w}\n" for a, u, v, w in rows))
    Path("moved.csv").write_text("w,label,more,v,u\n" + "".join(f"{w},{a},1,{v},{u}\n" for a, u, v, w in rows))
    Path("capitals.csv").write_text("W,V,U\n" + "".join(f"{w},{v},{u}\n" for _, u, v, w in rows))
    Path("moved.jsonl").write_text("".join(json.dumps({"w": w, "v": v, "u": u}) + "\n" for _, u, v, w in rows))
    orders = [{"w": w, "v": v, "u": u} if i % 2 else {"u": u, "w": w, "v": v} for i, (_, u, v, w) in enumerate(rows)]
    Path("mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in orders))
    Path("gone.csv").write_text("u,v,wide\n1,2,3\n")
    training = ("--candidates", "uniform:q=0", "--method", "cc", "--set", "train.epochs=2", "--device", "cpu")
    assert crosel_cli("train", "rows.csv", *training, "--out", "run").code == 0
    expected = tops(predicted(Path("run"), Path("rows.csv"), Path("p.jsonl")))
    for source in ("moved.csv", "capitals.csv", "moved.jsonl", "mixed.jsonl"):
        assert tops(predicted(Path("run"), Path(source), Path("p.jsonl"))) == expected
    refused = crosel_cli("predict", "run", "gone.csv", "--out", "p.csv")
    assert (refused.code, refused.err) == (
        2, "crosel: gone.csv, line 1: there is no column 'w', which the run was trained on; add it\n"
    )  # fmt: skip
    Path("near.csv").write_text("u,v,ww\n1,2,3\n")
    assert "trained on (did you mean 'ww'?); add it" in crosel_cli("predict", "run", "near.csv", "--out", "p.csv").err
    Path("code.csv").write_text("u,v,w\n1,2,3\n1,2_1,3\n")
    refused = crosel_cli("predict", "run", "code.csv", "--out", "p.csv")
    assert (refused.code, "code.csv, line 3, column 'v': '2_1' is not a number" in refused.err) == (2, True)
    scores = [crosel_cli("eval", "run", source, "--json").out for source in ("rows.csv", "moved.csv")]
    assert scores[0] == scores[1]
    assert json.loads(scores[0])["examples"] == 12


def test_features_joined_to_votes_are_found_by_name(tmp_path, monkeypatch, crosel_cli: CroselCli):
    """Trained on votes with features in another file, or beside: in a file with moved columns they are found."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(12, 3)) * [1, 10, 100]
    votes = ["cat" if row[0] > 0 else "dog" for row in x]
    Path("x.csv").write_text("id,u,v,w\n" + "".join(f"{i},{u},{v},{w}\n" for i, (u, v, w) in enumerate(x)))
    Path("moved.csv").write_text("id,w,v,u\n" + "".join(f"{i},{w},{v},{u}\n" for i, (u, v, w) in enumerate(x)))
    Path("votes.csv").write_text("id,anna,ben\n" + "".join(f"{i},{a},cat\n" for i, a in enumerate(votes)))
    lines = [f"{i},{a},{u},{v},cat,{w}\n" for i, (a, (u, v, w)) in enumerate(zip(votes, x, strict=True))]
    Path("beside.csv").write_text("id,anna,u,v,ben,w\n" + "".join(lines))
    training = ("--method", "cc", "--set", "train.epochs=2", "--device", "cpu")
    assert crosel_cli("train", "votes.csv", *training, "--set", "data.inputs=x.csv", "--out", "joined").code == 0
    assert crosel_cli("train", "beside.csv", *training, "--out", "beside").code == 0
    named = ("--set", "data.annotators=[anna,ben]", "--out", "named")
    assert crosel_cli("train", "beside.csv", *training, *named).code == 0
    true = "".join(f"{u},{v},{w},{a}\n" for a, (u, v, w) in zip(votes, x, strict=True))
    Path("true.csv").write_text("u,v,w,label\n" + true)  # without votes
    assert json.loads(crosel_cli("eval", "named", "true.csv", "--json").out)["examples"] == 12
    wide = ("--set", "data.format=wide-votes", "--set", "data.inputs=x.csv", "--out", "wide")
    assert crosel_cli("train", "votes.csv", *training, *wide).code == 0
    assert crosel_cli("eval", "wide", "true.csv").out == crosel_cli("eval", "joined", "true.csv").out
    Path("long.csv").write_text("id,worker,label\n" + "".join(f"{i},anna,{a}\n" for i, a in enumerate(votes)))
    long = ("--set", "data.format=votes", "--set", "data.inputs=x.csv", "--out", "long")
    assert crosel_cli("train", "long.csv", *training, *long).code == 0
    assert json.loads(crosel_cli("eval", "long", "true.csv", "--json").out)["examples"] == 12
    Path("ids.csv").write_text("id,label\n" + "".join(f"{i},{a}\n" for i, a in enumerate(votes)))
    refused = crosel_cli("eval", "joined", "ids.csv", "--set", "data.inputs=x.csv")  # they would not be looked at
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "ids.csv, line 1: data.inputs is for votes and scores; rows with candidates or labels hold" in refused.err
    expected = tops(predicted(Path("joined"), Path("x.csv"), Path("p.jsonl")))
    for run in ("joined", "beside"):
        for source in ("moved.csv", "beside.csv"):
            assert tops(predicted(Path(run), Path(source), Path("p.jsonl"))) == expected


@pytest.mark.parametrize("kind", ["wide-votes", "scores"])
def test_a_run_on_votes_or_scores_is_measured_on_a_plain_list_of_images(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crosel_cli: CroselCli
) -> None:
    monkeypatch.chdir(tmp_path)
    image, arrays = pytest.importorskip("PIL.Image"), small_arrays(n=12, test=0)
    labels = ["cat" if digit > 4 else "dog" for digit in arrays["y"]]
    for i, pixels in enumerate(arrays["x"]):
        image.fromarray(pixels).save(f"{i}.png")

    def write(name: str, header: str, cells: Callable[[str], str]) -> None:
        lines = [f"{i}.png,{cells(label)}\n" for i, label in enumerate(labels)]
        Path(name).write_text(header + "\n" + "".join(lines))

    if kind == "scores":
        write("own.csv", "path,cat,dog,label", lambda label: f"{int(label == 'cat')},0.5,{label}")
    else:
        write("own.csv", "path,anna,ben,label", lambda label: f"{label},dog,{label}")
        write("ids.csv", "id,anna,ben,carl,label", lambda label: f"{label},dog,,{label}")  # as many as channels
    write("plain.csv", "path,label", lambda label: label)
    write("remarks.csv", "path,label,remark", lambda label: f"{label},blurred")
    settings = ("--set", f"data.format={kind}", "--set", "data.image_size=8", "--set", "train.epochs=1")
    rule = ("--candidates", "top-m:m=1") if kind == "scores" else ()
    settings = (*settings, *rule, "--method", "cc", "--device", "cpu")
    assert crosel_cli("train", "own.csv", *settings, "--out", "run").code == 0
    others = ["plain.csv", "remarks.csv", *(["ids.csv"] if kind == "wide-votes" else [])]
    said = {crosel_cli("eval", "run", source, "--json").out for source in ("own.csv", *others)}
    assert len(said) == 1
    assert json.loads(said.pop())["examples"] == 12
    real = os.open

    def forbidden(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path) == "plain.csv":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", forbidden)
    refused = crosel_cli("eval", "run", "plain.csv")
    assert (refused.code, refused.err) == (2, "crosel: plain.csv: permission denied\n")


def test_eval_is_told_how_another_source_is_read(
    tiny_run: TinyRun, images: Path, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    listed = tmp_path / "list.csv"
    shutil.copy(images / "list.csv", listed)  # without its images
    eval_ = ("eval", tiny_run.path, listed, "--device", "cpu", "--json")
    assert f"{listed}, line 2" in crosel_cli(*eval_).err
    there = ("--set", f"data.image_root={images}")
    assert json.loads(crosel_cli(*eval_, *there).out)["examples"] == 10  # of the run's size, 8 x 8 in grey
    assert "has examples of shape (3, 8, 8)" in crosel_cli(*eval_, *there, "--set", "data.image_mode=RGB").err
    refused = crosel_cli(*eval_, "--set", "train.epochs=2")
    assert (refused.code, refused.err) == (
        2, f"crosel: --set train.epochs=2: the run is as it was trained; set only how {listed} is read (data.…)\n",
    )  # fmt: skip
    refused = crosel_cli("eval", tiny_run.path, "--set", "data.image_root=x")
    assert (refused.code, refused.err) == (
        2, "crosel: --set data.image_root=x: says how to read another source; give that source\n",
    )  # fmt: skip
    assert "unknown setting 'data.imageroot'" in crosel_cli(*eval_, "--set", "data.imageroot=x").err


def test_eval_finds_classes_by_their_names(tmp_path, monkeypatch, crosel_cli: CroselCli) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    y, names = (x > 0).sum(axis=1), np.array(["fox", "cat", "dog"])
    np.savez("train.npz", x=x, candidates=np.eye(3, dtype=bool)[y], classes=names)
    training = ("--set", "train.epochs=4", "--set", "network.width=4", "--set", "train.batch_size=4")
    assert crosel_cli("train", "train.npz", *training, "--out", "run").code == 0
    np.savez("same.npz", x=x, y=y, classes=names)
    np.savez("moved.npz", x=x, y=2 - y, classes=names[::-1])
    np.savez("named.npz", x=x, y=names[y])  # sorted, that is
    accuracy = {crosel_cli("eval", "run", f"{name}.npz", "--json").out for name in ("same", "moved", "named")}
    assert len(accuracy) == 1
    assert json.loads(accuracy.pop())["test_accuracy"] > 0.5
    some = y < 2  # no dog
    np.savez("some.npz", x=x[some], y=1 - y[some], classes=["cat", "fox"])
    assert json.loads(crosel_cli("eval", "run", "some.npz", "--json").out)["examples"] == some.sum()
    np.savez("other.npz", x=x, y=y, classes=["fox", "cat", "wolf"])
    refused = crosel_cli("eval", "run", "other.npz")
    known = "it knows fox, cat, dog; give the names of training (in an npz file: 'classes')"
    assert refused.err == f"crosel: other.npz has classes that the run does not know: wolf; {known}\n"


def test_eval_of_arrays_larger_than_image_files_may_be(tmp_path, monkeypatch, crosel_cli: CroselCli) -> None:
    monkeypatch.chdir(tmp_path)
    y = np.arange(8) % 2
    np.savez("tall.npz", x=np.zeros((8, 2100, 2), np.uint8), candidates=np.eye(2, dtype=bool)[y], y=y)
    settings = ("--method", "cc", "--set", "network.name=mlp", "--set", "train.epochs=1", "--device", "cpu")
    assert crosel_cli("train", "tall.npz", *settings, "--out", "run").code == 0
    found = crosel_cli("eval", "run", "tall.npz", "--device", "cpu", "--json")
    assert json.loads(found.out)["examples"] == 8


def test_a_list_of_images_starts_where_that_of_the_run_did(tiny_run: TinyRun, images: Path, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run.path, folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("image_root: null", f"image_root: {images / 'png'}"))
    assert (folder / "config.yaml").read_text() != config
    name = "a/0.png"
    (tmp_path / "list.csv").write_text(f"path\n{name}\n")
    (row,) = predicted(folder, tmp_path / "list.csv", tmp_path / "p.jsonl")
    assert row["id"] == name
    # Of a list with its images beside it, one that is not there is missing, not the run's own of that name.
    (tmp_path / "own.png").write_bytes((images / "png" / name).read_bytes())
    (tmp_path / "list.csv").write_text(f"path\nown.png\n{name}\n")
    with pytest.raises(UserError, match=r"line 3, column 'path': .*no such image file"):
        predicted(folder, tmp_path / "list.csv", tmp_path / "p.jsonl")


def test_features_with_other_names_are_taken_in_their_order_which_is_told(tmp_path, monkeypatch, crosel_cli: CroselCli):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(12, 3)).round(3).tolist()
    labels = ["cat" if row[0] > 0 else "dog" for row in x]

    def csv_text(header: str) -> str:
        return header + "\n" + "".join(f"{a},{u},{v},{w}\n" for a, (u, v, w) in zip(labels, x, strict=True))

    Path("rows.csv").write_text(csv_text("label,u,v,w"))
    Path("other.csv").write_text(csv_text("label,a,b,c"))
    Path("other.jsonl").write_text("".join(json.dumps(dict(zip("abc", row, strict=True))) + "\n" for row in x))
    Path("list.jsonl").write_text("".join(json.dumps({"x": row}) + "\n" for row in x))
    Path("wide.csv").write_text("a,b,c,d\n1,2,3,4\n")
    training = ("--candidates", "uniform:q=0", "--method", "cc", "--set", "train.epochs=2", "--device", "cpu")
    assert crosel_cli("train", "rows.csv", *training, "--out", "run").code == 0
    told = "line 1: no column has a name that the run was trained on; columns are used in order, 'a' for 'u' and so on"
    written = set()
    for source, line in (
        ("rows.csv", ""), ("other.csv", f"other.csv, {told}\n"), ("other.jsonl", f"other.jsonl, {told}\n"),
        ("list.jsonl", ""),  # a list has no names
    ):  # fmt: skip
        said = crosel_cli("predict", "run", source, "--out", "p.csv")
        assert (said.code, said.err) == (0, line)
        written.add(Path("p.csv").read_text())
    assert len(written) == 1
    refused = crosel_cli("predict", "run", "wide.csv", "--out", "p.csv")
    assert (refused.code, refused.err) == (
        2,
        "crosel: wide.csv, line 1: 4 features, but the run was trained on 3; give the same ones\n",
    )
    scores = [crosel_cli("eval", "run", source, "--json") for source in ("rows.csv", "other.csv")]
    assert scores[0].out == scores[1].out
    assert (scores[0].err, scores[1].err) == ("", f"other.csv: {told.removeprefix('line 1: ')}\n")


SET = '"candidates": ["x", "y"]'
UGLY = {
    "ids with blanks": ("csv", "id;candidates;f;g\n a ;x|y;1;2\nb;y; 3 ;4\n"),
    "an id of nothing": ("csv", "id,candidates,f,g\n,x|y,1,2\n"),
    "an id nobody sees": ("csv", "id,candidates,f,g\n\u200b,x|y,1,2\n"),
    "an id of two lines": ("csv", 'id,candidates,f,g\n"a\nb",x|y,1,2\n'),
    "quotes in an id": ("csv", 'id,candidates,f,g\n"a""b",x|y,"1",2\n'),
    "a byte order mark": ("csv", "\ufeffid,candidates,f,g\na,x|y,1,2\n\n"),
    "decimal commas": ("csv", "id;candidates;f;g\na;x|y;1,5;2\n"),
    "a thousand": ("csv", "id,candidates,f,g\na,x|y,1_000,2\n"),
    "not a number": ("csv", "id,candidates,f,g\na,x|y,nan,2\n"),
    "two of one name": ("csv", "id,candidates,f,f\na,x|y,1,2\n"),
    "two of one meaning": ("csv", "id,task,candidates,f,g\na,b,x|y,1,2\n"),
    "no rows": ("csv", "id,candidates,f,g\n"),
    "labels that we wrote": ("csv", "id,label,confidence,selected,candidates,flag\na,x,1,both,x|y,\n"),
    "the index of a table": ("csv", ",candidates,f,g\n5,x|y,1,2\n7,y,3,4\n"),
    "the index of votes": ("csv", ",anna,ben,f,g\n5,x,y,1,2\n7,y,,3,4\n"),
    "a first column of nothing": ("csv", ",label,f,g\n,x,1,2\n,y,3,4\n"),
    "a first column of little": ("csv", ",truth,f,g\nnote,x,1,2\n,y,3,4\n"),
    "true labels": ("csv", "truth,f,g\nx,1,2\ny,3,4\n"),
    "paths with blanks": ("csv", "path,candidates\n a.png ,x|y\nb.png,y\n"),
    "an address": ("csv", "path,candidates\nhttp://a/b.png,x|y\n"),
    "votes on images": ("csv", "task,worker,label\na.png,v,x\nb.png,v,x\na.png,w,y\n"),
    "scores of images": ("csv", "id,x,y\na.png,0.5,0.7\nb.png,0.1,0.9\n"),
    "votes on rows": ("csv", "task,worker,label,f,g\na,v,x,1,-0\nb,v,y,3,4\na,w,y,1.0,0\n"),
    "votes on paths": ("csv", "id,path,worker,label\n1,a.png,v,x\n1,,w,y\n"),
    "votes, the path late": ("csv", "id,path,worker,label\n1, ,v,x\n1,a.png,w,y\n1,,z,y\n2,b.png,v,x\n"),
    "votes, a path missing": ("csv", "id,path,worker,label\n1,a.png,v,x\n2,,v,y\n2, ,w,y\n"),
    "an id of a number": ("jsonl", f'{{"id": 1.0, {SET}, "f": 1, "g": 2}}\n\n{{"id": 2, {SET}, "g": 4, "f": 3}}\n'),
    "an id of null": ("jsonl", f'{{"id": null, {SET}, "f": 1, "g": 2}}\n'),
    "an id of a list": ("jsonl", f'{{"id": ["a"], {SET}, "f": 1, "g": 2}}\n'),
    "an id once": ("jsonl", f'{{"id": "a", {SET}, "f": 1, "g": 2}}\n{{{SET}, "f": 1, "g": 2}}\n'),
    "an id late": ("jsonl", f'{{{SET}, "f": 1, "g": 2}}\n{{"id": "a", {SET}, "f": 1, "g": 2}}\n'),
    "a list in capitals": ("jsonl", f'{{{SET}, "X": [1, 2]}}\n{{{SET}, "X": [3, 4]}}\n'),
    "a list of another name": ("jsonl", f'{{{SET}, "vector": [1, 2]}}\n'),
    "a short list": ("jsonl", f'{{{SET}, "x": [1, 2]}}\n{{{SET}, "x": [1]}}\n'),
    "a list in a list": ("jsonl", f'{{{SET}, "x": [[1, 2]]}}\n'),
    "a list that shifts": ("jsonl", f'{{{SET}, "x": [1], "features": [2]}}\n{{{SET}, "x": [], "features": [1, 2]}}\n'),
    "text for a number": ("jsonl", f'{{{SET}, "f": "1", "g": 2}}\n'),
    "null for a number": ("jsonl", f'{{{SET}, "f": null, "g": 2}}\n'),
    "infinity": ("jsonl", f'{{{SET}, "f": 1, "g": 1e400}}\n'),
    "digits without end": ("jsonl", f'{{{SET}, "f": 1{"0" * 400}, "g": 2}}\n'),
    "a row with less": ("jsonl", f'{{{SET}, "f": 1, "g": 2}}\n{{{SET}, "f": 1}}\n'),
    "nothing": ("jsonl", "\n"),
    "no object": ("jsonl", "[1]\n"),
    "a label late": ("jsonl", f'{{{SET}, "f": 1, "g": 2}}\n{{{SET}, "f": 1, "g": 2, "label": "x"}}\n'),
    "the truth": ("jsonl", '{"truth": "x", "f": 1, "g": 2}\n{"truth": "y", "f": 1, "g": 2}\n'),
    "no path": ("jsonl", f'{{{SET}, "path": "a.png"}}\n{{{SET}}}\n'),
    "votes as jsonl": ("jsonl", '{"task": "a.png", "worker": "v"}\n{"task": "a.png", "worker": "w", "label": "x"}\n'),
}  # fmt: skip


@pytest.mark.parametrize(("ending", "content"), UGLY.values(), ids=UGLY)
def test_a_file_is_the_same_to_train_on_and_to_predict(tmp_path, monkeypatch, ending, content):
    """Ids, numbers and images; or the same line about what is wrong."""
    monkeypatch.setattr(base, "_ROWS", 1)
    image = pytest.importorskip("PIL.Image")
    for name, grey in (("a.png", 50), ("b.png", 200)):
        image.new("L", (32, 32), grey).save(tmp_path / name)
    path = tmp_path / f"d.{ending}"
    path.write_bytes(content.encode())
    data = _outcome(lambda: load(str(path), None, DataSettings(cache=False)))
    shape, columns = ((3, 32, 32), None) if ".png" in content else ((2,), ("f", "g"))
    if not isinstance(data, str):
        shape, columns = data.shape, data.columns
    found = _outcome(lambda: list(open_inputs(path, shape, columns)))
    if isinstance(data, str) or isinstance(found, str):
        assert found == data
        return
    assert [name for chunk in found for name in chunk.ids] == [data.example_id(row) for row in range(data.n)]
    np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in found]), data.x)


def test_rows_with_sets_are_predicted_one_by_one_though_they_name_a_worker(tmp_path):
    """They are no votes; training counts each, too, and numbers them."""
    pytest.importorskip("PIL.Image").new("L", (32, 32), 50).save(tmp_path / "a.png")
    path = tmp_path / "d.csv"
    path.write_text("path,worker,candidates\na.png,v,x|y\na.png,w,y\n")
    assert load(str(path), None, DataSettings(cache=False)).n == 2
    assert [name for chunk in open_inputs(path, (3, 32, 32)) for name in chunk.ids] == ["a.png", "a.png"]


def test_a_list_of_one_number_is_named_as_that_number(tmp_path):
    """In runs that know their features by name, too."""
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{{SET}, "x": [1], "g": 2}}\n{{{SET}, "x": [3], "g": 4}}\n')
    assert load(str(path)).columns == ("x", "g")
    (chunk,) = open_inputs(path, (2,), ("g", "x"))
    assert chunk.x.tolist() == [[2, 1], [4, 3]]


def test_votes_on_one_task_are_one_prediction(tmp_path, monkeypatch, crosel_cli: CroselCli):
    """Where they stand does not matter; what they say of the task must be the same."""
    monkeypatch.chdir(tmp_path)
    votes = "task,worker,label,f,g,truth\nt1,ann,cat,1,2,cat\nt2,ann,dog,3,4,dog\nt1,bob,dog,1,2,\nt3,bob,,5,-1,\n"
    Path("votes.csv").write_text(votes)
    training = ("--method", "cc", "--set", "train.epochs=1", "--device", "cpu")
    assert crosel_cli("train", "votes.csv", *training, "--out", "run").code == 0
    said = crosel_cli("predict", "run", "votes.csv", "--out", "p.csv")
    assert (said.code, said.out) == (0, "3 predictions: p.csv\n")
    assert [row["id"] for row in csv.DictReader(Path("p.csv").read_text().splitlines())] == ["t1", "t2", "t3"]
    Path("votes.csv").write_text(votes + "t3,ann,cat,5,-2,\n")
    refused = crosel_cli("predict", "run", "votes.csv", "--out", "q.csv")
    where = "votes.csv, line 6: line 5 has something else for 't3'"
    assert (refused.code, refused.err) == (2, f"crosel: {where}; a task must have the same in all its rows\n")
    assert not Path("q.csv").exists()
    for name, content, said in (
        ("truth.csv", "id,truth,f,g\nt1,cat,1,2\nt2,dog,3,4\n", "examples       2"),
        ("whole.csv", "truth,g,f\ncat,2,1\n", "examples       1"),
        ("truth.jsonl", '{"truth": "cat", "f": 1, "g": 2}\n', "examples       1"),
        ("ids.csv", "id,truth\nt1,cat\n", "crosel: ids.csv, line 1: there are no inputs; add a column 'path' with"),
    ):
        Path(name).write_text(content)
        found = crosel_cli("eval", "run", name)
        assert said in found.out + found.err
        assert found.code == (2 if "crosel" in said else 0)


def test_names_of_features_in_npz_and_beside_a_list_are_looked_at(tmp_path):
    np.savez(tmp_path / "x.npz", x=[[3.0, 2, 1, 9]], columns=["w", "v", "u", "more"])
    (chunk,) = open_inputs(tmp_path / "x.npz", FEATURES, ("u", "v", "w"))
    assert chunk.x.tolist() == [[1, 2, 3]]
    with pytest.raises(UserError, match="there is no column 't', which the run was trained on"):
        list(open_inputs(tmp_path / "x.npz", FEATURES, ("t", "v", "w")))
    np.savez(tmp_path / "bad.npz", x=[[3.0, 2, 1]], columns=["w", "v"])
    with pytest.raises(UserError, match=r"bad\.npz: 'columns' has 2 names, but there must be one for each feature"):
        list(open_inputs(tmp_path / "bad.npz", FEATURES, ("u", "v", "w")))
    path = tmp_path / "d.jsonl"
    path.write_text('{"label": "cat", "x": [1, 2], "h": 3}\n')
    data = load(str(path))
    path.write_text('{"h": 3, "remark": "blurred", "x": [1, 2]}\n{"x": [4, 5], "h": 6, "time": null}\n')
    (chunk,) = open_inputs(path, data.shape, data.columns)
    assert chunk.x.tolist() == [[1, 2, 3], [4, 5, 6]]


def _outcome(read: Callable[[], Any]) -> Any:
    """What comes of reading, or the line that is said instead."""
    try:
        return read()
    except UserError as error:
        return str(error)


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


GOOD = np.zeros((4, 8, 8), np.uint8)
BAD: list[tuple[str, bytes, tuple[int, ...], str]] = [
    ("a.csv", b"", FEATURES, "line 1"),
    ("a.csv", b"u,v,w\n", FEATURES, "line 2: there are no rows"),
    (
        "a.csv",
        b"id,worker,label\na,b,c\n",
        FEATURES,
        "line 1: there are no columns of features; give a file with the columns of training",
    ),
    (
        "a.csv",
        b"5.1,3,4\n1,2,3\n",
        FEATURES,
        "line 1: '5.1' is not a column name; if this line holds data, put a line",
    ),
    (
        "a.csv",
        b"1,3,1\n1,2,3\n",
        FEATURES,
        "columns 1 and 3 are both named '1'; if this line holds data, put a line of",
    ),
    ("a.csv", b"-1.5,3,-1.5\n1,2,3\n", FEATURES, "columns 1 and 3 are both named '-1.5'; if this line holds data, put"),
    ("a.csv", b"u,v\n1,2\n", FEATURES, "line 1: 2 features, but the run was trained on 3"),
    ("a.csv", b"u,v,w\n1,2,3\n1,x,3\n", FEATURES, "line 3, column 'v': 'x' is not a number"),
    ("a.csv", b"u;v;w\n1;2;3\n1;2,5;3\n", FEATURES, "line 3, column 'v': '2,5' is not a number; write decimals with a"),
    ("a.csv", b"u,v,w\n1,2,3\n1,,3\n", FEATURES, "line 3, column 'v': empty"),
    ("a.csv", b"u,v,w\n1,2,3\n1,nan,3\n", FEATURES, "line 3, column 'v': NaN"),
    ("a.csv", b"u,v,w\n1,2,3\n1,1e39,3\n", FEATURES, "line 3, column 'v'"),
    ("a.csv", b"u,v,w\n1,2\n", FEATURES, "line 2"),
    ("a.csv", b"u,v,w\n1,2,3\n", IMAGE, "no column 'path', and the run was trained on images"),
    ("a.csv", b"path\na.png\n", FEATURES, "trained on 3 features"),
    ("a.csv", b"path\nnowhere.png\n", IMAGE, "line 2, column 'path'.*no such image"),
    ("a.csv", b'path\n""\n', IMAGE, "line 2, column 'path'.*not a path"),
    ("a.csv", b"\xff\xfea\x00", IMAGE, "UTF-16"),
    ("a.jsonl", b"", FEATURES, "line 1: there are no rows"),
    ("a.jsonl", b"[1]\n", FEATURES, "line 1, column 1: expected an object"),
    ("a.jsonl", b"{]\n", FEATURES, "line 1, column"),
    ("a.jsonl", b'{"x": [1, 2]}\n', FEATURES, "line 1: 2 features, but the run was trained on 3"),
    (
        "a.jsonl",
        b'{"x": [1, 2, 3]}\n{"x": [1, 2]}\n',
        FEATURES,
        "line 2, column 'x': 2 numbers, where the first row has 3",
    ),
    (
        "a.jsonl",
        b'{"x": [1, 2, 3]}\n{"y": [1, 2, 3]}\n',
        FEATURES,
        "line 2, column 'x': missing, but the first row has",
    ),
    ("a.jsonl", b'{"x": [1, 2, "3"]}\n', FEATURES, "line 1, column 'x': '3' is not a number"),
    ("a.jsonl", b'{"x": [1, 2, true]}\n', FEATURES, "line 1, column 'x': 'True' is not a number"),
    ("a.jsonl", b'{"x": [1, 2, NaN]}\n', FEATURES, r"line 1, column 'x\[2\]': NaN"),
    ("a.jsonl", b'{"x": [1, 2, Infinity]}\n', FEATURES, r"line 1, column 'x\[2\]': an infinite value"),
    ("a.jsonl", b'{"x": [1, 2, 1' + b"0" * 400 + b"]}\n", FEATURES, "line 1, column 'x'"),
    ("a.jsonl", b'{"id": 3}\n{"id": 4}\n', FEATURES, "line 1: there are no columns of features; give a file"),
    ("a.jsonl", b'{"photo": "a.png"}\n', IMAGE, "line 1: there is no column 'path', and the run was trained on images"),
    ("a.jsonl", b'{"path": 3}\n', IMAGE, "line 1, column 'path'"),
    ("a.npz", b"", IMAGE, "not a readable npz|cannot be read"),
    ("a.npz", npz(x=GOOD)[:-200], IMAGE, "not a readable npz"),
    ("a.npz", npz(y=GOOD), IMAGE, "array 'x' is missing"),
    ("a.npz", npz(x=GOOD, ids=["a"]), IMAGE, "x has 4 examples, but there are 1 ids"),
    ("a.npz", npz(x=GOOD, ids=np.array([b"\xff"] * 4)), IMAGE, "'ids' is not plain text"),
    ("a.npz", npz(x=GOOD, ids=np.zeros(4, object)), IMAGE, "'ids' holds Python objects, which are never loaded"),
    ("a.npz", npz(x=GOOD, ids=np.zeros((4, 1), int)), IMAGE, "'ids' must be one-dimensional"),
    ("a.npz", npz(x=GOOD[:, :5]), IMAGE, r"examples of shape \(1, 5, 8\)"),
    ("a.npz", npz(x=GOOD), FEATURES, r"examples of shape \(1, 8, 8\), but the run was trained on \(3,\)"),
    ("a.npz", npz(x=GOOD[0, 0]), IMAGE, "neither features"),
    ("a.npz", npz(x=GOOD[:0]), IMAGE, "no examples"),
    ("a.npz", npz(x=np.array([["a", "b"]])), IMAGE, "expected numbers"),
    ("a.npz", npz(x=GOOD * 1j), IMAGE, "expected numbers"),
    ("a.npz", npz(x=GOOD - 1.0), IMAGE, "pixels must lie in 0..255"),
    ("a.npz", npz(x=np.where(np.arange(4)[:, None, None] == 2, np.nan, GOOD)), IMAGE, "x: NaN in row 2, column 0"),
    ("a.npz", npz(x=np.array([[1.0, 2, 3], [1, np.inf, 3]])), FEATURES, "x: an infinite value in row 1, column 1"),
    ("a.npz", npz(x=np.array([[1.0, 2, 3], [1, 1e39, 3]])), FEATURES, "x: row 1, column 1 is too large"),
    ("a.txt", b"u", FEATURES, "cannot read '.txt'; give an image, a folder of images, csv, jsonl, parquet, npz or mat"),
]


@pytest.mark.parametrize(("name", "content", "shape", "said"), BAD)
def test_bad_inputs_are_one_clear_line(tmp_path, monkeypatch, name, content, shape, said):
    monkeypatch.setattr(base, "_ROWS", 1)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        list(open_inputs(tmp_path / name, shape))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_features_and_images_in_mat_files(tmp_path, monkeypatch):
    """PALM's files hold their sets as well; new data need not. SVHN's hold labels."""
    io, sparse = pytest.importorskip("scipy.io"), pytest.importorskip("scipy.sparse")
    monkeypatch.setattr(base, "_ROWS", 3)
    x = np.arange(24.0).reshape(8, 3)
    io.savemat(tmp_path / "new.mat", {"data": x})
    io.savemat(tmp_path / "sparse.mat", {"data": sparse.csr_matrix(x)})
    io.savemat(tmp_path / "palm.mat", {"data": x, "partial_target": np.ones((2, 8)), "target": np.eye(2)[:, [0] * 8]})
    for name in ("new.mat", "sparse.mat", "palm.mat"):
        found = list(open_inputs(tmp_path / name, FEATURES))
        assert [len(chunk.x) for chunk in found] == [3, 3, 2]
        assert np.concatenate([chunk.x for chunk in found]).tolist() == x.tolist()
        assert [i for chunk in found for i in chunk.ids] == [str(i) for i in range(8)]
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    io.savemat(tmp_path / "digits_32x32.mat", {"X": pixels, "y": np.array([[1], [10], [3], [4]])})
    found = list(open_inputs(tmp_path / "digits_32x32.mat", (3, 32, 32)))
    assert np.array_equal(np.concatenate([chunk.x for chunk in found]), pixels.transpose(3, 2, 0, 1))
    bad = x.copy()
    bad[5, 1] = np.nan
    io.savemat(tmp_path / "nan.mat", {"data": bad})
    io.savemat(tmp_path / "other.mat", {"features": x})
    for name, shape, said in (
        ("new.mat", (4,), r"examples of shape \(3,\), but the run was trained on \(4,\)"),
        ("nan.mat", FEATURES, "NaN in row 5, column 1"),
        ("other.mat", FEATURES, "expected PALM's 'data' or SVHN's 'X' and 'y'; found features"),
    ):
        with pytest.raises(UserError, match=said):
            list(open_inputs(tmp_path / name, shape))
    (tmp_path / "no.mat").write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a readable MATLAB file"):
        list(open_inputs(tmp_path / "no.mat", FEATURES))


def test_folders_without_images_and_runs_without_squares(tmp_path, images):
    with pytest.raises(UserError, match="there are no images"):
        list(open_inputs(tmp_path, IMAGE))
    with pytest.raises(UserError, match="trained on 3 features"):
        list(open_inputs(images / "png", FEATURES))
    with pytest.raises(UserError, match="only square images"):
        list(open_inputs(images / "png", (1, 8, 9)))
    with pytest.raises(UserError, match="no such file"):
        list(open_inputs(tmp_path / "nowhere", IMAGE))


def test_images_of_another_size_are_brought_to_that_of_the_run(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (30, 20), "red").save(tmp_path / "a.png")
    (chunk,) = open_inputs(tmp_path, IMAGE)
    assert chunk.x.shape == (1, 1, 8, 8)
    (chunk,) = open_inputs(tmp_path, (3, 5, 5))
    assert chunk.x.shape == (1, 3, 5, 5)
    assert chunk.x[0, :, 2, 2].tolist() == [255, 0, 0]


def test_a_bad_image_half_way_leaves_no_output(tiny_run: TinyRun, images: Path, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_ROWS", 2)
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "list.csv").write_text(f"path\n{images / 'png/a/0.png'}\n{images / 'png/a/1.png'}\nbad.png\n")
    with pytest.raises(UserError, match=r"list.csv, line 4, column 'path'.*bad.png"):
        predict_file(tiny_run.path, tmp_path / "list.csv", tmp_path / "p.csv", 1, CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.png", "list.csv"]


def test_ids_cannot_become_formulas(tiny_run: TinyRun, tmp_path):
    np.savez(tmp_path / "x.npz", x=GOOD, ids=["=1+1", "-2", "a\ud800", "@x"])
    seen: list[int] = []
    assert predict_file(tiny_run.path, tmp_path / "x.npz", tmp_path / "p.csv", 2, CPU, progress=seen.append) == 4
    with open(tmp_path / "p.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    assert rows[0] == ["id", "label", "confidence", "label_2", "confidence_2"]
    assert [row[0] for row in rows[1:]] == ["'=1+1", "-2", "a\\ud800", "'@x"]
    assert seen == [4]


def test_ids_as_bytes_come_out_as_text(tiny_run: TinyRun, tmp_path):
    np.savez(tmp_path / "x.npz", x=GOOD, ids=np.array([b"a", b"b 2", "é".encode(), b"d"]))
    rows = predicted(tiny_run.path, tmp_path / "x.npz", tmp_path / "p.jsonl")
    assert [row["id"] for row in rows] == ["a", "b 2", "é", "d"]


def test_predict_by_the_command_line(tiny_run: TinyRun, images: Path, tmp_path, crosel_cli: CroselCli):
    result = crosel_cli("predict", tiny_run.path, images / "list.csv", "--out", tmp_path / "p.csv", "--top", "3")
    assert result.code == 0, result.err
    assert result.out.endswith(f"10 predictions: {tmp_path / 'p.csv'}\n")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    refused = crosel_cli("predict", tiny_run.path, tmp_path / "bad.csv", "--out", tmp_path / "q.csv")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "bad.csv, line 1: there is no column 'path'" in refused.err


def test_one_image_is_enough(tiny_run: TinyRun, images: Path, tmp_path):
    whole = predicted(tiny_run.path, images / "png", tmp_path / "all.jsonl")
    (alone,) = predicted(tiny_run.path, images / "png" / "a" / "0.png", tmp_path / "one.JSONL")
    assert alone["id"] == "0.png"
    assert tops([alone]) == tops(whole[:1])
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    for source in (bad, tmp_path):  # the folder says nothing that the path does not
        with pytest.raises(UserError) as error:
            predict_file(tiny_run.path, source, tmp_path / "p.csv", 1, CPU)
        assert str(error.value) == f"{bad}: not an image that Pillow can read; replace it, or leave it out"


def test_images_on_another_scale_are_told_of(tiny_run: TinyRun, images: Path, tmp_path, crosel_cli: CroselCli):
    with np.load(images / "x.npz") as saved:
        x = saved["x"]
    np.savez(tmp_path / "sixteen.npz", x=x / 255 * 16, y=np.zeros(10, int))  # as scikit-learn has them
    np.savez(tmp_path / "unit.npz", x=x / 255, y=np.zeros(10, int))
    said = "sixteen.npz: no pixel is above 16 of 255, and those of training are 7"  # 7. on average
    for command in (("predict", tiny_run.path), ("eval", tiny_run.path)):
        out = ("--out", tmp_path / "p.csv") if command[0] == "predict" else ()
        dark = crosel_cli(*command, tmp_path / "sixteen.npz", *out)
        assert (dark.code, dark.err.count("\n")) == (0, 1)
        assert said in dark.err
        assert crosel_cli(*command, tmp_path / "unit.npz", *out).err == ""


def test_the_folder_of_an_output_is_made(tiny_run: TinyRun, images: Path, tmp_path, crosel_cli: CroselCli):
    for command in (
        ("predict", tiny_run.path, images / "x.npz", "--out", "new.CSV"), ("labels", tiny_run.path, "--out", "l.CSV"),
        ("candidates", build_config(file=tiny_run.path / "config.yaml").source, "--out", "sets.NPZ"),
        ("report", tiny_run.path, "--out", "r.HTML"),
    ):  # fmt: skip
        out = tmp_path / command[0] / "a b" / command[-1]
        assert crosel_cli(*command[:-1], out).code == 0
        assert out.is_file()


def test_the_home_folder_after_an_equals_sign(tmp_path, monkeypatch, crosel_cli: CroselCli):
    """Shells put it in the place of ~ at the beginning of a word only."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("votes.csv").write_text("id,anna,ben\na,cat,dog\nb,dog,dog\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "x.csv").write_text("id,f\na,1\nb,2\n")
    done = crosel_cli("candidates", "votes.csv", "--set", "data.inputs=~/x.csv", "--out=~/sets.npz")
    assert (done.code, Path("home/sets.npz").is_file(), Path("~").exists()) == (0, True, False), done.err
    (tmp_path / "home" / "tree.yaml").write_text("pet: [cat, dog]\n")
    done = crosel_cli("candidates", "home/sets.npz", "--rule", "tree:file=~/tree.yaml", "--out", "leaves.npz")
    assert (done.code, Path("leaves.npz").is_file()) == (0, True), done.err
    done = crosel_cli("candidates", "home/x.csv", "--set", "data.inputs=~", "--out=~")
    assert (done.code, Path("~").exists(), f"{tmp_path / 'home'}" in done.err) == (2, False, True), done.err


def test_a_folder_that_leads_to_an_output_stays_with_it(tmp_path, monkeypatch, crosel_cli: CroselCli):
    monkeypatch.chdir(tmp_path)
    Path("d.csv").write_text("candidates,f\ncat|dog,1\ndog,2\n")
    out = "new/../there/sets.npz"
    assert (crosel_cli("candidates", "bad.csv", "--out", out).code, os.listdir()) == (2, ["d.csv"])
    assert crosel_cli("candidates", "d.csv", "--out", out).code == 0
    assert Path(out).is_file()


def test_a_command_that_fails_leaves_no_folder(tiny_run: TinyRun, images: Path, tmp_path, crosel_cli: CroselCli):
    (tmp_path / "bad.csv").write_text("path\nnot-there.png\n")
    (tmp_path / "suite.yaml").write_text("title: T\nbase: {source: not-there.csv}\ngrid: {method: [cc]}\n")
    old = tmp_path / "old"
    old.mkdir()
    for command, out in (
        (("predict", tiny_run.path, tmp_path / "bad.csv"), "p.csv"),
        (("labels", tiny_run.path, "--tasks", tmp_path / "none.json"), "l.json"),
        (("candidates", tmp_path / "bad.csv"), "c.npz"),
        (("report", tiny_run.path, tmp_path / "none"), "r.html"),
        (("train", tmp_path / "bad.csv"), "run"),
        (("train", tmp_path / "bad.csv"), "long" * 100),
        (("bench", tmp_path / "suite.yaml"), "bench"),
        (("review", tiny_run.path), "corrections.csv"),
    ):
        option = "--export" if command[0] == "review" else "--out"
        for folder in (tmp_path / "new" / "below", old):
            assert crosel_cli(*command, option, folder / out).code == 2
    assert not (tmp_path / "new").exists()
    assert list(old.iterdir()) == [], "what was there before stays, as it was"


def test_the_ending_is_looked_at_before_the_data(tiny_run: TinyRun, tmp_path, monkeypatch, crosel_cli: CroselCli):
    monkeypatch.setattr("crosel.runs.folder.load_run", lambda *a, **k: pytest.fail("it may take minutes"))
    for out, more in (("l.xlsx", []), ("l.jsonl", ["--only-outside"])):
        refused = crosel_cli("labels", tiny_run.path, "--out", tmp_path / "new" / out, *more)
        assert (refused.code, len(refused.err.splitlines())) == (2, 1)
        assert f"{out}: labels " in refused.err
    assert not (tmp_path / "new").exists()


def test_what_is_read_is_not_written_over(tiny_run: TinyRun, images: Path, tmp_path, crosel_cli: CroselCli):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(tiny_run.path, run)
    shutil.copytree(tiny_run.path, other)
    tasks, listed = tmp_path / "export.json", tmp_path / "list.csv"
    tasks.write_text("[]")
    listed.write_bytes((images / "list.csv").read_bytes())
    (tmp_path / "link.csv").symlink_to(listed)
    (run / "review.jsonl").touch()
    source = Path(build_config(file=run / "config.yaml").source)
    (trained_on := tmp_path / "mine.csv").symlink_to(source)  # predictions are csv or jsonl, by their name
    for command in (
        ("predict", run, listed, "--out", tmp_path / "link.csv"),
        ("labels", run, "--out", tasks, "--tasks", tasks),
        ("labels", run, "--out", run / "candidates.npz"),
        ("labels", run, "--out", run / "metrics.jsonl"),
        ("labels", run, "--out", other / "labels.csv"),
        ("labels", run, "--only-outside", "--out", run / "labels.csv"),
        ("predict", run, listed, "--out", run / "labels.csv"),
        ("candidates", listed, "--out", run / "predictions.npz"),
        ("review", run, "--export", run / "review.jsonl"),
        ("labels", run, "--out", source),
        ("predict", run, listed, "--out", trained_on),
        ("review", run, "--export", trained_on),
    ):
        before = command[-1].read_bytes()
        refused = crosel_cli(*command)
        assert refused.code == 2
        assert re.search("this is the source itself|this file belongs to the run", refused.err)
        assert command[-1].read_bytes() == before
    assert crosel_cli("labels", run, "--out", run / "labels.csv").code == 0
    (run / "review.jsonl").unlink()
    refused = crosel_cli("predict", run, listed, "--out", run / "review.jsonl")
    assert (refused.code, "this file belongs to the run" in refused.err) == (2, True), "no decisions yet, but its place"
    assert not (run / "review.jsonl").exists()


def test_a_folder_with_a_config_is_no_run_yet(tmp_path: Path, crosel_cli: CroselCli) -> None:
    (tmp_path / "config.yaml").write_text("train: {epochs: 2}\n")
    (tmp_path / "sets.csv").write_text("id,candidates,f\na,x|y,1\nb,y,2\n")
    command = ("candidates", tmp_path / "sets.csv", "--out", tmp_path / "candidates.npz")
    assert [crosel_cli(*command).code for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("name", ["ids", "columns"])
def test_names_that_unfold_to_more_than_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch, name):
    np.savez_compressed(tmp_path / "i.npz", x=np.ones((3, 2)), **{name: np.zeros(4_000_000)})
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.05")
    with pytest.raises(UserError, match=r"i\.npz: its content would take"):
        list(read_chunks(tmp_path / "i.npz", InputSpec((2,))))
