"""The command line on good input: what a run leaves behind, that it repeats, and every verb that uses it."""

from __future__ import annotations

import csv
import errno
import json
import logging
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from _runs import ENVIRONMENT, arrays, metrics, tensors, tree
from _support import TINY, CroselCli, TinyRun, small_arrays
from _terminal import Terminal

from crosel import __version__
from crosel.bench.execution import BenchScreen, Options
from crosel.config import build_config, check_config
from crosel.estimator import CroSelClassifier
from crosel.methods import base, methods
from crosel.presets import presets
from crosel.runs.folder import RunFolder
from crosel.utils.console import Console, log_lines, mute
from crosel.utils.settings import dotted

FEATURES = ("--set", "network.hidden=[16]", "--set", "train.epochs=3", "--set", "method.warmup=1")
FILES = {
    "config.yaml", "environment.json", "candidates.npz", "metrics.jsonl", "selection.npz", "labels.csv", "report.html",
    "predictions.npz", "done",
    "checkpoints/epoch-00003-step-000000.safetensors", "checkpoints/epoch-00004-step-000000.safetensors",
}  # fmt: skip


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# --- what a run leaves behind -------------------------------------------------------------------------------------


def test_run_folder_has_exactly_the_promised_files(tiny_run: TinyRun) -> None:
    assert {name for name in tree(tiny_run.path) if not name.startswith("plots/")} == FILES


def test_every_row_of_metrics_has_the_promised_fields(tiny_run: TinyRun) -> None:
    rows = rows_of(tiny_run.path)
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert [row["phase"] for row in rows] == ["warm-up", "warm-up", "selection", "selection"]
    always = {
        "epoch", "phase", "seconds", "images_per_second", "peak_memory_mib", "lr", "loss", "loss_selected",
        "loss_comix", "lambda_d", "selection_ratio", "selection_ratio_1", "selection_ratio_2", "covering_rate",
        "approximated_accuracy",
        "test_accuracy", "test_accuracy_1", "test_accuracy_2",
    }  # fmt: skip
    for row in rows:
        expected = set(always)
        if row["selection_ratio"] > 0:
            expected.add("oracle_selection_accuracy")
        assert set(row) == expected
        assert type(row["epoch"]) is int
        assert all(type(row[name]) is float and math.isfinite(row[name]) for name in expected - {"epoch", "phase"})
        shares = [name for name in expected if name.endswith(("accuracy", "_1", "_2", "rate", "ratio"))]
        assert all(0 <= row[name] <= 1 for name in shares)
        assert row["seconds"] > 0
        assert row["images_per_second"] > 0
        assert row["peak_memory_mib"] > 10
    assert rows[-1]["selection_ratio"] > 0, "the tiny run should select something, or it tests too little"
    assert [(row["lambda_d"], row["loss_selected"], row["loss_comix"]) for row in rows[:2]] == [(0, 0, 0)] * 2
    assert all(row["loss_comix"] > 0 for row in rows[2:])
    assert rows[3]["lambda_d"] == pytest.approx(4 * (1 - rows[2]["selection_ratio"]), rel=1e-6)


def test_a_run_without_a_preset_says_what_its_defaults_came_to(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path
) -> None:
    """… and its config.yaml, read again, is the same config. The classifier has the same defaults."""
    run = tmp_path / "run"
    short = ("--set", "train.epochs=5", "--set", "train.batch_size=32", "--set", "network.width=2")
    result = crosel_cli("train", image_npz, *short, "--out", run)
    assert result.code == 0, result.err
    content = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    method, augment = content["method"], content["augment"]
    assert (method["warmup"], method["ramp"], method["alpha"]) == (2, 1, 0.25)
    assert (method["temperature_start"], method["lambda_cr_start"], method["gamma_start"]) == (1.0, 1.0, None)
    assert (augment["strong_ops"], augment["cutout"]) == (1, 0.25)
    again = check_config(content)
    assert again.model_dump(mode="json") == content
    assert build_config(file=run / "config.yaml") == again
    rows = rows_of(run)
    assert [row["phase"] for row in rows] == ["warm-up"] * 2 + ["selection"] * 3
    before = [row["selection_ratio"] for row in rows]
    assert rows[2]["lambda_d"] == pytest.approx(1 * (1 - before[1]), rel=1e-6)
    assert rows[3]["lambda_d"] == pytest.approx(4 * (1 - before[2]), rel=1e-6)
    theirs = CroSelClassifier(epochs=5)._config()
    assert theirs.method == again.method
    assert (theirs.augment.strong_ops, theirs.augment.cutout) == (1, 0.25)


def test_small_numbers_keep_their_digits(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    """A learning rate of 1e-8 once came out as 0.0, by rounding to six decimals."""
    command = ("train", image_npz, "--method", "cc", "--set", "train.epochs=1", "--set", "train.lr=1e-8")
    assert crosel_cli(*command, "--set", "train.schedule=constant", "--out", tmp_path / "run").code == 0
    assert rows_of(tmp_path / "run")[0]["lr"] == 1e-8


def test_environment(tiny_run: TinyRun) -> None:
    import crosel

    content = json.loads((tiny_run.path / "environment.json").read_text(encoding="utf-8"))
    assert content["crosel"] == crosel.__version__
    assert content["python"] == ".".join(map(str, sys.version_info[:3]))
    assert content["command"][:2] == ["crosel", "train"]
    assert content["device"] == "cpu"
    assert {"torch", "numpy", "platform", "cpu_count", "threads", "commit", "started"} <= content.keys()


def test_candidates_and_selection(tiny_run: TinyRun) -> None:
    given = small_arrays()
    with np.load(tiny_run.path / "candidates.npz") as saved:
        assert saved["candidates"].dtype == bool
        np.testing.assert_array_equal(saved["candidates"], given["candidates"])
        np.testing.assert_array_equal(saved["y"], given["y"])
        assert saved["classes"].tolist() == [str(k) for k in range(10)]
    with np.load(tiny_run.path / "selection.npz") as saved:
        labels, confidence, mask = saved["labels"], saved["confidence"], saved["mask"]
    assert labels.shape == confidence.shape == mask.shape == (2, 96)
    assert mask.dtype == bool
    assert mask.mean() == pytest.approx(rows_of(tiny_run.path)[-1]["selection_ratio"], abs=1e-6)
    for v in range(2):  # what is selected lies in its candidate set
        assert given["candidates"][np.flatnonzero(mask[v]), labels[v][mask[v]]].all()
    assert ((confidence >= 0) & (confidence <= 1)).all()


def check_label_rows(rows: list[dict[str, Any]], candidates: np.ndarray[Any, Any]) -> None:
    """Rows of labels.csv or jsonl, with `candidates` as lists of names and `confidence` as numbers."""
    assert [row["id"] for row in rows] == [str(i) for i in range(len(candidates))]
    for row, sets in zip(rows, candidates, strict=True):
        assert list(row)[:6] == ["id", "label", "confidence", "selected", "candidates", "flag"]
        assert set(row) - set(list(row)[:6]) <= {"outside_label"}  # in jsonl
        assert row["candidates"] == [str(j) for j in np.flatnonzero(sets)]
        assert row["label"] in row["candidates"]
        assert 0 < row["confidence"] <= 1
        assert row["selected"] in ("both", "one", "neither")
        assert row["flag"] in ("", "outside", "disputed", "unsure")
        assert row["flag"] != "" or row["selected"] != "neither"


def read_labels_csv(path: Path) -> list[dict[str, Any]]:
    with open(path, newline="", encoding="utf-8") as stream:
        rows: list[dict[str, Any]] = list(csv.DictReader(stream))
    for row in rows:
        row["confidence"], row["candidates"] = float(row["confidence"]), row["candidates"].split("|")
    return rows


def test_labels_csv_of_the_run(tiny_run: TinyRun) -> None:
    rows = read_labels_csv(tiny_run.path / "labels.csv")
    check_label_rows(rows, small_arrays()["candidates"])
    with np.load(tiny_run.path / "selection.npz") as saved:
        count = saved["mask"].sum(axis=0)
    assert [row["selected"] for row in rows] == [("neither", "one", "both")[c] for c in count]


# --- repeating ----------------------------------------------------------------------------------------------------


def test_config_alone_repeats_the_run(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    result = crosel_cli("train", "--config", tiny_run.path / "config.yaml", "--out", tmp_path / "again")
    assert result.code == 0, result.err
    assert metrics(tmp_path / "again") == metrics(tiny_run.path)
    assert tensors(tmp_path / "again") == tensors(tiny_run.path)
    assert (tmp_path / "again/config.yaml").read_text() == (tiny_run.path / "config.yaml").read_text()


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """With sets drawn by a rule, and with CC as well; the tiny run has sets of its own."""
    common = (
        "train", "digits", "--method", "cc", "--candidates", "uniform:q=0.3", "--set", "network.width=4",
        "--set", "train.epochs=1", "--set", "train.batch_size=256",
    )  # fmt: skip
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert crosel_cli(*common, "--seed", seed, "--out", tmp_path / name).code == 0
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert metrics(a) == metrics(b) != metrics(c)
    assert tensors(a) == tensors(b)
    assert arrays(a / "candidates.npz") == arrays(b / "candidates.npz")
    assert arrays(a / "candidates.npz")["candidates"] != arrays(c / "candidates.npz")["candidates"]
    different = tensors(c)
    weights = [name for name in tensors(a) if name.startswith("method.networks") and "num_batches" not in name]
    assert weights
    assert all(tensors(a)[name] != different[name] for name in weights if name.endswith("weight"))
    assert not (a / "selection.npz").exists(), "CC does not select"
    assert {row["phase"] for row in metrics(a)} == {"training"}
    assert not {"selection_ratio", "lambda_d", "loss_comix", "oracle_selection_accuracy"} & metrics(a)[0].keys()


def test_config_keeps_full_paths(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run started with a relative path can be used from any folder."""
    monkeypatch.chdir(image_npz.parent)
    result = crosel_cli("train", image_npz.name, "--method", "cc", "--set", "train.epochs=1", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    monkeypatch.chdir(tmp_path)
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["source"] == str(image_npz)
    assert crosel_cli("eval", "run", "--json").code == 0
    assert crosel_cli("train", "--resume", "--out", "run").code == 0


def test_default_run_folder(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = crosel_cli("train", image_npz, "--method", "cc", "--set", "train.epochs=1", "--seed", "7")
    assert result.code == 0, result.err
    assert (tmp_path / "runs/images-cc-7/done").is_file()
    assert f"run folder: {Path('runs/images-cc-7')}" in result.out


# --- kinds of data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cc", "crosel"])
@pytest.mark.parametrize("images", [False, True], ids=["features", "images"])
@pytest.mark.parametrize("keys", [("x", "candidates"), ("x", "candidates", "y"), ("x", "y", "x_test", "y_test")])
def test_npz_with_and_without_labels_and_test_data(
    tmp_path: Path, crosel_cli: CroselCli, method: str, images: bool, keys: tuple[str, ...]
) -> None:
    data = small_arrays(48, images)
    np.savez(tmp_path / "data.npz", **{key: data[key] for key in keys})
    settings = ["--folds", "0", "--set", "train.epochs=3", "--set", "network.width=4", "--set", "network.hidden=[16]"]
    if method == "crosel":
        settings += ["--set", "method.warmup=1", "--set", "method.bank_length=1", "--set", "method.gamma=0"]
    if "candidates" not in keys:
        settings += ["--candidates", "uniform:q=0.2"]
    run = tmp_path / "run"
    result = crosel_cli("train", tmp_path / "data.npz", "--method", method, *settings, "--out", run)
    assert result.code == 0, result.err
    rows = rows_of(run)
    assert len(rows) == 3
    assert all(("test_accuracy" in row) == ("x_test" in keys) for row in rows)
    assert ("oracle_selection_accuracy" in rows[-1]) == ("y" in keys and method == "crosel")
    assert yaml.safe_load((run / "config.yaml").read_text())["network"]["name"] == ("small-cnn" if images else "mlp")
    assert len(read_labels_csv(run / "labels.csv")) == 48
    evaluation = json.loads(crosel_cli("eval", run, "--json").out)
    assert ("test_accuracy" in evaluation) == ("x_test" in keys)
    assert evaluation["approximated_accuracy"] == pytest.approx(rows[-1]["approximated_accuracy"], abs=1e-5)


@pytest.mark.parametrize("method", ["cc", "crosel"])
@pytest.mark.parametrize("n", [2, 5])
def test_fewer_examples_than_a_batch(tmp_path: Path, crosel_cli: CroselCli, method: str, n: int) -> None:
    np.savez(tmp_path / "few.npz", **small_arrays(n, images=False))
    result = crosel_cli(
        "train", tmp_path / "few.npz", "--method", method, "--set", "train.epochs=3", "--out", tmp_path / "run"
    )
    assert result.code == 0, result.err
    assert len(rows_of(tmp_path / "run")) == 3
    assert len(read_labels_csv(tmp_path / "run/labels.csv")) == n


def test_a_stage_that_the_run_is_too_short_for_is_told_of_once(tmp_path: Path, crosel_cli: CroselCli) -> None:
    np.savez(tmp_path / "few.npz", **small_arrays(8, images=False))
    short = ("train", tmp_path / "few.npz", "--set", "train.epochs=2", "--out", tmp_path / "run", "--method")
    result = crosel_cli(*short, "pico", "--set", "method.proto_start=2")
    assert result.code == 0
    assert "method.proto_start=2 with train.epochs=2: pico never gets past that stage" in result.err
    assert "never gets past" not in crosel_cli("eval", tmp_path / "run").err


def test_settings_of_the_loop_without_effect_are_told_of(tmp_path: Path, crosel_cli: CroselCli) -> None:
    np.savez(tmp_path / "few.npz", **small_arrays(8, images=False))
    result = crosel_cli(
        "train", tmp_path / "few.npz", "--method", "cc", "--set", "train.epochs=1", "--set", "train.decay=0.5",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert result.code == 0
    assert "train.decay has no effect with train.schedule=cosine" in result.err


def test_names_of_classes_and_examples_come_back(tmp_path: Path, crosel_cli: CroselCli) -> None:
    data = small_arrays(20, images=False)
    names = [f"digit {k}, “{k}”" for k in range(10)]  # commas, quotes and other alphabets survive csv and json
    ids = [f"scan-{i}.png" for i in range(20)]
    np.savez(tmp_path / "named.npz", **data, classes=names, ids=ids)
    run = tmp_path / "run"
    command = ("train", tmp_path / "named.npz", "--method", "cc", "--set", "train.epochs=1", "--out", run)
    assert crosel_cli(*command).code == 0
    rows = read_labels_csv(run / "labels.csv")
    assert [row["id"] for row in rows] == ids
    assert {row["label"] for row in rows} <= set(names)
    np.savez(tmp_path / "new.npz", x=data["x_test"][:3], ids=["a", "b", "c"])
    assert crosel_cli("predict", run, tmp_path / "new.npz", "--out", tmp_path / "p.jsonl").code == 0
    predictions = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in predictions] == ["a", "b", "c"]
    assert {row["label"] for row in predictions} <= set(names)


# --- eval, predict, labels, report, info --------------------------------------------------------------------------


def test_eval_repeats_the_last_row(tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    result = crosel_cli("eval", tiny_run.path, "--json")
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1
    evaluation, last = json.loads(result.out), rows_of(tiny_run.path)[-1]
    assert (evaluation["epoch"], evaluation["method"], evaluation["examples"]) == (4, "crosel", 64)
    for name in (
        "test_accuracy", "test_accuracy_1", "test_accuracy_2", "covering_rate", "approximated_accuracy",
        "selection_ratio", "oracle_selection_accuracy",
    ):  # fmt: skip
        assert evaluation[name] == pytest.approx(last[name], abs=1e-5), name
    assert 0 < evaluation["classes_hardly_predicted"] < 10  # four epochs teach it little
    plain = crosel_cli("eval", tiny_run.path)
    assert plain.code == 0
    shown = dict(line.split(maxsplit=1) for line in plain.out.splitlines())
    assert shown["test_accuracy"] == f"{last['test_accuracy']:.4f}"


def test_eval_on_another_source(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    data = small_arrays()
    # The run's own test set, given as training examples with labels; and one class fewer than the run knows.
    few = data["y_test"] < 9
    np.savez(tmp_path / "all.npz", x=data["x_test"], y=data["y_test"], classes=[str(k) for k in range(10)])
    np.savez(tmp_path / "few.npz", x=data["x_test"][few], y=data["y_test"][few])
    own = json.loads(crosel_cli("eval", tiny_run.path, "--json").out)
    other = json.loads(crosel_cli("eval", tiny_run.path, tmp_path / "all.npz", "--json").out)
    assert other["examples"] == 64
    assert other["test_accuracy"] == own["test_accuracy"]
    part = crosel_cli("eval", tiny_run.path, tmp_path / "few.npz", "--json")
    assert part.code == 0, part.err
    assert json.loads(part.out)["examples"] == few.sum()


@pytest.fixture(scope="module")
def new_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "new.npz"
    np.savez(path, x=small_arrays()["x_test"])
    return path


def test_predict_csv_and_jsonl_agree(
    tiny_run: TinyRun, new_inputs: Path, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    for name in ("p.csv", "p.jsonl"):
        result = crosel_cli("predict", tiny_run.path, new_inputs, "--out", tmp_path / name, "--top", "3")
        assert result.code == 0, result.err
        assert result.out == f"64 predictions: {tmp_path / name}\n"
    with open(tmp_path / "p.csv", newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    assert list(table[0]) == ["id", "label", "confidence", "label_2", "confidence_2", "label_3", "confidence_3"]
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(table) == len(lines) == 64
    for i, (row, line) in enumerate(zip(table, lines, strict=True)):
        assert row["id"] == line["id"] == str(i)
        assert row["label"] == line["label"] == line["top"][0]["label"]
        assert [row["label"], row["label_2"], row["label_3"]] == [best["label"] for best in line["top"]]
        probabilities = [best["probability"] for best in line["top"]]
        assert probabilities == sorted(probabilities, reverse=True)
        assert float(row["confidence"]) == pytest.approx(line["confidence"], abs=1e-6)
        assert 0 < sum(probabilities) <= 1 + 1e-6
    right = np.mean([int(line["label"]) for line in lines] == small_arrays()["y_test"])
    assert right == pytest.approx(rows_of(tiny_run.path)[-1]["test_accuracy"], abs=1e-6)


def test_predict_top_1_is_the_default_and_top_99_means_all(
    tiny_run: TinyRun, new_inputs: Path, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    assert crosel_cli("predict", tiny_run.path, new_inputs, "--out", tmp_path / "one.csv").code == 0
    assert (tmp_path / "one.csv").read_text().splitlines()[0] == "id,label,confidence"
    assert crosel_cli("predict", tiny_run.path, new_inputs, "--out", tmp_path / "all.jsonl", "--top", "99").code == 0
    line = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[0])
    assert len(line["top"]) == 10
    assert sum(best["probability"] for best in line["top"]) == pytest.approx(1, abs=1e-5)


def test_predict_and_eval_elsewhere_need_nothing_but_the_run(
    new_inputs: Path, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    """The run folder alone goes to another machine; the training data stay behind."""
    data = small_arrays()
    np.savez(tmp_path / "data.npz", **data)
    run = tmp_path / "run"
    command = ("train", tmp_path / "data.npz", "--method", "cc", "--set", "train.epochs=1", "--out", run)
    assert crosel_cli(*command).code == 0
    assert crosel_cli("predict", run, new_inputs, "--out", tmp_path / "before.csv").code == 0
    (tmp_path / "data.npz").unlink()
    moved = run.rename(tmp_path / "elsewhere")
    result = crosel_cli("predict", moved, new_inputs, "--out", tmp_path / "after.csv")
    assert result.code == 0, result.err
    assert (tmp_path / "after.csv").read_bytes() == (tmp_path / "before.csv").read_bytes()
    np.savez(tmp_path / "other.npz", x=data["x_test"], y=data["y_test"], classes=[str(k) for k in range(10)])
    other = crosel_cli("eval", moved, tmp_path / "other.npz", "--json")
    assert other.code == 0, other.err
    assert json.loads(other.out)["test_accuracy"] == pytest.approx(rows_of(moved)[-1]["test_accuracy"], abs=1e-6)


def test_labels_in_three_formats(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    sets = small_arrays()["candidates"]
    for name in ("l.csv", "l.jsonl", "l.npz"):
        result = crosel_cli("labels", tiny_run.path, "--out", tmp_path / name)
        assert result.code == 0, result.err
        assert result.out.startswith("96 labels (")
    assert (tmp_path / "l.csv").read_bytes() == (tiny_run.path / "labels.csv").read_bytes()
    table = read_labels_csv(tmp_path / "l.csv")
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text(encoding="utf-8").splitlines()]
    check_label_rows(lines, sets)
    assert [row["label"] for row in lines] == [row["label"] for row in table]
    with np.load(tmp_path / "l.npz") as saved:  # labels and pred_probs are what cleanlab's functions take
        labels, probabilities = saved["labels"], saved["pred_probs"]
        assert saved["flags"].tolist() == [row["flag"] for row in table]
    assert np.issubdtype(labels.dtype, np.integer)
    assert [str(label) for label in labels] == [row["label"] for row in table]
    assert probabilities.shape == (96, 10)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(np.where(sets, probabilities, -1).argmax(axis=1), labels)


def test_reading_a_run_changes_nothing_in_it(
    tiny_run: TinyRun, new_inputs: Path, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    """Also not the half-written file of a training process that is at work in it."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    (run / "checkpoints/.writing-1-epoch-00005").write_bytes(b"half a checkpoint")
    (run / ".writing-1-labels.csv").write_bytes(b"half a table")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert crosel_cli("eval", run).code == 0
    assert crosel_cli("predict", run, new_inputs, "--out", tmp_path / "p.csv").code == 0
    assert crosel_cli("labels", run, "--out", tmp_path / "l.csv").code == 0
    assert crosel_cli("report", run, "--out", tmp_path / "r.html").code == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_report(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    result = crosel_cli("report", tiny_run.path, tiny_run.path, "--out", tmp_path / "r.html")
    assert result.code == 0, result.err
    assert "html" in (tmp_path / "r.html").read_text(encoding="utf-8").lower()
    assert result.out == f"report: {tmp_path / 'r.html'}\n"


def test_info(crosel_cli: CroselCli) -> None:
    result = crosel_cli("info")
    assert result.code == 0
    assert f"torch {metadata.version('torch')}" in result.out  # without the "+cu130" of a CUDA build
    assert all(f"\n  {method} " in result.out for method in methods())
    told = dict(line.split(maxsplit=1) for line in result.out.partition("presets:\n")[2].splitlines())
    assert told.keys() == presets().keys()
    assert told["fast/cifar10-crosel"] == "CroSel on CIFAR-10 in about ten minutes of one H200"


def test_info_lists_all_settings(crosel_cli: CroselCli) -> None:
    lines = crosel_cli("info", "--settings").out.splitlines()
    told = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines if line.startswith("  ")}
    assert told["train.epochs"] == ["50", "passes over the training set, including warm-up"]
    assert told["train.optimiser"][0] == "sgd"
    assert told["train.optimiser"][1].endswith("SGD for the rest (or adam, adamw, muon)")
    assert told["data.choices"][0] == "-"
    assert (told["source"][0], told["train.bf16"][0]) == ("required", "auto")
    for method in methods():
        settings = dotted(check_config({"source": "digits", "method": {"name": method}}).model_dump(mode="json"))
        assert settings.keys() <= told.keys()


def test_console_lines_are_a_view_of_the_metrics(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    result = crosel_cli("train", image_npz, *TINY, "--out", tmp_path / "run")
    rows, (read, plan, *lines, check, last) = rows_of(tmp_path / "run"), result.err.splitlines()
    assert read.startswith(f"read {image_npz}: 96 examples (images of 8 x 8 x 1), 10 classes, ")
    assert plan.startswith("train: CroSel, 2 networks (small-cnn), 4 epochs of ")
    assert re.fullmatch(r"\d+ of 96 labels to check \(.*\): crosel review .*run", check)
    assert last.startswith("hardly predicted: ")
    assert len(lines) == len(rows) == 4
    for row, line in zip(rows, lines, strict=True):
        assert line.startswith(f"epoch {row['epoch']}/4  {row['phase']}")
        assert f"loss {row['loss']:.4f}" in line
        assert f"accuracy {100 * row['test_accuracy']:.1f} %" in line
        assert f"S-ratio {100 * row['selection_ratio']:.1f} %" in line
    assert "\r" not in result.err, "no live line where nobody watches"


def test_what_nothing_can_be_learnt_of_is_said_at_the_start(tmp_path: Path, crosel_cli: CroselCli) -> None:
    sets = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1]] * 8, dtype=bool)
    np.savez(tmp_path / "d.npz", x=np.arange(48.0).reshape(24, 2), candidates=sets, classes=["cat", "dog", "fox"])
    command = ("train", tmp_path / "d.npz", "--method", "cc", "--set", "train.epochs=1", "--out", tmp_path / "run")
    said = crosel_cli(*command).err.splitlines()[2]
    assert said == "always in the same sets, so nothing tells them apart: cat, dog"


def test_the_time_that_is_left_is_told_where_it_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    train = SimpleNamespace(epochs=9, folds=5)
    session: Any = SimpleNamespace(config=SimpleNamespace(train=train), progress=SimpleNamespace(epoch=1))
    for epoch in (1, 2, 9):
        console.on_epoch(session, {"epoch": epoch, "phase": "training", "loss": 1.0, "seconds": 60.0})
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "this will take about 44 min 00 s"  # 8 more epochs, and 4 times 9
    assert [line.rpartition("  ")[2] for line in lines] == ["8 min 00 s left", "7 min 00 s left", "60.0 s"]


METHOD = """
from typing import Literal
import torch
from crosel.losses import candidate_probabilities, soft_cross_entropy
from crosel.methods.base import Losses, Method, MethodSettings, Stream
class AverageSettings(MethodSettings):
    name: Literal["average"] = "average"
    power: float = 1.0
class Average(Method):
    name, title, paper, Settings = "average", "Averaging", "folklore", AverageSettings
    def streams(self): return {"all": Stream(("weak",))}
    def loss(self, batches, generator):
        batch = batches["all"]
        logits, sets = self.networks[0](batch["weak"]), self.candidates[batch.index]
        return Losses(soft_cross_entropy(logits, candidate_probabilities(torch.zeros_like(logits), sets)))
"""


def test_a_method_of_ones_own_by_its_name(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "_METHODS", dict(base._METHODS))
    monkeypatch.setattr(base, "_trusts_code", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "average_of_mine.py").write_text(METHOD)
    run = tmp_path / "run"
    train = ("train", image_npz, "--method", "average_of_mine:Average", "--set", "train.epochs=1", "--out", run)
    refused = crosel_cli(*train)
    assert (refused.code, "--trust-code" in refused.err, run.exists()) == (2, True, False)
    assert "average_of_mine" not in sys.modules
    assert crosel_cli(*train, "--set", "method.power=2", "--trust-code").code == 0
    assert "name: average_of_mine:Average\n  power: 2.0" in (run / "config.yaml").read_text()
    config = RunFolder(run).read_config()
    assert pickle.loads(pickle.dumps(config)) == config  # as it goes to other ranks
    base._METHODS.pop("average_of_mine:Average")
    base._trusts_code = False
    assert "--trust-code" in crosel_cli("labels", run, "--out", tmp_path / "l.csv").err
    assert crosel_cli("labels", run, "--out", tmp_path / "l.csv", "--trust-code").code == 0
    wrong = crosel_cli(*train[:3], "average_of_mine:Averag", "--trust-code")
    assert (wrong.code, "cannot be imported" in wrong.err, len(wrong.err.splitlines())) == (2, True, 1)


def test_live_line_on_a_terminal_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream)
    session: Any = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(epochs=9)), steps=20)
    console.on_step(session, 3, 5, 0.25)
    console.on_step(session, 3, 6, 0.25)  # too soon after the last: not shown
    assert stream.getvalue().startswith("epoch 3/9  step 5/20  loss 0.2500 ")
    assert len(stream.lines()) == 1
    console.say("a whole [line] of 50 %")
    assert [line.split("  ")[0] for line in stream.lines()] == ["a whole [line] of 50 %", "epoch 3/9"]
    console.close()
    assert stream.lines() == ["a whole [line] of 50 %", ""]
    silent = Terminal()
    quiet = Console(silent, quiet=True)
    quiet.say("nothing")
    quiet.close()
    assert silent.getvalue() == ""


def test_what_is_logged_takes_the_live_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, logger = Terminal(), logging.getLogger("crosel.somewhere")
    monkeypatch.setattr(sys, "stderr", stream)
    with log_lines():
        with Console(stream) as console:
            console.show("live")
            logger.info("50 % of it")
            assert stream.lines() == ["50 % of it", "live"]
        logger.info("a whole line")
        mute()
        logger.warning("what another rank says")
    logger.info("nobody has asked for it")
    assert stream.lines() == ["50 % of it", "a whole line", ""]


def test_plain_lines_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Console(stream) as console:
        console.show("live")
        console.say("a whole line")
        console._said -= 61  # a log that says nothing looks hung
        console.show("after a minute")
        console.show("soon after")
    assert stream.getvalue() == "a whole line\nafter a minute\n"


def test_a_stream_that_takes_nothing_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is on a full disk, or whoever read it has gone."""

    class Full(Terminal):
        def write(self, text: str) -> int:
            tries.append(text)
            raise OSError(errno.ENOSPC, "No space left on device")

    tries: list[str] = []
    monkeypatch.setenv("TERM", "xterm")
    console = Console(Full())
    for _ in range(3):
        console.show("live")
        console.say("a whole line")
    console.close()
    assert len(tries) == 1, "after the first failure it is quiet"
    board = BenchScreen([], Options(Path("bench")), Full())
    for _ in range(3):
        board.say("a whole line")
        board.tick()
    board.close()
    assert len(tries) == 2


# --- true processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [(), ("--preset", "demo/digits")])
def test_the_source_may_be_a_setting(tmp_path: Path, crosel_cli: CroselCli, preset: tuple[str, ...]) -> None:
    given = ("source=digits", "candidates=uniform:q=0.1", "train.epochs=1")
    settings = [part for item in given for part in ("--set", item)]
    assert crosel_cli("train", *preset, *settings, "--device", "cpu", "--out", tmp_path).code == 0
    assert (tmp_path / "done").is_file()
    resumed = crosel_cli("train", "--resume", "--set", "source=digits", "--out", tmp_path)
    assert resumed.code == 0, "all other settings are the run's"


def test_help_answers_in_half_a_second() -> None:
    def seconds() -> float:
        """Of a processor: those on the clock also count what else the machine does."""
        before = os.times()
        result = subprocess.run(
            [sys.executable, "-m", "crosel", "--help"], capture_output=True, text=True, env=ENVIRONMENT, check=True
        )
        assert "Train a classifier from sets of candidate labels" in result.stdout
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "crosel", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "scipy", "sklearn", "pydantic", "yaml", "PIL", "rich"}


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_training_does_not_wait_for_imports_that_it_can_do_without(tmp_path: Path, optimiser: str) -> None:
    """Torch's compiler and sklearn take longer to import than a small run takes to its first step."""
    settings = ["--set", f"train.optimiser={optimiser}", "--set", "train.lr=0.001", "--set", "train.epochs=1"]
    given = ["digits", "--method", "cc", "--candidates", "uniform:q=0.3", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-X", "importtime", "-m", "crosel", "train", *given, *settings, "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert {"torch", "crosel.report.page"} <= imported  # it came to the end
    assert not imported & {"torch._dynamo", "sklearn", "scipy", "pandas", "matplotlib"}


def test_help_without_arguments(crosel_cli: CroselCli) -> None:
    result = crosel_cli()
    assert (result.code, result.err) == (0, "")
    for verb in ("demo", "train", "eval", "predict", "labels", "report", "info"):
        assert f"  {verb} " in result.out


def test_version(crosel_cli: CroselCli) -> None:
    assert crosel_cli("--version") == (0, f"crosel {__version__}\n", "")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("train --help >&-", 0, ""),  # commands that do without torch, which takes longer to import than all else here
        ("info >&- 2>&- <&-", 0, ""),
        ("data get nothing --to . 2>&-", 2, ""),
        ("data get nothing --to . 2>/dev/full", 2, ""),
        ("train --help >/dev/full", 2, "crosel: the output cannot be written: no space left where it goes\n"),
        ("train IMAGES --method cc --set train.epochs=1 --out run 2>/dev/full >/dev/null", 0, ""),
    ],
)
def test_output_that_goes_nowhere_is_no_traceback(
    command: str, code: int, said: str, image_npz: Path, tmp_path: Path
) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = command.replace("IMAGES", shlex.quote(str(image_npz)))
    shell = f"{shlex.quote(sys.executable)} -m crosel {command}"
    for unbuffered in ("", "1") if code else ("",):  # what is held back is written at the very end
        environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
        result = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (code, "", said)


def test_a_closed_pipe_is_no_traceback() -> None:
    """`crosel train --help | head -0`: whoever reads has gone before we write."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "crosel", "train", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
