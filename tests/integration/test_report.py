"""The report: one file that asks nobody for anything, for every method, finished or not, one run or several."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _support import CroselCli, TinyRun, small_arrays
from PIL import Image

from crosel import UserError
from crosel.config import build_config
from crosel.data import load
from crosel.data.dataset import make_dataset
from crosel.methods import methods
from crosel.report import write_report
from crosel.report.charts import Series, epoch_ticks, line_figure, number, ticks
from crosel.report.html import png, thumbnail
from crosel.runs.environment import hardware
from crosel.runs.folder import RunFolder
from crosel.runs.labels import read_labels
from crosel.runs.pipeline import train_run
from crosel.training.build import resolve
from crosel.training.devices import pick_device
from crosel.utils.text import duration

VOID = {"meta", "link", "img", "br"}
NASTY = ["<script>alert(1)</script>", 'a" onload="x', "b|c&amp;'d"]


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps text, tags and attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def svgs(self) -> list[ET.Element]:
        return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", self.source, flags=re.S)]

    @property
    def charts(self) -> list[str]:
        return re.findall(r"<figcaption>(.*?)</figcaption>", self.source)

    def check(self) -> Page:
        """What holds for every report."""
        names = {tag for tag, _ in self.tags}
        assert not names & {"script", "iframe", "object", "embed", "form", "base", "audio", "video"}
        assert not re.search(r"https?://|url\(|@import|javascript:", self.source, flags=re.I)
        for _, attributes in self.tags:
            assert not [name for name in attributes if name.startswith("on")]
            for name in ("src", "href", "srcset", "xlink:href", "action"):
                assert (attributes.get(name) or "data:").startswith(("data:", "#"))
        assert "default-src 'none'" in self.source
        assert "prefers-color-scheme: dark" in self.source
        assert "@media print" in self.source
        assert "width=device-width" in self.source
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {a["href"][1:] for _, a in self.tags if (a.get("href") or "").startswith("#")} <= set(ids)  # type: ignore[index]
        for svg in self.svgs:
            if svg.get("role") == "img":
                title = svg.find("title")
                assert title is not None
                assert title.get("id") == svg.get("aria-labelledby")
                assert title.text
        for tag, attributes in self.tags:
            assert tag != "img" or attributes.get("alt")
        return self


def report(tmp_path: Path, *folders: Path, **options: Any) -> Page:
    out = tmp_path / "report.html"
    write_report([RunFolder(folder) for folder in folders], out, **options)
    return Page(out.read_text(encoding="utf-8")).check()


def train(out: Path, arrays: dict[str, Any], *settings: str, method: str = "cc") -> Path:
    source = out.parent / f"{out.name}.npz"
    np.savez(source, **arrays)
    config = build_config(
        values={"source": str(source), "method": {"name": method}},
        settings=(
            "train.epochs=3",
            "train.batch_size=16",
            "train.folds=0",
            "network.name=mlp",
            "network.hidden=[8]",
            *settings,
        ),
    )
    train_run(config, out, pick_device("cpu"))
    return out


def unlabelled(**options: Any) -> dict[str, Any]:
    arrays = small_arrays(**options)
    return {name: arrays[name] for name in ("x", "candidates")}


@pytest.fixture
def run_copy(tiny_run: TinyRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run.path, tmp_path / "copy"))


# --- one run ------------------------------------------------------------------------------------------------------


def test_a_run_with_true_labels(tiny_run: TinyRun, tmp_path: Path) -> None:
    page = report(tmp_path, tiny_run.path)
    assert page.words.startswith("CroSel on images.npz")
    for text in (
        "96 examples", "Test accuracy", "S-ratio", "S-acc", "Covering rate", "Training time", "mean set size",
        "sets of one", "full sets", "Sizes of the candidate sets", "Flags", "Selected in the last epoch",
        "Calibration", "Training labels:", "Test predictions:", "Doubtful", "Most confident",
        "small-cnn", "end of warm-up", "training labels, error", "test set, error", "Every set contains the true label",
    ):  # fmt: skip
        assert text in page.words, text
    assert page.charts == [
        "Test accuracy", "Selection: S-ratio and S-acc", "Losses", "Weight of co-mix, λ_d", "Covering rate",
        "Learning rate", "Confidence and selection by class", "Confidence of the labels", "Calibration",
        "Flags", "Selected in the last epoch", "Sizes of the candidate sets",
    ]  # fmt: skip
    last = json.loads((tiny_run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{100 * last['test_accuracy']:.1f}\u202f%" in page.source
    assert "not finished" not in page.words
    assert 12 <= page.source.count('src="data:image/png') <= 48
    assert page.source.count('class="chances"') == page.source.count('src="data:image/png')
    assert len(page.source) < 150_000


def test_the_run_folder_has_one_and_the_command_writes_one(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    Page((tiny_run.path / "report.html").read_text(encoding="utf-8")).check()
    assert crosel_cli("report", tiny_run.path, "--out", tmp_path / "r.html").code == 0
    Page((tmp_path / "r.html").read_text(encoding="utf-8")).check()
    run = shutil.copytree(tiny_run.path, tmp_path / "run")
    (run / "report.html").unlink()
    assert crosel_cli("report", run).code == 0  # where a run has its own
    page = Page((run / "report.html").read_text(encoding="utf-8")).check()
    flags = [row.flag for row in read_labels(run / "labels.csv") if row.flag]
    assert f"{len(flags)} labels to check, start here ({flags.count('outside')} outside, " in page.words
    assert ("a", {"href": "#examples"}) in page.tags
    refused = crosel_cli("report", run, tiny_run.path)
    assert (refused.code, "--out" in refused.err) == (2, True)


@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_with_and_without_true_labels(method: str, tmp_path: Path) -> None:
    known = report(tmp_path, train(tmp_path / "known", small_arrays(images=False), method=method))
    unknown = report(tmp_path, train(tmp_path / "unknown", unlabelled(images=False), method=method))
    assert {"Test accuracy", "Losses", "Covering rate"} <= set(known.charts)
    assert {"Losses", "Covering rate"} <= set(unknown.charts)
    assert "Test accuracy" not in unknown.charts
    for text in ("S-acc 1", "Labels right", "Calibration", "truth", "Confusion"):
        assert text not in unknown.words
    assert "not known" in unknown.words
    assert "<img" not in known.source  # features have no pictures
    assert ("Selected in the last epoch" in known.words) == (method == "crosel")


def test_features_go_by_their_names(tmp_path: Path, crosel_cli: CroselCli) -> None:
    rows = "".join(f"{'cat' if i % 2 else 'dog'},{i},{i % 3}\n" for i in range(12))
    (tmp_path / "rows.csv").write_text("candidates,<b>length</b>,width\n" + rows)
    run = tmp_path / "run"
    assert crosel_cli("train", str(tmp_path / "rows.csv"), "--set", "train.epochs=2", "--out", str(run)).code == 0
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    page.check()
    assert "<th scope=col>&lt;b&gt;length&lt;/b&gt;</th><th scope=col>width</th>" in page.source
    assert "<b>length" not in page.source


def test_text_from_users_is_escaped(tmp_path: Path) -> None:
    arrays = small_arrays(images=False, n=48)
    arrays |= {"candidates": np.ones((48, 3), bool), "y": np.arange(48) % 3, "y_test": np.arange(64) % 3}
    arrays |= {"classes": np.array(NASTY), "ids": np.array([f"<i>{i}</i>&'\"" for i in range(48)])}
    first = train(tmp_path / "<b>run'\"&", arrays)
    page = report(tmp_path, first)
    for name in NASTY:
        assert name in page.words
    assert "<i>7</i>&'\"" in page.words
    assert "i" not in {tag for tag, attributes in page.tags if not attributes}
    both = report(tmp_path, first, train(tmp_path / "other", arrays, "train.lr=0.1"))
    assert "<b>run'\"&" in both.words


def test_a_card_that_was_there_and_not_used_is_not_named(run_copy: Path, tmp_path: Path) -> None:
    known = {"gpu": "Card 9000", "threads": 1, "command": ["crosel", "train", "--device", "cpu"]}
    (run_copy / "environment.json").write_text(json.dumps(known))
    page = report(tmp_path, run_copy)
    assert "CPU, 1 thread" in page.words
    assert "Card 9000" not in page.words


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ({"device": "cpu", "command": ["crosel", "my-program.py"]}, "CPU, 1 thread"),
        ({"device": "cuda", "command": ["crosel", "train"]}, "Card 9000"),
        ({"command": ["crosel", "train", "--device", "cuda", "--device=cpu"]}, "CPU, 1 thread"),  # made before it was
        ({"command": ["crosel", "train"]}, "Card 9000"),
    ],
)
def test_what_a_run_was_trained_on(noted: dict[str, Any], words: str) -> None:
    assert hardware({"gpu": "Card 9000", "threads": 1, **noted}) == words


# --- unfinished, damaged ------------------------------------------------------------------------------------------


def test_an_unfinished_run(run_copy: Path, tmp_path: Path) -> None:
    (run_copy / "labels.csv").unlink()
    page = report(tmp_path, run_copy)
    assert "the labels are not written yet" in page.words
    lines = (run_copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_copy / "metrics.jsonl").write_text(lines[0] + lines[1][:20])
    page = report(tmp_path, run_copy)
    assert "epoch 1 of 4 is done" in page.words
    assert re.search(r'<path class="line s-c1"[^>]*d="M[\d. ]+h0"/>', page.source)  # a single point is a dot
    (run_copy / "metrics.jsonl").write_text("")
    (run_copy / "environment.json").write_text("[")
    page = report(tmp_path, run_copy)
    assert "no epoch is finished yet" in page.words
    assert page.charts == ["Sizes of the candidate sets"]


def test_values_that_are_not_finite(run_copy: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (run_copy / "metrics.jsonl").read_text().splitlines()]
    rows[1]["loss"], rows[2]["test_accuracy"] = float("nan"), None
    (run_copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "nan" not in report(tmp_path, run_copy).words.lower()


def test_damaged_files_are_said(run_copy: Path, tmp_path: Path) -> None:
    labels = (run_copy / "labels.csv").read_text()
    (run_copy / "labels.csv").write_text(labels.rsplit("\n", 3)[0] + "\n")
    with pytest.raises(UserError, match="labels for 96 examples"):
        report(tmp_path, run_copy)
    (run_copy / "labels.csv").write_text(labels.replace("confidence", "konfidenz"))
    with pytest.raises(UserError, match=r"labels\.csv, line 1: expected the columns id,label,confidence"):
        report(tmp_path, run_copy)
    with pytest.raises(UserError, match="no such run folder"):
        report(tmp_path, tmp_path / "nowhere")
    with pytest.raises(UserError, match="at least one run"):
        write_report([], tmp_path / "r.html")
    (run_copy / "labels.csv").write_text(labels)
    with pytest.raises(UserError, match="folder does not exist"):
        write_report([RunFolder(run_copy)], tmp_path / "no" / "r.html")


# --- several runs -------------------------------------------------------------------------------------------------


def test_runs_are_compared(tiny_run: TinyRun, tmp_path: Path) -> None:
    other = train(tmp_path / "other", small_arrays(), method="proden")
    page = report(tmp_path, tiny_run.path, other)
    assert page.words.startswith("2 runs on")
    assert "Last epoch of each run" in page.words
    assert "method.name crosel proden" in page.words
    assert page.charts[0] == "Test accuracy"
    first = next(svg for svg in page.svgs if svg.get("role") == "img")
    drawn = [line.get("class") for line in first.findall("polyline")]
    assert (drawn.count("line s-c1"), drawn.count("line s-c2")) == (1, 1)
    assert "on which the runs differ" in page.words or "All runs give the same labels" in page.words
    assert page.words.count("Most confident") == 2  # each run has its galleries
    same = report(tmp_path, tiny_run.path, Path(shutil.copytree(tiny_run.path, tmp_path / "b" / "run")))
    assert str(tmp_path / "b" / "run") in same.words  # two runs of one name go by their paths
    assert "All settings that the runs have in common are equal" in same.words


# --- pictures -----------------------------------------------------------------------------------------------------


def test_pictures_only_of_the_same_data(tiny_run: TinyRun, run_copy: Path, tmp_path: Path) -> None:
    data = load(str(tiny_run.source), None)
    assert "<img" in report(tmp_path, run_copy, data=data).source
    other = make_dataset(data.x[::-1].transpose(0, 2, 3, 1), data.candidates)
    assert "<img" not in report(tmp_path, run_copy, data=other).source
    config = (run_copy / "config.yaml").read_text()
    (run_copy / "config.yaml").write_text(config.replace("images.npz", "moved.npz"))
    assert "<img" not in report(tmp_path, run_copy).source


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_png(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (channels, 5, 9)).astype(np.uint8)
    decoded = np.asarray(Image.open(io.BytesIO(png(image))))
    np.testing.assert_array_equal(decoded, image.transpose(1, 2, 0) if channels == 3 else image[0])
    assert len(thumbnail(np.zeros((3, 400, 300), np.uint8), "x")) < 500


# --- charts and numbers -------------------------------------------------------------------------------------------


def test_ticks() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    for low, high in ((0.31, 0.97), (-3, 8), (5, 5), (0, 0), (1e-9, 3e-9), (1e6, 2e6)):
        found = ticks(low, high)
        assert found[0] <= low <= high <= found[-1]
        assert 2 <= len(found) <= 8
    for last in (1, 2, 7, 14, 50, 99, 500, 2000):
        found = epoch_ticks(1, last)
        assert 1 <= len(found) <= 10
        assert all(1 <= epoch <= last for epoch in found)


def test_percent_charts_stay_below_a_hundred() -> None:
    figure = line_figure("c", "c", [Series("s", [(1, 1.0), (2, 1.0)], 0)], percent=True)
    assert figure is not None
    chart = figure.html(count())
    assert "100.0\u202f%" in chart
    assert "101" not in chart
    assert 'class="spot"' in chart
    assert line_figure("empty", "empty", [Series("s", [], 0)]) is None
    many = line_figure("many", "many", [Series("s", [(e, e / 2) for e in range(1, 400)], 0)])
    assert many is not None
    assert 'class="spot"' not in many.html(count())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.94, "2.9 s"), (27.2, "27 s"), (72, "1 min 12 s"), (119.7, "2 min 00 s"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert number(0.12345) == "0.123"
    assert number(12345.6) == "12346"


# --- size ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def large_folder(tmp_path: Path) -> Callable[[int, int], Path]:
    """A finished run of many examples, made without training."""

    def make(n: int, k: int) -> Path:
        rng = np.random.default_rng(0)
        y = rng.integers(0, k, n)
        sets = rng.random((n, k)) < 0.3
        sets[np.arange(n), y] = True
        x = np.zeros((n, 32, 32, 3), np.uint8)
        x[:, ::2] = rng.integers(0, 256, (32, 3))
        np.savez(tmp_path / "large.npz", x=x, candidates=sets, y=y, classes=np.array([f"class {j}" for j in range(k)]))
        source = str(tmp_path / "large.npz")
        config = build_config(values={"source": source, "method": {"name": "crosel"}})
        data = load(source, None)
        folder = RunFolder(tmp_path / "large")
        folder.path.mkdir()
        folder.create(resolve(config, data), data, {"command": ["crosel"]})
        names, given = data.classes, np.where(rng.random(n) < 0.9, y, sets.argmax(axis=1))
        lines = ["id,label,confidence,selected,candidates,flag"]
        for i in range(n):
            flag = ("", "", "disputed", "outside", "unsure")[i % 5]
            lines.append(f"{i},{names[given[i]]},{rng.random():.6f},both,x,{flag}")
        (folder / "labels.csv").write_text("\n".join(lines) + "\n")
        rows = ({"epoch": e, "phase": "selection", "loss": 1 / e, "selection_ratio": 1 - 1 / e} for e in range(1, 201))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder.path

    return make


def test_many_classes(large_folder: Callable[[int, int], Path], tmp_path: Path) -> None:
    page = report(tmp_path, large_folder(600, 120))
    assert "most common confusions" in page.words
    assert "the first 100 of 120" in page.words
    assert "the 12 most frequent of 120" in page.words
    assert re.search(r"and \d+ more", page.words)


def test_fifty_thousand_examples(large_folder: Callable[[int, int], Path], tmp_path: Path) -> None:
    folder = large_folder(50_000, 10)
    started = time.perf_counter()
    page = report(tmp_path, folder)
    assert time.perf_counter() - started < 15
    assert len(page.source) < 1_000_000
