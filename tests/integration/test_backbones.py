"""Pretrained backbones from the command line: embedded once, trained on, predicted with.

A small module stands in for timm; `test_pretrained.py` takes the real one.
"""

from __future__ import annotations

import csv
import io
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import CroselCli
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import crosel
from crosel.config import build_config
from crosel.errors import UserError
from crosel.nn import backbones
from crosel.nn.backbones import ImageBackbone, open_backbone, read_tensors
from crosel.review.cards import load_cards
from crosel.runs.pipeline import train_run

CONFIG = {
    "input_size": (3, 24, 24), "crop_pct": 0.75, "interpolation": "bilinear", "mean": (0.5,) * 3, "std": (0.25,) * 3,
}  # fmt: skip


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


class Passes:
    count = 0


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> type[Passes]:
    """A stand-in for timm with one model; counts the images that pass through it."""

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        if pretrained and name == "offline":
            raise OSError("Connection refused")
        model = tiny_model()
        model.register_forward_hook(lambda module, x, out: setattr(Passes, "count", Passes.count + len(x[0])))
        return model

    Passes.count = 0
    fake: Any = types.ModuleType("timm")
    fake.list_models = lambda pretrained=False: ["tiny_net", "offline", "tf_efficientnet_lite0"]
    fake.create_model = create_model
    fake.get_pretrained_cfg = lambda name: types.SimpleNamespace(to_dict=lambda: CONFIG)
    fake.data = types.SimpleNamespace(resolve_data_config=lambda args, pretrained_cfg: pretrained_cfg)
    monkeypatch.setitem(sys.modules, "timm", fake)
    return Passes


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs of three colours in a folder, with a list of candidate labels; some are upright only by EXIF."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    lines = ["path,candidates,label"]
    names = ("blue", "green", "red")
    for i in range(60):
        label = i % 3
        pixels = rng.integers(0, 60, (90, 120, 3), dtype=np.uint8)
        pixels[..., label] += 150
        Image.fromarray(pixels).save(folder / f"{i}.jpg")
        lines.append(f"{i}.jpg,{names[label]}|{names[(label + 1 + i % 2) % 3]},{names[label]}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder


SETTINGS = ("--set", "network.name=timm/tiny_net", "--set", "train.epochs=12", "--set", "data.test_share=0.2")


def test_from_photographs_to_labels(photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]) -> None:
    source, run = photos / "list.csv", tmp_path / "run"
    result = crosel_cli("train", source, *SETTINGS, "--method", "proden", "--out", run)
    assert result.code == 0, result.err
    assert "test accuracy 100.00 %" in result.out
    config = (run / "config.yaml").read_text()
    assert "lr: 0.01" in config
    assert "hidden: []" in config
    assert Passes.count == 61  # each once, and one to see how long an embedding is
    assert crosel_cli("train", source, *SETTINGS, "--method", "cc", "--out", tmp_path / "again").code == 0
    assert Passes.count == 62
    predicted = crosel_cli("predict", run, photos, "--out", tmp_path / "p.csv")
    assert predicted.code == 0, predicted.err
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert {row["label"] for row in rows if int(row["id"].removesuffix(".jpg")) % 3 == 0} == {"blue"}
    evaluated = crosel_cli("eval", run, source)
    assert evaluated.code == 0, evaluated.err
    assert "test_accuracy  1.0000" in evaluated.out


@pytest.mark.usefixtures("timm")
def test_embedded_on_the_device_of_the_run(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(name: str, weights: str | None, device: torch.device) -> None:
        asked.append((name, device))
        raise UserError("so far")

    monkeypatch.setattr("crosel.training.build.open_backbone", opened)
    card = torch.device("meta")  # any but the CPU
    for network in ("timm/tiny_net", "timm/tf_efficientnet_lite0.in1k"):
        config = build_config(values={"source": str(photos / "list.csv"), "network": {"name": network}})
        with pytest.raises(UserError, match="so far"):
            train_run(config, tmp_path / "run", card)
        assert asked.pop() == (network, card)


def test_weights_alone_name_the_suggested_backbone(
    photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]
) -> None:
    """Whoever gives a file with weights wants no network from scratch, whatever the size of the images."""
    weights, run = tmp_path / "w.safetensors", tmp_path / "run"
    save_file(tiny_model().state_dict(), weights)
    given = ("--set", f"network.weights={weights}", "--set", "train.epochs=1", "--method", "cc")
    result = crosel_cli("train", photos / "list.csv", *given, "--out", run)
    assert result.code == 0, result.err
    assert "name: timm/tf_efficientnet_lite0" in (run / "config.yaml").read_text()
    gone = crosel_cli(
        "train", photos / "list.csv", "--set", "network.weights=gone.safetensors", "--out", tmp_path / "b"
    )
    assert gone.code == 2
    assert "gone.safetensors: no such file" in gone.err
    weights.unlink()
    assert "(of a run: in its config.yaml)" in crosel_cli("predict", run, photos, "--out", tmp_path / "p.csv").err


def test_people_see_the_photographs(photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]) -> None:
    """The network has seen embeddings; report and review page show the files, each beside its own label."""
    run = tmp_path / "run"
    settings = (*SETTINGS[:4], "--set", "data.test_share=0.3", "--set", "data.split_seed=4")
    assert crosel_cli("train", photos / "list.csv", *settings, "--method", "proden", "--out", run).code == 0
    assert '<img class="thumb"' in (run / "report.html").read_text(encoding="utf-8")
    cards = load_cards(run)
    assert cards.has_images
    for row, name in enumerate(cards.ids):
        shown = np.asarray(Image.open(io.BytesIO(cards.png_of(row))))
        assert shown.shape == (90, 120, 3)
        assert shown.mean(axis=(0, 1)).argmax() == int(name.removesuffix(".jpg")) % 3
    (photos / cards.ids[0]).unlink()
    assert load_cards(run).notes  # the data are no longer those of the run


@pytest.mark.usefixtures("timm")
def test_the_exported_file_takes_pictures(
    photos: Path, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["timm"], "create_model", lambda name, pretrained, num_classes: tiny_model())
    run, out = tmp_path / "run", tmp_path / "m.pt2"
    assert crosel_cli("train", photos / "list.csv", *SETTINGS, "--method", "proden", "--out", run).code == 0
    result = crosel_cli("export", run, "--out", out)
    assert result.code == 0, result.err
    assert "images uint8 [n, 24, 24, 3]" in result.out
    backbone = open_backbone("timm/tiny_net")
    assert isinstance(backbone, ImageBackbone)
    pictures = [backbone.prepare(Image.open(photos / f"{i}.jpg").convert("RGB")) for i in range(5)]
    found = torch.export.load(out).module()(torch.from_numpy(np.stack(pictures)))
    assert crosel_cli("predict", run, photos, "--out", tmp_path / "p.csv").code == 0
    rows = {row["id"]: row for row in csv.DictReader((tmp_path / "p.csv").read_text().splitlines())}
    for i in range(5):
        assert float(rows[f"{i}.jpg"]["confidence"]) == pytest.approx(float(found[i].max()), abs=2e-6)


def test_a_killed_embedding_goes_on(
    photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosel.data.embeddings._BATCH", 8)
    monkeypatch.setattr("crosel.data.images.SUFFIXES", frozenset({".jpg"}))
    broken = photos / "40.jpg"
    content = broken.read_bytes()
    broken.write_bytes(b"no image")
    refused = crosel_cli("train", photos / "list.csv", *SETTINGS, "--out", tmp_path / "run")
    assert refused.code == 2
    assert "40.jpg" in refused.err
    assert "line 42" in refused.err
    seen = Passes.count
    assert seen > 8
    broken.write_bytes(content)
    assert crosel_cli("train", photos / "list.csv", *SETTINGS, "--out", tmp_path / "run").code == 0
    assert Passes.count <= 62 + 8


def test_arrays_of_images_are_embedded_too(tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 16, 16), dtype=np.uint8)
    sets = np.eye(4, dtype=bool)[np.arange(40) % 4]
    np.savez(tmp_path / "x.npz", x=x, candidates=sets)
    run = tmp_path / "run"
    result = crosel_cli("train", tmp_path / "x.npz", *SETTINGS[:4], "--method", "cc", "--out", run)
    assert result.code == 0, result.err
    np.savez(tmp_path / "new.npz", x=x[:5])
    assert crosel_cli("predict", run, tmp_path / "new.npz", "--out", tmp_path / "p.csv").code == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 6


def test_estimator_takes_images_of_any_size(timm: type[Passes]) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.integers(0, 60, (90, 40, 30, 3), dtype=np.uint8)
    x[np.arange(90), :, :, y] += 150
    sets = [{int(label), int(label + 1 + i % 2) % 3} for i, label in enumerate(y)]
    model = crosel.PartialLabelClassifier("cc", network="timm/tiny_net", epochs=15, batch_size=8).fit(x, sets)
    assert Passes.count == 91
    assert model.score(x, y) == 1
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(np.repeat(x[:9], 2, axis=1) / 255.0 * 255), y[:9])
    with pytest.raises(UserError, match="takes images"):
        model.predict(np.ones((2, 32)))


@pytest.mark.usefixtures("timm")
def test_of_a_strip_the_middle_is_seen_and_the_rest_costs_nothing() -> None:
    backbone = open_backbone("timm/tiny_net")
    assert isinstance(backbone, ImageBackbone)
    pixels = np.zeros((8, 60_000, 3), np.uint8)
    pixels[:, 30_000:] = 200
    found = backbone.prepare(Image.fromarray(pixels))
    assert found.shape == (24, 24, 3)
    assert (found[:, 0].max(), found[:, -1].min()) == (0, 200)
    assert np.array_equal(found, backbone.prepare(Image.fromarray(pixels[:, 29_900:30_100])))


def one_line(run: Callable[[], Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        run()
    assert "\n" not in str(error.value)


def test_wrong_names_and_weights_are_one_line(tmp_path: Path, timm: type[Passes]) -> None:
    one_line(lambda: open_backbone("timm/tiny_nett"), "did you mean 'timm/tiny_net'")
    one_line(lambda: open_backbone("timm/offline"), "cannot be had .*network.weights=PATH")
    one_line(lambda: open_backbone("timm/tiny_net", str(tmp_path / "no.pt")), "no such file")
    torch.save({"0.weight": torch.zeros(1)}, tmp_path / "other.pt")
    one_line(lambda: open_backbone("timm/tiny_net", str(tmp_path / "other.pt")), "has shape|there is no tensor")
    (tmp_path / "text.safetensors").write_text("not tensors")
    one_line(lambda: open_backbone("timm/tiny_net", str(tmp_path / "text.safetensors")), "not a file of tensors")


def test_photographs_are_learnt_from_on_a_backbone(
    photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]
) -> None:
    run, settings = tmp_path / "run", ("--method", "cc", "--set", "train.epochs=3", "--set", "train.lr=0.02")
    result = crosel_cli("train", photos / "list.csv", *settings, "--out", run)
    assert result.code == 0, result.err
    assert "images of 120 x 90 pixels: learning on timm/tf_efficientnet_lite0.in1k" in result.err
    config = (run / "config.yaml").read_text()
    assert "name: timm/tf_efficientnet_lite0.in1k" in config
    assert "weight_decay: 0.1\n" in config
    assert "lr: 0.02\n" in config
    again = crosel_cli("train", photos / "list.csv", *settings, "--out", run, "--resume")
    assert again.code == 0, again.err
    small = crosel_cli(
        "train", photos / "list.csv", *settings, "--set", "data.image_size=8", "--out", tmp_path / "small"
    )
    assert small.code == 0, small.err
    assert "name: small-cnn" in (tmp_path / "small" / "config.yaml").read_text()


def test_without_the_extra_a_line_says_what_photographs_lose(
    photos: Path, tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosel.training.build.installed", lambda kind: False)
    settings = ("--method", "cc", "--set", "train.epochs=1", "--set", "network.name=auto")
    result = crosel_cli("train", photos / "list.csv", *settings, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "120 x 90 pixels are reduced to 32 x 32 and learnt from scratch" in result.err
    assert "pip install 'crosel[photos]'" in result.err


class Bomb:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of a file ran')",))


def test_weights_with_code_in_them_do_not_run(tmp_path: Path) -> None:
    torch.save({"0.weight": Bomb()}, tmp_path / "bomb.pt")
    one_line(lambda: read_tensors(tmp_path / "bomb.pt"), "not a file of tensors")


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_weights_from_a_file(ending: str, tmp_path: Path, timm: type[Passes]) -> None:
    tensors = {name: value + 1 for name, value in tiny_model().state_dict().items()}
    path = tmp_path / f"w{ending}"
    if ending == ".pt":
        torch.save({"state_dict": {f"module.{name}": value for name, value in tensors.items()}}, path)
    else:
        save_file(tensors, path)
    plain, other = open_backbone("timm/tiny_net"), open_backbone("timm/tiny_net", str(path))
    assert plain.digest != other.digest
    assert isinstance(other, ImageBackbone)
    assert all((value == tensors[name]).all() for name, value in other.model.state_dict().items())


def test_a_run_knows_its_weights(photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]) -> None:
    save_file({k: v + 1 for k, v in tiny_model().state_dict().items()}, tmp_path / "w.safetensors")
    run, weights = tmp_path / "run", ("--set", f"network.weights={tmp_path / 'w.safetensors'}")
    assert crosel_cli("train", photos / "list.csv", *SETTINGS, *weights, "--method", "cc", "--out", run).code == 0
    save_file({k: v + 2 for k, v in tiny_model().state_dict().items()}, tmp_path / "w.safetensors")
    refused = crosel_cli("predict", run, photos, "--out", tmp_path / "p.csv")
    assert refused.code == 2
    assert "other weights" in refused.err


def test_what_is_no_image_is_refused(tmp_path: Path, crosel_cli: CroselCli, timm: type[Passes]) -> None:
    (tmp_path / "f.csv").write_text("candidates,a,b\nx|y,1,2\ny,2,1\nx,0,1\n")
    result = crosel_cli("train", tmp_path / "f.csv", *SETTINGS[:4], "--out", tmp_path / "run")
    assert result.code == 2
    assert "takes images, but there are rows of numbers" in result.err
    assert not (tmp_path / "run").exists()


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(backbones.importlib, "import_module", _missing)
    one_line(lambda: open_backbone("timm/resnet18"), r"pip install 'crosel\[photos\]'")
    one_line(lambda: open_backbone("text/x"), r"pip install 'crosel\[text\]'")


def _missing(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named '{name}'", name=name)
