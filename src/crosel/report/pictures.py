"""PNG files by hand, and thumbnails as data addresses, so that the page asks nobody for anything."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 64  # pixels of a thumbnail's longer side, at most


def png(image: NDArray[np.uint8]) -> bytes:
    """Encode [c, h, w] as grey (any number of channels but 3) or RGB."""
    return png_file(image.transpose(1, 2, 0) if image.shape[0] == 3 else image[0][..., None], 9)


def png_file(pixels: NDArray[np.uint8], level: int) -> bytes:
    """Encode [h, w, c], with 1 or 3 channels, as it is: compressed at a level of zlib's, and no line filtered."""
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter, 0
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)  # eight bits a channel
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), level)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    name, content = part
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def thumbnail(image: NDArray[Any], alt: str) -> str:
    """An <img> of an image [c, h, w], reduced by leaving out pixels; `alt` is escaped already."""
    step = -(-max(image.shape[1:]) // SIDE)
    data = base64.b64encode(png(np.ascontiguousarray(image[:, ::step, ::step]))).decode()
    return f'<img class="thumb" width="44" height="44" alt="{alt}" src="data:image/png;base64,{data}">'
