"""Pretrained backbones that go on learning (`network.freeze=false`): which layers move, and how far; stopped and
resumed to the bit; predicted with, exported and reported without the pretrained weights.

A small module stands in for timm; `test_pretrained.py` takes the real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from _runs import untimed
from _sessions import CPU, EARLY, NAMES, bits, different
from _support import CroselCli, small_arrays
from _timm import Tiny, stand_in
from PIL import Image
from safetensors.torch import save_file

import crosel
from crosel.config import build_config
from crosel.data.dataset import Dataset, make_dataset
from crosel.errors import Interrupted, UserError
from crosel.nn import fused
from crosel.nn.factory import NetworkSettings
from crosel.nn.fine_tuning import FineTuned
from crosel.nn.networks import forward_split_bn
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.trainer import fit


@pytest.fixture(autouse=True)
def timm(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return stand_in(monkeypatch)


BASE = ("network.name=timm/tiny", "network.freeze=false", "train.epochs=2", "train.batch_size=32")


def session(method: str, *settings: str, data: Dataset | None = None) -> Session:
    data = data or make_dataset(**small_arrays(), classes=10)
    values = {"source": "memory", "method": {"name": method}}
    config = build_config(settings=[*BASE, *EARLY.get(method, []), *settings], values=values)
    return build_session(resolve(config, data), data, CPU)


def moved(s: Session) -> dict[str, float]:
    """How far training moves each weight of the first network."""
    before = {name: p.detach().clone() for name, p in s.method.networks[0].named_parameters()}
    fit(s)
    return {name: float((p.detach() - before[name]).abs().max()) for name, p in s.method.networks[0].named_parameters()}


@pytest.mark.parametrize("method", NAMES)
def test_stopped_and_resumed_the_bits_are_the_same(method: str) -> None:
    straight, broken, resumed = (session(method) for _ in range(3))
    fit(straight)
    looks = iter([False] * 4 + [True])  # in the middle of the second epoch
    with pytest.raises(Interrupted):
        fit(broken, stop_requested=lambda: next(looks))
    tensors, state = broken.state()
    resumed.restore(crosel.training.checkpoint.Checkpoint({k: v.clone() for k, v in tensors.items()}, state))
    fit(resumed)
    assert different(bits(straight), bits(resumed)) == []
    assert untimed(straight.progress.rows) == untimed(resumed.progress.rows)


def test_pretrained_layers_move_less_than_the_head_and_statistics_stay() -> None:
    s = session("cc", "train.body_lr=0.01")
    statistics = [b.clone() for name, b in s.method.networks[0].named_buffers()]
    far = moved(s)
    body = [value for name, value in far.items() if name.startswith("body.")]
    assert len(body) == 11
    assert min(body) > 0
    assert max(body) < 0.02 * max(value for name, value in far.items() if name.startswith("head."))
    assert all(torch.equal(b, old) for b, old in zip(s.method.networks[0].buffers(), statistics, strict=True))


@pytest.mark.parametrize(
    ("freeze", "still"),
    [
        ("1", ("token", "stem")), ("2", ("token", "stem", "blocks.0")), ("blocks.0.0", ("blocks.0.0",)),
        ("[stem, blocks]", ("stem", "blocks")), ("0", ()),
    ],
)  # fmt: skip
def test_layers_are_frozen_by_number_or_name(freeze: str, still: tuple[str, ...]) -> None:
    far = moved(session("cc", f"network.freeze={freeze}"))
    for name, value in far.items():
        assert (value == 0) == name.removeprefix("body.").startswith(still or "nothing"), name


def test_less_memory_is_the_same_training() -> None:
    kept, again = session("crosel"), session("crosel", "network.checkpointing=true")
    fit(kept)
    fit(again)
    assert different(bits(kept), bits(again)) == []


def test_the_middle_of_images_of_any_size_is_what_it_sees() -> None:
    settings = NetworkSettings(name="timm/tiny", freeze=False)
    network = FineTuned(Tiny(), settings, 3).eval()
    x = torch.randn(2, 3, 12, 12)
    wide = torch.full((2, 3, 12, 20), 9.0)
    wide[:, :, :, 4:16] = x
    torch.testing.assert_close(network(wide), network(x))
    assert network(torch.randn(2, 3, 5, 5)).shape == network(torch.randn(2, 3, 30, 40)).shape == (2, 3)


def test_several_passes_are_one_where_no_example_depends_on_others() -> None:
    batches = [torch.randn(3, 3, 12, 12), torch.randn(5, 3, 12, 12)]
    for hidden, passes in (((), [8]), ((4,), [3, 5])):
        network = FineTuned(Tiny(), NetworkSettings(name="timm/tiny", freeze=False, hidden=hidden), 3)
        apart, seen = [network(x) for x in batches], []
        network.body.stem.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(len(inputs[0])))
        with mock.patch.object(fused, "available", return_value=True):  # as on a GPU
            together = forward_split_bn(network, *batches)
        assert seen == passes
        for one, other in zip(together, apart, strict=True):
            torch.testing.assert_close(one, other)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder, rng, names = tmp_path / "photos", np.random.default_rng(0), ("blue", "green", "red")
    folder.mkdir()
    lines = ["path,candidates,label"]
    for i in range(48):
        pixels = rng.integers(0, 60, (30, 40, 3), dtype=np.uint8)
        pixels[..., i % 3] += 150
        Image.fromarray(pixels).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{names[i % 3]}|{names[(i % 3 + 1 + i % 2) % 3]},{names[i % 3]}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_from_photographs_to_predictions(photos: Path, tmp_path: Path, crosel_cli: CroselCli, timm: list[bool]) -> None:
    run, settings = tmp_path / "run", [f"--set={s}" for s in (*BASE[:2], "train.epochs=10", "data.test_share=0.25")]
    result = crosel_cli(
        "train", photos / "list.csv", *settings, "--set=train.lr=0.01", "--set=train.batch_size=8",
        "--method", "proden", "--out", run,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "test accuracy 100.00 %" in result.out
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["image_size"] == config["network"]["size"] == 12
    assert config["train"]["optimiser"] == "adamw"
    assert config["train"]["bf16"] is False
    assert config["network"]["digest"]
    assert crosel_cli("train", "--resume", "--out", run).code == 0
    del timm[:]
    for command in (("predict", run, photos, "--out", tmp_path / "p.csv"), ("eval", run), ("report", run, "--out",
                    tmp_path / "r.html"), ("export", run, "--out", tmp_path / "m.pt2")):  # fmt: skip
        result = crosel_cli(*command)
        assert result.code == 0, result.err
    assert timm == [False] * 3  # the run has the weights; the report needs none
    rows = [line.split(",") for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    assert all(label == ("blue", "green", "red")[int(name.split(".")[0]) % 3] for name, label, _ in rows)


def test_the_estimator_fine_tunes_too(tmp_path: Path, timm: list[bool]) -> None:
    arrays = small_arrays()
    model = crosel.PartialLabelClassifier(
        "cc", network="timm/tiny", network_settings={"freeze": False}, epochs=2, lr=0.01
    ).fit(arrays["x"], arrays["candidates"])
    assert model._model.config["train"]["optimiser"] == "adamw"
    model.save(tmp_path / "m.safetensors")
    del timm[:]
    again = crosel.PartialLabelClassifier.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(again.predict_proba(arrays["x"]), model.predict_proba(arrays["x"]))
    assert timm == [False]


def test_small_arrays_are_enlarged_in_the_exported_file_too(tmp_path: Path, crosel_cli: CroselCli) -> None:
    runtime: Any = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    arrays, run, settings = small_arrays(), tmp_path / "run", [f"--set={s}" for s in (*BASE[:2], "train.epochs=1")]
    np.savez(tmp_path / "d.npz", x=arrays["x"], candidates=arrays["candidates"])
    assert crosel_cli("train", tmp_path / "d.npz", *settings, "--method", "cc", "--out", run).code == 0
    result = crosel_cli("export", run, "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert result.code == 0, result.err
    assert "images uint8 [n, 8, 8, 1] to 10 classes" in result.out
    (found,) = runtime.InferenceSession(tmp_path / "m.onnx").run(None, {"images": arrays["x"][..., None]})
    assert crosel_cli("predict", run, tmp_path / "d.npz", "--out", tmp_path / "p.csv").code == 0
    wanted = [float(line.split(",")[2]) for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    np.testing.assert_allclose(found.max(axis=1), wanted, atol=1e-5)


def weights(path: Path) -> None:
    save_file({name: value + 1 for name, value in Tiny().state_dict().items()}, path)


def test_a_run_goes_on_with_its_own_weights(
    tmp_path: Path, photos: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    weights(tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    settings = [f"--set={s}" for s in (*BASE[:2], "train.epochs=1", "network.weights=w.safetensors")]
    assert crosel_cli("train", photos / "list.csv", *settings, "--method", "cc", "--out", run).code == 0
    monkeypatch.chdir(photos)
    assert crosel_cli("train", "--resume", "--out", run).code == 0
    save_file(Tiny().state_dict(), tmp_path / "w.safetensors")
    result = crosel_cli("train", "--resume", "--out", run)
    assert result.code == 2
    assert "other weights" in result.err
    assert crosel_cli("predict", run, photos, "--out", tmp_path / "p.csv").code == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["network.freeze=maybe"], "'timm/tiny' has no layer 'maybe'; it has stem, blocks.0, blocks.1"),
        (["network.freeze=blocks.3"], r"no layer 'blocks.3' \(did you mean 'blocks.[01]'\?\)"),
        (["network.freeze=4"], "has 3 layers, not 4"), (["network.freeze=-1"], "give true, false, a number of layers"),
        (["network.size=13"], "cannot take images of 13 x 13 .*leave network.size out"),
        (["network.name=wrn-10-1"], "to fine-tune, name an image backbone"),
        (["network.name=text/some"], "to fine-tune, name an image backbone"),
        (["train.optimiser=muon"], "muon is for convolutions larger than 1x1 that are not pretrained"),
        (["network.freeze=true", "network.size=12"], "size and checkpointing need network.freeze=false"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(settings: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        assert session("cc", *settings).optimiser
    assert "\n" not in str(error.value)


def test_what_are_no_pictures_is_refused() -> None:
    for x, found in ((np.ones((40, 3)), "rows of numbers"), (np.ones((40, 9, 9, 2)), "images of 2 channels")):
        with pytest.raises(UserError, match=f"takes images of 1 or 3 channels, but there are {found}"):
            session("cc", data=make_dataset(x, np.eye(4, dtype=bool)[np.arange(40) % 4]))
