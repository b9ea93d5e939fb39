"""A real Chromium for tests: pages that remember what went wrong in them, and checks that run inside of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Skips, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser test")
    path = os.environ.get("CROSEL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium on this machine: no browser test")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox, since tests often run as root in a container; only our own pages are opened.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that remembers what went wrong in it, and what it asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1440, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)  # generous: other work may share the machine
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.open(address)

    def open(self, address: str) -> None:
        self.page.goto(address)
        if address.startswith("http:"):
            self.page.wait_for_selector("article.current")

    def press(self, *keys: str) -> None:
        """Each key, and then until the log holds it."""
        for key in keys:
            self.page.keyboard.press(key)

    def done(self, count: int) -> None:
        self.page.wait_for_function("n => document.getElementById('done').textContent.startsWith(n + ' of')", arg=count)

    def current(self) -> str:
        return str(self.page.inner_text("article.current .id"))

    def close(self) -> None:
        self.context.close()


@cache
def _axe() -> str:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed: no check by axe")
    return (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def axe_faults(page: Any) -> list[str]:
    """Serious and critical faults that axe finds, each with the element it is about."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(_axe())
    # Every rule is tried; of places where one is met it names the first alone, which takes half the time.
    result = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    assert len(result["passes"]) > 10  # it did look
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:200]}"
        for fault in result["violations"]
        if fault["impact"] in ("serious", "critical")
    ]


# Text that runs out of its box, or is smaller than 12 pixels.
CUT = """() => [...document.querySelectorAll("main *")].filter((e) => e.getClientRects().length && e.textContent && (
  parseFloat(getComputedStyle(e).fontSize) < 12 ||
  (e.matches("button, h2, p, dd, .word") && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
)).map((e) => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`)"""

# Text and what lies behind it must differ by 4.5 to 1 (WCAG 2, AA); semi-transparent colours are laid over each other.
CONTRAST = r"""() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((v, i) => (i < 3 ? v : v / 255)); };
  const painted = {};  // a page has few colours, and thousands of places that have them
  const parse = (colour) => painted[colour] ??= paint(colour);
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
