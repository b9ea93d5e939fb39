"""A new method in a few lines, through the public registry: from inside a program, and from an installed package."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from crosel.config import build_config
from crosel.errors import UserError
from crosel.losses import candidate_probabilities, soft_cross_entropy
from crosel.methods import base
from crosel.methods.base import Losses, Method, MethodSettings, Problem, find_method, methods, register
from crosel.pipeline import train_run

OUTSIDE = """
from typing import Literal
from crosel.losses import cc_loss
from crosel.methods.base import Losses, Method, MethodSettings

class Settings(MethodSettings):
    name: Literal["outsider"] = "outsider"

class Outsider(Method):
    name, title, paper, Settings = "outsider", "From another package", "none", Settings

    def loss(self, batches, generator):
        batch = batches["all"]
        loss = cc_loss(self.networks[0](batch["weak"]), self.candidates[batch.index])
        return Losses(loss, {"loss": loss.detach()})
"""


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    before = dict(methods())
    yield
    base._METHODS.clear()
    base._METHODS.update(before)


def train_with(name: str, out: Path) -> dict[str, float]:
    values = {"source": "digits", "candidates": "uniform:q=0.3", "method": {"name": name}}
    settings = ["network.width=16", "train.epochs=3", "train.lr=0.1"]
    return train_run(build_config(settings=settings, values=values), out, torch.device("cpu")).progress.rows[-1]


def test_a_method_in_a_few_lines(tmp_path: Path) -> None:
    class AverageSettings(MethodSettings):
        name: Literal["average"] = "average"

    @register
    class Average(Method):
        """Treats all candidates alike: cross-entropy against the uniform distribution on S."""

        name, title, paper, Settings = "average", "Averaging baseline", "folklore", AverageSettings

        def loss(self, batches, generator):  # type: ignore[no-untyped-def]
            batch = batches["all"]
            logits, sets = self.networks[0](batch["weak"]), self.candidates[batch.index]
            loss = soft_cross_entropy(logits, candidate_probabilities(torch.zeros_like(logits), sets))
            return Losses(loss, {"loss": loss.detach()})

    assert "average" in methods()
    assert train_with("average", tmp_path / "run")["test_accuracy"] > 0.3


def test_a_method_from_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site"
    info = package / "outsider-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "outsider_pkg.py").write_text(OUTSIDE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[crosel.methods]\noutsider = outsider_pkg:Outsider\n")
    monkeypatch.setattr(sys, "path", [str(package), *sys.path])
    importlib.invalidate_caches()
    assert "outsider" in methods()
    assert train_with("outsider", tmp_path / "run")["test_accuracy"] > 0.3


def test_the_loop_the_views_the_checkpoint_and_the_report_know_no_method() -> None:
    """They import the contract alone, and no text of theirs but prose is a method's name."""
    root = Path(base.__file__).parents[1]
    files = [
        root / f"{name}.py" for name in ("train", "stepper", "session", "checkpoint", "run", "pipeline", "outcome")
    ]
    files += [file for folder in ("augment", "report", "compute") for file in (root / folder).glob("*.py")]
    assert len(files) > 20
    names = {name for name in methods() if name != "crosel"}  # the package is called that, too
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosel.methods"):
                assert node.module == "crosel.methods.base", file
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.lower() not in names, f"{file}: {node.value}"
            if isinstance(node, ast.Compare):
                assert not any(isinstance(c, ast.Constant) and c.value == "crosel" for c in node.comparators), file


def test_wrong_registrations_are_refused() -> None:
    with pytest.raises(TypeError, match="needs the class attribute 'name'"):
        register(type("Nameless", (Method,), {}))
    with pytest.raises(ValueError, match="registered already"):
        register(type("Again", (Method,), {"name": "cc", "title": "", "paper": "", "Settings": MethodSettings}))


def test_a_method_without_a_loss_cannot_be_built() -> None:
    class Nothing(Method):
        name = "nothing"

    with pytest.raises(TypeError, match=r"abstract method '?loss"):
        Nothing(MethodSettings(name="nothing"), Problem(torch.ones(2, 2, dtype=torch.bool), 1), nn.Identity)


def test_an_unknown_method_is_named_with_its_neighbour() -> None:
    with pytest.raises(UserError, match=r"unknown method 'prodn' \(did you mean 'proden'\?\)"):
        find_method("prodn")
