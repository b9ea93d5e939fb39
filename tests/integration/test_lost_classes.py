"""A run that has lost classes says so at its end: on the console, in the report, in eval and in Python."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from _support import CroselCli, small_arrays
from torch import Tensor, nn

from crosel import PartialLabelClassifier
from crosel.runs.result import rarely_predicted_warning

LINE = re.compile(r"^hardly predicted: .*$", re.MULTILINE)
# A network that learns all classes but 3, which nothing can bring back.
CODE = """
import torch
from torch import nn


class Without3(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.hidden, self.last = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x):
        logits = self.last(torch.relu(self.hidden(x.flatten(1))))
        low = torch.zeros_like(logits)
        low[:, 3] = -1000.0
        return logits + low


def make(classes, shape):
    return Without3(classes, shape)
"""


class Without(nn.Module):
    """Zeros for every example, but for some classes, which are never predicted."""

    def __init__(self, classes: int, lost: range) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes))
        self.register_buffer("low", torch.zeros(classes))
        self.low[lost.start : lost.stop] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.sin(1e3 * x.flatten(1).sum(dim=1, keepdim=True) * torch.arange(1.0, 1.0 + len(self.weight)))
        return self.weight + self.low + noise


@pytest.fixture
def without_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "net_without_3.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "net_without_3:make"
    sys.modules.pop("net_without_3", None)


def names_source(path: Path, n: int, test: int = 40) -> Path:
    """Digits whose classes have names that html must not take for its own."""
    np.savez(path, **small_arrays(n, test=test), classes=np.array([f"<b>{j}" for j in range(10)]))
    return path


def flags(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def notices(page: Path) -> list[str]:
    return [unescape(text) for text in re.findall(r'<p class="notice"[^>]*>(.*?)</p>', page.read_text("utf-8"))]


def test_a_lost_class_is_said_at_the_end(without_3: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    source, out = names_source(tmp_path / "digits.npz", 1200), tmp_path / "run"
    settings = flags("train.epochs=12", "train.lr=0.05", f"network.name={without_3}")
    trained = crosel_cli("train", source, "--method", "cc", *settings, "--trust-code", "--out", out)
    assert trained.code == 0, trained.err
    held = int(np.load(out / "candidates.npz")["candidates"][:, 3].sum())
    (line,) = LINE.findall(trained.err)
    assert held > 300
    assert line == (
        f"hardly predicted: <b>3 (0 of {held} examples whose sets hold it): lost in training, not learnt yet, or rare "
        "(docs: Lost classes)"
    )
    assert trained.err.rindex("epoch 12/12") < trained.err.index(line)
    measured = crosel_cli("eval", out, "--json", "--trust-code")
    assert json.loads(measured.out)["classes_hardly_predicted"] == 1
    assert re.search(r"^classes_hardly_predicted +1$", crosel_cli("eval", out, "--trust-code").out, re.MULTILINE)
    assert notices(out / "report.html") == [f"This run: {line}"]
    assert crosel_cli("report", out, out, "--out", tmp_path / "two.html").code == 0
    assert notices(tmp_path / "two.html") == [f"{out}: {line}"] * 2
    with np.load(out / "predictions.npz") as kept:
        guesses, sets = kept["train"].argmax(axis=1), np.load(out / "candidates.npz")["candidates"]
        inside = guesses[sets[np.arange(len(sets)), guesses]]
        assert np.abs(kept["predicted"] - np.bincount(inside, minlength=10)).sum() <= 4  # half precision has ties
    again = crosel_cli("train", "--resume", "--out", out, "--trust-code")
    assert again.code == 0
    assert "hardly predicted" not in again.err  # the report has it


def test_a_run_of_few_examples_says_nothing(without_3: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    source, out = names_source(tmp_path / "digits.npz", 48), tmp_path / "run"
    settings = flags("train.epochs=2", f"network.name={without_3}")
    trained = crosel_cli("train", source, "--method", "cc", *settings, "--trust-code", "--out", out)
    assert trained.code == 0, trained.err
    assert np.load(out / "predictions.npz")["predicted"][3] == 0
    assert "hardly predicted" not in trained.err
    assert notices(out / "report.html") == []


def test_a_healthy_run_says_nothing(tmp_path: Path, crosel_cli: CroselCli) -> None:
    out = tmp_path / "run"
    how = ("--preset", "demo/digits", "--method", "cc", "--candidates", "uniform:q=0.3", *flags("train.epochs=8"))
    trained = crosel_cli("train", "digits", *how, "--out", out)
    assert trained.code == 0, trained.err
    assert "hardly predicted" not in trained.err
    assert notices(out / "report.html") == []
    assert json.loads(crosel_cli("eval", out, "--json").out)["classes_hardly_predicted"] == 0


def test_the_classifier_warns_once_and_is_fitted() -> None:
    rng = np.random.default_rng(0)
    x, sets = rng.random((400, 3), dtype=np.float32), np.ones((400, 6), dtype=bool)

    def fit(lost: range) -> PartialLabelClassifier:
        clf = PartialLabelClassifier("cc", epochs=1, network=lambda classes, shape: Without(classes, lost))
        return clf.fit(x, sets)

    with pytest.warns(UserWarning, match="hardly predicted") as caught:
        assert fit(range(1, 5)).predict(x).max() == 5
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith(
        "hardly predicted: 1 (0 of 400 examples whose sets hold it), 2 (0 of 400), 3 (0 of 400) and 1 more: lost"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(range(0))


def test_the_docs_have_the_section_that_the_line_names() -> None:
    sets = np.ones((100, 2), dtype=bool)
    (line,) = rarely_predicted_warning(np.array([100, 0]), sets, ["cat", "dog"])
    named = line.rpartition("(docs: ")[2].removesuffix(")")
    page = Path(__file__).parents[2] / "docs" / "how-it-works.md"
    assert named in re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
