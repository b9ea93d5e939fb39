"""Everything a user can mend: exit code 2, one or two plain lines with the place, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _runs import ENVIRONMENT, ForkServer, assert_same_run, checkpoints, metrics, tree
from _support import CroselCli, TinyRun, small_arrays

from crosel.runs.pipeline import StopFlag
from crosel.training import trainer as train


def assert_refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert "Traceback" not in err, err
    assert code == 2, (code, out, err)
    lines = err.splitlines()
    if lines[0].startswith("read "):  # a run that had begun, and said what it would do
        lines = lines[2:]
    assert 1 <= len(lines) <= 2, err
    assert lines[0].startswith("crosel: ")
    for part in parts:
        assert part in err, f"{part!r} is not in {err!r}"


# --- settings and names -------------------------------------------------------------------------------------------

SETTINGS = {
    "train.epoch=5": "unknown setting 'train.epoch' (did you mean 'train.epochs'?)",
    "method.gama=0.5": "unknown setting 'method.gama' (did you mean 'method.gamma'?)",
    "network.widht=8": "unknown setting 'network.widht' (did you mean 'network.width'?)",
    "trian.epochs=5": "unknown setting 'trian' (did you mean 'train'?)",
    "epochs=5": "unknown setting 'epochs' (did you mean 'train.epochs'?)",
    "lr=0.1": "unknown setting 'lr' (did you mean 'train.lr'?)",
    "gamma=0.8": "unknown setting 'gamma' (did you mean 'method.gamma'?)",
    "train.gamma=0.8": "unknown setting 'train.gamma' (did you mean 'method.gamma'?)",
    "ema_decay=0.9": "unknown setting 'ema_decay' (did you mean 'train.ema_decay'?)",
    "train.refresh=4": "setting 'train.refresh' does not exist any more (given: 4); train without it",
    "zzz=1": "unknown setting 'zzz'",
    "train.epochs=0": "setting 'train.epochs': input should be greater than or equal to 1 (given: 0)",
    "train.epochs=2.5": "setting 'train.epochs'",
    "train.epochs=many": "setting 'train.epochs'",
    "train.lr=-1": "setting 'train.lr': input should be greater than 0 (given: -1)",
    "train.lr=.nan": "setting 'train.lr'",
    "train.momentum=1": "setting 'train.momentum': input should be less than 1 (given: 1)",
    "train.milestones=[0.9, 0.1]": "setting 'train.milestones': give rising numbers between 0 and 1",
    "train.schedule=linear": "setting 'train.schedule'",
    "method.gamma=1.5": "setting 'method.gamma': input should be less than or equal to 1 (given: 1.5)",
    "method.warmup=50": "method.warmup is 50, but the run has only 50 epochs",
    "method.name=crosl": "unknown method 'crosl' (did you mean 'crosel'?)",
    "method=cc": "setting 'method' needs a name and its settings",
    "train=5": "setting 'train'",
    "seed=-1": "setting 'seed': input should be greater than or equal to 0 (given: -1)",
    "train.epochs": "--set train.epochs: write NAME=VALUE",
    "=5": "--set =5: write NAME=VALUE",
    "network.name=smal-cnn": "unknown network 'smal-cnn' (did you mean 'small-cnn'?)",
    "network.name=no_module:factory": "network 'no_module:factory' is code from outside crosel; add --trust-code",
}


@pytest.mark.parametrize("item", list(SETTINGS))
def test_bad_setting(item: str, tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    result = crosel_cli("train", image_npz, "--set", item, "--out", tmp_path / "run")
    assert_refused(result, SETTINGS[item])
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_batches_of_one_where_batch_norm_has_a_single_value(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path
) -> None:
    one = ("--set", "train.batch_size=1", "--set", "train.epochs=1")
    result = crosel_cli("train", image_npz, *one, "--set", "network.name=mlp", "--out", tmp_path / "run")
    assert_refused(result, "this network has batch normalisation and cannot train on batches of one example; raise the")
    assert not (tmp_path / "run").exists()
    images = crosel_cli("train", image_npz, *one, "--set", "network.width=2", "--out", tmp_path / "images")
    assert images.code == 0, "of an image it has as many values as pixels"


FLAGS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("train", "digits", "--method", "crosl"): ("unknown method 'crosl' (did you mean 'crosel'?)",),
    ("train", "digits", "--method", ""): ("what follows --method is empty",),  # $METHOD that is not set
    ("train", "digits", "--preset="): ("--preset= is empty; give it a value",),
    ("train", "digits", "--out", ""): ("what follows --out is empty; give it a value (is a shell variable not set?)",),
    ("train", "digits", "--preset", "demo/digit"): ("unknown preset 'demo/digit' (did you mean 'demo/digits'?)",),
    ("train", "digits", "--candidates", "unifrm:q=0.3"): (
        "unknown candidate rule 'unifrm' (did you mean 'uniform'?)",
    ),
    ("train", "digits", "--candidates", "uniform"): ("rule 'uniform' needs q, as in 'uniform:q=0.5'",),
    ("train", "digits", "--candidates", "uniform:q=2"): ("q must lie between 0 and 1, not 2.0",),
    ("train", "digits", "--candidates", "uniform:q=half"): ("'q=half' needs a number",),
    ("train", "digits", "--candidates", "uniform:p=0.5"): ("unknown value 'p'", "'uniform' takes q"),
    ("train", "digits", "--candidates", "superclass:q=0.5"): ("needs superclasses, which this data does not have",),
    ("train", "digits"): ("this data has plain labels", "--candidates uniform:q=0.3"),
    ("train", "digits", "--candidates", "uniform:q=0.3", "--device", "gpu"): ("unknown device 'gpu'",),
    ("train", "digits", "--candidates", "uniform:q=0.3", "--seed", "x"): ("'--seed'",),
    ("train", "digits", "--candidates", "uniform:q=0.3", "--set", "train.epochs=1", "--set", "train.epochs.x=2"): (
        "'epochs' already has a value",
    ),
    ("train", "digit"): ("source 'digit' is neither a file nor one of digits", "did you mean 'digits'?"),
    ("train", "cifar10"): ("cifar-10-batches-py does not exist", "--data DIR", "crosel data get cifar10 --to DIR"),
    ("train", "."): ("cannot read a folder without a folder of images for each class", "csv file: path,candidates"),
    ("train", ""): ("what follows train is empty",),
    ("train", " "): ("source ' ' is neither a file nor one of digits",),
    ("train", "digits", "--candidates", "uniform:q=0.3,q=0.5"): ("rule 'uniform:q=0.3,q=0.5': q is given twice",),
    ("train",): ("give something to train on", "--resume with --out RUN"),
    ("train", "--resume"): ("give something to train on", "--resume with --out RUN"),
    ("train", "--preset", "demo/digits"): ("give something to train on", "--resume with --out RUN"),
    ("train", "digits", "--epochs", "5"): ("--epochs", "crosel train --help", "--set train.epochs=20"),
    ("train", "digits", "--out"): ("'--out' requires an argument", "crosel --help"),
    ("train", "--resume=yes"): ("'--resume' does not take a value", "crosel --help"),
    ("trian", "digits"): ("trian", "crosel --help"),
    ("predict", "run"): ("crosel predict --help",),
    ("data",): ("Missing command", "crosel data --help"),
    ("data", "get"): ("crosel data get --help",),
    ("report", "run", "--out", "r.pdf"): ("r.pdf: the report is an .html file",),
    ("tables", ".", "--out", "t.xlsx"): ("t.xlsx: use one of the endings .md, .txt, .csv, .tex",),
    ("predict", "run", "x.npz", "--out", "p.csv", "--top", "0"): ("'--top'",),
    ("train", "--config", "nowhere.yaml"): ("nowhere.yaml: no such file",),
}  # fmt: skip


@pytest.mark.parametrize("args", list(FLAGS), ids=" ".join)
def test_bad_flag(
    args: tuple[str, ...], tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(crosel_cli(*args), *FLAGS[args])
    assert list(tmp_path.glob("runs/*")) == []


def test_cuda_where_there_is_none(crosel_cli: CroselCli, tmp_path: Path, image_npz: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    result = crosel_cli("train", image_npz, "--device", "cuda", "--out", tmp_path / "run")
    assert_refused(result, "torch finds no CUDA device; use --device cpu")


CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "not YAML": ("train:\n  epochs: 5\n lr: 0.1\n", "config.yaml, line 3, column 2: not valid YAML"),
    "a tab": ("train:\n\tepochs: 5\n", "config.yaml, line 2, column 1: not valid YAML"),
    "a list": ("- 1\n- 2\n", "config.yaml: expected settings as 'name: value' lines"),
    "empty": ("", "config.yaml: expected settings as 'name: value' lines"),
    "unknown name": ("trian: {epochs: 5}\n", "unknown setting 'trian' (did you mean 'train'?)"),
    "code": ("source: !!python/object/apply:os.mkdir [ran]\n", "config.yaml, line 1, column 9: not valid YAML"),
    "not text": (b"\xff\xfe\x00", "config.yaml: not UTF-8 text"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CONFIGS))
def test_bad_config_file(
    case: str, tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, says = CONFIGS[case]
    (tmp_path / "config.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    result = crosel_cli("train", image_npz, "--config", "config.yaml", "--out", "run")
    assert_refused(result, says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


# --- data ---------------------------------------------------------------------------------------------------------

Arrays = dict[str, Any]


def put(name: str, value: Any) -> Callable[[Arrays], None]:
    return lambda data: data.update({name: value})


def cell(name: str, *place: Any) -> Callable[[Arrays], None]:
    *index, value = place

    def change(data: Arrays) -> None:
        data[name] = data[name].astype(np.float64) if isinstance(value, float) else data[name]
        data[name][tuple(index)] = value

    return change


def drop(*names: str) -> Callable[[Arrays], None]:
    def change(data: Arrays) -> None:
        for name in names:
            del data[name]

    return change


def cut(name: str, n: int) -> Callable[[Arrays], None]:
    return lambda data: data.update({name: data[name][:n]})


# name -> (change of good features data with 20 examples of 64 values and 10 classes, what must be said)
DATA: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "empty set": (cell("candidates", 7, slice(None), False), "candidates: the candidate set of example 7 is empty"),
    "set of 0, 1 and 2": (put("candidates", np.full((20, 10), 2)), "candidates: row 0, column 0 is 2"),
    "sets in one dimension": (put("candidates", np.ones(20)), "candidates: expected a matrix [n, k]"),
    "label above the classes": (cell("y", 3, 10), "y: label 10 of example 3 is outside the classes 0 to 9"),
    "label below the classes": (cell("y", 3, -1), "y: label -1 of example 3 is outside the classes 0 to 9"),
    "label between the classes": (cell("y", 3, 1.5), "y: label 1.5 of example 3"),
    "labels as text": (put("y", np.array(["a"] * 20)), "'y' has names, so 'classes' must name the columns"),
    "test label outside": (cell("y_test", 2, 99), "y_test: label 99 of example 2 is outside the classes 0 to 9"),
    "NaN": (cell("x", 4, 6, float("nan")), "x: NaN in row 4, column 6"),
    "infinity": (cell("x", 5, 1, float("inf")), "x: an infinite value in row 5, column 1"),
    "minus infinity": (cell("x", 5, 2, float("-inf")), "x: an infinite value in row 5, column 2"),
    "NaN in the test set": (cell("x_test", 1, 2, float("nan")), "x_test: NaN in row 1, column 2"),
    "too large for float32": (cell("x", 2, 3, 1e300), "x: row 2, column 3 is too large for single precision"),
    "complex": (put("x", np.ones((20, 4), complex)), "x: complex numbers cannot be used"),
    "text": (put("x", np.array([["a"] * 4] * 20)), "x: expected numbers"),
    "fewer sets than examples": (cut("candidates", 19), "x has 20 examples, but candidates has 19"),
    "fewer labels than examples": (cut("y", 19), "x has 20 examples, but y has 19"),
    "fewer test labels": (cut("y_test", 4), "x_test has 5 examples, but y_test has 4"),
    "test set without labels": (drop("y_test"), "give both x_test and y_test, or neither"),
    "test labels without set": (drop("x_test"), "give both x_test and y_test, or neither"),
    "x in one dimension": (put("x", np.ones(20)), "x: expected features [n, d] or images"),
    "x in five dimensions": (put("x", np.ones((20, 1, 1, 1, 1))), "x: expected features [n, d] or images"),
    "x of size 0": (put("x", np.ones((20, 0))), "x: there are no examples, or examples of size 0"),
    "test set of another shape": (put("x_test", np.ones((5, 63))), "x_test has examples of shape (63,)"),
    "pixels out of range": (put("x", np.full((20, 8, 8), 300.0)), "x: pixels must lie in 0..255 or 0..1"),
    "names for other classes": (put("classes", list("abc")), "candidates has 10 columns for 3 classes"),
    "too few ids": (put("ids", ["a"]), "x has 20 examples, but there are 1 ids"),
    "ids in two dimensions": (put("ids", np.ones((20, 2))), "'ids' must be one-dimensional"),
    "pickled x": (put("x", np.array([{}] * 20)), "'x' holds Python objects"),
    "pickled sets": (put("candidates", np.array([[1], [1, 2]], object)), "'candidates' holds Python objects"),
    "no x": (drop("x"), "the array 'x' is missing"),
    "neither sets nor labels": (drop("candidates", "y"), "there are neither candidate sets"),
    "unknown array": (put("candidate", np.ones(3)), "unknown array 'candidate' (did you mean 'candidates'?)"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(DATA))
def test_bad_arrays(case: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    change, says = DATA[case]
    data = small_arrays(20, images=False, test=5)
    change(data)
    np.savez(tmp_path / "bad.npz", **data)
    result = crosel_cli("train", tmp_path / "bad.npz", "--out", tmp_path / "run")
    assert_refused(result, f"crosel: {tmp_path / 'bad.npz'}: ", says)
    assert not (tmp_path / "run").exists()


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    at = 400  # inside x, the first array and the only one that every verb reads
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


FILES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": truncated,
    "a byte flipped": flipped,
    "zeros inside": lambda content: content[:400] + bytes(200) + content[600:],
    "empty": lambda content: b"",
    "text": lambda content: b"x,candidates\n1,cat|dog\n",
    "a pickle": lambda content: b"\x80\x04}\x94.",
    "half a zip header": lambda content: content[:20],
}


@pytest.mark.parametrize("case", list(FILES))
def test_unreadable_npz(case: str, tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, **small_arrays())
    path.write_bytes(FILES[case](path.read_bytes()))
    says = f"crosel: {path}: not a readable npz file"
    assert_refused(crosel_cli("train", path, "--out", tmp_path / "run"), says)
    assert not (tmp_path / "run").exists()
    assert_refused(crosel_cli("eval", tiny_run.path, path), says)
    assert_refused(crosel_cli("predict", tiny_run.path, path, "--out", tmp_path / "p.csv"), says)
    assert not (tmp_path / "p.csv").exists()


def test_single_array_instead_of_npz(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    with open(tmp_path / "single.npz", "wb") as stream:
        np.save(stream, np.ones((3, 4)))
    assert_refused(crosel_cli("train", tmp_path / "single.npz", "--out", tmp_path / "run"), "this is a single array")
    result = crosel_cli("predict", tiny_run.path, tmp_path / "single.npz", "--out", tmp_path / "p.csv")
    assert_refused(result, "this is a single array")


def test_data_and_settings_that_do_not_fit(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    np.savez(tmp_path / "features.npz", **small_arrays(20, images=False))
    result = crosel_cli("train", tmp_path / "features.npz", "--set", "network.name=wrn-10-1", "--out", tmp_path / "run")
    assert_refused(result, "network 'wrn-10-1' is for images, but the data has features", "network.name=mlp")
    result = crosel_cli("train", image_npz, "--set", "network.name=wrn-11-1", "--out", tmp_path / "run")
    assert_refused(result, "11")
    result = crosel_cli("train", image_npz, "--candidates", "uniform:q=0.3", "--out", tmp_path / "run")
    assert_refused(result, "this data has its own candidate sets; leave out the rule 'uniform:q=0.3'")
    assert not (tmp_path / "run").exists()


def spoil_weights(patch: pytest.MonkeyPatch, first: int) -> None:
    """From this step of the third epoch on the weights are NaN, as with a learning rate that is far too high."""
    real = train.learning_rate

    def learning_rate(settings: Any, epoch: int, step: int, steps: int) -> float:
        return float("nan") if (epoch, step) >= (3, first) else real(settings, epoch, step, steps)

    patch.setattr(train, "learning_rate", learning_rate)


@pytest.mark.parametrize("step", [0, 5], ids=["first step", "last step"])
def test_divergence_keeps_the_last_good_checkpoint(
    step: int, tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil_weights(patch, step)
        result = crosel_cli(*tiny_run.command, "--out", run)
    assert result.code == 2, result.err
    last = result.err.splitlines()[-1]
    assert " epoch 3" in last
    assert "the last checkpoint is intact" in last
    assert "Traceback" not in result.err
    assert metrics(run) == metrics(tiny_run.path)[:2]
    assert [path.name[:11] for path in checkpoints(run)] == ["epoch-00001", "epoch-00002"]
    result = crosel_cli("train", "--resume", "--out", run)
    assert result.code == 0, result.err
    assert_same_run(run, tiny_run.path)


def test_divergence_is_noticed_before_an_interrupted_epoch_is_saved(
    tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two looks at the loss must not put NaN weights into the newest checkpoint."""
    run = tmp_path / "run"
    looks = iter(range(1000))
    with monkeypatch.context() as patch:
        spoil_weights(patch, 0)
        patch.setattr(StopFlag, "__call__", lambda flag: next(looks) >= 16)  # the third step of the third epoch
        result = crosel_cli(*tiny_run.command, "--out", run)
    assert result.code == 2, result.err
    assert " epoch 3" in result.err.splitlines()[-1]
    assert crosel_cli("train", "--resume", "--out", run).code == 0
    assert_same_run(run, tiny_run.path)


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_runs_is_not_a_run(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    inside = tmp_path / "bench" / "digits" / "crosel-seed0"
    shutil.copytree(tiny_run.path, inside)
    for folder in (tmp_path / "bench", tmp_path / "bench" / "digits"):
        says = f"{folder} is not a run folder (it has no config.yaml); it contains runs, such as {inside}"
        assert_refused(crosel_cli("report", folder, "--out", tmp_path / "r.html"), says)


@pytest.mark.parametrize("extra", [("--resume",), ("--candidates", "uniform:q=0.3")])
def test_a_run_folder_is_no_data(extra: tuple[str, ...], tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    says = f"{tiny_run.path} is a run folder, not data; to continue it: crosel train --resume --out {tiny_run.path}"
    assert_refused(crosel_cli("train", *extra, tiny_run.path), says)


def test_the_plots_of_a_run_are_not_predicted(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    says = f"{tiny_run.path} is a run folder, not data; give the images themselves"
    out = tmp_path / "new.csv"
    assert_refused(crosel_cli("predict", tiny_run.path, tiny_run.path, "--out", out), says)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["missing", "empty folder", "other folder", "file"])
def test_not_a_run_folder(kind: str, tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("hello")
    elif kind != "missing":
        path.mkdir()
        if kind == "other folder":
            (path / "holiday.jpg").write_text("hello")
    says = f"{path}: no such run folder" if kind == "missing" else f"{path} is not a run folder (it has no config.yaml)"
    for command in (
        ("eval", path), ("predict", path, image_npz, "--out", tmp_path / "p.csv"),
        ("labels", path, "--out", tmp_path / "l.csv"), ("report", path, "--out", tmp_path / "r.html"),
        ("train", "--resume", "--out", path),
    ):  # fmt: skip
        result = crosel_cli(*command)
        assert_refused(result, says)
    assert {p.name for p in tmp_path.iterdir()} <= {"thing"}


def test_run_without_checkpoint(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    for path in checkpoints(run):
        path.write_bytes(path.read_bytes()[:100])
    assert "all checkpoints are damaged" in crosel_cli("eval", run).err
    for path in checkpoints(run):
        path.unlink()
    assert_refused(crosel_cli("eval", run), f"{run}: the checkpoints are gone")


def test_broken_config_of_a_run(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    config = run / "config.yaml"
    broken = config.read_text().replace("epochs: 4", "epochs: -4")
    config.write_text(broken)
    for command in (("eval", run), ("train", "--resume", "--out", run)):  # resuming writes it anew
        code, _, err = crosel_cli(*command)
        assert code == 0
        assert err.splitlines()[0] == f"{config} is damaged; using the settings from the newest checkpoint"
    for path in checkpoints(run):
        path.unlink()
    config.write_text(broken)
    assert_refused(crosel_cli("eval", run), f"{config}: setting 'train.epochs'", "(given: -4)")


def test_network_code_needs_trust(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, image_npz: Path) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: small-cnn", "name: antigravity:factory"))
    for command in (("eval", run), ("predict", run, image_npz, "--out", tmp_path / "p.csv")):
        assert_refused(crosel_cli(*command), "'antigravity:factory' is code from outside crosel; add --trust-code")
    assert "antigravity" not in sys.modules


def test_network_code_that_raises(
    own_network: str, tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, image_npz: Path
) -> None:
    """Before a run folder is made; and when a run is used whose code has changed since."""
    run, file = tmp_path / "run", tmp_path / "net_of_a_user.py"
    sets = ("--set", f"network.name={own_network}", "--trust-code", "--out", run)
    good = file.read_text()
    file.write_text(good.replace("    return", "    raise LookupError('no such layer')\n    return"))
    says = f"network '{own_network}' cannot be built: LookupError: no such layer ({file}, line 7); correct it there"
    assert_refused(crosel_cli(*tiny_run.command, *sets), says)
    assert not run.exists()
    del sys.modules["net_of_a_user"]
    file.write_text(good)
    assert crosel_cli(*tiny_run.command, *sets).code == 0
    del sys.modules["net_of_a_user"]
    file.write_text(f"1 / 0  # in the first of its lines\n{good}")
    for command in (("eval", run), ("predict", run, image_npz, "--out", tmp_path / "p.csv")):
        assert_refused(crosel_cli(*command, "--trust-code"), "cannot be imported: ZeroDiv", f"({file}, line 1)")


def test_eval_on_rows_of_which_some_have_no_label(tmp_path: Path, crosel_cli: CroselCli) -> None:
    source, run = tmp_path / "train.csv", tmp_path / "run"
    rows = [f"{i},{-i},{label}|owl,{label}" for i, label in enumerate(["cat", "dog", "fox"] * 4)]
    source.write_text("\n".join(["f,g,candidates,label", *rows]))
    training = ("--method", "cc", "--set", "train.epochs=1", "--device", "cpu", "--out", run)
    assert crosel_cli("train", source, *training).code == 0
    for name, text, says in (
        ("l.csv", "f,g,label\n1,2,cat\n1,2,\n", "l.csv, line 3, column 'label': no label, though other rows have one; "
         "fill it in, or leave the row out"),
        ("l.jsonl", '{"f": 1, "g": 2, "label": null}\n{"f": 1, "g": 2, "label": "dog"}\n',
         "l.jsonl, line 1, column 'label': no label, though other rows have one; fill it in, or leave the row out"),
        ("c.csv", "f,g,candidates,label\n1,2,cat,cat\n1,2,dog|cat,\n1,2,dog,\n",
         "c.csv: some rows have no label (line 3 is the first); fill them in, or leave these examples out"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        result = crosel_cli("eval", run, tmp_path / name)
        assert_refused(result, says)
        assert "column 'candidates'" not in result.err


def test_bad_inputs_and_outputs_of_a_run(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    run, x = tiny_run.path, small_arrays()["x_test"]
    for name, arrays in {
        "good": {"x": x}, "shape": {"x": x[:, :5]}, "ids": {"x": x, "ids": ["a"]}, "no-x": {"y": x[:, 0, 0]},
        "nan": {"x": np.where(x > 250, np.nan, x / 255)}, "pickle": {"x": np.array([{}])},
        "other": {"x": x, "y": np.zeros(64, int), "classes": list("abcdefghij")},
        "no-y": {"x": x, "candidates": np.ones((64, 10), bool)},
    }.items():  # fmt: skip
        np.savez(tmp_path / f"{name}.npz", **arrays)
    (tmp_path / "x.csv").write_text("a,b\n")
    out = tmp_path / "p.csv"

    def predict(name: str, out: Path = out) -> Any:
        return crosel_cli("predict", run, tmp_path / name, "--out", out)

    assert_refused(predict("nowhere.npz"), "nowhere.npz: no such file")
    assert_refused(predict("x.csv"), "x.csv, line 2: there are no rows below the column names")
    assert_refused(predict("shape.npz"), "examples of shape (1, 5, 8), but the run was trained on (1, 8, 8)")
    assert_refused(predict("ids.npz"), "x has 64 examples, but there are 1 ids")
    assert_refused(predict("no-x.npz"), "the array 'x' is missing")
    assert_refused(predict("nan.npz"), "x: NaN in row ")
    assert_refused(predict("pickle.npz"), "Object arrays cannot be loaded")
    assert_refused(predict("good.npz", tmp_path / "p.txt"), "predictions are written as .csv or .jsonl")
    assert_refused(predict("good.npz", tmp_path / "x.csv/p.csv"), "x.csv: this is a file; give a folder")
    below = tmp_path / "x.csv/new"
    assert_refused(predict("good.npz", below / "p.csv"), f"{below}: a part of this path is a file")
    (tmp_path / "folder.csv").mkdir()
    assert_refused(predict("good.npz", tmp_path / "folder.csv"), "folder.csv: this is a folder; give a file name")
    assert_refused(crosel_cli("labels", run, "--out", tmp_path / "l.txt"), "labels are written as .csv, .jsonl or .npz")
    assert_refused(crosel_cli("eval", run, tmp_path / "shape.npz"), "shape.npz")
    assert_refused(
        crosel_cli("eval", run, tmp_path / "other.npz"), "other.npz has classes that the run does not know: a, b, c"
    )
    assert_refused(
        crosel_cli("eval", run, tmp_path / "no-y.npz"), "no-y.npz has no true labels for every example (a column"
    )
    assert not list(tmp_path.glob("*.txt"))
    assert not out.exists()
    assert not list(tmp_path.glob("**/.writing-*"))


def test_out_holds_something_already(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    assert_refused(
        crosel_cli(*tiny_run.command, "--out", tiny_run.path), "already holds a run; continue it with --resume"
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    for extra in ((), ("--resume",)):
        assert_refused(crosel_cli(*tiny_run.command, *extra, "--out", other), "is not empty and not a run folder")
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    assert_refused(crosel_cli("demo", "--out", other), "exists and is not the folder of a demo")
    assert (other / "thesis.tex").read_text() == "precious"


def test_an_optimiser_that_is_not_for_the_network_leaves_no_run(
    tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli
) -> None:
    muon = ("--set", "network.name=mlp", "--set", "train.optimiser=muon")
    assert_refused(
        crosel_cli(*tiny_run.command, *muon, "--out", tmp_path / "run"), "muon is for convolutions larger than 1x1"
    )
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_out_is_a_file_or_below_one(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    (tmp_path / "file").write_text("hello")
    assert_refused(crosel_cli(*tiny_run.command, "--out", tmp_path / "file"), "this is a file; give a folder")
    below = tmp_path / "file/run"
    assert_refused(crosel_cli(*tiny_run.command, "--out", below), f"{below}: a part of this path is a file")
    long = tmp_path / ("x" * 300)
    assert_refused(crosel_cli(*tiny_run.command, "--out", long), "the name is too long")
    assert_refused(crosel_cli("eval", long), "the name is too long")


# --- disks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "number"), [*((write, errno.ENOSPC) for write in range(1, 13)), (1, errno.EIO), (6, errno.EIO)]
)
def test_a_write_fails(
    write: int, number: int, tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of a run in turn meets a full or failing disk; with space again the run goes on and ends as ever."""
    run, calls, real = tmp_path / "run", 0, os.fsync

    def fsync(handle: int) -> None:
        nonlocal calls
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            calls += 1
            if calls == write:
                raise OSError(number, os.strerror(number))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        result = crosel_cli(*tiny_run.command, "--out", run)
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith(f"crosel: {run}")
    assert ".writing-" not in last, "the user knows the file by its own name"
    assert ("no space left on the device" if number == errno.ENOSPC else "cannot be written (Input/output err") in last
    assert "Traceback" not in result.err
    assert not any(".writing-" in name for name in tree(run))
    result = crosel_cli(*tiny_run.command, "--out", run, "--resume")
    assert result.code == 0, result.err
    assert_same_run(run, tiny_run.path)


def test_metrics_cannot_be_appended(
    tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def full(row: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("crosel.runs.folder._line", full)
        result = crosel_cli(*tiny_run.command, "--out", run)
    assert_refused(result, f"{run / 'metrics.jsonl'}: no space left on the device")
    assert crosel_cli("train", "--resume", "--out", run).code == 0
    assert_same_run(run, tiny_run.path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a file system here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk(small_disk: Path, tiny_run: TinyRun, fork_server: ForkServer) -> None:
    run, filler = small_disk / "run", small_disk / "filler"
    trap = {"target": "crosel.runs.folder:Recorder.on_epoch", "call": 1, "when": "after"}
    assert fork_server.run(*tiny_run.command, "--out", run, trap=trap)[0] == -signal.SIGKILL
    size = checkpoints(run)[-1].stat().st_size
    # From nothing left to room for all but the last file: every write meets the full disk in its turn.
    refused = 0
    for room in (0, size // 2, size + 8192, 2 * size + 16384):
        before = len(metrics(run))
        free = shutil.disk_usage(small_disk).free
        with open(filler, "wb") as stream:
            stream.write(bytes(max(0, free - room)))
        result = fork_server.run("train", "--resume", "--out", run)
        if result[0] != 0:
            refused += 1
            assert result[0] == 2, result[2]
            assert "Traceback" not in result[2]
            assert (
                result[2]
                .splitlines()[-1]
                .endswith("no space left on the device; free some and try again (a run continues with --resume)")
            )
        assert not any(".writing-" in name for name in tree(run))
        assert fork_server.run("eval", run)[0] == 0, "the last good checkpoint stays usable"
        filler.unlink()
        assert len(metrics(run)) >= before
    assert refused >= 2
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 0, err
    assert "damaged" not in err
    assert_same_run(run, tiny_run.path)


def test_full_disk_at_the_start(small_disk: Path, tiny_run: TinyRun, fork_server: ForkServer) -> None:
    run, filler = small_disk / "run", small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    assert_refused(fork_server.run(*tiny_run.command, "--out", run), "no space left on the device")
    filler.unlink()
    assert fork_server.run(*tiny_run.command, "--out", run)[0] == 0
    assert_same_run(run, tiny_run.path)


def test_read_only_disk(small_disk: Path, tmp_path: Path, tiny_run: TinyRun, fork_server: ForkServer) -> None:
    run = small_disk / "run"
    trap = {"target": "crosel.runs.folder:Recorder.on_epoch", "call": 2, "when": "after"}
    assert fork_server.run(*tiny_run.command, "--out", run, trap=trap)[0] == -signal.SIGKILL
    before = tree(run)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    says = "this file system is read-only; choose another place with --out"
    assert_refused(fork_server.run(*tiny_run.command, "--out", small_disk / "new"), f"{small_disk / 'new'}: {says}")
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 2
    assert err.splitlines()[-1].endswith(says)
    assert tree(run) == before
    assert fork_server.run("eval", run)[0] == 0
    code, _, err = fork_server.run("labels", run, "--out", small_disk / "l.csv")
    unfinished, refused = err.splitlines()
    assert unfinished == f"{run} is not finished; using its state after 2 of 4 epochs"
    assert (code, refused) == (2, f"crosel: {small_disk / 'l.csv'}: {says}")
    assert fork_server.run("labels", run, "--out", tmp_path / "l.csv")[0] == 0
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert fork_server.run("train", "--resume", "--out", run)[0] == 0
    assert_same_run(run, tiny_run.path)


def test_folder_without_permission(tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; test_read_only_disk stands in")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    result = crosel_cli(*tiny_run.command, "--out", closed / "run")
    assert_refused(result, f"{closed / 'run'}: no permission to write here")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EDQUOT])
def test_folder_cannot_be_made(
    number: int, tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number), str(path.parent))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run")
    says = "the disk quota is used up" if number == errno.EDQUOT else "no permission to write here"
    assert_refused(result, f"{tmp_path / 'run'}: {says}")


def test_folder_removed_underneath(tmp_path: Path, tiny_run: TinyRun, fork_server: ForkServer) -> None:
    run = tmp_path / "run"
    slow = {"target": "crosel.training.step:TrainStep.__call__", "call": 7, "seconds": 0.05}
    child = fork_server.start(*tiny_run.command, "--out", run, trap=slow)
    child.wait_for(lambda: "epoch 1/4" in child.err)
    shutil.rmtree(run)
    assert child.wait() == 2
    assert "Traceback" not in child.err
    assert child.err.splitlines()[-1].endswith("the folder does not exist, or was removed")


# --- two processes ------------------------------------------------------------------------------------------------


def test_second_process_is_told_at_once(tmp_path: Path, tiny_run: TinyRun, fork_server: ForkServer) -> None:
    run = tmp_path / "run"
    slow = {"target": "crosel.training.step:TrainStep.__call__", "call": 7, "seconds": 60}
    first = fork_server.start(*tiny_run.command, "--out", run, trap=slow)
    first.wait_for(lambda: "epoch 1/4" in first.err)
    before = tree(run)
    # Reading a large dataset may take minutes: the second is told before that.
    reading = {"target": "crosel.data.formats.npz:Npz.read", "seconds": 60}
    started = time.monotonic()
    for extra in (("--resume",), ()):
        result = fork_server.run(*tiny_run.command, *extra, "--out", run, trap=reading)
        assert_refused(result, f"{run} is in use by another process; wait for it or choose another --out")
    assert time.monotonic() - started < 30
    assert tree(run) == before
    assert fork_server.run("eval", run, "--json")[0] == 0, "reading is free"
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    code, _, err = fork_server.run("train", "--resume", "--out", run)  # the claim has gone with the process
    assert code == 0, err
    assert_same_run(run, tiny_run.path)


def test_file_system_without_locks(
    tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none: better no lock than no run."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", flock)
    assert crosel_cli(*tiny_run.command, "--out", tmp_path / "run").code == 0


# --- true processes -----------------------------------------------------------------------------------------------


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    data = small_arrays(20, images=False)
    data["candidates"][11] = False
    np.savez(tmp_path / "bad.npz", **data)
    command = [sys.executable, "-m", "crosel", "train", str(tmp_path / "bad.npz")]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    says = "bad.npz: candidates: the candidate set of example 11 is empty"
    assert_refused((result.returncode, result.stdout, result.stderr), says)
    assert result.stdout == ""
