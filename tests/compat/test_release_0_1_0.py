"""What release 0.1.0 left behind goes on working: run folders and pickled estimators, made by its own code.

Three runs on the same 60 rows: CroSel, PiCO, and CroSel with settings whose names have changed since.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from _support import CroselCli

from crosel.runs.folder import RunFolder

RELEASE = Path(__file__).parent / "release-0.1.0"
RUNS = ("crosel", "pico", "crosel-averaged")
OLD_SETTINGS = {
    "crosel-averaged": (
        "setting 'train.average' is called 'train.ema_decay' now; the old name still works",
        "setting 'method.average' is called 'method.ensemble' now; the old name still works",
        "setting 'train.refresh' does not exist any more; 1 was used in training",
    )
}


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(RELEASE / "folders" / name, tmp_path / name))


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_opens(name: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = copy_of(name, tmp_path)
    labels = tmp_path / "labels.csv"
    for command in (
        ("labels", run, "--data", RELEASE, "--out", labels),
        ("predict", run, RELEASE / "wine.csv", "--out", tmp_path / "predictions.csv"),
        ("report", run, "--out", tmp_path / "report.html"),
    ):
        result = crosel_cli(*command)
        assert result.code == 0, result.err
        said = [line for line in result.err.splitlines() if "config.yaml: setting '" in line]
        assert said == [f"{run}/config.yaml: {line}" for line in OLD_SETTINGS.get(name, ())]
    assert labels.read_bytes() == (run / "labels.csv").read_bytes()
    assert "Labels right" in (tmp_path / "report.html").read_text(encoding="utf-8")
    evaluated = crosel_cli("eval", run, "--data", RELEASE, "--json")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(evaluated.out)["test_accuracy"] == pytest.approx(last["test_accuracy"])


def interrupted(name: str, tmp_path: Path) -> Path:
    run = copy_of(name, tmp_path)
    max((run / "checkpoints").iterdir()).unlink()
    for gone in ("done", "labels.csv", "predictions.npz"):
        (run / gone).unlink()
    return run


def test_a_run_with_a_setting_that_is_gone_does_not_go_on(tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = interrupted("crosel-averaged", tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = crosel_cli("train", "--resume", "--out", run, "--data", RELEASE)
    assert result.code == 2
    assert result.err.splitlines()[-1] == (
        f"crosel: {run}/config.yaml: setting 'train.refresh' does not exist any more (given: 1); "
        "train without it, or with crosel 0.1.0"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_command_of_0_1_0_goes_on_with_its_run(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """What nobody gave and 0.2.0 decides otherwise for features stays as it was."""
    run = interrupted("crosel", tmp_path)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for section, name in (("network", "hidden"), ("augment", "weak_feature_noise"), ("train", "weight_decay")):
        tree[section].pop(name, None)
    (tmp_path / "command.yaml").write_text(yaml.safe_dump(tree))
    result = crosel_cli("train", "--config", tmp_path / "command.yaml", "--resume", "--out", run, "--data", RELEASE)
    assert result.code == 0, result.err
    config = RunFolder(run).read_config()
    assert (config.network.scaling, config.augment.weak_feature_noise) == ("standard", 0)
    assert config.train.candidate_weights is False


def test_averaged_weights_of_an_interrupted_run_go_on(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """By the old name of the setting, and from a checkpoint of the old version."""
    run = interrupted("crosel-averaged", tmp_path)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("refresh: 1", "refresh: 0"))
    result = crosel_cli("train", "--resume", "--out", run, "--data", RELEASE)
    assert result.code == 0, result.err
    assert "continuing after epoch 5" in result.err
    assert (run / "done").is_file()


@pytest.mark.parametrize("name", ["crosel", "pico"])
def test_an_interrupted_run_goes_on(name: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = interrupted(name, tmp_path)
    rows = (RELEASE / "folders" / name / "metrics.jsonl").read_text().splitlines()
    result = crosel_cli("train", "--resume", "--out", run, "--data", RELEASE)
    assert result.code == 0, result.err
    assert "continuing after epoch 5" in result.err
    again = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    before = json.loads(rows[-1])
    for key in ("loss", "covering_rate", "test_accuracy"):
        assert again[key] == pytest.approx(before[key], abs=1e-4)
    assert (run / "done").is_file()


@pytest.mark.parametrize("name", ["crosel", "proden", "averaged"])
def test_a_pickled_estimator_predicts(name: str) -> None:
    table = np.genfromtxt(RELEASE / "wine.csv", delimiter=",", skip_header=1, usecols=range(3, 9), encoding="utf-8")
    clf = pickle.loads((RELEASE / f"{name}.pickle").read_bytes())
    np.testing.assert_allclose(clf.predict_proba(table), np.load(RELEASE / f"{name}-proba.npy"), atol=1e-5)
    assert list(clf.classes_) == ["red", "rosé", "white"]
    assert len(clf.transduction_) == len(table)


def test_image_files_of_its_runs_stay_stretched(tmp_path: Path) -> None:
    run = copy_of("crosel", tmp_path)
    assert "resize" not in (run / "config.yaml").read_text()
    assert RunFolder(run).read_config().data.resize == "stretch"
