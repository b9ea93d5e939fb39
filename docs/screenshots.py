"""Pictures of the report and of the review page for README and documentation, from a real run on digits.

    python docs/screenshots.py                      # trains the demo's run first, about a minute on two cores
    python docs/screenshots.py --run demo-run       # or takes the folder that `crosel demo` left

Needs Playwright and a Chromium (`pip install 'crosel[dev]'`, `apt-get install chromium`; CROSEL_CHROMIUM names another
one). Every picture is reduced to 256 colours, and so stays below 300 kB.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

LARGEST = 300_000
WIDE, PHONE = (1440, 960), (390, 844)


@contextmanager
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is not installed: pip install playwright")
    chromium = os.environ.get("CROSEL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("there is no chromium on this machine; install it, or name one in CROSEL_CHROMIUM")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def review(run: Path) -> Iterator[str]:
    """The address of the review page of a copy of the run, so that the run keeps no decisions of ours."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(run, Path(folder) / run.name))
        (copy / "review.jsonl").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "crosel", "review", str(copy), "--no-browser"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            process.terminate()
            process.wait()


class Camera:
    def __init__(self, browser: Any, out: Path) -> None:
        self.browser, self.out = browser, out
        out.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def page(self, address: str, size: tuple[int, int], scheme: str = "light") -> Iterator[Any]:
        view = {"width": size[0], "height": size[1]}
        context = self.browser.new_context(
            viewport=view, color_scheme=scheme, device_scale_factor=2 if size == PHONE else 1
        )
        page = context.new_page()
        page.goto(address)
        yield page
        context.close()

    def keep(self, name: str, picture: bytes) -> None:
        small = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
        content = small.getvalue()
        if len(content) > LARGEST:
            sys.exit(f"{name}.png has {len(content):,} bytes, more than {LARGEST:,}")
        (self.out / f"{name}.png").write_bytes(content)
        print(f"{self.out / name}.png  {len(content) / 1000:.0f} kB")


def shoot_report(camera: Camera, run: Path, other: Path | None) -> None:
    address = (run / "report.html").resolve().as_uri()
    for name, size, scheme in (
        ("report", WIDE, "light"), ("report-dark", WIDE, "dark"), ("report-phone", PHONE, "dark"),
    ):  # fmt: skip
        with camera.page(address, size, scheme) as page:
            camera.keep(name, page.screenshot())
    with camera.page(address, WIDE) as page:
        page.add_style_tag(content="* { position: static !important }")  # headings would follow the scrolling
        for section in ("labels", "truth", "examples"):
            box = page.locator(f"#{section}").bounding_box()
            clip = {"x": 0, "y": box["y"] + 24, "width": WIDE[0], "height": box["height"]}
            camera.keep(f"report-{section}", page.screenshot(full_page=True, clip=clip))
    if other is not None:
        with tempfile.TemporaryDirectory() as folder:
            page_file = Path(folder) / "both.html"
            subprocess.run(
                [sys.executable, "-m", "crosel", "report", str(run), str(other), "--out", str(page_file)], check=True
            )
            with camera.page(page_file.as_uri(), WIDE) as page:
                camera.keep("report-compare", page.screenshot())


def shoot_review(camera: Camera, run: Path) -> None:
    with review(run) as address:
        for name, size, scheme in (
            ("review-phone", PHONE, "light"), ("review-dark", WIDE, "dark"), ("review", WIDE, "light"),
        ):  # fmt: skip
            with camera.page(address, size, scheme) as page:
                page.wait_for_selector("article.current")
                if name == "review":
                    for key in ("a", "s", "a"):
                        page.keyboard.press(key)
                    page.wait_for_function("() => document.getElementById('done').textContent.startsWith('3 of')")
                page.wait_for_function("() => [...document.images].slice(0, 2).every(i => i.complete)")
                camera.keep(name, page.screenshot())


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of the report and of the review page.")
    parser.add_argument("--run", type=Path, default=None, help="folder of a demo, or a run folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder for the pictures")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser() as found:
        run = a.run
        if run is None:
            run = Path(folder) / "demo-run"
            subprocess.run([sys.executable, "-m", "crosel", "demo", "--out", str(run)], check=True)
        other = run / "cc" if (run / "cc").is_dir() else None
        run = run / "crosel" if (run / "crosel").is_dir() else run
        camera = Camera(found, a.out)
        shoot_report(camera, run, other)
        shoot_review(camera, run)


if __name__ == "__main__":
    main()
