"""The colours of report, review page and plots: one table for light, dark, print and PNG."""

from __future__ import annotations

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
COLOURS = 10
# Beside the hue, so that curves can be told apart without it: dashes of lines 1, 2, 3, and again.
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3))


def colour(index: int) -> str:
    return f"c{index % COLOURS + 1}"


def dash(index: int) -> tuple[float, ...]:
    return DASHES[index % len(DASHES)]


def css() -> str:
    """The colours as CSS variables, and classes that draw with them: `s-c1` strokes, `f-c1` fills."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in table.items()) for table in (LIGHT, DARK))
    shapes = "".join(f".s-{n}{{stroke:var(--{n})}}.f-{n}{{fill:var(--{n})}}" for n in LIGHT if _is_drawn(n))
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{shapes}\n"
    )


def _is_drawn(name: str) -> bool:
    return name in ("text", "soft", "rule", "edge", "page", "accent", "bad") or name.removeprefix("c").isdigit()
