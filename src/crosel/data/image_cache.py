"""Decoded images kept beside their list, so that the second run starts at once.

The key covers every path with its size and time of change, and the settings that decide the pixels: a cache is
never stale, only unused. Images that could not be read (`data.skip_bad`) are named in it, to be tried again each
time: why they are bad may not show in the file itself. Where the folder cannot be written to, there is no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosel.data.settings import DataSettings
from crosel.errors import UserError
from crosel.utils.files import atomic_write_with

FOLDER = ".crosel-cache"
_VERSION = 3  # raise it when the same files give other pixels, or the cache is written in another way
_KEEP = 8


class ImageCache:
    def __init__(self, beside: Path, paths: Sequence[Path], settings: DataSettings) -> None:
        digest = hashlib.sha256(f"{_VERSION} {settings.image_size} {settings.image_mode}".encode())
        for path in paths:
            try:
                stat = os.stat(path)
                text = f"\0{os.path.abspath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}"
            except (OSError, ValueError):
                text = f"\0{path}\0missing"  # decoding will say so
            digest.update(text.encode("utf-8", "surrogatepass"))
        root = beside if beside.is_dir() else beside.parent
        self.path = root / FOLDER / f"images-{digest.hexdigest()[:32]}.npz"

    def read(self, shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], list[int]] | None:
        """The images, and the rows of those that could not be read."""
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                images, bad = archive["images"], archive["bad"].astype(np.int64).ravel().tolist()
        except Exception:  # not there, or damaged: the images themselves are
            return None
        fits = images.shape == shape and images.dtype == np.uint8 and all(0 <= row < len(images) for row in bad)
        return (images, bad) if fits else None

    def write(self, images: NDArray[np.uint8], bad: Sequence[int]) -> None:
        """Best effort: a cache that cannot be written is no error."""
        with contextlib.suppress(UserError, OSError):
            self.path.parent.mkdir(exist_ok=True)
            atomic_write_with(self.path, lambda stream: np.savez(stream, images=images, bad=np.array(bad, np.int64)))
            kept = sorted(self.path.parent.glob("images-*.npz"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
            for old in kept[_KEEP:]:
                old.unlink()
