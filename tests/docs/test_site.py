"""The site builds without a warning, its links lead somewhere, and no page of it asks for anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from _blocks import ROOT, docs_script
from typer.main import get_command

from crosel.cli.app import app

LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"), ("iframe", "src"), ("use", "href")}


class Page(HTMLParser):
    """What a page links to, what it loads, and which places in it have a name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)
            elif (tag, name) in LOADED and value and dict(attrs).get("rel") != "canonical":
                self.loads.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="pip install 'crosel[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", "-d", str(out / "trees")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(out / "html")], env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return out / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html")}


def test_links_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loads = [(path, load) for path, page in pages.items() for load in page.loads]
    assert any(load.endswith(".css") or ".css?" in load for _, load in loads)
    for path, load in loads:
        parts = urlsplit(load)
        assert parts.scheme in ("", "data"), f"{path.name} loads {load}"
        assert not parts.netloc, f"{path.name} loads {load}"
        assert parts.scheme or (path.parent / unquote(parts.path)).exists(), f"{path.name}: {load} is missing"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_reference_has_every_command_and_setting(site: Path) -> None:
    commands = (site / "command-line.html").read_text(encoding="utf-8")
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"crosel {name}" in commands
    settings = (site / "settings.html").read_text(encoding="utf-8")
    for name in ("train.epochs", "data.image_size", "network.width", "augment.flip", "method.gamma", "method.queue"):
        assert name in settings


def test_equations_are_mathml(site: Path) -> None:  # so they need no script
    page = (site / "methods" / "crosel.html").read_text(encoding="utf-8")
    assert "<math" in page


def test_figures_are_those_of_the_records() -> None:
    """Whoever changes results/ draws the figures anew: python docs/figures.py."""
    module = docs_script("figures")
    drawn = {name: module.draw(figure) for name, figure in module.figures().items()}
    assert len(drawn) >= 5
    for name, text in drawn.items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == text, name
