"""What is exported predicts as the run does, in other programs, and holds nothing that is not its business."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import CroselCli, TinyRun, small_arrays

from crosel.runs import export as export_module
from crosel.runs.export import DESCRIPTION, export_run
from crosel.runs.folder import load_run
from crosel.training.trainer import predicted_probabilities

onnxruntime = pytest.importorskip("onnxruntime")
RELEASE = Path(__file__).parents[1] / "compat" / "release-0.1.0"
SHORT = ("--set", "train.epochs=1", "--set", "train.batch_size=16", "--set", "network.width=4", "--folds", "0")
# Every kind of network, and methods with one network and with two.
RUNS = {
    "small-cnn": ("crosel", "images", ()),
    "averaged": ("crosel", "images", ("--set", "train.ema_decay=0.9", "--set", "method.ensemble=probabilities")),
    "mlp": ("crosel", "features", ()),
    "mlp-of-pixels": ("lws", "images", ("--set", "network.name=mlp")),
    "wrn": ("cc", "images", ("--set", "network.name=wrn-10-1")),
}
Found = tuple[np.ndarray[Any, Any], dict[str, Any]]  # probabilities and the description


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in ("images", "features"):
        np.savez(folder / f"{name}.npz", **small_arrays(32, images=name == "images", test=8))
    return folder


def from_onnx(path: Path, x: np.ndarray[Any, Any]) -> Found:
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    description = json.loads(session.get_modelmeta().custom_metadata_map[DESCRIPTION])
    assert given.name == description["input"]["name"]
    assert given.shape == description["input"]["shape"]
    assert (made.name, made.shape) == ("probabilities", ["n", len(description["classes"])])
    return session.run(None, {given.name: x})[0], description


def from_torch(path: Path, x: np.ndarray[Any, Any]) -> Found:
    extra = {DESCRIPTION: ""}
    model = torch.export.load(path, extra_files=extra).module()
    with torch.no_grad():
        return model(torch.from_numpy(x)).numpy(), json.loads(extra[DESCRIPTION])


READERS = {"onnx": ("classifier.onnx", from_onnx), "torch": ("classifier.pt2", from_torch)}


def assert_predicts_as(run: Path, folder: Path, x: np.ndarray[Any, Any]) -> None:
    """`x` as crosel takes it, for every number of examples."""
    expected = predicted_probabilities(
        load_run(run, torch.device("cpu"), needs_data=False),
        x if x.ndim == 2 else np.ascontiguousarray(x.transpose(0, 3, 1, 2)),
    ).numpy()
    for to, (name, read) in READERS.items():
        description = export_run(run, to, folder / name)
        for n in (1, 2, len(x)):
            found, told = read(folder / name, x[:n])
            assert told == description
            np.testing.assert_allclose(found, expected[:n], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_it_predicts_as_the_run_does(name: str, sources: Path, tmp_path: Path, crosel_cli: CroselCli) -> None:
    method, source, settings = RUNS[name]
    run = tmp_path / "run"
    trained = crosel_cli(
        "train", sources / f"{source}.npz", "--method", method, *SHORT, *settings, "--device", "cpu", "--out", run
    )
    assert trained.code == 0, trained.err
    x = small_arrays(32, images=source == "images", test=64)["x_test"]
    assert_predicts_as(run, tmp_path, x[..., None] if source == "images" else x)


@pytest.mark.parametrize("name", ["pico", "crosel-averaged"])
def test_runs_of_the_first_release(name: str, tmp_path: Path) -> None:
    table = np.genfromtxt(RELEASE / "wine.csv", delimiter=",", skip_header=1, usecols=range(3, 9), encoding="utf-8")
    assert_predicts_as(RELEASE / "folders" / name, tmp_path, table.astype(np.float32))


@pytest.mark.parametrize("to", READERS)
def test_as_crosel_predict(to: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    """From the command line, with names of classes and features that need care in every encoding."""
    rng = np.random.default_rng(0)
    names = np.array(["Zürich | Köln", "東京", '"q"'])[rng.integers(0, 3, 24)]
    rows = [f"{i},{a:.4f},{b:.4f}" for i, (a, b) in enumerate(rng.normal(size=(24, 2)) * [1, 100])]
    quoted = [name.replace('"', '""') for name in names]
    train, new = tmp_path / "train.csv", tmp_path / "new.csv"
    train.write_text(
        "id,länge,α,label\n" + "".join(f'{row},"{name}"\n' for row, name in zip(rows, quoted, strict=True)),
        encoding="utf-8",
    )
    new.write_text("id,länge,α\n" + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    run, predictions = tmp_path / "run", tmp_path / "predictions.jsonl"
    made = crosel_cli("train", train, "--candidates", "uniform:q=0.3", *SHORT, "--device", "cpu", "--out", run)
    assert made.code == 0, made.err
    assert crosel_cli("predict", run, new, "--out", predictions, "--top", "3", "--device", "cpu").code == 0
    file, read = READERS[to]
    exported = crosel_cli("export", run, "--to", to, "--out", tmp_path / "new" / file)
    assert exported == (0, f"features float32 [n, 2] to 3 classes: {tmp_path / 'new' / file}\n", "")
    x = np.array([row.split(",")[1:] for row in rows], dtype=np.float32)
    found, description = read(tmp_path / "new" / file, x)
    assert description["input"]["columns"] == ["länge", "α"]
    assert sorted(description["classes"]) == sorted(set(names))
    for line, probabilities in zip(predictions.read_text(encoding="utf-8").splitlines(), found, strict=True):
        expected = {entry["label"]: entry["probability"] for entry in json.loads(line)["top"]}
        assert dict(zip(description["classes"], probabilities, strict=True)) == pytest.approx(expected, abs=1e-5)


def test_it_runs_without_crosel(tiny_run: TinyRun, tmp_path: Path) -> None:
    export_run(tiny_run.path, "torch", tmp_path / "c.pt2")
    script = (
        "import sys; sys.modules['crosel'] = None\n"
        "import torch\n"
        f"model = torch.export.load({str(tmp_path / 'c.pt2')!r}).module()\n"
        "print(tuple(model(torch.zeros(3, 8, 8, 1, dtype=torch.uint8)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "(3, 10)\n", done.stderr


def members(path: Path) -> dict[str, bytes]:
    """Of a .pt2 file, what is in the archive, since torch 2.6 also writes the time; else all there is."""
    if path.suffix != ".pt2":
        return {"": path.read_bytes()}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("to", READERS)
def test_only_the_classifier_is_in_the_file(to: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    """Neither the tables of the training set (candidate sets, labels) nor folders; and the same bytes each time."""
    file, _ = READERS[to]
    export_run(tiny_run.path, to, tmp_path / file)
    content = (tmp_path / file).read_bytes()
    session = load_run(tiny_run.path, torch.device("cpu"), needs_data=False)
    weights = sum(t.nbytes for t in session.method.networks.state_dict().values())
    assert len(session.data.candidates) == 96  # rows that some tensor below would have
    if to == "torch":
        program = torch.export.load(tmp_path / file)
        tensors = {**program.state_dict, **program.constants}
        assert all(name.startswith(("networks.", "normalise.")) for name in program.state_dict)
        assert [name for name, t in tensors.items() if 96 in t.shape] == []
    else:
        assert len(content) < weights + 20_000
    for place in (Path(export_module.__file__).parent, Path.home(), tmp_path, tiny_run.path):
        assert str(place).encode() not in content
    before = members(tmp_path / file)
    export_run(tiny_run.path, to, tmp_path / file)
    assert members(tmp_path / file) == before
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_bad_targets(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, monkeypatch) -> None:
    out = tmp_path / "c.onnx"

    def refusal(run: Path, to: str, out: Path) -> str:
        code, said, error = crosel_cli("export", run, "--to", to, "--out", out)
        assert (code, said, error.count("\n")) == (2, "", 1)
        return error.removeprefix("crosel: ").strip()

    assert refusal(tiny_run.path, "onxx", out) == (
        "--to onxx: there is no such form (did you mean 'onnx'?); choose from onnx, torch"
    )
    assert refusal(tiny_run.path, "torch", out) == f"{out}: --to torch writes a .pt2 file; use this ending"
    assert refusal(tmp_path / "none", "onnx", out) == f"{tmp_path / 'none'}: no such run folder"
    begun = Path(shutil.copytree(tiny_run.path, tmp_path / "begun", ignore=shutil.ignore_patterns("*.safetensors")))
    assert "the checkpoints are gone" in refusal(begun, "torch", tmp_path / "c.pt2")
    (tmp_path / "folder.onnx").mkdir()
    assert "this is a folder" in refusal(tiny_run.path, "onnx", tmp_path / "folder.onnx")
    monkeypatch.setattr(export_module, "find_spec", lambda name: None)
    assert refusal(tiny_run.path, "onnx", out) == (
        "--to onnx needs onnxscript, which is not installed: pip install 'crosel[onnx]'"
    )
    assert not out.exists()


def test_an_unfinished_run_is_said_to_be_one(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    (run / "done").unlink()
    max((run / "checkpoints").iterdir()).unlink()
    result = crosel_cli("export", run, "--to", "torch", "--out", tmp_path / "c.pt2")
    assert result.code == 0
    assert result.err == f"{run} is not finished; using its state after 3 of 4 epochs\n"


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        x = x.flatten(1)
        {step}
        return self.head(x)

def make(classes, shape):
    return Own(64, classes)
"""


@pytest.mark.parametrize(
    ("step", "reason"),  # None: it can be exported
    [
        ("x = x / x.norm(dim=1, keepdim=True)", None),
        ("x = x if x.mean() > 0 else 2 * x", "net_of_a_user.py, line 12); correct it there"),
        ("x = x / len(x) if len(x) < 5 else x", "cannot be exported"),
        ("x = torch.from_numpy(x.numpy())", "cannot be exported"),
        ("x = x + torch.rand_like(x)", "predicts something else once exported"),
    ],
)
def test_networks_of_ones_own(step: str, reason: str | None, own_network, tiny_run, tmp_path, crosel_cli) -> None:
    Path("net_of_a_user.py").write_text(OWN.format(step=step))
    trained = crosel_cli(
        "train", tiny_run.source, "--method", "cc", *SHORT, "--set", f"network.name={own_network}", "--trust-code",
        "--device", "cpu", "--out", "run",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    command = ("export", "run", "--to", "onnx", "--out", "c.onnx")
    refused = crosel_cli(*command)
    assert (refused.code, "add --trust-code" in refused.err) == (2, True)
    code, _, said = crosel_cli(*command, "--trust-code")
    if reason is None:
        assert code == 0, said
        return
    assert (code, said.count("\n")) == (2, 1), said
    assert said.startswith(f"crosel: run: network '{own_network}' ")
    assert reason in said
    assert not Path("c.onnx").exists()
