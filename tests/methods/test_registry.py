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

from crosel.cli.info import info_lines
from crosel.config import build_config
from crosel.errors import UserError
from crosel.methods import base
from crosel.methods.base import Losses, Method, MethodSettings, Problem, Stream, find_method, methods, register
from crosel.methods.losses import candidate_probabilities, soft_cross_entropy
from crosel.runs.folder import RunFolder
from crosel.runs.pipeline import train_run

OUTSIDE = """
from typing import Literal
from crosel.methods.losses import cc_loss
from crosel.methods.base import Losses, Method, MethodSettings

class Settings(MethodSettings):
    name: Literal["outsider"] = "outsider"

class Outsider(Method):
    name, title, paper, Settings = "outsider", "From another package", "none", Settings

    def loss(self, batches, generator):
        batch = batches["all"]
        loss = cc_loss(self.networks[0](batch["weak"]), self.candidates[batch.index])
        return Losses(loss)
"""


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    before = dict(methods())
    yield
    base._METHODS.clear()
    base._METHODS.update(before)
    base._BROKEN.clear()
    sys.modules.pop("outsider_pkg", None)


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
            return Losses(loss)

    assert "average" in methods()
    assert train_with("average", tmp_path / "run")["test_accuracy"] > 0.3


def install(entry: str, site: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """A package with a method in it, as an installer would leave it."""
    info = site / "outsider-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "outsider_pkg.py").write_text(OUTSIDE + more)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[crosel.methods]\n{entry}\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    importlib.invalidate_caches()


def test_a_method_from_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("outsider = outsider_pkg:Outsider", tmp_path / "site", monkeypatch)
    assert "outsider" in methods()
    assert train_with("outsider", tmp_path / "run")["test_accuracy"] > 0.3
    # A run of it, looked at where the package is not installed: the place and the remedy.
    monkeypatch.undo()
    base._METHODS.pop("outsider")
    with pytest.raises(UserError, match=r"run/checkpoints: unknown method 'outsider'; .* from another package"):
        RunFolder(tmp_path / "run").read_config()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("outsider = outsider_pkg.nothing:Outsider", "ModuleNotFoundError: No module named"),
        ("outsider = outsider_pkg:Nobody", "AttributeError: .*has no attribute 'Nobody'"),
        ("outsider = outsider_pkg:cc_loss", "ValueError: the class must have the entry point's name"),
        ("other = outsider_pkg:Outsider", "ValueError: the class must have the entry point's name, name = 'other'"),
    ],
)
def test_a_package_with_a_fault_concerns_only_those_who_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, why: str
) -> None:
    install(entry, tmp_path / "site", monkeypatch)
    name = entry.split()[0]
    assert name not in methods()
    assert find_method("cc").name == "cc"
    with pytest.raises(
        UserError, match=rf"^method '{name}': outsider_pkg\S* of the package outsider cannot be .*{why}"
    ):
        find_method(name)
    assert any(name in line and "cannot be used" in line for line in info_lines())


def test_a_package_that_fails_after_it_has_registered_its_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "from crosel.methods.base import register\nregister(Outsider)\nraise RuntimeError('too late')\n"
    install("outsider = outsider_pkg:Outsider", tmp_path / "site", monkeypatch, late)
    assert "outsider" not in methods()
    with pytest.raises(UserError, match=r"^method 'outsider': .* cannot be used .RuntimeError: too late"):
        find_method("outsider")


def test_the_loop_the_views_the_checkpoint_and_the_report_know_no_method() -> None:
    """They import the contract alone, and no text of theirs but prose is a method's name."""
    root = Path(base.__file__).parents[1]
    folders = ("augment", "nn", "report", "review", "runs", "training")
    files = [file for folder in folders for file in (root / folder).glob("*.py")]
    names = {name for name in methods() if name != "crosel"}  # the package is called that, too
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosel.methods"):
                assert node.module in ("crosel.methods.base", "crosel.methods.bank"), file
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.lower() not in names, f"{file}: {node.value}"
            if isinstance(node, ast.Compare):
                assert not any(isinstance(c, ast.Constant) and c.value == "crosel" for c in node.comparators), file


def test_wrong_registrations_are_refused() -> None:
    with pytest.raises(TypeError, match="needs the class attribute 'name'"):
        register(type("Nameless", (Method,), {}))
    with pytest.raises(ValueError, match="already registered"):
        register(type("Again", (Method,), {"name": "cc", "title": "", "paper": "", "Settings": MethodSettings}))


def test_a_method_without_a_loss_cannot_be_built() -> None:
    class Nothing(Method):
        name = "nothing"

    with pytest.raises(TypeError, match=r"abstract method '?loss"):
        Nothing(MethodSettings(name="nothing"), Problem(torch.ones(2, 2, dtype=torch.bool), 1), nn.Identity)


@pytest.mark.parametrize(
    ("asked", "taken", "message"),
    [
        ("wek", "weak", "stream 'all' asks for a view 'wek'; choose from plain, weak"),
        ("weak", "strong", "this batch has no view 'strong'; its stream asks for weak"),
    ],
)
def test_a_view_that_is_not_there_is_named_to_who_writes_a_method(
    tmp_path: Path, asked: str, taken: str, message: str
) -> None:
    class WrongSettings(MethodSettings):
        name: Literal["wrong"] = "wrong"

    @register
    class Wrong(Method):
        name, title, paper, Settings = "wrong", "", "", WrongSettings

        def streams(self) -> dict[str, Stream]:
            return {"all": Stream((asked,))}

        def loss(self, batches, generator):  # type: ignore[no-untyped-def]
            return Losses(self.networks[0](batches["all"][taken]).mean())

    with pytest.raises(ValueError, match=message):
        train_with("wrong", tmp_path / "run")


def test_an_unknown_method_is_named_with_its_neighbour() -> None:
    with pytest.raises(UserError, match=r"unknown method 'prodn' \(did you mean 'proden'\?\)"):
        find_method("prodn")


def settings_of(name: str, **values: object) -> MethodSettings:
    return find_method(name).Settings.model_validate({"name": name, **values})


@pytest.mark.parametrize(
    ("settings", "epochs", "remarks"),
    [
        (settings_of("pop"), 20, ["method.warm_up=20 with train.epochs=20: pop never gets past that stage"]),
        (settings_of("pop"), 21, []),
        (
            settings_of("pop", threshold=0.2, cap=0.1),
            21,
            ["method.cap=0.1 has no effect: method.threshold=0.2 is already above it"],
        ),
        (settings_of("pop", threshold=0.2, cap=0.2), 21, []),
        (settings_of("pico", proto_start=3), 3, ["method.proto_start=3 with train.epochs=3: pico never gets"]),
        (settings_of("pico"), 2, []),
        (settings_of("cc"), 1, []),
        (settings_of("crosel"), 1, ["one epoch is a warm-up and selects nothing for CroSel to learn from; raise"]),
        (settings_of("crosel"), 2, []),
        (settings_of("crosel"), 9, []),
        (settings_of("crosel").filled_in(9), 9, []),
        (settings_of("crosel", gamma_start=0.5), 9, []),  # the default ramp moves it
        (settings_of("crosel", gamma_start=0.5, ramp=0), 9, ["method.gamma_start has no effect without method.ramp"]),
        (settings_of("crosel", ramp=2), 9, ["method.ramp=2 has no effect without a start value"]),
        (settings_of("crosel", ramp=2, lambda_cr_start=1), 9, []),
        (
            settings_of("crosel", outside_gamma=0.95),
            9,
            ["method.outside_gamma=0.95 is above method.gamma; 0.9 is used"],
        ),
        (
            settings_of("crosel", least_selected=50, scope="none"),
            9,
            ["method.least_selected=50 with method.scope=none: while fewer are selected, a network learns nothing"],
        ),
        (settings_of("crosel", least_selected=50), 9, []),
        (settings_of("crosel", scope="none"), 9, []),
        (settings_of("crosel", outside_gamma=0.9), 9, []),
        (settings_of("crosel", outside_gamma=0.5), 9, []),  # the flags of the labels follow it
    ],
)
def test_settings_that_do_nothing_in_this_run_are_remarked_on(
    settings: MethodSettings, epochs: int, remarks: list[str]
) -> None:
    found = settings.remarks(epochs)
    assert len(found) == len(remarks)
    assert all(line.startswith(start) for line, start in zip(found, remarks, strict=True))
