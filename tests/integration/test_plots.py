"""Charts of a report as files, and what is drawn in them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from _support import CroselCli, TinyRun, small_arrays

from crosel.config import build_config
from crosel.report import figures, write_report, write_run_report
from crosel.report.charts import (
    Reliability,
    Series,
    bar_figure,
    calibration_figure,
    dot_figure,
    line_figure,
    matrix_figure,
    matrix_names,
    scatter_figure,
    spread,
)
from crosel.report.figures import principal_components
from crosel.report.html import _bars, _round_robin, confusion_counts, groups
from crosel.report.run import Run, read_runs
from crosel.report.svg import DARK, LIGHT
from crosel.runs.folder import RunFolder
from crosel.runs.pipeline import train_run
from crosel.runs.result import Result
from crosel.training.devices import pick_device

EXPECTED = {
    "accuracy", "selection", "losses", "lambda", "covering", "learning-rate", "set-sizes", "confidence", "calibration",
    "classes", "confusion-train", "confusion-test",
}  # fmt: skip


def test_a_run_leaves_its_charts_as_svg(tiny_run: TinyRun) -> None:
    folder = tiny_run.path / "plots"
    assert {path.name for path in folder.iterdir()} == {f"{name}.svg" for name in EXPECTED}
    for name in EXPECTED:
        svg = ET.parse(folder / f"{name}.svg").getroot()
        assert svg.find("{*}title").text  # type: ignore[union-attr]
        assert len(svg.findall(".//{*}polyline") + svg.findall(".//{*}rect")) > 3  # not an empty sheet


def test_the_command_writes_them_where_asked(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    result = crosel_cli("report", tiny_run.path, tiny_run.path, "--out", tmp_path / "r.html", "--plots", tmp_path / "p")
    assert result.code == 0, result.err
    assert (tmp_path / "p" / "accuracy.svg").is_file()
    assert str(tmp_path / "p") in result.out
    (tmp_path / "file").touch()
    result = crosel_cli("report", tiny_run.path, "--out", tmp_path / "r.html", "--plots", tmp_path / "file")
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_features_have_a_table_and_a_projection(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", **small_arrays(images=False))
    config = build_config(
        values={"source": str(tmp_path / "f.npz"), "method": {"name": "crosel"}},
        settings=("train.epochs=3", "network.name=mlp", "network.hidden=[8]", "method.warmup=1"),
    )
    train_run(config, tmp_path / "run", pick_device("cpu"), write_report=write_run_report)
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The examples in two dimensions" in html
    assert "The first 6 of 64 features." in html
    assert 'class="gallery"' not in html
    assert (tmp_path / "run" / "plots" / "projection.svg").is_file()
    result = read_runs([RunFolder(tmp_path / "run")])[0].result
    assert result is not None
    unknown = replace(result, labels=np.full_like(result.labels, -1))  # no name in labels.csv is among the classes
    assert figures.projection(unknown, small_arrays(images=False)["x"]) is None


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_principal_components_are_those_of_a_plain_eigenvalue_problem() -> None:
    x = (
        np.random.default_rng(0).normal(size=(200, 5))
        @ np.diag([5, 1, 1, 1, 1])
        @ np.random.default_rng(1).normal(size=(5, 5))
    )
    places, kept = principal_components(x)
    z = (x - x.mean(0)) / x.std(0)
    values, axes = np.linalg.eigh(z.T @ z)
    np.testing.assert_allclose(np.abs(places), np.abs(z @ axes[:, ::-1][:, :2]), rtol=1e-4, atol=1e-6)
    assert kept == pytest.approx(values[::-1][:2].sum() / values.sum())
    assert principal_components(np.ones((4, 1)))[0].shape == (4, 2)
    assert principal_components(np.arange(4.0)[:, None])[1] == pytest.approx(1)


def test_reliability_is_the_expected_calibration_error() -> None:
    draw = np.random.default_rng(0)
    sure, right = draw.random(500), draw.random(500) < 0.6
    slow = sum(
        abs(sure[m].mean() - right[m].mean()) * m.mean()
        for b in range(10)
        if (m := (sure >= b / 10) & (sure < (b + 1) / 10)).any()
    )
    assert Reliability.of(sure, right).error == pytest.approx(slow)
    exact = Reliability.of(np.array([1.0, 1.0]), np.array([True, True]))
    assert (exact.error, exact.counts.tolist()) == (0, [2])


def test_confusion_counts() -> None:
    counts = confusion_counts(np.array([0, 0, 1, 2]), np.array([0, 1, 1, -1]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_galleries_take_classes_round_robin() -> None:
    rows, classes = np.array([9, 8, 7, 6, 5]), np.array([1, 1, 1, 0, 0])
    assert _round_robin(rows, classes).tolist() == [9, 6, 8, 5, 7]


def read_result(tiny_run: TinyRun) -> tuple[Run, Result]:
    (run,) = read_runs([RunFolder(tiny_run.path)])
    assert run.result is not None
    return run, run.result


def test_the_likeliest_label_that_is_not_in_the_set_is_not_named_as_the_flag_is(tiny_run: TinyRun) -> None:
    run, result = read_result(tiny_run)
    assert result.probabilities is not None
    beyond = int(np.flatnonzero(~run.examples.candidates[0])[0])
    result.probabilities[0] = np.eye(len(run.classes))[beyond]
    assert f'{run.classes[beyond]} <em class="beyond">not in the set</em>' in _bars(result, 0)


def test_the_first_gallery_is_that_of_the_review(tiny_run: TinyRun) -> None:
    _, result = read_result(tiny_run)
    first = groups(result)[0]
    assert (first.title, len(first.rows)) == ("Doubtful", 96)
    assert [result.examples.example_id(int(row)) for row in first.rows] == result.doubtful_first().examples.ids


def test_headings_of_a_matrix_are_cut_to_nothing_that_means_two_classes() -> None:
    assert matrix_names(["cat", "dog"], 3) == (["cat", "dog"], ["cat", "dog"])
    assert matrix_names(["class 1", "class 2"], 4) == (["1.", "2."], ["1. class 1", "2. class 2"])
    figure = matrix_figure("m", "m", np.eye(2, dtype=int), ["a long name of one class", "a long name of another"])
    assert [text for text in re.findall(r">([^<>]+)</text>", figure.svg_file()) if "." in text] == [
        "1. a long name o", "1.", "2. a long name o", "2.",
    ]  # fmt: skip


def test_epochs_of_selection_are_kept(tiny_run: TinyRun) -> None:
    _, result = read_result(tiny_run)
    networks = result.networks
    assert networks is not None
    assert networks.epochs_selected is not None
    assert networks.epochs_selected.shape == (2, 96)
    assert networks.epochs_selected.max() <= 4
    assert ((networks.epochs_selected > 0) >= networks.selected).all()  # the last epoch counts


def test_losses_of_selection_and_comix_begin_after_the_warm_up(tiny_run: TinyRun) -> None:
    run, _ = read_result(tiny_run)
    (losses,) = (figure for figure in figures.curves(run) if figure.name == "losses")
    began = dict(re.findall(r"([\w-]+) from \S+ in epoch (\d+)", losses.description))
    assert 0 < run.warm_up < len(run.rows)
    assert began == {"total": "1", "selected": str(run.warm_up + 1), "co-mix": str(run.warm_up + 1)}


# --- drawing ------------------------------------------------------------------------------------------------------


def test_names_in_files_are_escaped() -> None:
    nasty = ["<a>&", 'b"']
    for figure in (
        matrix_figure("m", nasty[0], np.eye(2, dtype=int), nasty),
        dot_figure("d", nasty[0], [(nasty[0], [0.5, None]), (nasty[1], [1.0, 0.2])], nasty),
        bar_figure("b", nasty[0], [(nasty[0], [1, 2]), ("", [0, 0])], [(nasty[0], "c1"), (nasty[1], "c2")], nasty[1]),
        scatter_figure(np.random.default_rng(0).normal(size=(9, 2)), np.arange(9) % 2, nasty, nasty[0]),
        line_figure("l", nasty[0], [Series(nasty[1], [(1, 2), (2, 3)], 0)], marks=[(1.5, nasty[0])]),
        calibration_figure([(nasty[0], Reliability.of(np.array([0.2, 0.9]), np.array([False, True])))]),
    ):
        assert figure is not None
        assert ET.fromstring(figure.svg_file()).tag.endswith("svg")


def test_names_in_a_projection_do_not_cover_each_other() -> None:
    draw = np.random.default_rng(0)
    names = [(float(x), float(y), "class name") for x, y in draw.uniform(100, 130, (8, 2))]
    placed = spread(names)
    heights = sorted(y for _, y, _ in placed)
    assert min(np.diff(heights)) >= 14 - 1e-9
    assert spread([(0, 0, "a"), (200, 0, "b")]) == [(0, 0, "a"), (200, 0, "b")]


def test_many_classes_share_the_colours() -> None:
    figure = scatter_figure(
        np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 20, [str(j) for j in range(20)], ""
    )
    assert sum('font-weight="600"' in shape for shape in figure.drawing.shapes) == 10


@pytest.mark.parametrize("table", [LIGHT, DARK])
def test_colours_can_be_told_from_the_page(table: dict[str, str]) -> None:
    def light(name: str) -> float:
        parts = [v / 255 for v in bytes.fromhex(table[name][1:])]
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        low, high = sorted((light(a), light(b)))
        return (high + 0.05) / (low + 0.05)

    for name in ("text", "soft", "accent", "good", "bad"):
        assert contrast(name, "page") >= 4.5, name
        assert contrast(name, "card") >= 4.5, name
    for name in (f"c{i}" for i in range(1, 11)):
        assert contrast(name, "page") >= 3, name


def test_an_older_run_still_has_a_report(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Without predictions and history, as runs had before those were kept."""
    import shutil

    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    (run / "predictions.npz").unlink()
    (run / "selection.npz").unlink()
    write_report([RunFolder(run)], tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Doubtful" in html
    assert "Test predictions" not in html
