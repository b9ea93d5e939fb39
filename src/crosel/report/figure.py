"""A chart that is ready to be shown: drawing, title, legend, and words for those who cannot see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count

from crosel.report.draw import Box, Dots, Drawing, Line, Shape, Text


@dataclass(frozen=True)
class Key:
    """A line of a legend."""

    text: str
    colour: str
    value: str = ""
    dash: tuple[float, ...] = ()
    shape: str = "line"  # or "dot", "box"


@dataclass(frozen=True)
class Figure:
    """A chart that is ready to be shown or saved as `name`.svg and `name`.png."""

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

    def with_words(self) -> Drawing:
        """The drawing as a file of its own has it: under its title and legend."""
        rows = _legend_rows(self.keys, self.drawing.width)
        head = 30.0 + 20 * len(rows)
        shapes: list[Shape] = [Text(12, 20, self.title, colour="text", size=15, bold=True)]
        for line, row in enumerate(rows):
            for x, key in row:
                shapes += _key_shapes(x, 42 + 20 * line, key)
        return Drawing(
            self.drawing.width, self.drawing.height + head, shapes + [_moved(s, head) for s in self.drawing.shapes]
        )


def _moved(shape: Shape, by: float) -> Shape:
    if isinstance(shape, Line | Dots):
        return replace(shape, points=[(x, y + by) for x, y in shape.points])
    return replace(shape, y=shape.y + by)


# --- legends ------------------------------------------------------------------------------------------------------


def _legend(keys: Sequence[Key]) -> str:
    items = []
    for key in keys:
        drawing = Drawing(18, 10, _key_shapes(0, 5, key)[:1])
        mark = f'<svg class="key" viewBox="0 0 18 10" aria-hidden="true">{drawing.body()}</svg>'
        items.append(f"<li>{mark}{escape(key.text)}{f' <b>{key.value}</b>' if key.value else ''}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def _key_shapes(x: float, y: float, key: Key) -> list[Shape]:
    mark: Shape = Line([(x, y), (x + 18, y)], key.colour, 2, key.dash)
    if key.shape == "dot":
        mark = Dots([(x + 9, y)], key.colour, 4)
    elif key.shape == "box":
        mark = Box(x + 4, y - 5, 10, 10, key.colour)
    return [mark, Text(x + 24, y, f"{key.text}  {key.value}".strip(), colour="text")]


def _legend_rows(keys: Sequence[Key], width: float) -> list[list[tuple[float, Key]]]:
    """Places of a legend's entries; text is taken to be seven units a letter."""
    rows: list[list[tuple[float, Key]]] = []
    x = width
    for key in keys:
        size = 40.0 + 7 * len(f"{key.text}  {key.value}".strip())
        if x + size > width:
            rows.append([])
            x = 12.0
        rows[-1].append((x, key))
        x += size
    return rows
