"""Texts -> embeddings, once each (`crosel.data.embeddings`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.data.images import OR_SKIP
from crosel.data.settings import DataSettings, OnImages
from crosel.errors import UserError

NEEDS_BACKBONE = "--set network.name=text/all-MiniLM-L6-v2 (it needs pip install 'crosel[text]')"


def embed_texts(
    cells: Sequence[Any],
    place: Callable[[int], str],
    settings: DataSettings,
    beside: Path | None,
    progress: OnImages | None = None,
) -> tuple[NDArray[np.float32], dict[int, str]]:
    """Embeddings [n, d] of texts, and the rows without one, which `data.skip_bad` leaves out."""
    embedder = settings.embedder
    assert embedder is not None

    def read(row: int) -> bytes:
        cell = cells[row]
        if not isinstance(cell, str) or not cell.strip():
            raise ValueError("there is no text; fill it in or drop the row")
        return cell.encode("utf-8", "surrogatepass")

    def prepare(content: bytes) -> Any:
        return embedder.encoder.prepare(content.decode("utf-8", "replace"))

    kept = beside if settings.cache else None
    x, failed = embedder.embed(len(cells), read, prepare, kept, progress, settings.skip_bad)
    bad = {row: f"{place(row)}: {error}" for row, error in failed.items()}
    if bad and (not settings.skip_bad or len(bad) == len(cells)):
        raise UserError(bad[min(bad)] + ("" if settings.skip_bad else OR_SKIP))
    embedder.remember(x, cells)
    return x, bad
