"""Charts of a report as files, and what is drawn in them."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from _sessions import make_session, small_data
from _support import CroselCli, TinyRun, small_arrays
from PIL import Image

from crosel.config import build_config
from crosel.report import raster, run_figures, write_report, write_run_report
from crosel.report.charts import bar_figure, dot_figure, matrix_figure, scatter_figure, spread
from crosel.report.curves import Chart, Reliability, Series, calibration_figure, line_figure
from crosel.report.draw import Box, Drawing, Line, Text
from crosel.report.gallery import _bars, _in_turn, groups
from crosel.report.gather import gather
from crosel.report.palette import DARK, LIGHT
from crosel.report.run_figures import principal_components
from crosel.report.tables import confusion_counts
from crosel.runs.folder import RunFolder
from crosel.runs.labels import label_table
from crosel.runs.outcome import read_predictions, read_selection, write_predictions
from crosel.runs.pipeline import train_run
from crosel.training.devices import pick_device
from crosel.training.session import Session

EXPECTED = {
    "accuracy", "selection", "losses", "lambda", "covering", "learning-rate", "set-sizes", "confidence", "calibration",
    "classes", "confusion-train", "confusion-test",
}  # fmt: skip


def test_a_run_leaves_its_charts_as_svg_and_png(tiny_run: TinyRun) -> None:
    folder = tiny_run.path / "plots"
    assert {path.name for path in folder.iterdir()} == {f"{n}.{kind}" for n in EXPECTED for kind in ("svg", "png")}
    for name in EXPECTED:
        svg = ET.parse(folder / f"{name}.svg").getroot()
        assert svg.find("{*}title").text  # type: ignore[union-attr]
        with Image.open(folder / f"{name}.png") as image:
            assert image.width == round(2 * float(svg.get("width") or 0))
            assert len(image.convert("RGB").getcolors(1 << 16) or []) > 3  # not an empty sheet
        assert (folder / f"{name}.png").stat().st_size < 100_000


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
    assert (tmp_path / "run" / "plots" / "projection.png").is_file()


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


def test_galleries_take_classes_in_turn() -> None:
    rows, classes = np.array([9, 8, 7, 6, 5]), np.array([1, 1, 1, 0, 0])
    assert _in_turn(rows, classes).tolist() == [9, 6, 8, 5, 7]


def test_the_likeliest_label_that_is_not_in_the_set_is_not_named_as_the_flag_is(tiny_run: TinyRun) -> None:
    (run,) = gather([RunFolder(tiny_run.path)])
    assert run.labels is not None
    assert run.predictions.train is not None
    beyond = int(np.flatnonzero(~run.sets[0])[0])
    run.predictions.train[0] = np.eye(run.sets.shape[1])[beyond]
    assert f'{run.classes[beyond]} <em class="beyond">not in the set</em>' in _bars(run, run.labels, 0)


def test_never_selected_means_in_no_epoch(tiny_run: TinyRun) -> None:
    (run,) = gather([RunFolder(tiny_run.path)])
    assert run.selection is not None
    assert run.selection.epochs is not None
    assert run.labels is not None
    assert run.selection.epochs.shape == (2, 96)
    assert run.selection.epochs.max() <= 4
    assert ((run.selection.epochs > 0) >= run.selection.mask).all()  # the last epoch counts
    shown = {group.title: group.rows for group in groups(run, run.labels)}
    never = shown.get("Never selected", np.array([], int))
    assert sorted(never) == np.flatnonzero((run.selection.epochs == 0).all(axis=0)).tolist()
    assert (np.diff(run.labels.confidence[never]) >= 0).all()


def test_losses_of_selection_and_comix_begin_after_the_warm_up(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    charts: dict[str, Chart] = {}
    monkeypatch.setattr(run_figures, "figures", lambda found: charts.update({chart.name: chart for chart in found}))
    (run,) = gather([RunFolder(tiny_run.path)])
    run_figures.curves(run)
    epochs = {series.name: [epoch for epoch, _ in series.points] for series in charts["losses"].series}
    assert 0 < run.warm_up < len(run.rows)
    assert epochs["total"] == [*range(1, len(run.rows) + 1)]
    assert epochs["selected"] == epochs["co-mix"] == [*range(run.warm_up + 1, len(run.rows) + 1)]


def test_outcomes_that_do_not_fit_are_left_aside(tiny_run: TinyRun, tmp_path: Path) -> None:
    assert read_selection(tiny_run.path / "selection.npz", 95) is None
    assert read_predictions(tiny_run.path / "predictions.npz", 96, 9).train is None
    assert read_predictions(tiny_run.path / "predictions.npz", 96, 9).test is None
    (tmp_path / "broken.npz").write_bytes(b"PK")
    assert read_selection(tmp_path / "broken.npz", 96) is None
    assert read_predictions(tmp_path / "nowhere.npz", 96, 10).train is None
    np.savez(tmp_path / "old.npz", **{n: np.zeros((2, 5)) for n in ("labels", "confidence")}, mask=np.eye(2, 5) > 0)
    old = read_selection(tmp_path / "old.npz", 5)
    assert old is not None
    assert old.never.tolist() == [False, False, True, True, True]


def test_of_an_outcome_in_part_damaged_the_rest_is_used(tiny_run: TinyRun, tmp_path: Path) -> None:
    def changed(name: str, **changes: np.ndarray | None) -> Path:
        arrays = {**np.load(tiny_run.path / name), **changes}
        np.savez(tmp_path / name, **{key: value for key, value in arrays.items() if value is not None})
        return tmp_path / name

    whole = read_selection(tiny_run.path / "selection.npz", 96)
    assert whole is not None
    assert whole.epochs is not None
    assert whole.past_labels is not None
    assert (whole.labels.dtype, whole.confidence.dtype, whole.mask.dtype) == (np.int32, np.float32, bool)
    for lost in ({"mask": None}, {"labels": whole.labels[:1]}, {"confidence": whole.confidence[:, :-1]}):
        assert read_selection(changed("selection.npz", **lost), 96) is None
    flat = {name: getattr(whole, name)[0] for name in ("labels", "confidence", "mask")}
    assert read_selection(changed("selection.npz", **flat), 96) is None
    found = read_selection(changed("selection.npz", epochs=whole.epochs[:, :-1]), 96)
    assert found is not None
    assert found.epochs is None
    np.testing.assert_array_equal(found.past_labels, whole.past_labels)
    short = {name: getattr(whole, name)[:, :, :-1] for name in ("past_labels", "past_confidence")}
    for lost in ({"past_labels": None}, {"past_confidence": None}, short, dict([*short.items()][1:])):
        found = read_selection(changed("selection.npz", **lost), 96)
        assert found is not None
        assert (found.past_labels, found.past_confidence) == (None, None)
        np.testing.assert_array_equal(found.epochs, whole.epochs)
    for lost in ({"y_test": None}, {"test": None}, {"y_test": np.zeros(63, int)}):
        predictions = read_predictions(changed("predictions.npz", **lost), 96, 10)
        assert predictions.train is not None
        assert (predictions.test, predictions.y_test) == (None, None)
        assert predictions.predicted is not None
    for counts in (None, np.zeros(9, int), np.zeros((1, 10), int), np.zeros(10), np.full(10, "1")):
        predictions = read_predictions(changed("predictions.npz", predicted=counts), 96, 10)
        assert predictions.predicted is None
        assert predictions.train is not None


def test_probabilities_are_kept_where_they_are_not_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(session: Session) -> list[str]:
        write_predictions(session, label_table(session), tmp_path / "p.npz")
        return list(np.load(tmp_path / "p.npz"))

    session = make_session("proden")  # 96 examples of 10 classes, and 64 to test
    for cells, names in ((960, ["train", "test", "y_test"]), (959, ["test", "y_test"]), (639, [])):
        monkeypatch.setattr("crosel.runs.outcome.CELLS", cells)
        assert kept(session) == ["predicted", *names]
    monkeypatch.undo()
    assert kept(make_session("proden", data=small_data(x_test=None, y_test=None))) == ["predicted", "train"]


def test_saved_probabilities_are_those_of_the_labels(tiny_run: TinyRun) -> None:
    (run,) = gather([RunFolder(tiny_run.path)])
    assert run.labels is not None
    assert run.predictions.train is not None
    given = run.predictions.train[np.arange(run.n), run.labels.labels]
    np.testing.assert_allclose(given, run.labels.confidence, atol=1e-3)
    assert run.predictions.test is not None
    assert (run.predictions.test.argmax(1) == run.predictions.y_test).mean() == pytest.approx(run.last("test_accuracy"))


# --- drawing ------------------------------------------------------------------------------------------------------


def test_a_png_shows_what_was_drawn() -> None:
    drawing = Drawing(40, 20, [Box(10, 5, 20, 10, "c2"), Line([(0, 2), (40, 2)], "c1", 2, dash=(4, 4))])
    file = raster.png(drawing)
    Image.open(io.BytesIO(file)).verify()  # its sums are right
    pixels = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
    assert pixels.shape == (40, 80, 3)

    def near(x: int, y: int, colour: str) -> bool:
        return bool(np.abs(pixels[y, x] - list(bytes.fromhex(LIGHT[colour][1:]))).max() < 12)

    assert near(40, 20, "c2")
    assert near(4, 30, "page")
    assert near(4, 4, "c1")  # a dash,
    assert near(12, 4, "page")  # and a gap


def test_without_a_font_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "_font_file", lambda: None)
    raster._font.cache_clear()
    drawing = Drawing(200, 20, [Text(0, 10, "λ_d é – 中", colour="text")])
    assert (np.asarray(Image.open(io.BytesIO(raster.png(drawing))).convert("L")) < 128).any()
    raster._font.cache_clear()


def test_names_in_files_are_escaped() -> None:
    nasty = ["<a>&", 'b"']
    for figure in (
        matrix_figure("m", nasty[0], np.eye(2, dtype=int), nasty),
        dot_figure("d", nasty[0], [(nasty[0], [0.5, None]), (nasty[1], [1.0, 0.2])], nasty),
        bar_figure("b", nasty[0], [(nasty[0], [1, 2]), ("", [0, 0])], [(nasty[0], "c1"), (nasty[1], "c2")], nasty[1]),
        scatter_figure(np.random.default_rng(0).normal(size=(9, 2)), np.arange(9) % 2, nasty, nasty[0]),
        line_figure(Chart("l", nasty[0], [Series(nasty[1], [(1, 2), (2, 3)], 0)], marks=[(1.5, nasty[0])])),
        calibration_figure([(nasty[0], Reliability.of(np.array([0.2, 0.9]), np.array([False, True])))]),
    ):
        assert figure is not None
        drawing = figure.with_words()
        assert ET.fromstring(drawing.svg_file(figure.description)).tag.endswith("svg")
        assert raster.png(drawing).startswith(b"\x89PNG")


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
    assert sum(isinstance(shape, Text) and shape.bold for shape in figure.drawing.shapes) == 10


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
    assert "Least confident" in html
    assert "Test predictions" not in html
