"""Draw the picture of docs/architecture.md: `python docs/architecture.py` writes docs/images/architecture.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "architecture.svg"

# A hop: its module, and what becomes of the row there. A line of the picture is a stage, from its left to its right.
STAGES = {
    "Read, once": [
        ("cli/train.py", "options"),
        ("runs/pipeline.py", "one run"),
        ("data/sources.py", "which format?"),
        ("data/formats/csv.py", "values, labels"),
        ("data/dataset.py", "x[i], candidates[i]"),
        ("training/build.py", "on the device"),
    ],
    "Train": [
        ("training/trainer.py", "place in the order"),
        ("training/batches.py", "one of a batch"),
        ("augment/views.py", "weak, strong view"),
        ("methods/crosel.py", "loss"),
        ("nn/networks.py", "logits"),
        ("training/step.py", "gradient, update"),
        ("methods/bank.py", "selected or not"),
    ],
    "Write, at the end": [
        ("runs/result.py", "label, flag"),
        ("runs/labels.py", "labels.csv"),
    ],
}
LOOPS = (("every epoch", 7, 13, 7, 30), ("every step", 8, 12, 4, 8))  # first and last hop; space beside and above
STYLE = """
svg{--paper:#fff;--ink:#1c1917;--dim:#57534e;--box:#f5f5f4;--line:#a8a29e;--loop:#0b66c3}
@media (prefers-color-scheme:dark){
svg{--paper:#131416;--ink:#f5f5f4;--dim:#a8a29e;--box:#292524;--line:#78716c;--loop:#7ab8ff}}
.paper{fill:var(--paper)}.box{fill:var(--box);stroke:var(--line)}
.loop{fill:none;stroke:var(--loop);stroke-dasharray:6 4}
.arrow{stroke:var(--dim);stroke-width:1.6}.tip{fill:var(--dim)}
text{fill:var(--ink);font:13px sans-serif}.dim{fill:var(--dim);font-size:12px}.name{font:bold 13px monospace}
.stage{font-weight:bold;font-size:15px}.turn{fill:var(--loop);font-size:12px}
""".strip()
WIDTH, BOX, HIGH, GAP, LEFT, TOP, LINE = 958, 118, 76, 14, 24, 50, 190


def draw() -> str:
    hops = [module for stage in STAGES.values() for module, _ in stage]
    title = escape("The way of a row: " + ", ".join(hops))
    parts, places = [], {}
    for row, (stage, found) in enumerate(STAGES.items()):
        y = TOP + row * LINE
        x, above = LEFT + 32 * bool(row), 36 if row == 1 else 14
        parts.append(f'<text class="stage" x="{x}" y="{y - above}">{escape(stage)}</text>')
        for column, (module, what) in enumerate(found):
            x = LEFT + column * (BOX + GAP)
            number = len(places) + 1
            places[number] = (x, y)
            folder, _, file = module.rpartition("/")
            parts.append(f'<rect class="box" x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="6"/>')
            head = f"{number}  {folder}/" if folder else str(number)
            parts.append(f'<text class="dim" x="{x + 10}" y="{y + 21}">{head}</text>')
            parts.append(f'<text class="name" x="{x + 10}" y="{y + 41}">{file}</text>')
            parts.append(f'<text class="dim" x="{x + 10}" y="{y + 63}">{escape(what)}</text>')
            if column:
                parts.append(arrow(x - GAP + 2, y + HIGH / 2, x - 2, y + HIGH / 2))
            elif row:  # from the end of the line above
                ax, ay = places[number - 1][0] + BOX / 2, places[number - 1][1] + HIGH
                parts.append(arrow(ax, ay, ax, ay + 58, LEFT + 16, ay + 58, LEFT + 16, y - 2))
    for name, first, last, beside, above in LOOPS:
        (x, y), end = places[first], places[last][0] + BOX
        size = f'width="{end - x + 2 * beside}" height="{HIGH + 2 * above}"'
        parts.append(f'<rect class="loop" x="{x - beside}" y="{y - above}" {size} rx="8"/>')
        parts.append(f'<text class="turn" x="{x}" y="{y + HIGH + above - 6 + 20 * (above < 10)}">{name}</text>')
    height = TOP + 2 * LINE + HIGH + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n<title>{title}</title>\n'
        f'<style>\n{STYLE}\n</style>\n<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def arrow(x: float, y: float, *more: float) -> str:
    path = f"M{x:g} {y:g}" + "".join(f"L{a:g} {b:g}" for a, b in zip(more[::2], more[1::2], strict=True))
    return f'<path class="arrow" d="{path}" fill="none" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
