"""Writing files so that a crash leaves the old content or the new, never half of either."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from crosel.errors import UserError

TEMPORARY = ".writing-"

_REMEDIES = {
    errno.ENOSPC: "no space left on the device; free some, then go on with --resume",
    errno.EDQUOT: "the disk quota is used up; free some space, then go on with --resume",
    errno.EACCES: "no permission to write here; choose another folder with --out",
    errno.EPERM: "no permission to write here; choose another folder with --out",
    errno.EROFS: "this file system is read-only; choose another folder with --out",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "this is a folder; a file name is needed",
    errno.ENOENT: "the folder is not there, or was removed",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EFBIG: "the file would be larger than this system allows",
}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a user can mend about a disk into one clear line."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        raise UserError(f"{error.filename or path}: {remedy}") from None


def make_folder(path: Path) -> None:
    with disk_errors(path):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: this is a file; a folder is needed")
        path.mkdir(parents=True, exist_ok=True)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a whole file: a temporary neighbour, flushed to the disk, then renamed over the target."""
    data = content.encode() if isinstance(content, str) else content
    atomic_write_with(path, lambda stream: stream.write(data))


def atomic_write_with(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with disk_errors(path):
        try:
            with open(temporary, "wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_stray(folder: Path) -> None:
    """Remove what a killed process was in the middle of writing."""
    for stray in folder.glob(f"{TEMPORARY}*"):
        stray.unlink(missing_ok=True)
