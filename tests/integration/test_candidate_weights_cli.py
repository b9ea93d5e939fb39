"""Weights of candidates from a file to the loss: used, left out on request, and the same when a run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy
from _support import CroselCli

from crosel.runs.folder import RunFolder

SETTINGS = ("--method", "cc", "--folds", "0", "--set", "train.epochs=2", "--set", "train.keep_checkpoints=9")


def write(path: Path, first: float = 0.9) -> Path:
    rng = np.random.default_rng(0)
    lines = ["candidates,weight,a,b,c"]
    for row in range(40):
        weight = first if row == 0 else rng.uniform(0.1, 0.9)
        a, b, c = rng.normal(size=3)
        lines.append(f"cat|dog,{weight:.3f}|{1 - weight:.3f},{a:.3f},{b:.3f},{c:.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_weights_of_a_column_train_and_a_run_goes_on_with_them(tmp_path: Path, crosel_cli: CroselCli) -> None:
    source = write(tmp_path / "mine.csv")
    losses = {}
    for name, more in (("used", ()), ("left-out", ("--set", "train.candidate_weights=false"))):
        result = crosel_cli("train", source, *SETTINGS, *more, "--out", tmp_path / name)
        assert result.code == 0, result.err
        folder = RunFolder(tmp_path / name)
        assert folder.read_config().train.candidate_weights is (name == "used")
        losses[name] = folder.read_metrics()[-1]["loss"]
    assert losses["used"] != losses["left-out"]
    run = tmp_path / "used"
    before = safetensors.numpy.load_file(max((run / "checkpoints").iterdir()))
    max((run / "checkpoints").iterdir()).unlink()
    for gone in ("done", "labels.csv", "predictions.npz"):
        (run / gone).unlink()
    write(source, first=0.2)
    result = crosel_cli("train", source, *SETTINGS, "--out", run, "--resume")
    assert (result.code, "weights of candidates differ" in result.err) == (2, True), result.err
    write(source)
    assert crosel_cli("train", source, *SETTINGS, "--out", run, "--resume").code == 0
    after = safetensors.numpy.load_file(max((run / "checkpoints").iterdir()))
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_shares_of_votes_train(tmp_path: Path, crosel_cli: CroselCli) -> None:
    rng = np.random.default_rng(0)
    votes = rng.integers(0, 3, (40, 3))
    votes[votes.sum(axis=1) == 0] = 1
    np.savez(tmp_path / "votes.npz", x=rng.normal(size=(40, 4)), votes=votes)
    result = crosel_cli("train", tmp_path / "votes.npz", *SETTINGS, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert RunFolder(tmp_path / "run").read_config().train.candidate_weights is True
