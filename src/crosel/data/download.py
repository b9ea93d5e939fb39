"""Fetching the published files of cifar10, cifar100 and svhn: resumed where it broke off, checked, unpacked safely.

A download grows in NAME.part and gets its own name only when its checksum is right; an archive is unpacked beside its
place and then moved there. So anything with its final name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

import crosel
from crosel.errors import UserError
from crosel.utils.files import TEMPORARY, claim, disk_errors, make_folder
from crosel.utils.reading import APPEND, open_file, open_plain
from crosel.utils.system import WINDOWS, sync_folder
from crosel.utils.text import choose_from, one_line, without_login

MIRROR = "CROSEL_MIRROR"
OnBytes = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where the server says

_ATTEMPTS = 5  # in a row without getting on
_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 18
_GETTING_ON = 1 << 16  # bytes that an attempt must add for the count to start again
_MAX_FILE = 1 << 30  # the largest of ours has 182 MB
_MAX_UNPACKED = 1 << 30
_MAX_MEMBERS = 1000
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_sleep = time.sleep


@dataclass(frozen=True)
class Published:
    """One file as its authors publish it. MD5 is what they give: good against accidents, which is the purpose."""

    url: str
    md5: str
    folder: str | None = None  # what an archive unpacks to

    @property
    def file(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
DATASETS: dict[str, tuple[Published, ...]] = {
    "cifar10": (
        Published(f"{_CIFAR}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
    ),
    "cifar100": (
        Published(f"{_CIFAR}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
    ),
    "svhn": (
        Published(f"{_SVHN}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Published(f"{_SVHN}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
}


def get(name: str, to: Path, mirror: str | None = None, progress: OnBytes | None = None) -> Path:
    """Download a dataset's published files into the folder `to` (for `--data`), unless they are there; return `to`.

    `mirror` (or the environment variable CROSEL_MIRROR) is the address of another folder with the same files.
    """
    if name not in DATASETS:
        raise UserError(f"unknown dataset '{name}'{choose_from(name, DATASETS)}")
    mirror = mirror or os.environ.get(MIRROR) or None
    if mirror is not None and urlsplit(mirror).scheme not in ("http", "https"):
        raise UserError(f"mirror '{without_login(mirror)}': expected an address that begins with http:// or https://")
    if mirror is not None and without_login(mirror) != mirror:
        raise UserError(f"mirror '{without_login(mirror)}': addresses with a name and password are not accepted")
    make_folder(to)
    for published in DATASETS[name]:
        if published.folder is not None and (to / published.folder).is_dir():
            continue
        path = to / published.file
        if path.exists():
            if not path.is_file() or checksum(path) != published.md5:
                raise UserError(f"{path} is not the published file (its checksum differs); remove it and try again")
        else:
            url = f"{mirror.rstrip('/')}/{published.file}" if mirror else published.url
            fetch(url, path, published.md5, progress)
        if published.folder is not None:
            unpack(path, to, published.folder)
    return to


def checksum(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with disk_errors(path), open_file(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- fetching -----------------------------------------------------------------------------------------------------


class _Broken(Exception):  # noqa: N818  (shown to the user only if it persists)
    """The connection failed or ended early; another attempt may go on."""


def fetch(url: str, path: Path, md5: str, progress: OnBytes | None = None) -> None:
    """Download to `path` by way of `path`.part, going on where an earlier attempt ended."""
    part = _part_of(path)
    try:
        with disk_errors(part), open(open_plain(part, links=False, flags=APPEND), "ab") as stream:
            claim(  # two downloads into one file would spoil each other
                stream.fileno(), f"{part}: another process is downloading this; wait for it, or choose another folder"
            )
            _fetch(url, stream, path, md5, progress)
            os.fsync(stream.fileno())
            if WINDOWS:
                stream.close()  # it renames no open file
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            if part.stat().st_size == 0:
                part.unlink()
    sync_folder(path.parent)


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _fetch(url: str, stream: IO[bytes], path: Path, md5: str, progress: OnBytes | None) -> None:
    left, restarted = _ATTEMPTS, False
    resumed = stream.seek(0, os.SEEK_END) > 0
    while True:
        before = stream.seek(0, os.SEEK_END)
        try:
            _attempt(url, stream, path, progress)
        except _Broken as error:
            have = stream.seek(0, os.SEEK_END)
            resumed |= have > 0
            left = _ATTEMPTS if have >= before + _GETTING_ON else left - 1
            if left == 0:
                raise UserError(f"{url}: {error}; {_by_hand(path)}") from None
            _sleep(2.0 ** (_ATTEMPTS - left - 1) if left < _ATTEMPTS else 1.0)
            continue
        stream.flush()
        if checksum(_part_of(path)) == md5:
            return
        _start_again(stream)
        if restarted or not resumed:
            raise UserError(
                f"{url}: wrong content (its checksum is not the published one), nothing was kept; "
                f"try another mirror ({MIRROR}), or {_by_hand(path)}"
            )
        restarted = True  # the part was of something else, perhaps: once more, from the start


def _by_hand(path: Path) -> str:
    return f"without a connection, download it elsewhere, put it at {path}, and run this again"


def _start_again(stream: IO[bytes]) -> None:
    stream.seek(0)
    stream.truncate()


def _attempt(url: str, stream: IO[bytes], path: Path, progress: OnBytes | None) -> None:
    """One request; adds to the stream what it can. Disk errors go through, those of the network become _Broken."""
    have = stream.seek(0, os.SEEK_END)
    headers = {"User-Agent": f"crosel/{crosel.__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:  # all of it is there already, or it is not of this file
                return
            if error.code in _TRY_AGAIN:
                raise _Broken(f"the server answers {error.code} {error.reason}") from None
            raise UserError(
                f"{url}: the server answers {error.code} {error.reason}; try a mirror ({MIRROR}), or {_by_hand(path)}"
            ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Broken(f"cannot be reached ({one_line(getattr(error, 'reason', error))})") from None
    with response:
        start, total = _position(response)
        if start != have:
            _start_again(stream)  # the server ignored the range and sends all of it
            if start:
                raise _Broken("the server resumed at the wrong position")
            have = 0
        _receive(response, stream, have, total, path, progress)


def _position(response: Any) -> tuple[int, int | None]:
    """Where the answer starts, and how long the whole file is, where the server says so. -1: unknown."""
    length = response.headers.get("Content-Length", "")
    size = int(length) if length.isascii() and length.isdecimal() else None
    if response.status != 206:
        return 0, size
    text = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    start = int(text) if text.isascii() and text.isdecimal() else -1
    return start, None if size is None else start + size


def _receive(
    response: Any, stream: IO[bytes], have: int, total: int | None, path: Path, progress: OnBytes | None
) -> None:
    if total is not None and total > _MAX_FILE:
        raise UserError(
            f"{response.url}: {total:,} bytes, more than any of these files; nothing was kept. Try a mirror ({MIRROR})"
        )
    while True:
        try:
            block = response.read1(_BLOCK)  # what has come: `read` would lose it when the rest does not
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"the connection broke off ({one_line(error)})") from None
        if not block:
            break
        have += len(block)
        if have > _MAX_FILE:
            _start_again(stream)
            raise UserError(f"{response.url}: the download does not end; nothing was kept. Try a mirror ({MIRROR})")
        stream.write(block)
        if progress is not None:
            progress(path.name, have, total)
    if total is not None and have < total:
        raise _Broken(f"the connection ended after {have:,} of {total:,} bytes")


# --- unpacking ----------------------------------------------------------------------------------------------------


def unpack(archive: Path, to: Path, folder: str) -> None:
    """Unpack a tar.gz of plain files below `folder` into `to`; anything else in it is refused, and leaves nothing."""
    temporary = to / f"{TEMPORARY}{os.getpid()}-{folder}"
    try:
        with disk_errors(temporary):
            temporary.mkdir()
        _unpack(archive, temporary, folder)
        with disk_errors(to / folder):
            os.replace(temporary / folder, to / folder)
        sync_folder(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack(archive: Path, temporary: Path, folder: str) -> None:
    left, count = _MAX_UNPACKED, 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                count, left = count + 1, left - member.size
                if count > _MAX_MEMBERS or left < 0 or member.size < 0:
                    raise UserError(f"{archive}: larger than the published archive; nothing was unpacked")
                target = _target(member, archive, temporary, folder)
                if member.isdir():
                    with disk_errors(target):
                        target.mkdir(parents=True, exist_ok=True)
                    continue
                source = tar.extractfile(member)
                assert source is not None  # it is a plain file
                content = source.read()
                with disk_errors(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{archive}: not a readable archive ({one_line(error)}); remove it and try again") from None
    if not (temporary / folder).is_dir():
        raise UserError(f"{archive}: it has no folder {folder}")


def _target(member: tarfile.TarInfo, archive: Path, temporary: Path, folder: str) -> Path:
    """Where a member goes. Only plain files and folders, only below `folder`: no links, no devices, no way out."""
    parts = PurePosixPath(member.name).parts
    plain = member.isfile() or member.isdir()
    if not plain or not parts or parts[0] != folder or ".." in parts or "\0" in member.name or "\\" in member.name:
        raise UserError(f"{archive}: it has an unexpected member {member.name[:100]!r}; nothing was unpacked")
    return temporary.joinpath(*parts)
