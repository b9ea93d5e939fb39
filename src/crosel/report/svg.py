"""Drawings as SVG: the colours of report and review page, shapes, and charts with their title, legend and words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from itertools import count

# Text on page or card differs from it by at least 4.5 to 1, curves by at least 3 to 1 (WCAG 2, AA).
LIGHT = {
    "page": "#ffffff", "card": "#f6f7f9", "text": "#14181f", "soft": "#586272", "rule": "#dfe3e9", "edge": "#838d9c",
    "accent": "#1c5bb8", "tint": "#e7effa", "good": "#15703a", "good-tint": "#e4f3e9", "bad": "#b3261e",
    "bad-tint": "#fbe9e7", "notice": "#fdf3d7", "notice-text": "#5c4400",
    "c1": "#1c5bb8", "c2": "#c8501e", "c3": "#1b7f5c", "c4": "#8b52c4", "c5": "#9a6a00", "c6": "#0d7890",
    "c7": "#b9336f", "c8": "#5d6675", "c9": "#5a7d18", "c10": "#8a4a2b",
}  # fmt: skip
DARK = {
    "page": "#0f1216", "card": "#181c22", "text": "#e9edf3", "soft": "#a2adbc", "rule": "#2b323b", "edge": "#6d788a",
    "accent": "#7fb2ff", "tint": "#1d2c44", "good": "#6fdc9a", "good-tint": "#16301f", "bad": "#ff9d93",
    "bad-tint": "#3a1f1d", "notice": "#3a3015", "notice-text": "#ffe3a0",
    "c1": "#7fb2ff", "c2": "#ff9b6a", "c3": "#5fcf9f", "c4": "#c9a4f5", "c5": "#e8b64c", "c6": "#5cc9de",
    "c7": "#fb90bd", "c8": "#b3bdca", "c9": "#b3cf6a", "c10": "#dda58a",
}  # fmt: skip
DRAWN = ("text", "soft", "rule", "edge", "page", "accent", "bad")  # used by shapes, beside the colours of curves
COLOURS = 10
# Curves must be distinguishable without colours, too: the dashes of lines 1, 2, 3, then again.
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3))


def colour(index: int) -> str:
    return f"c{index % COLOURS + 1}"


def dash(index: int) -> tuple[float, ...]:
    return DASHES[index % len(DASHES)]


def css() -> str:
    """The colours as CSS variables, and classes that draw with them: `s-c1` strokes, `f-c1` fills."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in table.items()) for table in (LIGHT, DARK))
    drawn = [name for name in LIGHT if name in DRAWN or name.removeprefix("c").isdigit()]
    shapes = "".join(f".s-{name}{{stroke:var(--{name})}}.f-{name}{{fill:var(--{name})}}" for name in drawn)
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{shapes}\n"
    )


# --- shapes -------------------------------------------------------------------------------------------------------

Point = tuple[float, float]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'
TEXT_SIZE = 12.0
# Style of the shapes, in the page and in files.
SHAPES = (
    f"svg text{{font-size:{TEXT_SIZE}px;font-variant-numeric:tabular-nums}}"
    "svg .line{fill:none;stroke-linejoin:round;stroke-linecap:round}svg .spot{fill:transparent}"
    "svg .halo{paint-order:stroke;stroke:var(--page);stroke-width:3px;stroke-linejoin:round}"
)


def short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _opacity(value: float) -> str:
    return "" if value == 1 else f' opacity="{value:g}"'


def line(
    points: Sequence[Point], colour: str, width: float = 1, dash: tuple[float, ...] = (), opacity: float = 1
) -> str:
    """A line through points. Colours are names of the palette."""
    places = " ".join(f"{short(x)},{short(y)}" for x, y in points)
    dashes = f' stroke-dasharray="{" ".join(map(short, dash))}"' if dash else ""
    thick = "" if width == 1 else f' stroke-width="{width:g}"'
    return f'<polyline class="line s-{colour}"{thick}{dashes}{_opacity(opacity)} points="{places}"/>'


def dots(points: Sequence[Point], colour: str, radius: float, opacity: float = 1) -> str:
    """Discs of one colour and size: one path of round line ends, a tenth of the bytes of a circle each."""
    places = "".join(f"M{short(x)} {short(y)}h0" for x, y in points)
    return f'<path class="line s-{colour}" stroke-width="{short(2 * radius)}"{_opacity(opacity)} d="{places}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1, title: str = "") -> str:
    """A rectangle; `title` is what a browser shows under the pointer."""
    place = f'x="{short(x)}" y="{short(y)}" width="{short(width)}" height="{short(height)}"'
    end = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect class="f-{colour}" {place}{_opacity(opacity)}{end}'


def text(
    x: float, y: float, content: str, anchor: str = "start", colour: str = "soft", size: float = TEXT_SIZE,
    bold: bool = False, halo: bool = False,
) -> str:  # fmt: skip
    """Text, vertically centred on y; `halo` adds a rim, for text on top of other shapes."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    style = "" if size == TEXT_SIZE else f' style="font-size:{size:g}px"'
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{short(x)}" y="{short(y)}" dy=".35em"{where}{style}{weight}'
    return f'<text class="f-{colour}{" halo" if halo else ""}" {place}>{escape(content)}</text>'


def spot(x: float, y: float, title: str) -> str:
    """An invisible disc with a title, for the pointer."""
    return f'<circle class="spot" cx="{short(x)}" cy="{short(y)}" r="6"><title>{escape(title)}</title></circle>'


# What XML has no way to write: a browser would refuse the whole drawing.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def escape(text: str, quote: bool = True) -> str:
    return escape_html(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text), quote)


@dataclass
class Drawing:
    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def add(self, *shapes: str) -> None:
        self.shapes += shapes

    def svg(self, title: str, name: str) -> str:
        """For the page, which has the colours; `name` is an id of its own there."""
        return (
            f'<svg viewBox="0 0 {short(self.width)} {short(self.height)}" role="img" aria-labelledby="{name}">'
            f'<title id="{name}">{escape(title)}</title>{"".join(self.shapes)}</svg>'
        )


# --- charts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    text: str
    colour: str
    value: str = ""
    dash: tuple[float, ...] = ()
    shape: str = "line"  # or "dot", "box"

    def mark(self, x: float, y: float) -> str:
        if self.shape == "dot":
            return dots([(x + 9, y)], self.colour, 4)
        if self.shape == "box":
            return box(x + 4, y - 5, 10, 10, self.colour)
        return line([(x, y), (x + 18, y)], self.colour, 2, self.dash)

    @property
    def words(self) -> str:
        return f"{self.text}  {self.value}".strip()


@dataclass(frozen=True)
class Figure:
    """A finished chart, shown in a page or saved as `name`.svg; `description` is its text alternative."""

    name: str
    title: str
    drawing: Drawing
    description: str
    keys: Sequence[Key] = ()
    note: str = ""

    def html(self, ids: count[int]) -> str:
        note = f"<p class=note>{escape(self.note)}</p>" if self.note else ""
        return (
            f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>{_legend(self.keys)}'
            f'<div class="plot">{self.drawing.svg(self.description, f"chart-{next(ids)}")}{note}</div></figure>'
        )

    def svg_file(self) -> str:
        """A file of its own: the drawing under its title and legend, with the colours in it and a background."""
        width, x, y = self.drawing.width, 12.0, 42.0
        shapes = [text(x, 20, self.title, colour="text", size=15, bold=True)]
        for i, key in enumerate(self.keys):
            wide = 40.0 + 7 * len(key.words)  # seven units a letter
            if i and x + wide > width:
                x, y = 12.0, y + 20
            shapes += [key.mark(x, y), text(x + 24, y, key.words, colour="text")]
            x += wide
        head = y + 8 if self.keys else 30.0
        size = f'width="{short(width)}" height="{short(self.drawing.height + head)}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {short(width)} {short(self.drawing.height + head)}" '
            f'role="img" font-family="{escape(FONT, quote=True)}"><title>{escape(self.description)}</title>'
            f'<style>{css()}{SHAPES}</style><rect {size} style="fill:var(--page)"/>{"".join(shapes)}'
            f'<g transform="translate(0 {short(head)})">{"".join(self.drawing.shapes)}</g></svg>\n'
        )


def _legend(keys: Sequence[Key]) -> str:
    items = []
    for key in keys:
        mark = f'<svg class="key" viewBox="0 0 18 10" aria-hidden="true">{key.mark(0, 5)}</svg>'
        items.append(f"<li>{mark}{escape(key.text)}{f' <b>{key.value}</b>' if key.value else ''}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""
