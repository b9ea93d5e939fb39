"""Files in the form in which CIFAR is published: pickles of Python 2."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, ClassVar

import numpy as np


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 wrote: protocol 2, byte strings as strings, numpy's functions under their old names."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
        self.write(head + value)
        self.memoize(value)

    def save_global(self, value: Any, name: str | None = None) -> None:
        module = value.__module__.replace("numpy._core", "numpy.core")
        self.write(b"c" + module.encode() + b"\n" + value.__name__.encode() + b"\n")
        self.memoize(value)

    dispatch[bytes] = save_bytes
    dispatch[type] = save_global
    dispatch[type(np.array([0]).__reduce__()[0])] = save_global


def as_published(content: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(content)
    return stream.getvalue()
