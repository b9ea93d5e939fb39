"""Charts with two axes of numbers: curves over the epochs, and calibration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosel.report.axes import HEIGHT, TOP, WIDTH, Frame, epoch_ticks, number, share_ticks, ticks
from crosel.report.draw import Dots, Drawing, Line, Point, Shape, Spot, Text
from crosel.report.figure import Figure, Key
from crosel.report.palette import colour, dash

HOVER_POINTS = 240  # more points than this would make the page heavy; then there are no hover texts


@dataclass(frozen=True)
class Series:
    name: str
    points: list[Point]
    colour: int  # 0, 1, …
    quiet: bool = False  # thin: one of several networks behind their mean


@dataclass(frozen=True)
class Chart:
    """Curves over the epochs."""

    name: str
    title: str
    series: Sequence[Series]
    percent: bool = False
    low: float | None = None  # fixed ends of the y axis; None: from the data
    high: float | None = None
    epochs: int = 1  # the x axis goes at least from 1 to here, so that charts side by side can be compared
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: epoch, text
    note: str = ""


def line_figure(chart: Chart) -> Figure | None:
    """None if no series has a point."""
    series = [s for s in chart.series if s.points]
    if not series:
        return None
    xs = [x for s in series for x, _ in s.points]
    y_ticks = _y_ticks(chart, [y for s in series for _, y in s.points])
    frame = Frame(min(1, *xs), max(chart.epochs, *xs), y_ticks[0], y_ticks[-1])
    drawing = Drawing(WIDTH, HEIGHT)
    frame.rows(drawing, y_ticks, chart.percent)
    frame.foot(drawing, [(e, str(e)) for e in epoch_ticks(int(frame.x_low), int(frame.x_high))], "epoch")
    drawing.add(*_marks(frame, chart.marks))
    drawing.add(*(_curve(frame, s) for s in sorted(series, key=lambda s: not s.quiet)))
    drawing.add(*_hover_points(frame, series, chart.percent))
    keys = [
        Key(s.name, colour(s.colour), number(s.points[-1][1], chart.percent), dash(s.colour), "line") for s in series
    ]
    return Figure(chart.name, chart.title, drawing, _describe(chart, series), keys, chart.note)


def figures(charts: Iterable[Chart]) -> list[Figure]:
    return [figure for chart in charts if (figure := line_figure(chart)) is not None]


def _y_ticks(chart: Chart, ys: list[float]) -> list[float]:
    low = min(ys) if chart.low is None else min(chart.low, *ys)
    high = max(ys) if chart.high is None else max(chart.high, *ys)
    if low == high == 0:  # nothing happened: the line lies on the floor
        high = 1.0
    return share_ticks(low, high) if chart.percent and low >= 0 and high <= 1 else ticks(low, high)


def _marks(frame: Frame, marks: Sequence[tuple[float, str]]) -> list[Shape]:
    out: list[Shape] = []
    for epoch, text in marks:
        if frame.x_low <= epoch <= frame.x_high:
            x = frame.x(epoch)
            late = epoch > (frame.x_low + frame.x_high) / 2  # the text goes where there is room
            out.append(Line([(x, TOP - 12), (x, frame.bottom)], "edge", dash=(2, 3)))
            out.append(Text(x - 5 if late else x + 5, TOP - 9, text, "end" if late else "start"))
    return out


def _curve(frame: Frame, series: Series) -> Shape:
    points = [(frame.x(x), frame.y(y)) for x, y in series.points]
    name = colour(series.colour)
    if len(points) == 1:
        return Dots(points, name, 4)
    width, opacity = (1.25, 0.7) if series.quiet else (2.25, 1.0)
    return Line(points, name, width, dash(series.colour), opacity)


def _hover_points(frame: Frame, series: Sequence[Series], percent: bool) -> list[Shape]:
    if sum(len(s.points) for s in series) > HOVER_POINTS:
        return []
    return [
        Spot(frame.x(x), frame.y(y), f"{s.name}, epoch {x:.0f}: {number(y, percent)}")
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


# --- calibration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reliability:
    """Confidence in ten parts: mean confidence, share right and count of those that are not empty."""

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
    """Whether a confidence of 80 % means right in 80 % of the cases."""
    if not curves:
        return None
    frame, drawing = Frame(0, 1, 0, 1), Drawing(WIDTH, HEIGHT)
    fifths = [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    frame.rows(drawing, fifths, True)
    frame.foot(drawing, [(t, f"{100 * t:.0f}\u202f%") for t in fifths], "mean confidence")
    drawing.add(Line([(frame.x(0), frame.y(0)), (frame.x(1), frame.y(1))], "edge", dash=(2, 3)))
    for i, (name, r) in enumerate(curves):
        points = [(frame.x(s), frame.y(g)) for s, g in zip(r.sure, r.right, strict=True)]
        if len(points) > 1:
            drawing.add(Line(points, colour(i), 2.25, dash(i)))
        for (x, y), s, g, n in zip(points, r.sure, r.right, r.counts, strict=True):
            hint = f"{name}: confidence {number(s, True)}, right {number(g, True)} of {n:,}"
            size = 2.2 + 4 * float(np.sqrt(n / r.counts.sum()))  # few examples, small dot
            drawing.add(Dots([(x, y)], colour(i), size), Spot(x, y, hint))
    keys = [Key(f"{name}, error", colour(i), number(r.error, True), dash(i)) for i, (name, r) in enumerate(curves)]
    said = "; ".join(f"{name}: expected calibration error {number(r.error, True)}" for name, r in curves)
    return Figure(
        "calibration", "Calibration", drawing, f"Share right by confidence. {said}", keys,
        "On the dotted line, confidence equals accuracy. Small dots stand for few examples. "
        "The error is the expected calibration error.",
    )  # fmt: skip
