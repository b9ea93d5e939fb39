"""A drawing is a list of shapes. It becomes SVG in the page, an SVG file, or a PNG file: one description, one look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from crosel.report.palette import css

Point = tuple[float, float]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'
TEXT_SIZE = 12.0


@dataclass(frozen=True)
class Line:
    """A line through points. Colours are names of the palette."""

    points: Sequence[Point]
    colour: str
    width: float = 1.0
    dash: tuple[float, ...] = ()
    opacity: float = 1.0


@dataclass(frozen=True)
class Dots:
    """Discs of one colour and size."""

    points: Sequence[Point]
    colour: str
    radius: float
    opacity: float = 1.0


@dataclass(frozen=True)
class Box:
    """`title` is what a browser shows under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True)
class Text:
    x: float
    y: float  # of the middle of the letters
    text: str
    anchor: str = "start"  # or "middle", "end"
    colour: str = "soft"
    size: float = TEXT_SIZE
    bold: bool = False
    halo: bool = False  # a rim of the page's colour, where the text stands on other shapes


@dataclass(frozen=True)
class Spot:
    """An invisible disc with a title, for the pointer."""

    x: float
    y: float
    title: str


Shape = Line | Dots | Box | Text | Spot


@dataclass
class Drawing:
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes

    def svg(self, title: str, name: str) -> str:
        """For the page, which has the colours; `name` is an id of its own there."""
        return (
            f'<svg viewBox="0 0 {short(self.width)} {short(self.height)}" role="img" aria-labelledby="{name}">'
            f'<title id="{name}">{escape(title)}</title>{self.body()}</svg>'
        )

    def svg_file(self, title: str) -> str:
        """As a file of its own, with the colours in it and a background."""
        size = f'width="{short(self.width)}" height="{short(self.height)}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {short(self.width)} {short(self.height)}" '
            f'role="img" font-family="{escape(FONT, quote=True)}"><title>{escape(title)}</title>'
            f'<style>{css()}{SHAPES}</style><rect {size} style="fill:var(--page)"/>{self.body()}</svg>\n'
        )

    def body(self) -> str:
        return "".join(map(_svg, self.shapes))


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


def _svg(shape: Shape) -> str:
    if isinstance(shape, Line):
        points = " ".join(f"{short(x)},{short(y)}" for x, y in shape.points)
        dash = f' stroke-dasharray="{" ".join(map(short, shape.dash))}"' if shape.dash else ""
        width = "" if shape.width == 1 else f' stroke-width="{shape.width:g}"'
        return f'<polyline class="line s-{shape.colour}"{width}{dash}{_opacity(shape.opacity)} points="{points}"/>'
    if isinstance(shape, Dots):
        # One path of round line ends instead of a circle each: a tenth of the bytes.
        points = "".join(f"M{short(x)} {short(y)}h0" for x, y in shape.points)
        attributes = f'class="line s-{shape.colour}" stroke-width="{short(2 * shape.radius)}"{_opacity(shape.opacity)}'
        return f'<path {attributes} d="{points}"/>'
    if isinstance(shape, Box):
        place = f'x="{short(shape.x)}" y="{short(shape.y)}" width="{short(shape.width)}" height="{short(shape.height)}"'
        end = f"><title>{escape(shape.title)}</title></rect>" if shape.title else "/>"
        return f'<rect class="f-{shape.colour}" {place}{_opacity(shape.opacity)}{end}'
    if isinstance(shape, Text):
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        size = "" if shape.size == TEXT_SIZE else f' style="font-size:{shape.size:g}px"'
        bold = ' font-weight="600"' if shape.bold else ""
        place = f'x="{short(shape.x)}" y="{short(shape.y)}" dy=".35em"{anchor}{size}{bold}'
        return f'<text class="f-{shape.colour}{" halo" if shape.halo else ""}" {place}>{escape(shape.text)}</text>'
    place = f'cx="{short(shape.x)}" cy="{short(shape.y)}" r="6"'
    return f'<circle class="spot" {place}><title>{escape(shape.title)}</title></circle>'
