"""Parts of a page: numbers, tables, bars, sections, images. Arguments that are HTML must be escaped already."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from crosel.report.charts import number

SIDE = 64  # pixels of a thumbnail's longer side, at most


def pct(value: float) -> str:
    return number(value, percent=True)


def section(title: str, body: str, intro: str = "", anchor: str = "") -> str:
    """A section with heading and introduction; empty if there is no content."""
    if not body:
        return ""
    lead = f"<p>{intro}</p>" if intro else ""
    name = f' id="{anchor}"' if anchor else ""
    return f'<section{name}><div class="head"><h2>{title}</h2>{lead}</div><div class="body">{body}</div></section>\n'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", note: str = "") -> str:
    """Cells and captions are HTML; the first cell of a row is its heading."""
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{c}</td>" for c in row[1:])}</tr>' for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}"><table class="{kind}">'
        f"<caption>{caption}</caption>{table_head(head)}"
        f"<tbody>{body}</tbody></table>{f'<p class=note>{note}</p>' if note else ''}</div>"
    )


def table_head(names: Sequence[str]) -> str:
    cells = (f"<th scope=col>{name}</th>" if name else "<td></td>" for name in names)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span>'


def bar_table(caption: str, what: str, counts: Sequence[tuple[str, int]], total: int) -> str:
    """Counts with their share of the total and bars relative to the largest."""
    largest = max((c for _, c in counts), default=0) or 1
    rows = [[escape(name), f"{c:,}", pct(c / max(1, total)), bar(c / largest)] for name, c in counts]
    return table(escape(caption), (escape(what), "examples", "share", ""), rows, "bars")


def stack(caption: str, parts: Sequence[tuple[str, int, str]], note: str = "") -> str:
    """A stacked bar of parts (name, count, colour) with a legend."""
    total = sum(count for _, count, _ in parts) or 1
    pieces = "".join(
        f'<i class="b-{ink}" style="flex-grow:{count}"></i>' for _, count, ink in parts if count
    )  # fmt: skip
    items = "".join(
        f'<li><i class="swatch b-{ink}"></i>{escape(name)} <b>{count:,}</b> <span>{pct(count / total)}</span></li>'
        for name, count, ink in parts
    )
    words = f"<p class=note>{note}</p>" if note else ""
    return (
        f'<figure class="chart stack"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="pieces" aria-hidden="true">{pieces}</div><ul class="legend">{items}</ul>{words}</figure>'
    )


def png(image: NDArray[np.uint8]) -> bytes:
    """A PNG file of an image [c, h, w]: RGB, or grey where it has another number of channels than 3."""
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0) if len(image) == 3 else image[0])).save(out, "PNG")
    return out.getvalue()


def reduced(image: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """At most `side` pixels per side, by the mean of each square of pixels, so that fine lines remain visible."""
    channels, height, width = image.shape
    step = -(-max(height, width) // side)
    if step == 1:
        return image
    # A side that is shorter than a square stays as it is.
    tall, wide = min(step, height), min(step, width)
    rows, columns = height // tall, width // wide
    cut = image[:, : rows * tall, : columns * wide].reshape(channels, rows, tall, columns, wide)
    means: NDArray[np.uint8] = np.rint(cut.mean(axis=(2, 4))).astype(np.uint8)
    return means


def thumbnail(image: NDArray[Any], alt: str) -> str:
    """An <img> of an image [c, h, w]; `alt` must be escaped."""
    data = base64.b64encode(png(reduced(image, SIDE))).decode()
    return f'<img class="thumb" width="44" height="44" alt="{alt}" src="data:image/png;base64,{data}">'
