"""Charts: curves over the epochs, calibration, bars, dots by class, confusion, projection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from crosel.report import svg
from crosel.report.svg import COLOURS, Drawing, Figure, Key, Point, colour, dash

# About the width of a chart on a phone, so that text stays legible there.
WIDTH, HEIGHT = 340.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 18.0, 38.0

HOVER_POINTS = 240  # with more points than this, hover texts would make the page too large
SHOWN_POINTS = 2000  # of a projection


# --- axes ---------------------------------------------------------------------------------------------------------


def number(value: float, percent: bool = False) -> str:
    """Format a value for people."""
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


class Frame(Drawing):
    """A drawing with axes, which maps values to places."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], height: float = HEIGHT, left: float = LEFT
    ) -> None:
        super().__init__(WIDTH, height)
        (self.x_low, self.x_high), (self.y_low, self.y_high) = x, y
        self.left, self.right, self.bottom = left, WIDTH - RIGHT, height - BOTTOM

    def x(self, value: float) -> float:
        share = 0.5 if self.x_high == self.x_low else (value - self.x_low) / (self.x_high - self.x_low)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - TOP)

    def places(self, points: Iterable[Point]) -> list[Point]:
        return [(self.x(x), self.y(y)) for x, y in points]

    def add_y_axis(self, y_ticks: list[float], percent: bool = False) -> None:
        """Grid lines with their values on the left."""
        for tick in y_ticks:
            y = self.y(tick)
            words = svg.text(self.left - 7, y, tick_text(tick, y_ticks, percent), "end")
            self.add(svg.line([(self.left, y), (self.right, y)], "rule"), words)

    def add_x_axis(self, x_ticks: list[tuple[float, str]], what: str) -> None:
        """A line with values and their meaning."""
        self.add(svg.line([(self.left, self.bottom), (self.right, self.bottom)], "edge"))
        for value, text in x_ticks:
            self.add(svg.text(self.x(value), self.bottom + 12, text, "middle"))
        self.add(svg.text((self.left + self.right) / 2, self.height - 8, what, "middle"))


# --- curves -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    name: str
    points: list[Point]
    colour: int  # 0, 1, …
    quiet: bool = False  # thin: one of several networks behind their mean


def line_figure(
    name: str,
    title: str,
    series: Sequence[Series],
    percent: bool = False,
    low: float | None = None,  # fixed ends of the y axis; None: from the data
    high: float | None = None,
    epochs: int = 1,  # the x axis goes at least from 1 to here, so that charts side by side can be compared
    marks: Sequence[tuple[float, str]] = (),  # vertical lines: epoch, text
    note: str = "",
) -> Figure | None:
    """Curves over the epochs; None if no series has a point."""
    series = [s for s in series if s.points]
    if not series:
        return None
    xs, ys = zip(*(point for s in series for point in s.points), strict=True)
    y_ticks = _y_ticks(min(ys) if low is None else min(low, *ys), max(ys) if high is None else max(high, *ys), percent)
    frame = Frame((min(1, *xs), max(epochs, *xs)), (y_ticks[0], y_ticks[-1]))
    frame.add_y_axis(y_ticks, percent)
    frame.add_x_axis([(e, str(e)) for e in epoch_ticks(int(frame.x_low), int(frame.x_high))], "epoch")
    for epoch, text in marks:
        if frame.x_low <= epoch <= frame.x_high:
            x = frame.x(epoch)
            late = epoch > (frame.x_low + frame.x_high) / 2  # put the text on the side with more room
            frame.add(svg.line([(x, TOP - 12), (x, frame.bottom)], "edge", dash=(2, 3)))
            frame.add(svg.text(x - 5 if late else x + 5, TOP - 9, text, "end" if late else "start"))
    for s in sorted(series, key=lambda s: not s.quiet):
        points, ink = frame.places(s.points), colour(s.colour)
        width, opacity = (1.25, 0.7) if s.quiet else (2.25, 1.0)
        dotted = len(points) == 1
        frame.add(svg.dots(points, ink, 4) if dotted else svg.line(points, ink, width, dash(s.colour), opacity))
    if len(xs) <= HOVER_POINTS:
        for s in series:
            for x, y in () if s.quiet else s.points:
                frame.add(svg.spot(frame.x(x), frame.y(y), f"{s.name}, epoch {x:.0f}: {number(y, percent)}"))
    ends = [(s.name, s.colour, *s.points[0], *s.points[-1]) for s in series]
    keys = [Key(curve, colour(i), number(y, percent), dash(i)) for curve, i, _, _, _, y in ends]
    described = [
        f"{curve} from {number(y0, percent)} in epoch {x0:.0f} to {number(y, percent)} in epoch {x:.0f}"
        for curve, _, x0, y0, x, y in ends
    ]
    return Figure(name, title, frame, f"{title}: {'; '.join(described)}", keys, note)


def _y_ticks(low: float, high: float, percent: bool) -> list[float]:
    if low == high == 0:  # all values are 0
        high = 1.0
    return share_ticks(low, high) if percent and low >= 0 and high <= 1 else ticks(low, high)


# --- calibration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reliability:
    """Confidence in ten bins: mean confidence, share right and count of each bin that is not empty."""

    sure: NDArray[np.float64]
    right: NDArray[np.float64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> Reliability:
        bins = np.minimum((confidence * 10).astype(np.int64), 9)
        counts = np.bincount(bins, minlength=10)
        sums = [np.bincount(bins, values, minlength=10) for values in (confidence.astype(np.float64), right)]
        some = counts > 0
        return cls(sums[0][some] / counts[some], sums[1][some] / counts[some], counts[some])

    @property
    def error(self) -> float:
        """Expected calibration error."""
        return float((np.abs(self.sure - self.right) * self.counts).sum() / max(1, self.counts.sum()))


def calibration_figure(curves: Sequence[tuple[str, Reliability]]) -> Figure | None:
    """Whether labels with 80 % confidence are right in 80 % of the cases."""
    if not curves:
        return None
    frame, fifths = Frame((0, 1), (0, 1)), [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    frame.add_y_axis(fifths, percent=True)
    frame.add_x_axis([(t, f"{100 * t:.0f}\u202f%") for t in fifths], "mean confidence")
    frame.add(svg.line(frame.places([(0, 0), (1, 1)]), "edge", dash=(2, 3)))
    for i, (name, r) in enumerate(curves):
        points = frame.places(zip(r.sure, r.right, strict=True))
        if len(points) > 1:
            frame.add(svg.line(points, colour(i), 2.25, dash(i)))
        for (x, y), s, g, n in zip(points, r.sure, r.right, r.counts, strict=True):
            hint = f"{name}: confidence {number(s, True)}, right {number(g, True)} of {n:,}"
            size = 2.2 + 4 * float(np.sqrt(n / r.counts.sum()))  # small dots stand for few examples
            frame.add(svg.dots([(x, y)], colour(i), size), svg.spot(x, y, hint))
    keys = [Key(f"{name}, error", colour(i), number(r.error, True), dash(i)) for i, (name, r) in enumerate(curves)]
    said = "; ".join(f"{name}: expected calibration error {number(r.error, True)}" for name, r in curves)
    return Figure(
        "calibration", "Calibration", frame, f"Share right by confidence. {said}", keys,
        "On the dotted line, confidence equals accuracy. Small dots stand for few examples. "
        "The error is the expected calibration error.",
    )  # fmt: skip


# --- bars ---------------------------------------------------------------------------------------------------------


def bar_figure(
    name: str, title: str, bars: Sequence[tuple[str, Sequence[int]]], parts: Sequence[tuple[str, str]], what: str,
    note: str = "",
) -> Figure:  # fmt: skip
    """Upright bars of one or more parts, (name, colour) each; every bar is a name and a count for each part."""
    totals = [sum(counts) for _, counts in bars]
    y_ticks = ticks(0, max(totals) or 1)
    frame = Frame((0, len(bars)), (0, y_ticks[-1]), left=58)
    frame.add_y_axis(y_ticks)
    every = -(-len(bars) // 12)
    frame.add_x_axis([(i + 0.5, text) for i, (text, _) in enumerate(bars) if i % every == 0], what)
    wide = (frame.right - frame.left) / len(bars)
    for i, (text, counts) in enumerate(bars):
        done = 0
        for count_, (part, ink) in zip(counts, parts, strict=True):
            top, floor = frame.y(done + count_), frame.y(done)
            hint = f"{what} {text}: {count_:,}{f' {part}' if part else ''}"
            frame.add(svg.box(frame.x(i) + 0.12 * wide, top, 0.76 * wide, floor - top, ink, title=hint))
            done += count_
    keys = [Key(part, ink, f"{sum(c[j] for _, c in bars):,}", shape="box") for j, (part, ink) in enumerate(parts)]
    described = "; ".join(f"{text}: {total:,}" for (text, _), total in zip(bars, totals, strict=True))
    return Figure(name, title, frame, f"{title}: {described}", keys if len(parts) > 1 else (), note)


# --- classes ------------------------------------------------------------------------------------------------------


def dot_figure(
    name: str, title: str, rows: Sequence[tuple[str, Sequence[float | None]]], parts: Sequence[str]
) -> Figure:
    """One line per class, one dot per share."""
    longest = min(max((len(text) for text, _ in rows), default=1), 16)
    left, pitch = 16 + 7.2 * longest, 22.0
    height = TOP + BOTTOM + pitch * len(rows)
    x_ticks = share_ticks(min((v for _, values in rows for v in values if v is not None), default=0.0), 1.0)
    frame = Frame((x_ticks[0], 1), (0, 1), height, left)
    for tick in x_ticks:
        frame.add(svg.line([(frame.x(tick), TOP - 4), (frame.x(tick), frame.bottom)], "rule"))
    frame.add_x_axis([(t, tick_text(t, x_ticks, True)) for t in x_ticks], "share")
    for i, (text, values) in enumerate(rows):
        y = TOP + pitch * (i + 0.5)
        known = [v for v in values if v is not None]
        frame.add(svg.text(left - 10, y, text if len(text) <= 16 else f"{text[:15]}…", "end", "text"))
        if known:
            frame.add(svg.line([(frame.x(min(known)), y), (frame.x(max(known)), y)], "edge", 1.5))
        for j, value in enumerate(values):
            if value is not None:
                hint = f"{text}: {parts[j]} {number(value, True)}"
                x = frame.x(value)
                frame.add(svg.dots([(x, y)], colour(j), (5.5, 4.2, 3.0)[j % 3]), svg.spot(x, y, hint))
    described = "; ".join(
        f"{text}: {', '.join(f'{p} {number(v, True)}' for p, v in zip(parts, values, strict=True) if v is not None)}"
        for text, values in rows
    )
    keys = [Key(part, colour(j), shape="dot") for j, part in enumerate(parts)]
    return Figure(name, title, frame, f"{title}: {described}", keys)


# --- confusion ----------------------------------------------------------------------------------------------------


def matrix_names(classes: Sequence[str], room: int) -> tuple[list[str], list[str]]:
    """Names for the columns and rows of a matrix; where a column has no room for all of one, numbers stand for them."""
    if max(map(len, classes)) <= room:
        return list(classes), list(classes)
    return [f"{j}." for j in range(1, len(classes) + 1)], [f"{j}. {name}" for j, name in enumerate(classes, 1)]


def matrix_figure(name: str, title: str, counts: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """For files; the page has a table instead, which can be read aloud and copied."""
    k, numbers = len(classes), len(classes) <= 15
    cell = max(5.0, min(34.0, 560 / k))
    columns, rows = matrix_names(classes, int(cell // 7))
    longest = min(max(map(len, rows)), 16) if k <= 40 else 0
    left, top = 24 + 7 * longest, 26.0
    drawing = Drawing(left + cell * k + RIGHT, top + cell * k + 30)
    totals = np.maximum(counts.sum(axis=1), 1)
    for i, j in zip(*map(np.ndarray.tolist, np.nonzero(counts)), strict=True):
        share = counts[i, j] / totals[i]
        ink, strength = ("c1", 0.08 + 0.5 * share) if i == j else ("c2", min(0.65, 0.08 + 3 * share))
        hint = f"{classes[i]} taken for {classes[j]}: {counts[i, j]:,}"
        drawing.add(svg.box(left + cell * j, top + cell * i, cell - 1, cell - 1, ink, round(float(strength), 3), hint))
        if numbers:
            drawing.add(
                svg.text(left + cell * (j + 0.5), top + cell * (i + 0.5), str(counts[i, j]), "middle", "text", 11)
            )
    for i, (column, row) in enumerate(zip(columns, rows, strict=True) if longest else ()):
        drawing.add(svg.text(left - 6, top + cell * (i + 0.5), row[:longest], "end", "text", min(12.0, cell + 2)))
        drawing.add(svg.text(left + cell * (i + 0.5), top - 10, column, "middle", "text", 11))
    drawing.add(
        svg.text(left + cell * k / 2, drawing.height - 10, "label given (columns), true label (rows)", "middle")
    )
    right = int(np.trace(counts))
    return Figure(name, title, drawing, f"{title}: {right:,} of {int(counts.sum()):,} on the diagonal")


# --- projection ---------------------------------------------------------------------------------------------------


def scatter_figure(places: NDArray[np.float64], labels: NDArray[np.int64], classes: Sequence[str], note: str) -> Figure:
    """Points coloured by label; the most frequent labels have a colour each and are named in the chart."""
    frame = Frame(_ends(places[:, 0]), _ends(places[:, 1]), height=300, left=RIGHT)
    found, counts = np.unique(labels, return_counts=True)
    order = found[np.argsort(-counts, kind="stable")]
    own = sorted(order[:COLOURS].tolist())
    rest = ~np.isin(labels, own)
    groups = [(j, colour(i), labels == j) for i, j in enumerate(own)]
    if rest.any():
        frame.add(svg.dots(frame.places(places[rest]), "edge", 1.8, 0.5))
    for _, ink, mask in groups:
        frame.add(svg.dots(frame.places(places[mask]), ink, 2.2, 0.6))
    middles = [np.median(places[mask], axis=0) for _, _, mask in groups]
    names = [(frame.x(x), frame.y(y), classes[j][:16]) for (x, y), (j, _, _) in zip(middles, groups, strict=True)]
    for x, y, name in spread(names):
        frame.add(svg.text(x, y, name, "middle", "text", bold=True, halo=True))
    frame.add_x_axis([], "first principal component (across), second (upwards)")
    said = ", ".join(f"{classes[j]} {int(mask.sum()):,}" for j, _, mask in groups)
    return Figure("projection", "The examples in two dimensions", frame, f"Projection by label: {said}", (), note)


def spread(names: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Move names down, from the top on, until none overlaps another; a letter counts as seven units wide."""
    placed: list[tuple[float, float, str]] = []
    for x, y, name in sorted(names, key=lambda n: n[1]):
        for other_x, other_y, other in sorted(placed, key=lambda n: n[1]):
            if abs(x - other_x) < 3.5 * (len(name) + len(other)) + 4 and abs(y - other_y) < 14:
                y = other_y + 14
        placed.append((x, y, name))
    return placed


def _ends(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 1, high + 1)
