"""The report in a real browser: legible at both widths, light, dark and printed, and it asks nobody for anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _browser import CONTRAST, CUT, Visit, axe_faults
from _support import TinyRun, small_arrays

from crosel.config import build_config
from crosel.report import write_report, write_run_report
from crosel.runs.folder import RunFolder
from crosel.runs.pipeline import train_run
from crosel.training.devices import pick_device

LONG = "a_very_long_name_" + "of_a_class_" * 6


@pytest.fixture(scope="module")
def pages(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run on images; two runs compared; features with many classes of long names, without true labels."""
    folder = tmp_path_factory.mktemp("pages")
    arrays = small_arrays(images=False)
    sets = np.concatenate([arrays["candidates"], np.zeros((96, 12), bool)], axis=1)
    names = np.array([f"{LONG}{j}" if j % 3 == 0 else f"class {j}" for j in range(22)])
    np.savez(folder / "f.npz", x=arrays["x"], candidates=sets, classes=names)
    config = build_config(
        values={"source": str(folder / "f.npz"), "method": {"name": "proden"}},
        settings=("train.epochs=2", "network.name=mlp", "network.hidden=[8]"),
    )
    train_run(config, folder / "features", pick_device("cpu"), write_report=write_run_report)
    write_report([RunFolder(tiny_run.path), RunFolder(folder / "features")], folder / "both.html")
    return {
        "images": tiny_run.path / "report.html", "features": folder / "features" / "report.html",
        "both": folder / "both.html",
    }  # fmt: skip


# Axe takes its time: once for each kind of page, and once for each width and colour scheme.
AXE = {("images", 390, "light"), ("features", 1440, "dark"), ("both", 390, "dark")}


@pytest.mark.parametrize("kind", ["images", "features", "both"])
def test_legible_at_both_widths_light_and_dark(browser: Any, pages: dict[str, Path], kind: str) -> None:
    address = pages[kind].as_uri()
    visit = Visit(browser, address, 390)
    page = visit.page
    for width, scheme in ((390, "light"), (390, "dark"), (1440, "dark"), (1440, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        shots = os.environ.get("CROSEL_SCREENSHOTS")
        if shots:
            page.screenshot(path=f"{shots}/report-{kind}-{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT) == []
        assert page.evaluate(SMALL_LETTERS) == []
        assert page.evaluate(CONTRAST) == []
        if (kind, width, scheme) in AXE:
            assert axe_faults(page) == []
    assert visit.faults == []
    assert {url for url in visit.asked if not url.startswith("data:")} == {address}
    visit.close()


# Letters of a chart are scaled with it: below eleven pixels nobody can read them.
SMALL_LETTERS = """() => [...document.querySelectorAll("svg text")].filter((e) => {
  const svg = e.ownerSVGElement; const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(e).fontSize) * scale < 10.9;
}).map((e) => e.textContent)"""


def test_the_keyboard_reaches_everything_and_it_prints(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["images"].as_uri(), 1440, "dark")
    page = visit.page
    for section in ("#examples", "#training"):  # the labels to check come first
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('href')") == section
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#training'")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"  # no black paper
    assert not page.is_visible("nav")
    page.set_viewport_size({"width": 703, "height": 1000})  # of A4 within margins of 12 mm
    assert page.evaluate("document.documentElement.scrollWidth") <= 703
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/") >= 2 or len(pdf) > 50_000
    assert visit.faults == []
    visit.close()
