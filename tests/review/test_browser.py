"""The page in a real browser: by keyboard, over reloads and a killed server, at both widths, light and dark."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _examples import made_up
from _server import Server, served
from _support import TinyRun

from crosel.review import export_corrections
from crosel.review.examples import Examples

pytest.importorskip("fastapi", reason="the extra 'review' is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser test")
CHROMIUM = os.environ.get("CROSEL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine: no browser test")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox, since tests often run as root in a container; only our own page is opened.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that remembers what went wrong in it, and what it asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1440, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.open(address)

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector("article.current")

    def press(self, *keys: str) -> None:
        """Each key, and then until the log holds it."""
        for key in keys:
            self.page.keyboard.press(key)

    def done(self, count: int) -> None:
        self.page.wait_for_function("n => document.getElementById('done').textContent.startsWith(n + ' of')", arg=count)

    def current(self) -> str:
        return str(self.page.inner_text("article.current h2"))

    def close(self) -> None:
        self.context.close()


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
        order = page.eval_on_selector_all("article h2", "all => all.map(h => h.textContent)")
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
        page.wait_for_function("() => document.getElementById('where').textContent.includes('of 91')")
        page.reload()
        page.wait_for_function("() => document.getElementById('where').textContent.includes('of 91')")
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


def nasty() -> Examples:
    """Features instead of images, more classes than keys, and names that would be markup."""
    classes = (*NASTY, *(f"class {j}" for j in range(11)))
    ids = [f"{NASTY[i % 3]}{i}" for i in range(96)]
    return made_up(96, 14, classes=classes, ids=ids, x=np.random.default_rng(0).normal(size=(96, 40)))


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


# Text that runs out of its box, or is smaller than 12 pixels.
CUT = """() => [...document.querySelectorAll("main *")].filter((e) => e.getClientRects().length && e.textContent && (
  parseFloat(getComputedStyle(e).fontSize) < 12 ||
  (e.matches("button, h2, p, dd, .word") && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
)).map((e) => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`)"""

# Text and what lies behind it must differ by 4.5 to 1 (WCAG 2, AA); semi-transparent colours are laid over each other.
CONTRAST = r"""() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((v, i) => (i < 3 ? v : v / 255)); };
  const light = (colour) => colour.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > .99) return c; } return [255, 255, 255, 1]; };
  const faults = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest(":disabled, option, .jump")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) faults.push(`${e.tagName}.${e.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(faults)];
}"""


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
        assert page.eval_on_selector_all("article h2", "all => all.every(h => h.textContent.includes('9'))")
        assert len(lines(tmp_path)) == 1  # what is typed into a box is no command
        assert visit.faults == []
        visit.close()
