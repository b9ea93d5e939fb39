"""Files and folders: atomic writes, locks, and errors of the disk in one line."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from crosel.errors import UserError
from crosel.utils.system import WINDOWS, lock, sync_folder

logger = logging.getLogger(__name__)

TEMPORARY = ".writing-"
_OF_A_RUN = {
    "config.yaml", "environment.json", "done", "labels.csv", "candidates.npz", "selection.npz", "predictions.npz",
    "folds.npz", "label_error.json",
    "metrics.jsonl", "review.jsonl",
}  # fmt: skip

_REMEDIES = {
    errno.ENOSPC: "no space left on the device; free some and try again (a run continues with --resume)",
    errno.EDQUOT: "the disk quota is used up; free some space and try again (a run continues with --resume)",
    errno.EACCES: "no permission to write here; {elsewhere}",
    errno.EPERM: "no permission to write here; {elsewhere}",
    errno.EROFS: "this file system is read-only; {elsewhere}",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "this is a folder; give a file name",
    errno.ENOENT: "the folder does not exist, or was removed",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EFBIG: "the file would be larger than this system allows",
}


@contextmanager
def disk_errors(path: Path, elsewhere: str = "choose another place with --out") -> Iterator[None]:
    """Turn an OSError into one line about `path`, the file that the user knows.

    `elsewhere` says what to do if nothing may be written there.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        remedy = _REMEDIES.get(error.errno, f"cannot be written ({error.strerror or error})")
        raise UserError(f"{path}: {remedy.replace('{elsewhere}', elsewhere)}") from None


def refuse_overwrite(out: Path, *sources: Path | str | None, rewrites: str = "") -> None:
    """Refuse to overwrite a source, or a file of a run other than `rewrites`.

    The run's file need not exist yet: whatever has its name would be taken for the run's own.
    """
    for source in sources:
        if source is not None and out.exists() and os.path.exists(source) and out.samefile(source):
            raise UserError(f"{out}: this is the source itself; choose another name")
    inside = is_run_folder(out.parent) or (out.parent.name == "checkpoints" and is_run_folder(out.parent.parent))
    if inside and (out.name in _OF_A_RUN - {rewrites} or out.suffix == ".safetensors"):
        raise UserError(f"{out}: this file belongs to the run; choose another name")


def is_run_folder(path: Path) -> bool:
    """Whether crosel made it for a run. A config alone may be the user's."""
    return (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()


def claim(handle: int, taken: str) -> None:
    """Lock an open file or folder until it is closed; UserError(taken) if another process has it."""
    if not lock(handle):
        raise UserError(taken)


def wait_for_lock(handle: int, why: str) -> None:
    """Lock an open file until it is closed, as soon as no other process has it; say once why that takes time."""
    told = False
    while not lock(handle):
        if not told:
            logger.info(f"waiting for another process, which is {why}")
            told = True
        time.sleep(0.2)


@contextmanager
def claimed(folder: Path, taken: str) -> Iterator[None]:
    """Lock a folder until the end of the block, or of the process, however it ends."""
    # Windows opens no folders: a file beside it stands for it.
    beside = folder.resolve().with_name(f".{folder.resolve().name}.lock") if WINDOWS else None
    with disk_errors(folder):
        handle = os.open(beside, os.O_RDWR | os.O_CREAT) if beside else os.open(folder, os.O_RDONLY)
    try:
        claim(handle, taken)
        yield
    finally:
        os.close(handle)
        if beside:
            with contextlib.suppress(OSError):  # another process has it open by now
                beside.unlink()


def make_folder(path: Path) -> None:
    with disk_errors(path):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: this is a file; give a folder")
        path.mkdir(parents=True, exist_ok=True)


def make_own_folder(path: Path) -> None:
    """Make a folder inside one of ours. A link in its place would have us overwrite and delete files elsewhere."""
    check_own_folder(path)
    make_folder(path)


def check_own_folder(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path}: this is a symbolic link; put a folder in its place")


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make a folder with its parents, and remove again what of these is empty after the block."""
    with disk_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_folder(path)
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # only an empty folder can be removed
                folder.rmdir()
            if os.path.exists(path):  # and its path must stay valid: the empty a of a/../run
                break


def atomic_write(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Write a whole file, so that a crash leaves the old content or the new: a temporary file beside it is written,
    flushed to the disk and renamed.

    A file that can be made again at any time need not be `durable`: waiting for the disk would cost more.
    """
    # Names of files may be no UTF-8; what a table or a page says about them is.
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    atomic_write_with(path, lambda stream: stream.write(data), durable)


def atomic_write_with(path: Path, write: Callable[[IO[bytes]], object], durable: bool = True) -> None:
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with disk_errors(path):
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as stream:  # never through a link that lies there
                write(stream)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
            raise
        if durable:
            sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> None:
    """Remove what a killed process was writing, also in folders below. Only for whoever has locked the folder."""
    with disk_errors(folder):
        for stray in list(folder.rglob(f"{TEMPORARY}*")):
            stray.unlink(missing_ok=True)
