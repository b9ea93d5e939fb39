"""Small files of every format, and what is true of an error that a user sees."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from crosel.data import Dataset, DataSettings, load
from crosel.errors import UserError


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def picture(path: Path, colour: Any = (200, 10, 10), size: tuple[int, int] = (12, 9), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def read(path: Path, **settings: Any) -> Dataset:
    return load(str(path), None, DataSettings(**settings))


def refused(path: Path, **settings: Any) -> str:
    """The one line that reading this file ends with."""
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def sets_of(data: Dataset) -> list[set[str]]:
    assert data.candidates is not None
    return [{data.classes[j] for j in np.flatnonzero(row)} for row in data.candidates]


def png_bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims so many pixels; its data would unfold to zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
