"""Searches: trials are ordinary runs, judged without true labels, and a search that broke goes on."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import CroselCli, small_arrays

from crosel.bench import EXECUTORS, BenchRun, Options, RunResult, Suite, parse_suite, run_one, run_suite, search_suite
from crosel.bench.execution import BenchScreen
from crosel.bench.search import score_of
from crosel.bench.suite import Range, parse_search
from crosel.cli.bench import search_lines
from crosel.config import build_config
from crosel.data import load
from crosel.errors import Interrupted, UserError
from crosel.runs.folder import load_run

pytest.importorskip("optuna")
SPACE = {"train.lr": {"low": 0.01, "high": 0.2, "log": True}, "method.view": ["weak", "plain"]}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "digits.npz"
    np.savez(path, **small_arrays(96))
    return path


def suite(source: Path, space: dict[str, Any] | None = None, trials: int = 3, **more: Any) -> Suite:
    base = {"source": str(source), "method": "cc", "network.width": 4, "train.epochs": 1, "train.batch_size": 32}
    search = {"trials": trials, "held_out": 0.25, "space": space or SPACE, **more.pop("search", {})}
    return parse_suite({"base": base, "search": search, **more}, "s", "s.yaml")


class Here:
    """An executor in this process. It may be told to stop before a run; `seen` are the runs it ran."""

    def __init__(self, stop_before: int = 99) -> None:
        self.stop_before, self.seen = stop_before, list[str]()

    def __call__(
        self, runs: Sequence[BenchRun], options: Options, progress: BenchScreen, stop: Callable[[], bool]
    ) -> Generator[RunResult, None, None]:
        for run in runs:
            if len(self.seen) >= self.stop_before:
                raise Interrupted("stopped")
            progress.started(run)
            self.seen.append(run.name)
            yield run_one(run, options.folder(run), options.device, options.trust_code)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    executor = Here()
    monkeypatch.setitem(EXECUTORS, "here", executor)
    return executor


def test_a_search_that_was_stopped_goes_on_and_its_best_config_trains(here: Here, source: Path, tmp_path: Path) -> None:
    here.stop_before = 1
    with pytest.raises(Interrupted):
        search_suite(suite(source), tmp_path, on="here", device="cpu", jobs=2)
    begun = list(here.seen)
    here.stop_before = 99
    found = search_suite(suite(source), tmp_path, on="here", device="cpu", jobs=2)
    assert sorted(trial.number for trial in found.trials) == [0, 1, 2]
    assert (
        here.seen[len(begun)] == "train/cc-trial001-seed0"
    )  # what was done is skipped, what was not begun is not lost
    scores = [trial.score for trial in found.trials]
    assert all(score is not None for score in scores)
    assert scores == sorted(scores, reverse=True)
    with open(found.table, encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["trial"]) for row in rows] == [trial.number for trial in found.trials]
    assert float(rows[0]["covering_rate"]) == pytest.approx(scores[0], abs=1e-6)
    best = found.trials[0]
    assert found.best is not None
    config = build_config(file=found.best)
    assert config.source == str(source)  # all examples again
    assert config.train.lr == pytest.approx(best.settings["train.lr"])
    assert config.method.model_dump()["view"] == best.settings["method.view"]
    seen = len(here.seen)
    assert search_suite(suite(source), tmp_path, on="here", device="cpu").trials == found.trials
    assert len(here.seen) == seen  # nothing left to do
    with pytest.raises(UserError, match="contains another search"):
        search_suite(suite(source, {"train.lr": [0.1]}), tmp_path, on="here", device="cpu")


def test_the_best_config_has_what_trials_took_from_the_data(here: Here, tmp_path: Path) -> None:
    """Digits are not flipped, which is no default; a rule given by --set has been used when a trial begins."""
    base = {"source": "digits", "method": "cc", "network.width": 4, "train.epochs": 1, "train.batch_size": 256}
    searched = parse_suite({"base": base, "search": {"trials": 1, "space": {"train.lr": [0.1]}}}, "s", "s.yaml")
    found = search_suite(searched, tmp_path, on="here", device="cpu", settings=["candidates=uniform:q=0.4"])
    assert found.best is not None, found.trials
    trial, best = build_config(file=tmp_path / here.seen[0] / "config.yaml"), build_config(file=found.best)
    assert (best.augment, best.network) == (trial.augment, trial.network)
    assert (best.augment.flip, best.network.name) == (False, "small-cnn")
    assert (best.source, best.candidates, trial.candidates) == ("digits", "uniform:q=0.4", None)


def test_no_true_label_is_within_reach_unless_asked_for(here: Here, source: Path, tmp_path: Path) -> None:
    parts = {}
    for name, oracle in (("blind", False), ("oracle", True)):
        found = search_suite(
            suite(source, trials=1),
            tmp_path / name,
            on="here",
            device="cpu",
            oracle=oracle,
            settings=["train.epochs=2"],
        )
        assert found.score == ("oracle_accuracy" if oracle else "covering_rate")
        folder = tmp_path / name / "search"
        train, held_out = load(str(folder / "train.npz")), load(str(folder / "held-out.npz"))
        assert (train.n, held_out.n) == (72, 24)
        assert train.ids is not None
        assert held_out.ids is not None
        assert sorted(map(int, (*train.ids, *held_out.ids))) == list(range(96))
        assert train.y is train.x_test is train.y_test is held_out.x_test is None
        assert (held_out.y is not None) == oracle
        run = tmp_path / name / here.seen[-1]
        # An independent count: where the prediction of the run lies inside the set, or is the truth.
        session = load_run(run, CPU, needs_data=False)
        x = session.normalise(torch.from_numpy(held_out.x))
        with torch.no_grad():
            guesses = session.method.eval().outputs(x)[0].argmax(dim=1).tolist()
        truth = small_arrays(96)["y"][[int(i) for i in held_out.ids]]
        inside = [held_out.candidates[row, guess] for row, guess in enumerate(guesses)]
        right = [guess == label for guess, label in zip(guesses, truth, strict=True)]
        assert found.trials[0].score == pytest.approx(np.mean(right if oracle else inside))
        parts[name] = score_of(run, held_out, "approximated_accuracy", "cpu")
    assert 0 < parts["blind"] <= 1
    with pytest.raises(UserError, match="add --oracle to allow this"):
        search_suite(suite(source, search={"score": "oracle_accuracy"}), tmp_path / "not", on="here", device="cpu")


def test_a_failing_trial_is_reported_and_the_rest_go_on(here: Here, source: Path, tmp_path: Path) -> None:
    space = {"method.view": ["weak"], "train.batch_size": [32], "network.name": ["=wrn-7-1", "small-cnn"]}
    found = search_suite(suite(source, space, trials=4), tmp_path, on="here", device="cpu", jobs=4)
    failed = [trial for trial in found.trials if trial.score is None]
    assert 0 < len(failed) < 4
    assert all("=wrn-7-1" in trial.line for trial in failed)
    assert ",'=wrn-7-1\n" in found.table.read_text()  # a name that a spreadsheet would run
    assert found.trials[0].score is not None


@pytest.mark.usefixtures("here")
def test_a_network_of_the_users_own(own_network: str, source: Path, tmp_path: Path) -> None:
    """Trials with it are run, and judged, only if its code is trusted."""
    out, space = tmp_path / "out", {"network.name": ["small-cnn", own_network], "train.lr": [0.1]}
    in_base = {"settings": [f"network.name={own_network}"]}
    for searched, more in ((suite(source, space), {}), (suite(source), in_base)):
        with pytest.raises(UserError, match=rf"s\.yaml, run digits/cc-seed0: network '{own_network}' is code from"):
            search_suite(searched, out, on="here", device="cpu", **more)  # type: ignore[arg-type]
    assert not out.exists()
    found = search_suite(suite(source, space, trials=4), out, on="here", device="cpu", trust_code=True)
    assert {trial.settings["network.name"] for trial in found.trials} == {"small-cnn", own_network}
    assert all(trial.score is not None for trial in found.trials)
    assert search_lines(found, trust_code=True)[-1].endswith(f"crosel train --config {found.best} --trust-code")
    assert search_lines(found)[-1].endswith(f"crosel train --config {found.best}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {}}, "'space' names settings"),
        ({"space": {"a": {"low": 2, "high": 1}}}, "'low' the smaller"),
        ({"space": {"a": {"low": 0, "high": 1, "log": True}}}, "above 0"),
        ({"space": {"a": {"low": 1, "high": 3, "step": 0}}}, "'step' must be a number"),
        ({"space": {"a": {"low": 1, "hihg": 3}}}, "did you mean 'high'"),
        ({"space": {"a": 3}}, "a list of values"),
        ({"trials": 0}, "at least 1"),
        ({"trials": "many"}, "whole number"),
        ({"held_out": 1}, "share between"),
        ({"score": "accuracy"}, "unknown score 'accuracy'"),
        ({"spaces": 1}, "unknown key 'spaces'"),
    ],
)
def test_a_bad_block_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_search({"space": {"train.lr": [0.1]}, **change}, "s.yaml")


def test_ranges_of_whole_numbers_stay_whole() -> None:
    search = parse_search({"space": {"a": {"low": 1, "high": 3}, "b": {"low": 1, "high": 3.5}}}, "s.yaml")
    a, b = search.space["a"], search.space["b"]
    assert isinstance(a, Range)
    assert isinstance(b, Range)
    assert a.whole
    assert not b.whole


def test_the_command_line(source: Path, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch) -> None:
    made = suite(source)
    with pytest.raises(UserError, match="search_suite"):
        run_suite(made, tmp_path)
    text = tmp_path / "s.yaml"
    text.write_text(
        f"base: {{source: {source}, method: cc}}\nsearch: {{space: {{train.lr: [0.1]}}, trials: 2}}\n", encoding="utf-8"
    )
    listed = crosel_cli("bench", text, "--list")
    assert listed.out == "s: search with 2 trials over train.lr\n"
    for words in (("--list",), ("--out", tmp_path / "out")):
        part = crosel_cli("bench", text, "--only", "*", *words)
        assert (part.code, part.out) == (2, "")
        assert part.err == (
            f"crosel: {text} has a search, where each trial depends on earlier ones; --only works only with runs of "
            "a grid\n"
        )
        assert not (tmp_path / "out").exists()
    missing = tmp_path / "missing.yaml"
    missing.write_text(text.read_text().replace(str(source), "nowhere.npz"))
    result = crosel_cli("bench", missing, "--out", tmp_path / "out")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"crosel: {missing}, run nowhere/cc-seed0: source 'nowhere.npz': no such file")
    assert not (tmp_path / "out").exists()
    assert "--oracle works only with suites that have a search" in crosel_cli("bench", "digits-tiny", "--oracle").err
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *a: _missing() if name == "optuna" else real(name, *a))
    result = crosel_cli("bench", text, "--out", tmp_path / "out")
    assert (result.code, result.err) == (2, "crosel: a search needs Optuna: pip install 'crosel[search]'\n")


def _missing() -> Any:
    raise ImportError("optuna")
