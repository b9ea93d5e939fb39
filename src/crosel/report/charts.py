"""Curves as inline SVG: a frame, a grid, lines, and nothing that needs a script.

Colours are CSS classes (`c1` …), so that the page's light, dark and print themes apply. Numbers in a chart are
pixels of its view box, which is about as wide as the chart on a phone; text keeps a legible size there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 34
COLOURS = 8
HOVER_POINTS = 240  # more points than this would make the page heavy; then there are no hover texts

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: list[Point]
    colour: int  # 0, 1, …
    quiet: bool = False  # thin: one of several networks behind their mean


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    percent: bool = False
    low: float | None = None  # fixed ends of the y axis; None: from the data
    high: float | None = None
    epochs: int = 1  # the x axis goes at least from 1 to here, so that charts side by side can be compared
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: epoch, text
    note: str = ""


def number(value: float, percent: bool = False) -> str:
    """A value as people read it."""
    if percent:
        return f"{100 * value:.1f}\u202f%"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def nice_step(span: float, parts: int) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that cuts the span into at most `parts`."""
    rough = span / parts
    scale = 10.0 ** math.floor(math.log10(rough))
    return next((f * scale for f in (1, 2, 2.5, 5, 10) if f * scale >= rough * (1 - 1e-9)), 10 * scale)


def ticks(low: float, high: float, parts: int = 5) -> list[float]:
    """Round numbers that enclose low and high."""
    if not high > low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = nice_step(high - low, parts)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def epoch_ticks(first: int, last: int) -> list[int]:
    """Multiples of a round number, and the first epoch where there is room for it."""
    span = max(last - first, 1)
    step = next(f * 10**power for power in count() for f in (1, 2, 5) if span / (f * 10**power) <= 8)
    multiples = list(range(math.ceil(first / step) * step, last + 1, step))
    return multiples if multiples and multiples[0] - first < 0.6 * step else [first, *multiples]


def line_chart(chart: Chart, ids: count[int]) -> str:
    """A <figure> with caption, curves and legend; nothing at all if no series has a point."""
    series = [s for s in chart.series if s.points]
    if not series:
        return ""
    xs = [x for s in series for x, _ in s.points]
    y_ticks = _y_ticks(chart, [y for s in series for _, y in s.points])
    frame = _Frame(min(1, *xs), max(chart.epochs, *xs), y_ticks[0], y_ticks[-1])
    name = f"chart-{next(ids)}"
    body = [
        *_axes(frame, y_ticks, chart.percent),
        *_marks(frame, chart.marks),
        *(_curve(frame, s) for s in series),
        *_hover_points(frame, series, chart.percent),
    ]
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}">'
        f'<title id="{name}">{escape(_describe(chart, series))}</title>{"".join(body)}</svg>'
        f"{_legend(chart, series)}{f'<p class=note>{escape(chart.note)}</p>' if chart.note else ''}</figure>"
    )


def _y_ticks(chart: Chart, ys: list[float]) -> list[float]:
    low = min(ys) if chart.low is None else min(chart.low, *ys)
    high = max(ys) if chart.high is None else max(chart.high, *ys)
    if not chart.percent or low < 0 or high > 1:
        return ticks(low, high)
    if high - low < 0.04:  # a flat line needs some room, but there is none beyond 0 and 100 %
        low, high = max(0.0, low - 0.02), min(1.0, high + 0.02)
    return [t for t in ticks(low, high) if -1e-9 <= t <= 1 + 1e-9]


@dataclass(frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> str:
        share = 0.5 if self.x_high == self.x_low else (value - self.x_low) / (self.x_high - self.x_low)
        return _short(LEFT + share * (WIDTH - LEFT - RIGHT))

    def y(self, value: float) -> str:
        return _short(HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _axes(frame: _Frame, y_ticks: list[float], percent: bool) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    digits = 0 if not percent or all(abs(100 * t - round(100 * t)) < 1e-6 for t in y_ticks) else 1
    out = []
    for tick in y_ticks:
        y = frame.y(tick)
        text = f"{100 * tick:.{digits}f}\u202f%" if percent else f"{tick:.6g}"
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{y}" dy="0.33em" text-anchor="end">{text}</text>')
    for epoch in epoch_ticks(int(frame.x_low), int(frame.x_high)):
        out.append(f'<text class="tick" x="{frame.x(epoch)}" y="{bottom + 14}" text-anchor="middle">{epoch}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    out.append(f'<text class="tick" x="{(LEFT + right) / 2}" y="{HEIGHT - 5}" text-anchor="middle">epoch</text>')
    return out


def _marks(frame: _Frame, marks: Sequence[tuple[float, str]]) -> list[str]:
    out = []
    for epoch, text in marks:
        if not frame.x_low <= epoch <= frame.x_high:
            continue
        x = frame.x(epoch)
        late = epoch > (frame.x_low + frame.x_high) / 2  # the text goes where there is room
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        out.append(
            f'<text class="tick" x="{x}" dx="{-4 if late else 4}" y="{TOP - 3}" '
            f'text-anchor="{"end" if late else "start"}">{escape(text)}</text>'
        )
    return out


def _style(series: Series) -> str:
    return f"line c{series.colour % COLOURS + 1}{' quiet' if series.quiet else ''}"


def _curve(frame: _Frame, series: Series) -> str:
    if len(series.points) == 1:
        ((x, y),) = series.points
        return f'<circle class="dot c{series.colour % COLOURS + 1}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"/>'
    points = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in series.points)
    return f'<polyline class="{_style(series)}" points="{points}"/>'


def _hover_points(frame: _Frame, series: Sequence[Series], percent: bool) -> list[str]:
    """Invisible discs whose titles browsers show under the pointer."""
    if sum(len(s.points) for s in series) > HOVER_POINTS:
        return []
    return [
        f'<circle class="hover" cx="{frame.x(x)}" cy="{frame.y(y)}" r="5">'
        f"<title>{escape(s.name)}, epoch {x:.0f}: {number(y, percent)}</title></circle>"
        for s in series
        if not s.quiet
        for x, y in s.points
    ]


def _describe(chart: Chart, series: Sequence[Series]) -> str:
    parts = [
        f"{s.name} from {number(s.points[0][1], chart.percent)} in epoch {s.points[0][0]:.0f} "
        f"to {number(s.points[-1][1], chart.percent)} in epoch {s.points[-1][0]:.0f}"
        for s in series
    ]
    return f"{chart.title}: {'; '.join(parts)}"


def _legend(chart: Chart, series: Sequence[Series]) -> str:
    items = [
        f'<li><svg class="key" viewBox="0 0 18 8" aria-hidden="true"><line class="{_style(s)}" x1="0" x2="18" y1="4" '
        f'y2="4"/></svg>{escape(s.name)} <b>{number(s.points[-1][1], chart.percent)}</b></li>'
        for s in series
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'
