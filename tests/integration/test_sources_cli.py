"""Every kind of source from the command line: what its sets are like, a run, its labels, and new data predicted."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _published import as_published
from _support import PAPER_SETS, CroselCli, real_data, small_arrays
from PIL import Image

N, K = 40, 10
QUICK = (
    "--set", "train.epochs=3", "--set", "train.batch_size=20", "--set", "train.folds=0", "--set", "network.width=2",
    "--set", "network.hidden=[8]", "--set", "method.warmup=1", "--set", "method.bank_length=1",
    "--set", "method.gamma=0.2", "--set", "data.image_size=8", "--set", "data.cache=false", "--device", "cpu",
    *(part for item in PAPER_SETS for part in ("--set", item)),
)  # fmt: skip
Case = tuple[str, list[str], Path]  # SOURCE, its options for `train`, and something to predict


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    return small_arrays(N, test=8)


def names(row: np.ndarray) -> list[str]:
    return [f"digit {j}" for j in np.flatnonzero(row)]


def write_csv(path: Path, rows: list[list[Any]]) -> Path:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def pictures(folder: Path, images: np.ndarray) -> list[str]:
    """PNG files; their paths relative to the folder above."""
    folder.mkdir(parents=True)
    for i, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    return [f"{folder.name}/{i:02}.png" for i in range(len(images))]


def image_csv(folder: Path, d: dict[str, Any]) -> Case:
    paths = pictures(folder / "my photos", d["x"])
    rows = [[p, "|".join(names(s)), f"digit {y}"] for p, s, y in zip(paths, d["candidates"], d["y"], strict=True)]
    return str(write_csv(folder / "list.csv", [["path", "candidates", "label"], *rows])), [], folder / "my photos"


def feature_csv(folder: Path, d: dict[str, Any]) -> Case:
    columns = [f"pixel {i}" for i in range(64)]
    flat = d["x"].reshape(N, 64).tolist()
    rows = [["|".join(names(s)), *x] for s, x in zip(d["candidates"], flat, strict=True)]
    new = write_csv(folder / "new.csv", [columns, *d["x_test"].reshape(-1, 64).tolist()])
    return str(write_csv(folder / "rows.csv", [["candidates", *columns], *rows])), [], new


def jsonl(folder: Path, d: dict[str, Any]) -> Case:
    lines = [
        json.dumps({"x": x.flatten().tolist(), "candidates": names(s), "label": f"digit {y}"})
        for x, s, y in zip(d["x"], d["candidates"], d["y"], strict=True)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "new.jsonl").write_text("\n".join(json.dumps({"x": x.flatten().tolist()}) for x in d["x_test"]))
    return str(folder / "rows.jsonl"), [], folder / "new.jsonl"


def npz(folder: Path, d: dict[str, Any]) -> Case:
    np.savez(folder / "arrays.npz", **d)
    np.savez(folder / "new.npz", x=d["x_test"])
    return str(folder / "arrays.npz"), [], folder / "new.npz"


def palm(folder: Path, d: dict[str, Any]) -> Case:
    io_ = pytest.importorskip("scipy.io")
    sets = d["candidates"].T.astype(float)
    truth = np.eye(K)[d["y"]].T
    io_.savemat(folder / "palm.mat", {"data": d["x"].reshape(N, 64), "partial_target": sets, "target": truth})
    np.savez(folder / "new.npz", x=d["x_test"].reshape(-1, 64).astype(np.float32))
    return str(folder / "palm.mat"), ["--set", "data.test_share=0.1"], folder / "new.npz"


def inputs_npz(folder: Path, d: dict[str, Any]) -> Path:
    np.savez(folder / "inputs.npz", x=d["x"], ids=np.array([f"t{i}" for i in range(N)]))
    np.savez(folder / "new.npz", x=d["x_test"])
    return folder / "inputs.npz"


def long_votes(folder: Path, d: dict[str, Any]) -> Case:
    rows = [[f"t{i}", f"worker {w}", name] for i, s in enumerate(d["candidates"]) for w, name in enumerate(names(s))]
    path = write_csv(folder / "votes.csv", [["task", "worker", "label"], *rows])
    options = ["--set", f"data.inputs={inputs_npz(folder, d)}", "--candidates", "votes:min=1"]
    return str(path), options, folder / "new.npz"


def wide_votes(folder: Path, d: dict[str, Any]) -> Case:
    most = int(d["candidates"].sum(axis=1).max())
    rows = [[f"t{i}", *(names(s) + [""] * most)[:most]] for i, s in enumerate(d["candidates"])]
    path = write_csv(folder / "readers.csv", [["task", *(f"annotator_{w}" for w in range(most))], *rows])
    return str(path), ["--set", f"data.inputs={inputs_npz(folder, d)}", "--candidates", "union"], folder / "new.npz"


def label_studio(folder: Path, d: dict[str, Any]) -> Case:
    paths = pictures(folder / "upload" / "7", d["x"])
    tasks = [
        {
            "id": 100 + i, "data": {"image": f"/data/upload/{paths[i]}"},
            "annotations": [
                {"completed_by": w, "was_cancelled": False, "result": [{"value": {"choices": [name]}}]}
                for w, name in enumerate(names(s))
            ],
        }
        for i, s in enumerate(d["candidates"])
    ]  # fmt: skip
    (folder / "export.json").write_text(json.dumps(tasks), encoding="utf-8")
    return str(folder / "export.json"), ["--candidates", "union"], folder / "upload"


def score_csv(folder: Path, d: dict[str, Any]) -> Case:
    scores = np.where(d["candidates"], 0.5, 0.01).round(2).tolist()
    header = ["id", *(f"digit {j}" for j in range(K))]
    path = write_csv(folder / "scores.csv", [header, *([f"t{i}", *row] for i, row in enumerate(scores))])
    return str(path), ["--set", f"data.inputs={inputs_npz(folder, d)}", "--candidates", "top-m:m=2"], folder / "new.npz"


def score_npz(folder: Path, d: dict[str, Any]) -> Case:
    np.savez(folder / "scores.npz", x=d["x"], scores=d["candidates"] + 0.01)
    np.savez(folder / "new.npz", x=d["x_test"])
    return str(folder / "scores.npz"), ["--candidates", "top-p:p=0.6"], folder / "new.npz"


def class_folders(folder: Path, d: dict[str, Any]) -> Case:
    for j in range(K):
        pictures(folder / "photos" / f"digit {j}", d["x"][d["y"] == j])
    return str(folder / "photos"), ["--candidates", "uniform:q=0.3"], folder / "photos"


def coarse(folder: Path, d: dict[str, Any]) -> Case:
    tree = "".join(f"group {g}: [{', '.join(f'digit {j}' for j in range(2 * g, 2 * g + 2))}]\n" for g in range(5))
    (folder / "classes.yaml").write_text(tree)
    rows = [[f"group {y // 2}", *x] for y, x in zip(d["y"], d["x"].reshape(N, 64).tolist(), strict=True)]
    path = write_csv(folder / "coarse.csv", [["candidates", *(f"f{i}" for i in range(64))], *rows])
    np.savez(folder / "new.npz", x=d["x_test"].reshape(-1, 64).astype(np.float32))
    return str(path), ["--candidates", f"tree:file={folder / 'classes.yaml'}"], folder / "new.npz"


def cifar(folder: Path, d: dict[str, Any]) -> Case:
    """Files in the published form, with few pictures."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir()
    pixels = np.repeat(d["x"].reshape(N, -1), 48, axis=1).astype(np.uint8)
    for i, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        rows = slice(8 * (i % 5), 8 * (i % 5) + 8)
        content = {b"data": pixels[rows], b"labels": d["y"][rows].tolist()}
        (batches / name).write_bytes(as_published(content))
    meta = {b"label_names": [f"digit {j}".encode() for j in range(K)]}
    (batches / "batches.meta").write_bytes(as_published(meta))
    pictures(folder / "new", pixels[:8].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    options = ["--data", str(folder), "--candidates", "uniform:q=0.5", "--set", "network.name=small-cnn"]
    return "cifar10", options, folder / "new"


KINDS: dict[str, Callable[[Path, dict[str, Any]], Case]] = {
    kind.__name__: kind
    for kind in (
        image_csv, feature_csv, jsonl, npz, palm, long_votes, wide_votes, label_studio, score_csv, score_npz,
        class_folders, coarse, cifar,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_from_source_to_labels(kind: str, tmp_path: Path, crosel_cli: CroselCli, digits: dict[str, Any]) -> None:
    source, options, new = KINDS[kind](tmp_path, digits)
    as_rule = ["--rule" if option == "--candidates" else option for option in options]
    told = crosel_cli("candidates", source, *as_rule, "--out", tmp_path / "sets.npz", "--json")
    assert (told.code, told.err) == (0, "")
    held_out = 4 if kind == "palm" else 0
    summary = json.loads(told.out)
    assert (summary["n"], summary["k"]) == (N - held_out, K)

    run = tmp_path / "run"
    trained = crosel_cli("train", source, *options, *QUICK, "--out", run)
    assert trained.code == 0, trained.err
    with np.load(run / "candidates.npz") as made, np.load(tmp_path / "sets.npz") as converted:
        np.testing.assert_array_equal(made["candidates"], converted["candidates"])
    if kind not in ("score_csv", "score_npz", "class_folders", "coarse", "cifar"):  # their rules make other sets
        expected = np.sort(digits["candidates"].sum(axis=1))
        assert summary["mean_size"] == pytest.approx(expected.mean(), abs=0.5)
        assert held_out or summary["sizes"] == {str(s): int((expected == s).sum()) for s in set(expected.tolist())}

    labelled = crosel_cli("labels", run, "--out", tmp_path / "labels.jsonl")
    assert labelled.code == 0, labelled.err
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == N - held_out
    assert all(row["label"] in row["candidates"] for row in rows)
    predicted = crosel_cli("predict", run, new, "--out", tmp_path / "new-labels.csv", "--top", "2")
    assert predicted.code == 0, predicted.err
    with open(tmp_path / "new-labels.csv", newline="", encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    assert found
    assert {row["label"] for row in found} <= {f"digit {j}" for j in range(K)} | set(map(str, range(K)))


def test_an_export_of_label_studio_goes_back_as_predictions(
    tmp_path: Path, crosel_cli: CroselCli, digits: dict[str, Any]
) -> None:
    """Several annotators in, one prediction a task out, on the project's own tasks; and what is read again fits."""
    source, options, _ = label_studio(tmp_path, digits)
    tasks = json.loads(Path(source).read_text())
    tasks[0]["annotations"][0]["was_cancelled"] = True  # skipped by one annotator
    tasks[3]["annotations"] = []  # nobody has seen it
    Path(source).write_text(json.dumps(tasks))
    trained = crosel_cli("train", source, *options, *QUICK, "--out", tmp_path / "run")
    assert trained.code == 0, trained.err
    assert "tasks without a choice, left out: 1" in trained.err + trained.out
    out = tmp_path / "predictions.json"
    names = ("--from-name", "digit", "--to-name", "scan", "--tasks", source)
    made = crosel_cli("labels", tmp_path / "run", "--out", out, *names)
    assert made.code == 0, made.err
    back = {task["id"]: task for task in json.loads(out.read_text())}
    assert set(back) == {task["id"] for task in tasks if task["id"] != 103}
    for task in tasks:
        if task["id"] != 103:
            ticked = {a["result"][0]["value"]["choices"][0] for a in task["annotations"] if not a["was_cancelled"]}
            (prediction,) = back[task["id"]]["predictions"]
            (result,) = prediction["result"]
            assert (result["from_name"], result["to_name"], result["type"]) == ("digit", "scan", "choices")
            assert set(result["value"]["choices"]) <= ticked
            assert back[task["id"]]["data"] == task["data"]
            assert 0 < prediction["score"] <= 1


def test_a_file_in_the_data_folder(
    tmp_path: Path, crosel_cli: CroselCli, digits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--data DIR` is where a suite's files are; the run knows the place, wherever it is resumed or used from."""
    (tmp_path / "data").mkdir()
    (tmp_path / "here").mkdir()
    source, _, _ = palm(tmp_path / "data", digits)
    monkeypatch.chdir(tmp_path / "here")
    share = ("--set", "data.test_share=0.1", "--data", "../data")
    trained = crosel_cli("train", "palm.mat", *share, *QUICK, "--out", "run")
    assert trained.code == 0, trained.err
    assert f"source: {Path(source).resolve()}\n" in Path("run/config.yaml").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert crosel_cli("labels", "here/run", "--out", "l.csv").code == 0
    assert crosel_cli("eval", "here/run", "--json").code == 0
    Path("data").rename("moved")
    lost = crosel_cli("labels", "here/run", "--out", "l.csv")
    assert lost.code == 2
    assert "palm.mat: no such file or folder; if it has moved, give its folder: --data DIR" in lost.err
    assert lost.err.endswith(f" (the run's settings are in {Path('here/run/config.yaml')})\n")
    found = crosel_cli("labels", "here/run", "--out", "l.csv", "--data", "moved")
    told = f"{Path(source).resolve()} is not there; {Path('moved/palm.mat')} is read instead\n"
    assert (found.code, found.err.count(told)) == (0, 1)
    again = crosel_cli("train", "--config", "here/run/config.yaml", "--data", "moved", "--out", "again")
    assert again.code == 0, again.err
    (Path("again") / "done").unlink()  # as if it had been stopped
    Path("moved").rename("elsewhere")
    resumed = crosel_cli("train", "--resume", "--out", "again", "--data", "elsewhere")
    assert resumed.code == 0, resumed.err
    Path("elsewhere").rename("moved")
    missing = crosel_cli("train", "none.mat", *share, "--out", "other")
    assert missing.code == 2
    assert "source 'none.mat': no such file, also not in ../data" in missing.err


def test_labels_by_the_command_line(tmp_path: Path, crosel_cli: CroselCli, digits: dict[str, Any]) -> None:
    source, options, _ = npz(tmp_path, digits)
    run = tmp_path / "run"
    assert crosel_cli("train", source, *options, *QUICK, "--out", run).code == 0
    counts = []
    for gamma in ("0", "1"):
        result = crosel_cli("labels", run, "--out", tmp_path / f"{gamma}.npz", "--outside-gamma", gamma)
        assert result.code == 0, result.err
        assert ("--outside-gamma 1 is above the run's method.gamma; " in result.err) == (gamma == "1")
        with np.load(tmp_path / f"{gamma}.npz") as saved:
            counts.append(int((saved["flags"] == "outside").sum()))
            assert saved["pred_probs"].shape == (N, K)
            assert saved["labels"].shape == (N,)
        assert result.out.startswith(f"{N} labels (")
        assert (f"{counts[-1]} outside" in result.out) == (counts[-1] > 0)
    assert counts[0] >= counts[1] == 0
    found = tmp_path / "found.csv"
    told = crosel_cli("labels", run, "--out", found, "--only-outside", "--outside-gamma", "0")
    assert (told.code, told.out) == (0, f"{counts[0]} of {N} sets seem to miss the true label: {found}\n"), told.err
    assert counts[0] > 0, "else the next step shows nothing"
    again = crosel_cli("train", source, *options, *QUICK, "--corrections", found, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    with np.load(run / "candidates.npz") as before, np.load(tmp_path / "again" / "candidates.npz") as after:
        changed = (before["candidates"] != after["candidates"]).any(axis=1)
        assert changed.sum() == counts[0]
        assert (after["candidates"][changed].sum(axis=1) == 1).all()
        assert not (after["candidates"] & before["candidates"])[changed].any(), "the new labels were outside the sets"
    named = crosel_cli("labels", run, "--out", tmp_path / "l.json", "--data-key", "url", "--from-name", "kind")
    assert named.code == 0, named.err
    task = json.loads((tmp_path / "l.json").read_text())[0]
    assert task["data"] == {"url": "0"}
    assert task["predictions"][0]["result"][0]["from_name"] == "kind"
    for arguments, says in (
        (["--out", tmp_path / "l.jsonl", "--only-outside"], "written as .csv, for crosel train --corrections"),
        (["--out", tmp_path / "l.xlsx"], "l.xlsx: labels are written as .csv"),
        (["--out", tmp_path / "l.csv", "--outside-gamma", "2"], "--outside-gamma must lie between 0 and 1"),
        (["--out", tmp_path / "m.json", "--tasks", tmp_path / "none.json"], "none.json: cannot be read"),
        (["--out", found / "l.csv"], "found.csv: this is a file; give a folder"),
    ):
        refused = crosel_cli("labels", run, *arguments)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
        assert says in refused.err
    assert not (tmp_path / "m.json").exists()


# --- the real files, where the environment says they are ----------------------------------------------------------


@pytest.mark.parametrize(("name", "n", "preset"), [("lost", 1010, "features-linear"), ("MSRCv2", 1582, "features")])
def test_real_candidate_labels(name: str, n: int, preset: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    folder = real_data(f"{name}.mat")
    few = ("--set", "train.epochs=6", "--set", "data.test_share=0.1", "--device", "cpu")
    trained = crosel_cli(
        "train", f"{name}.mat", "--data", folder, "--preset", f"own/{preset}", *few, "--out", tmp_path / "run"
    )
    assert trained.code == 0, trained.err
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_accuracy"] > 0.3
    assert len((tmp_path / "run" / "labels.csv").read_text().splitlines()) == n + 1


def test_real_cifar10(tmp_path: Path, crosel_cli: CroselCli) -> None:
    folder = real_data("cifar-10-batches-py")
    told = crosel_cli(
        "candidates", "cifar10", "--data", folder, "--rule", "uniform:q=0.5", "--out", tmp_path / "c.npz", "--json"
    )
    assert told.code == 0, told.err
    summary = json.loads(told.out)
    assert (summary["n"], summary["k"], summary["n_test"], summary["missing"]) == (50_000, 10, 10_000, 0)
    assert summary["mean_size"] == pytest.approx(5.5, abs=0.05)


def test_a_file_that_is_not_there_may_be_one_beside_it(tmp_path, monkeypatch, crosel_cli: CroselCli):
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "digit.cs"):
        Path(folder).mkdir()
    for file in ("digits.csv", "other.csv", "data/flowers.npz"):
        Path(file).touch()
    elsewhere, near = "if it lies elsewhere: --data DIR", "(did you mean 'digits.csv'?)"
    for told, *arguments in [
        (f"source 'digit.csv': no such file {near}; {elsewhere}", "digit.csv"),
        (f"source 'digits.cvs': no such file {near}; {elsewhere}", "digits.cvs"),
        (f"source 'x.csv': no such file; {elsewhere}", "x.csv"),
        (f"source 'no/digit.csv': no such file; {elsewhere}", "no/digit.csv"),
        (
            "source 'flower.npz': no such file, also not in data (did you mean 'data/flowers.npz'?)",
            *("flower.npz", "--data", "data"),
        ),
        (f"no such file or folder (did you mean '{tmp_path / 'digits.csv'}'?); if", str(tmp_path / "digit.csv")),
    ]:
        result = crosel_cli("train", *arguments)
        assert (result.code, told in result.err) == (2, True), result.err
