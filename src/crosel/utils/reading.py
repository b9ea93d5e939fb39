"""The one way in: plain files of bounded size, JSON and arrays whose content is checked. They may be a stranger's."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from crosel.errors import UserError
from crosel.utils.system import check_bytes, memory_limit
from crosel.utils.text import one_line

logger = logging.getLogger(__name__)

OF_A_RUN = 1 << 28  # bytes of a text in a run folder, at most
_TEXT_GROWS = 16  # a text takes up to so many times its size as Python objects
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
STORE = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_PLAIN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not keep us waiting


def is_plain(mode: int) -> bool:
    """Not a pipe or a device, which may keep a reader waiting for ever or have no end. Folders refuse themselves."""
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def check_plain(path: Path, mode: int | None = None) -> None:
    """For files that a library opens by their names; all others are opened here. OSError where nothing is there."""
    if not is_plain(os.stat(path).st_mode if mode is None else mode):
        raise UserError(f"{path}: not a plain file; pipes and devices are not read")


def open_plain(path: Path | str, links: bool = True, flags: int = _PLAIN) -> int:
    """A handle of a plain file. `links=False`: of a file that crosel wrote there, which is never a symbolic link."""
    path = Path(path)
    if links:
        check_plain(path)  # opening alone sets some devices going
    elif path.is_symlink():
        raise UserError(f"{path}: this is a symbolic link; put the file itself in its place")
    handle = os.open(path, flags | (0 if links else _NO_LINK), 0o644)
    try:
        check_plain(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_file(path: Path | str, links: bool = True) -> IO[bytes]:
    return open(open_plain(path, links), "rb")


def read_file(path: Path | str, limit: int, links: bool = True) -> bytes:
    """All of a file of at most `limit` bytes; OSError where it cannot be read."""
    with open_file(path, links) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: larger than {limit >> 20} MiB, which is the limit for such a file")
    return content


def read_run_text(path: Path | str, links: bool = False) -> str:
    """A text of a run folder, whatever its bytes; OSError where it is not there."""
    return read_file(path, min(OF_A_RUN, memory_limit() // _TEXT_GROWS), links).decode("utf-8", "replace")


def load_json(text: str) -> Any:
    """What a JSON text holds; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# --- arrays -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArraySpec:
    """What an array of an npz file must be like."""

    kinds: str  # of its dtype, in numpy's letters
    axes: str  # a letter for each axis: axes of the same letter have the same length, in all arrays of the file
    low: float = -math.inf
    high: float | str = math.inf  # the largest value; a letter: one less than the length of that axis


def read_arrays(
    path: Path,
    specs: Mapping[str, ArraySpec],
    sizes: Mapping[str, int] | None = None,
    most: Mapping[str, int] | None = None,
    leave_out: bool = False,
) -> dict[str, NDArray[Any]]:
    """Those arrays of a run's npz file that `specs` names. Size, type and shape are checked before they are unpacked.

    `sizes`: lengths of axes that are known; `most`: how long others may be. `leave_out`: go on without an array that is
    not as it must be. UserError or OSError where the file cannot be used.
    """
    known, taken = dict(sizes or {}), 0
    found: dict[str, NDArray[Any]] = {}
    try:
        with open_file(path, links=False) as stream, zipfile.ZipFile(stream) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = {name: members[name] for name in specs if name in members}
            check_bytes(sum(info.file_size for info in wanted.values()), "its content", path)
            for name, info in wanted.items():
                try:
                    with archive.open(info) as member:
                        taken += _check_header(member, specs[name], info.file_size, known, most or {})
                        check_bytes(taken, "its content", path)
                    with archive.open(info) as member:
                        array = np.lib.format.read_array(member, allow_pickle=False)
                    _check_values(array, specs[name], known)
                except ValueError as error:
                    if not leave_out:
                        raise
                    logger.warning(f"{path}: left out {name} ({one_line(error)})")
                else:
                    found[name] = array
    except (UserError, OSError):
        raise
    except Exception as error:  # zip, zlib and numpy each have their own errors for a damaged file
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from None
    return found


def npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the numbers are stored by columns, and their type."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the npy format does not hold plain numbers")


def _check_header(member: IO[bytes], spec: ArraySpec, size: int, known: dict[str, int], most: Mapping[str, int]) -> int:
    """Bytes that the array takes at the most, with a copy of another type, or as Python's own texts."""
    shape, _, dtype = npy_header(member)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded")
    if dtype.kind not in spec.kinds or len(shape) != len(spec.axes):
        raise ValueError(f"an array of {dtype.kind}{list(shape)} where {spec.kinds}[{','.join(spec.axes)}] is expected")
    if math.prod(shape) * dtype.itemsize > size or (len(shape) > 1 and not all(shape)):
        raise ValueError(f"the shape {list(shape)} does not fit the size of the array")
    own = dict(zip(spec.axes, shape, strict=True))
    for axis, length in own.items():
        if known.get(axis, length) != length:
            raise ValueError(f"an axis has the length {length}, and {known[axis]} elsewhere")
        if length > most.get(axis, length):
            raise ValueError(f"an axis has the length {length}, more than {most[axis]}")
    known.update(own)
    return int(math.prod(shape) * (2 * dtype.itemsize + (64 if dtype.kind == "U" else 8)))


def is_text(array: NDArray[Any]) -> bool:
    """Whether an array of texts holds characters alone; any other array does. Python raises a SystemError when it looks
    at a text whose 32 bits are no character."""
    if array.dtype.kind != "U" or not array.size:
        return True
    letters = np.ascontiguousarray(array.reshape(-1)).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    return bool(letters.max(initial=0) <= sys.maxunicode)


def _check_values(array: NDArray[Any], spec: ArraySpec, known: Mapping[str, int]) -> None:
    if not is_text(array):
        raise ValueError("not text")
    high = known[spec.high] - 1 if isinstance(spec.high, str) else spec.high
    if (spec.low, high) == (-math.inf, math.inf) or not array.size:
        return
    low, top = array.min(), array.max()  # nan where any is
    if not (spec.low <= low and top <= high):
        raise ValueError(f"values from {low} to {top}, which must lie between {spec.low:g} and {high:g}")
