"""Charts by class or by count: bars, dots, confusion, projection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from crosel.report.axes import BOTTOM, HEIGHT, RIGHT, TOP, WIDTH, Frame, number, share_ticks, tick_text, ticks
from crosel.report.draw import Box, Dots, Drawing, Line, Spot, Text
from crosel.report.figure import Figure, Key
from crosel.report.palette import COLOURS, colour

SHOWN_POINTS = 2000  # of a projection


def bar_figure(
    name: str, title: str, bars: Sequence[tuple[str, Sequence[int]]], parts: Sequence[tuple[str, str]], what: str,
    note: str = "",
) -> Figure:  # fmt: skip
    """Upright bars of one or more parts, (name, colour) each; every bar is a name and a count for each part."""
    totals = [sum(counts) for _, counts in bars]
    y_ticks = ticks(0, max(totals) or 1)
    frame = Frame(0, len(bars), 0, y_ticks[-1], left=58)
    drawing = Drawing(WIDTH, HEIGHT)
    frame.rows(drawing, y_ticks, False)
    every = -(-len(bars) // 12)
    frame.foot(drawing, [(i + 0.5, text) for i, (text, _) in enumerate(bars) if i % every == 0], what)
    wide = (frame.right - frame.left) / len(bars)
    for i, (text, counts) in enumerate(bars):
        done = 0
        for count_, (part, ink) in zip(counts, parts, strict=True):
            top, floor = frame.y(done + count_), frame.y(done)
            hint = f"{what} {text}: {count_:,}{f' {part}' if part else ''}"
            drawing.add(Box(frame.x(i) + 0.12 * wide, top, 0.76 * wide, floor - top, ink, title=hint))
            done += count_
    keys = [Key(part, ink, f"{sum(c[j] for _, c in bars):,}", shape="box") for j, (part, ink) in enumerate(parts)]
    described = "; ".join(f"{text}: {total:,}" for (text, _), total in zip(bars, totals, strict=True))
    return Figure(name, title, drawing, f"{title}: {described}", keys if len(parts) > 1 else (), note)


# --- classes ------------------------------------------------------------------------------------------------------


def dot_figure(
    name: str, title: str, rows: Sequence[tuple[str, Sequence[float | None]]], parts: Sequence[str]
) -> Figure:
    """One line a class, one dot for each share."""
    longest = min(max((len(text) for text, _ in rows), default=1), 16)
    left, pitch = 16 + 7.2 * longest, 22.0
    height = TOP + BOTTOM + pitch * len(rows)
    x_ticks = share_ticks(min((v for _, values in rows for v in values if v is not None), default=0.0), 1.0)
    frame, drawing = Frame(x_ticks[0], 1, 0, 1, height=height, left=left), Drawing(WIDTH, height)
    for tick in x_ticks:
        drawing.add(Line([(frame.x(tick), TOP - 4), (frame.x(tick), frame.bottom)], "rule"))
    frame.foot(drawing, [(t, tick_text(t, x_ticks, True)) for t in x_ticks], "share")
    for i, (text, values) in enumerate(rows):
        y = TOP + pitch * (i + 0.5)
        known = [v for v in values if v is not None]
        drawing.add(Text(left - 10, y, text if len(text) <= 16 else f"{text[:15]}…", "end", "text"))
        if known:
            drawing.add(Line([(frame.x(min(known)), y), (frame.x(max(known)), y)], "edge", 1.5))
        for j, value in enumerate(values):
            if value is not None:
                hint = f"{text}: {parts[j]} {number(value, True)}"
                x = frame.x(value)
                drawing.add(Dots([(x, y)], colour(j), (5.5, 4.2, 3.0)[j % 3]), Spot(x, y, hint))
    described = "; ".join(
        f"{text}: {', '.join(f'{p} {number(v, True)}' for p, v in zip(parts, values, strict=True) if v is not None)}"
        for text, values in rows
    )
    keys = [Key(part, colour(j), shape="dot") for j, part in enumerate(parts)]
    return Figure(name, title, drawing, f"{title}: {described}", keys)


# --- confusion ----------------------------------------------------------------------------------------------------


def matrix_figure(name: str, title: str, counts: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """For files; the page has a table, which can be read out and copied."""
    k, numbers = len(classes), len(classes) <= 15
    longest = min(max(map(len, classes)), 14) if k <= 40 else 0
    cell = max(5.0, min(34.0, 560 / k))
    left, top = 24 + 7 * longest, 26.0
    drawing = Drawing(left + cell * k + RIGHT, top + cell * k + 30)
    totals = np.maximum(counts.sum(axis=1), 1)
    for i, j in zip(*map(np.ndarray.tolist, np.nonzero(counts)), strict=True):
        share = counts[i, j] / totals[i]
        ink, strength = ("c1", 0.08 + 0.5 * share) if i == j else ("c2", min(0.65, 0.08 + 3 * share))
        hint = f"{classes[i]} taken for {classes[j]}: {counts[i, j]:,}"
        drawing.add(Box(left + cell * j, top + cell * i, cell - 1, cell - 1, ink, round(float(strength), 3), hint))
        if numbers:
            drawing.add(Text(left + cell * (j + 0.5), top + cell * (i + 0.5), str(counts[i, j]), "middle", "text", 11))
    for i, text in enumerate(classes if longest else ()):
        drawing.add(Text(left - 6, top + cell * (i + 0.5), text[:14], "end", "text", min(12.0, cell + 2)))
        drawing.add(Text(left + cell * (i + 0.5), top - 10, text[: int(cell // 7)], "middle", "text", 11))
    drawing.add(Text(left + cell * k / 2, drawing.height - 10, "label given (columns), true label (rows)", "middle"))
    right = int(np.trace(counts))
    return Figure(name, title, drawing, f"{title}: {right:,} of {int(counts.sum()):,} on the diagonal")


# --- projection ---------------------------------------------------------------------------------------------------


def scatter_figure(places: NDArray[np.float64], labels: NDArray[np.int64], classes: Sequence[str], note: str) -> Figure:
    """Points coloured by label; the commonest labels have a colour each and stand in the picture."""
    frame = Frame(*_ends(places[:, 0]), *_ends(places[:, 1]), height=300, left=RIGHT)
    drawing = Drawing(WIDTH, 300)
    found, counts = np.unique(labels, return_counts=True)
    order = found[np.argsort(-counts, kind="stable")]
    own = sorted(order[:COLOURS].tolist())
    rest = ~np.isin(labels, own)
    groups = [(j, colour(i), labels == j) for i, j in enumerate(own)]
    if rest.any():
        drawing.add(Dots([(frame.x(x), frame.y(y)) for x, y in places[rest]], "edge", 1.8, 0.5))
    for _, ink, mask in groups:
        drawing.add(Dots([(frame.x(x), frame.y(y)) for x, y in places[mask]], ink, 2.2, 0.6))
    middles = [np.median(places[mask], axis=0) for _, _, mask in groups]
    names = [(frame.x(x), frame.y(y), classes[j][:16]) for (x, y), (j, _, _) in zip(middles, groups, strict=True)]
    for x, y, name in spread(names):
        drawing.add(Text(x, y, name, "middle", "text", bold=True, halo=True))
    frame.foot(drawing, [], "first principal component (across), second (upwards)")
    said = ", ".join(f"{classes[j]} {int(mask.sum()):,}" for j, _, mask in groups)
    return Figure("projection", "The examples in two dimensions", drawing, f"Projection by label: {said}", (), note)


def spread(names: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Push names down, from the top on, until none covers another; a letter is taken to be seven units wide."""
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
