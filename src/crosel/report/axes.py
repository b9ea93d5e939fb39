"""Frames of charts: scales, ticks, grid, and how numbers are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

from crosel.report.draw import Drawing, Line, Text

# About as wide as a chart on a phone, so that its letters keep a legible size there.
WIDTH, HEIGHT = 340.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 18.0, 38.0


def number(value: float, percent: bool = False) -> str:
    """A value as people read it."""
    if percent:
        return f"{100 * value:.1f}\u202f%"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def nice_step(span: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that cuts the span into at most five parts."""
    rough = span / 5
    scale = 10.0 ** math.floor(math.log10(rough))
    return next((f * scale for f in (1, 2, 2.5, 5) if f * scale >= rough * (1 - 1e-9)), 10 * scale)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose low and high."""
    if not high > low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = nice_step(high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def epoch_ticks(first: int, last: int) -> list[int]:
    """Multiples of a round number, and the first epoch where there is room for it."""
    span = max(last - first, 1)
    step = next(f * 10**power for power in count() for f in (1, 2, 5) if span / (f * 10**power) <= 8)
    multiples = list(range(math.ceil(first / step) * step, last + 1, step))
    return multiples if multiples and multiples[0] - first < 0.6 * step else [first, *multiples]


def share_ticks(low: float, high: float) -> list[float]:
    """For shares: within 0 and 1, and with some room around a flat line."""
    if high - low < 0.04:
        low, high = max(0.0, low - 0.02), min(1.0, high + 0.02)
    return [t for t in ticks(low, high) if -1e-9 <= t <= 1 + 1e-9]


def tick_text(tick: float, all_ticks: list[float], percent: bool) -> str:
    if not percent:
        return f"{tick:.6g}"
    digits = 0 if all(abs(100 * t - round(100 * t)) < 1e-6 for t in all_ticks) else 1
    return f"{100 * tick:.{digits}f}\u202f%"


@dataclass(frozen=True)
class Frame:
    """Where values lie in a drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        share = 0.5 if self.x_high == self.x_low else (value - self.x_low) / (self.x_high - self.x_low)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - TOP)

    def rows(self, drawing: Drawing, y_ticks: list[float], percent: bool) -> None:
        """Grid lines with their values on the left."""
        for tick in y_ticks:
            y = self.y(tick)
            drawing.add(
                Line([(self.left, y), (self.right, y)], "rule"),
                Text(self.left - 7, y, tick_text(tick, y_ticks, percent), "end"),
            )

    def foot(self, drawing: Drawing, x_ticks: list[tuple[float, str]], what: str) -> None:
        """The line below, with values and what they are."""
        drawing.add(Line([(self.left, self.bottom), (self.right, self.bottom)], "edge"))
        for value, text in x_ticks:
            drawing.add(Text(self.x(value), self.bottom + 12, text, "middle"))
        drawing.add(Text((self.left + self.right) / 2, self.height - 8, what, "middle"))
