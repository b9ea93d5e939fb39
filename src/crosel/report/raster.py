"""Drawings as PNG, by Pillow: drawn several times larger and reduced, which smooths the edges."""

from __future__ import annotations

import importlib.util
import itertools
import math
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from crosel.report.draw import Box, Dots, Drawing, Line, Point, Text
from crosel.report.palette import LIGHT
from crosel.report.pictures import png_file

SCALE = 2  # pixels of the file for each unit of the drawing
SMOOTH = 2  # drawn this many times larger still
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "Helvetica.ttc")


def png(drawing: Drawing) -> bytes:
    size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
    image = Image.new("RGB", (size[0] * SMOOTH, size[1] * SMOOTH), LIGHT["page"])
    pen = _Pen(ImageDraw.Draw(image))
    for shape in drawing.shapes:
        pen.draw(shape)
    image = image.reduce(SMOOTH)
    # Letters are smooth already and would only blur: they go on top, in the final size.
    letters = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Text):
            _write(letters, shape)
    # Not by Pillow, which tries five filters on every row, as is good for photographs: drawings take three times as
    # long that way, and become larger. The smallest file would take several times as long as this level.
    return png_file(np.asarray(image), 3)


class _Pen:
    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._scale = SCALE * SMOOTH

    def draw(self, shape: Any) -> None:
        if isinstance(shape, Line):
            points = [(x * self._scale, y * self._scale) for x, y in shape.points]
            width = max(1, round(shape.width * self._scale))
            for part in _dashes(points, [d * self._scale for d in shape.dash]):
                self._draw.line(part, _blend(shape.colour, shape.opacity), width, joint="curve")
        elif isinstance(shape, Dots):
            r = shape.radius * self._scale
            for x, y in shape.points:
                x, y = x * self._scale, y * self._scale
                self._draw.ellipse((x - r, y - r, x + r, y + r), _blend(shape.colour, shape.opacity))
        elif isinstance(shape, Box) and shape.width > 0 and shape.height > 0:
            left, top = shape.x * self._scale, shape.y * self._scale
            right, bottom = left + shape.width * self._scale - 1, top + shape.height * self._scale - 1
            self._draw.rectangle((left, top, max(left, right), max(top, bottom)), _blend(shape.colour, shape.opacity))


def _blend(colour: str, opacity: float) -> tuple[int, int, int]:
    """The colour as it looks on the page."""
    over, under = (bytes.fromhex(LIGHT[name][1:]) for name in (colour, "page"))
    red, green, blue = (round(opacity * a + (1 - opacity) * b) for a, b in zip(over, under, strict=True))
    return red, green, blue


def _dashes(points: list[Point], pattern: list[float]) -> list[list[Point]]:
    """Cut a line into the parts that a dash pattern shows."""
    if not pattern:
        return [points]
    parts: list[list[Point]] = []
    place, left, shown = 0, pattern[0], True
    part = [points[0]]
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        length = math.hypot(x2 - x1, y2 - y1)
        done = 0.0
        while length - done > left:
            done += left
            turn = (x1 + (x2 - x1) * done / length, y1 + (y2 - y1) * done / length)
            if shown:
                parts.append([*part, turn])
            part, shown, place = [turn], not shown, (place + 1) % len(pattern)
            left = pattern[place]
        left -= length - done
        part.append((x2, y2))
    return [*parts, part] if shown and len(part) > 1 else parts


@lru_cache
def _font_file() -> str | None:
    """A font with more than ASCII: the system's, or the one that matplotlib brings along."""
    for name in FONTS:
        try:
            ImageFont.truetype(name, 10)
        except OSError:
            continue
        return name
    found = importlib.util.find_spec("matplotlib")
    path = Path(found.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf" if found and found.origin else None
    return str(path) if path is not None and path.is_file() else None


@lru_cache
def _font(size: int) -> Any:
    name = _font_file()
    return ImageFont.load_default(size) if name is None else ImageFont.truetype(name, size)


def _plain(text: str) -> str:
    """What Pillow's own font can write: ASCII."""
    if _font_file() is not None:
        return text
    text = text.replace("λ", "lambda").replace("\u202f", " ").replace("–", "-")
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _write(draw: Any, shape: Text) -> None:
    anchor = {"start": "l", "middle": "m", "end": "r"}[shape.anchor] + "m"
    font = _font(round(shape.size * SCALE * 0.94))
    rim = {"stroke_width": 3, "stroke_fill": LIGHT["page"]} if shape.halo else {}
    draw.text((shape.x * SCALE, shape.y * SCALE), _plain(shape.text), LIGHT[shape.colour], font, anchor, **rim)
