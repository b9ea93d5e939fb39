"""The page in a real browser: by keyboard, over reloads and a killed server, at both widths, light and dark."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _browser import CONTRAST, CUT, Visit, axe_faults
from _examples import made_up
from _server import Server, served
from _support import TinyRun
from PIL import Image

from crosel.data.images import ImageFiles
from crosel.review import export_corrections
from crosel.review.cards import Cards
from crosel.runs.labels import read_labels

pytest.importorskip("fastapi", reason="the extra 'review' is not installed")


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"


def lines(run: Path) -> list[tuple[str, str, str]]:
    found = [json.loads(line) for line in (run / "review.jsonl").read_text().splitlines()]
    return [(entry["id"], entry["decision"], entry["label"]) for entry in found]


def test_review_by_keyboard_reload_kill_restart(browser: Any, tiny_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(tiny_run.path, tmp_path)
    server = Server(run)
    visit = Visit(browser, server.address)
    page = visit.page
    try:
        assert "token" not in page.url
        order = page.eval_on_selector_all("article .id", "all => all.map(h => h.textContent)")
        flags = [row.flag for row in read_labels(run / "labels.csv")]
        in_queue = 96 - flags.count("outside")
        assert page.inner_text("[data-queue=labels][aria-pressed=true]") == f"Labels {in_queue}"
        page.click("[data-queue=outside]")
        page.wait_for_function(f"() => document.getElementById('where').textContent.endsWith(' of {96 - in_queue}')")
        page.click("[data-queue=labels]")
        page.wait_for_function(f"() => document.getElementById('where').textContent.endsWith(' of {in_queue}')")
        visit.press("Enter", "s", "ArrowRight", "a")
        visit.done(3)
        assert visit.current() == order[4]
        candidate = page.inner_text(
            "article.current .choice:not(.beyond):not(.run) .word, article.current .choice .word"
        )
        visit.press(candidate)  # digits are their own keys
        visit.done(4)
        visit.press("o")
        page.wait_for_selector("#choose[open] [role=option]")
        outside = page.inner_text("#options [aria-selected=true] .word")
        visit.press("Enter")
        visit.done(5)
        visit.press("s")
        visit.done(6)
        visit.press("u")
        visit.done(5)
        assert visit.current() == order[6]
        written = lines(run)
        assert [entry[0] for entry in written] == [order[i] for i in (0, 1, 3, 4, 5, 6, 6)]
        kinds = [entry[1] for entry in written]
        assert kinds[:3] == ["accept", "skip", "accept"]
        assert kinds[3] in ("accept", "choose")
        assert written[3][2] == candidate
        assert kinds[5:] == ["skip", "undo"]
        assert written[4][2] == outside

        page.select_option("select[name=state]", "undecided")
        left = f"() => document.getElementById('where').textContent.endsWith(' of {in_queue - 5}')"
        page.wait_for_function(left)
        page.reload()
        page.wait_for_function(left)
        visit.done(5)
        assert page.input_value("select[name=state]") == "undecided"

        visit.press("a")
        visit.done(6)
        before = (run / "review.jsonl").read_bytes()
        server.kill()
        assert visit.faults == []
        refused = visit.current()
        visit.press("a")
        page.wait_for_selector("#status.bad")
        assert "is not saved" in page.inner_text("#status")
        assert visit.current() == refused  # back at what was not saved
        assert (run / "review.jsonl").read_bytes() == before

        with open(run / "review.jsonl", "a") as stream:  # as if it had died in the middle of a line
            stream.write('{"time": "2026-01-01T00:00:00.000Z", "id": "')
        server = Server(run, server.port)
        visit.faults.clear()
        visit.open(server.address)
        visit.done(6)
        assert "cut short" in page.inner_text("#notes")
        visit.press("s")
        visit.done(7)
        visit.press("u", "u")
        visit.done(5)
        assert visit.faults == []
        with page.expect_download() as download:
            page.click("#export")
        rows = Path(download.value.path()).read_text().splitlines()
        assert "5 decisions: " in server.stop()
        assert export_corrections(run, tmp_path / "out.csv") == 5
        assert (tmp_path / "out.csv").read_text().splitlines() == rows
        assert sorted(row.split(",")[0] for row in rows[1:]) == sorted(order[i] for i in (0, 1, 3, 4, 5))
    finally:
        visit.close()
        server.kill()


NASTY = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "a_very_" + "long_" * 30 + "name")


def nasty() -> Cards:
    """Features instead of images, more classes than keys, and names that would be markup."""
    classes = (*NASTY, *(f"class {j}" for j in range(11)))
    ids = [f"{NASTY[i % 3]}{i}" for i in range(96)]
    return made_up(96, 14, classes=classes, given_ids=ids, x=np.random.default_rng(0).normal(size=(96, 40)))


@pytest.mark.parametrize("kind", ["images", "features"])
def test_legible_at_both_widths_light_and_dark(browser: Any, kind: str, tmp_path: Path) -> None:
    examples = made_up(96, 12, side=32) if kind == "images" else nasty()
    with served(examples, tmp_path / "review.jsonl") as address:
        visit = Visit(browser, address, 390)
        page = visit.page
        for width, scheme in ((390, "dark"), (390, "light"), (1440, "light"), (1440, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function("() => [...document.images].slice(0, 2).every(i => i.complete && i.naturalWidth)")
            visit.press("s")  # a decided card too
            page.wait_for_selector("article.decided")
            assert page.is_visible("select[name=flag]") == (width == 1440)
            shots = os.environ.get("CROSEL_SCREENSHOTS")
            if shots:
                page.screenshot(path=f"{shots}/review-{kind}-{width}-{scheme}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT) == []
            assert page.evaluate(CONTRAST) == []
        assert visit.faults == []
        hosts = {url.split("/")[2] for url in visit.asked}
        assert hosts == {address.split("/")[2]}
        visit.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
def test_axe_finds_no_serious_fault(browser: Any, width: int, scheme: str, tmp_path: Path) -> None:
    """On few cards: all are built alike, and axe looks long at many."""
    with served(made_up(3, 12, side=32), tmp_path / "review.jsonl") as address:
        visit = Visit(browser, address, width, scheme)
        visit.press("s")
        visit.page.wait_for_selector("article.decided")
        assert axe_faults(visit.page) == []
        for key, dialog in (("o", "#choose[open] [role=option]"), ("?", "#help[open]")):
            visit.press(key)
            visit.page.wait_for_selector(dialog)
            assert axe_faults(visit.page) == []
            visit.press("Escape")
        visit.close()


def test_a_picture_keeps_its_shape_and_is_large_on_a_key(browser: Any, tmp_path: Path) -> None:
    """A file of 600 x 200 pixels, where the networks saw a square; and the first card is there at once on a phone."""
    Image.new("RGB", (600, 200), "teal").save(tmp_path / "wide.png")
    cards = made_up(3, 12, x=ImageFiles([tmp_path / "wide.png"] * 3))
    with served(cards, tmp_path / "review.jsonl") as address:
        visit = Visit(browser, address, 390)
        page = visit.page
        page.set_viewport_size({"width": 390, "height": 664})
        page.wait_for_function("() => document.images[0].complete && document.images[0].naturalWidth === 128")
        card = page.evaluate(
            "(({ top, bottom }) => ({ top, bottom }))(document.querySelector('article').getBoundingClientRect())"
        )
        assert 0 <= card["top"] < card["bottom"] <= 664
        shape = page.evaluate("(({ width, height }) => width / height)(document.images[0].getBoundingClientRect())")
        assert shape == pytest.approx(3, rel=0.05)
        assert page.inner_text("article.current").index("class") < page.inner_text("article.current").index("img/")
        assert not page.is_visible("article.current .past")  # histories are behind a disclosure
        page.click("article.current summary")
        assert page.is_visible("article.current .past")
        visit.press("z")
        page.wait_for_function("() => document.querySelector('#large[open] img')?.naturalWidth === 600")
        visit.press("a", "z")  # closes it; what else is typed there decides nothing
        page.wait_for_selector("#large", state="hidden")
        assert page.inner_text("#done").startswith("0 of")
        assert visit.faults == []
        visit.close()


def test_names_stay_text_and_the_search_finds_them(browser: Any, tmp_path: Path) -> None:
    with served(nasty(), tmp_path / "review.jsonl") as address:
        visit = Visit(browser, address)
        page = visit.page
        page.on("dialog", lambda dialog: (visit.faults.append("alert"), dialog.dismiss()))
        assert page.query_selector("img") is None
        visit.press("o")
        page.fill("#search", "onerror")
        assert page.inner_text("#options li .word") == NASTY[0]
        visit.press("Enter")
        visit.done(1)
        assert page.query_selector("img") is None
        assert lines(tmp_path)[0][2] == NASTY[0]
        visit.press("?")
        page.wait_for_selector("#help[open]")
        visit.press("Escape", "/")
        page.keyboard.type("9")
        page.wait_for_function("() => document.getElementById('where').textContent.includes('of 15')")
        assert page.eval_on_selector_all("article .id", "all => all.every(h => h.textContent.includes('9'))")
        assert len(lines(tmp_path)) == 1  # what is typed into a box is no command
        assert visit.faults == []
        visit.close()
