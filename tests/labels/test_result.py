"""The result of a run: made once, used in memory, saved and read back; files that are damaged or do not fit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _sessions import make_session, small_data
from _support import TinyRun, small_arrays

from crosel.config import build_config
from crosel.data import Dataset
from crosel.report import write_report, write_run_report
from crosel.runs.folder import RunFolder, load_run
from crosel.runs.pipeline import train_run
from crosel.runs.result import NetworkLabels, Result, TrainingSet, review_order


def of_run(path: Path) -> Result:
    result = Result.load(path, TrainingSet.load(path / "candidates.npz"))
    assert result is not None
    return result


def assert_same(ours: Any, theirs: Any, name: str = "") -> None:
    if ours is None or theirs is None:
        assert ours is theirs, name
    elif hasattr(ours, "__dataclass_fields__"):
        for field in ours.__dataclass_fields__:
            assert_same(getattr(ours, field), getattr(theirs, field), field)
    elif isinstance(ours, np.ndarray) and ours.dtype.kind == "f":
        np.testing.assert_allclose(ours, theirs, atol=1e-3, err_msg=name)
    else:
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("method", ["crosel", "proden"])
def test_a_result_comes_back_as_it_was_saved(method: str, tmp_path: Path) -> None:
    ids = tuple(f"={i}" for i in range(96))
    result = Result.of(make_session(method, data=replace(small_data(), ids=ids)), with_test=True)
    result.examples.save(tmp_path / "candidates.npz")
    result.save(tmp_path)
    back = of_run(tmp_path)
    assert_same(replace(result, outside_labels=None), back)
    assert (back.examples.ids[1], back.selected is None) == ("=1", method == "proden")
    assert back.warnings() == result.warnings()


def test_the_end_of_a_run_reads_nothing_back_and_hashes_the_inputs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "data.npz", **small_arrays())
    settings = ("train.epochs=3", "network.name=mlp", "network.hidden=[8]", "method.warmup=1")
    config = build_config(values={"source": str(tmp_path / "data.npz")}, settings=settings)
    hashed = []
    compute = Dataset.fingerprint.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Dataset.fingerprint, "func", lambda data: hashed.append(1) or compute(data))
    with monkeypatch.context() as patch:
        for name in ("read_labels", "load_arrays"):
            patch.setattr(f"crosel.runs.result.{name}", lambda *_: pytest.fail("it is in memory"))
        train_run(config, tmp_path / "run", torch.device("cpu"), write_report=write_run_report)
    assert len(hashed) == 1
    written = (tmp_path / "run" / "report.html").read_bytes()
    write_report([RunFolder(tmp_path / "run")], tmp_path / "later.html")
    assert (tmp_path / "later.html").read_bytes() == written, "a report written later must be the same"
    hashed.clear()
    (tmp_path / "run" / "done").unlink()
    train_run(config, tmp_path / "run", torch.device("cpu"), resume=True)
    assert len(hashed) == 1


def test_saved_probabilities_are_those_of_the_labels(tiny_run: TinyRun) -> None:
    result = of_run(tiny_run.path)
    assert result.probabilities is not None
    given = result.probabilities[np.arange(96), result.labels]
    np.testing.assert_allclose(given, result.confidence, atol=1e-3)
    assert result.test_probabilities is not None
    right = (result.test_probabilities.argmax(1) == result.test_truth).mean()
    assert right == pytest.approx(RunFolder(tiny_run.path).read_metrics()[-1]["test_accuracy"])


def test_tables_that_are_too_large_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session("proden")  # 96 examples of 10 classes, and 64 to test
    for entries, names in ((960, ["train", "test", "y_test"]), (959, ["test", "y_test"]), (639, [])):
        monkeypatch.setattr("crosel.runs.result.SAVED_ENTRIES", entries)
        Result.of(session, with_test=True).save(tmp_path)
        assert list(np.load(tmp_path / "predictions.npz")) == ["predicted", *names]
    monkeypatch.undo()
    Result.of(make_session("proden", data=small_data(x_test=None, y_test=None)), with_test=True).save(tmp_path)
    assert list(np.load(tmp_path / "predictions.npz")) == ["predicted", "train"]


def test_what_is_missing_or_damaged_is_left_out_and_the_rest_is_used(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))

    def changed(name: str, **changes: np.ndarray | None) -> Result:
        arrays = {**np.load(tiny_run.path / name), **changes}
        np.savez(run / name, **{key: value for key, value in arrays.items() if value is not None})
        return of_run(run)

    whole = of_run(run).networks
    assert whole is not None
    assert whole.epochs_selected is not None
    assert whole.past_labels is not None
    assert whole.past_confidence is not None
    assert (whole.labels.dtype, whole.confidence.dtype, whole.selected.dtype) == (np.int32, np.float32, bool)
    flat = {"labels": whole.labels[0], "confidence": whole.confidence[0], "mask": whole.selected[0]}
    for lost in ({"mask": None}, {"labels": whole.labels[:1]}, {"confidence": whole.confidence[:, :-1]}, flat):
        assert changed("selection.npz", **lost).networks is None
    found = changed("selection.npz", epochs=whole.epochs_selected[:, :-1]).networks
    assert found is not None
    assert found.epochs_selected is None
    np.testing.assert_array_equal(found.past_labels, whole.past_labels)
    short = {name: getattr(whole, name)[:, :, :-1] for name in ("past_labels", "past_confidence")}
    for lost in ({"past_labels": None}, {"past_confidence": None}, short, dict([*short.items()][1:])):
        found = changed("selection.npz", **lost).networks
        assert found is not None
        assert (found.past_labels, found.past_confidence) == (None, None)
        np.testing.assert_array_equal(found.epochs_selected, whole.epochs_selected)
    for lost in ({"y_test": None}, {"test": None}, {"y_test": np.zeros(63, int)}):
        result = changed("predictions.npz", **lost)
        assert result.probabilities is not None
        assert (result.test_probabilities, result.test_truth) == (None, None)
        assert result.predicted is not None
    for counts in (None, np.zeros(9, int), np.zeros((1, 10), int), np.zeros(10), np.full(10, "1")):
        result = changed("predictions.npz", predicted=counts)
        assert result.predicted is None
        assert result.probabilities is not None
    for name in ("selection.npz", "predictions.npz"):
        (run / name).write_bytes(b"PK")
    result = of_run(run)
    assert (result.networks, result.probabilities, result.test_truth, result.warnings()) == (None, None, None, [])
    assert result.selected is not None


def test_networks_of_other_data_or_an_earlier_version(tiny_run: TinyRun, tmp_path: Path) -> None:
    assert NetworkLabels.load(tiny_run.path / "selection.npz", 95, 10) is None
    np.savez(tmp_path / "old.npz", labels=np.zeros((2, 5), int), confidence=np.zeros((2, 5)), mask=np.eye(2, 5) > 0)
    old = NetworkLabels.load(tmp_path / "old.npz", 5, 10)
    assert old is not None
    assert old.selected.any(axis=0).tolist() == [True, True, False, False, False]
    assert old.epochs_selected is None


def test_in_another_order_all_of_it_goes_along(tiny_run: TinyRun) -> None:
    result = Result.of(load_run(tiny_run.path, torch.device("cpu")))
    ranked = result.doubtful_first()
    rows = review_order(result.within_set, result.examples.candidates)
    assert ranked.examples.ids == [str(row) for row in rows]
    assert ranked.networks is not None
    assert result.networks is not None
    np.testing.assert_array_equal(ranked.networks.past_labels[..., 5], result.networks.past_labels[..., rows[5]])
    np.testing.assert_array_equal(ranked.examples.truth, result.examples.truth[rows])
