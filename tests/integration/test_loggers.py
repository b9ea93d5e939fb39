"""TensorBoard, Weights & Biases and notebooks: what they are told, and that a run outlives them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _support import TINY, CroselCli, small_arrays

from crosel import CroSelClassifier
from crosel.training.callbacks import check_loggers
from crosel.utils.console import NotebookConsole, in_notebook


class FakeWandb:
    """As much of wandb as is used."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.starts: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self._fail_at = fail_at

    def init(self, **options: Any) -> FakeWandb:
        self.starts.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self._fail_at:
            raise ConnectionError("the server is away\nand more lines")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_wandb_is_told_every_epoch_and_a_resumed_run_goes_on_with_the_same(
    image_npz: Path, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = tmp_path / "run"
    result = crosel_cli("train", image_npz, *TINY, "--logger", "wandb", "--out", run)
    assert result.code == 0, result.err
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4]
    for (_, values), row in zip(fake.logged, metrics(run), strict=True):
        assert values["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert "phase" not in values
    assert fake.starts[0]["project"] == "crosel"
    assert fake.starts[0]["config"]["train"]["epochs"] == 4
    assert fake.finished == 1
    assert crosel_cli("train", "--resume", "--out", run, "--logger", "wandb").code == 0  # finished: nothing to tell
    assert len(fake.starts) == 1
    newest = max((run / "checkpoints").iterdir())
    newest.unlink()
    (run / "done").unlink()
    assert crosel_cli("train", "--resume", "--out", run, "--logger", "wandb").code == 0
    assert [start["id"] for start in fake.starts] == [fake.starts[0]["id"]] * 2
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 4]


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(
    image_npz: Path, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb(fail_at=2)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    result = crosel_cli("train", image_npz, *TINY, "--logger", "wandb", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert [step for step, _ in fake.logged] == [1]
    assert result.err.count("wandb failed (the server is away) and is switched off") == 1
    assert len(metrics(tmp_path / "run")) == 4


def test_what_is_not_there_is_said_before_the_run(
    image_npz: Path, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = crosel_cli("train", image_npz, *TINY, "--logger", "tensorbord", "--out", tmp_path / "run")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "tensorboard" in result.err
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = crosel_cli("train", image_npz, *TINY, "--logger", "wandb", "--out", tmp_path / "run")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "pip install wandb" in result.err
    assert not (tmp_path / "run").exists()
    check_loggers([])


def test_tensorboard_reads_what_was_written(image_npz: Path, tmp_path: Path, crosel_cli: CroselCli) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run = tmp_path / "run"
    result = crosel_cli("train", image_npz, *TINY, "--logger", "tensorboard", "--out", run)
    assert result.code == 0, result.err
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("loss", "test_accuracy", "selection_ratio"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(row["epoch"], row[name]) for row in metrics(run) if name in row]
        assert found == [(step, pytest.approx(value, rel=1e-5)) for step, value in expected]


# --- notebooks ----------------------------------------------------------------------------------------------------


class FakeDisplay:
    """As much of IPython.display as is used: display, and a handle that can be updated."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, content: Any, display_id: bool) -> FakeDisplay:
        assert display_id
        self.update(content)
        return self

    def update(self, content: Any) -> None:
        self.shown.append(content._repr_mimebundle_((), ())["text/html"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> FakeDisplay:
    display = FakeDisplay()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    return display


def fit(**options: Any) -> CroSelClassifier:
    arrays = small_arrays(images=False)
    clf = CroSelClassifier(epochs=3, warmup=1, network="mlp", folds=0, device="cpu", **options)
    return clf.fit(arrays["x"], arrays["candidates"])


def test_fit_shows_live_progress_in_a_notebook(notebook: FakeDisplay, capfd: pytest.CaptureFixture[str]) -> None:
    assert in_notebook()
    fit()
    assert len(notebook.shown) >= 4
    assert any("epoch 3/3" in block for block in notebook.shown)
    assert "epoch 3/3" not in notebook.shown[-1]  # no bar is left behind,
    assert "part" not in notebook.shown[-1]  # nor that of the folds
    assert notebook.shown[-1].count("warm-up") == 1
    assert notebook.shown[-1].count("selection") == 2
    assert "S-ratio" in notebook.shown[-1]
    assert capfd.readouterr() == ("", "")


def test_fit_can_be_silent_there_and_is_elsewhere(
    notebook: FakeDisplay, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(verbose=False)
    assert notebook.shown == []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))  # type: ignore[arg-type]
    assert not in_notebook()  # IPython on a terminal
    fit()
    assert capfd.readouterr() == ("", "")
    fit(verbose=True)
    assert capfd.readouterr().err.count("epoch") == 3


def test_text_is_escaped_there(notebook: FakeDisplay) -> None:
    NotebookConsole().say("<b>note</b>")
    assert "&lt;b&gt;note" in notebook.shown[-1]


# --- plots --------------------------------------------------------------------------------------------------------


def test_history_is_drawn_by_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("Agg")
    history = fit(gamma=0.2, bank_length=1).history_
    axes = history.plot()
    assert {line.get_label() for line in axes.get_lines()} >= {"loss", "loss selected", "loss comix", "end of warm-up"}
    axes = history.plot_selection()
    (ratio,) = [line for line in axes.get_lines() if line.get_label() == "selection ratio"]
    assert list(ratio.get_ydata()) == [row["selection_ratio"] for row in history]
    importlib.import_module("matplotlib.pyplot").close("all")
