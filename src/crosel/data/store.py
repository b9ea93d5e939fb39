"""Decoded images on disk, for data larger than memory: rows of one size in one file, and a checksum of each in another.

A row counts once its checksum is written, so a build that was killed goes on where it was. A checksum is compared when
its row is first read; a damaged row is crossed out, and decoded anew by the next run. Rows are read into buffers, not
mapped into memory: a disk that fails raises an error instead of ending the process, and no rank seems to hold all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.errors import UserError
from crosel.utils.files import atomic_write, check_own_folder, claim, disk_errors, make_own_folder, wait_for_lock
from crosel.utils.reading import load_json, open_plain, read_file
from crosel.utils.system import check_bytes, memory_limit, processes_here, read_at, sync_folder, workers, write_at
from crosel.utils.text import gib

logger = logging.getLogger(__name__)

Rows = NDArray[np.int64]
_THERE = 1 << 32  # a record is this plus the checksum; anything else: there is no such row
_COMPLETE = 0x636F6D706C657465  # the last record, once all that can be decoded is on the disk
_PART = 1 << 22  # bytes that a thread reads or writes in one go
_IN_MEMORY = 4  # images stay in memory where they take at most this part of what data may take
_KEPT = 8  # stores in a folder; the oldest go
_MOST_SUMMARY = 1 << 20
_READ_WRITE = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)


def fits_in_memory(size: int) -> bool:
    """Whether so many bytes of images stay in memory, as far as the other ranks on this machine leave room."""
    return size * processes_here() <= memory_limit() // _IN_MEMORY


def _checksum(row: int, pixels: memoryview) -> int:
    return zlib.crc32(pixels, row & 0xFFFFFFFF) | _THERE  # row: one that lies in another's place is damaged


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.data).cast("B")


class ImageStore:
    """The two files of a store, by the name that their content gives them. Nothing is made before it is written to."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, ...]) -> None:
        self.path, self.shape, self.width = folder / f"{name}.u8", shape, math.prod(shape[1:])
        self.records_path = folder / f"{name}.crc"
        self.records = np.zeros(shape[0] + 1, np.uint64)  # the last one says whether the store is complete
        self._handles: tuple[int, int] | None = None  # while it is written
        self._lock = threading.Lock()
        with contextlib.suppress(UserError, OSError):  # not there, or not one of ours
            check_own_folder(folder)
            size = len(self.records) * 8
            found = read_file(self.records_path, size, links=False)
            if len(found) == size and os.path.getsize(self.path) == shape[0] * self.width:
                self.records = np.frombuffer(found, np.uint64).copy()

    @property
    def is_complete(self) -> bool:
        """Whether all that can be decoded is there, and was on the disk before this was written."""
        return bool(self.records[-1] == _COMPLETE)

    def missing(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.records[:-1] >> np.uint64(32) != 1).tolist()
        return found

    def images(self) -> StoredImages:
        return StoredImages(StoreReader(self), range(self.shape[0]))

    def read_into(self, out: NDArray[np.uint8]) -> list[int]:
        """Fill an array with what is there. Returns the rows that are not, or are damaged."""
        missing = self.missing()
        if len(missing) == len(out):
            return missing
        there = np.setdiff1d(np.arange(len(out)), missing)
        try:
            reader = StoreReader(self)
            return sorted({*missing, *_read(reader, there, out, there if missing else None)})
        except (UserError, OSError):  # gone meanwhile
            return list(range(len(out)))

    # --- writing ----------------------------------------------------------------------------------------------

    def begin(self, wait: bool = True) -> None:
        """Lock the store and prepare it for `put`. Rows of a build that was killed are compared with their checksums.

        UserError or OSError where it cannot be written to; at once, unless `wait`, where another process does so.
        """
        if self._handles is not None:
            return
        with disk_errors(self.records_path):
            handles = self._open_and_lock(wait)
            while not handles:  # whoever had the store has removed it
                handles = self._open_and_lock(wait)
        self._handles = handles
        try:
            size, count = self.shape[0] * self.width, 8 * len(self.records)
            sizes = [os.fstat(handle).st_size for handle in handles]
            self.records = np.zeros(len(self.records), np.uint64)
            with disk_errors(self.path):
                if sizes != [size, count]:
                    for handle, length in zip(handles, (size, count), strict=True):
                        os.ftruncate(handle, 0)
                        os.ftruncate(handle, length)
                else:
                    read_at(handles[1], _bytes(self.records), 0)
            missing = self.missing()
            if not self.is_complete and len(missing) < self.shape[0]:
                there = np.setdiff1d(np.arange(self.shape[0]), missing)
                damaged = _read(StoreReader(self), there)
                self._write_records(np.array(damaged, np.int64), 0)
            self._check_space(len(self.missing()) * self.width)
        except BaseException:
            self.close()
            raise

    def _open_and_lock(self, wait: bool) -> tuple[int, int] | None:
        """Handles of both files, which are ours alone; None if there are others in their place by then."""
        make_own_folder(self.path.parent)
        with ExitStack() as opened:
            handles = []
            for path in (self.path, self.records_path):
                handles.append(open_plain(path, False, _READ_WRITE))
                opened.callback(os.close, handles[-1])
            if wait:
                wait_for_lock(handles[1], f"decoding the same images ({self.path})")
            else:
                claim(handles[1], f"{self.path}: another process is writing it")
            for handle, path in zip(handles, (self.path, self.records_path), strict=True):
                if not os.path.exists(path) or not os.path.samestat(os.fstat(handle), os.stat(path)):
                    return None
            opened.pop_all()
        return handles[0], handles[1]

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(
                f"{self.path.parent}: the decoded images need {gib(needed)} more on this disk, which has {gib(free)} "
                "left; free some, or use smaller images: --set data.image_size=…"
            )

    def put(self, rows: Sequence[int], pixels: NDArray[np.uint8]) -> None:
        """Keep decoded images [m, c, h, w] of these rows, which rise. Several threads may do so."""
        if not len(rows):
            return
        with self._lock:
            self.begin()
        assert self._handles is not None
        at = np.asarray(rows, np.int64)
        checksums = np.array([_checksum(row, _bytes(pixels[i])) for i, row in enumerate(at.tolist())], np.uint64)
        with disk_errors(self.path):
            for start, stop in _runs(at):
                write_at(self._handles[0], _bytes(pixels[start:stop]), int(at[start]) * self.width)
            self._write_records(at, checksums)

    def _write_records(self, rows: Rows, values: Any) -> None:
        assert self._handles is not None
        self.records[rows] = values
        if self.is_complete and len(rows):
            self.records[-1] = 0
            rows = np.append(rows, self.shape[0])
        for start, stop in _runs(rows):
            first, last = int(rows[start]), int(rows[stop - 1]) + 1
            write_at(self._handles[1], _bytes(self.records[first:last]), 8 * first)

    def finish(self) -> None:
        """All that can be decoded is there: make it last, and remove the oldest stores."""
        if self._handles is None:
            return
        with disk_errors(self.path):
            for handle in self._handles:
                os.fsync(handle)
            self.records[-1] = _COMPLETE
            write_at(self._handles[1], _bytes(self.records[-1:]), 8 * self.shape[0])
            os.fsync(self._handles[1])
            sync_folder(self.path.parent)
        self.close()
        with contextlib.suppress(OSError):
            names = {path.stem: path.stat().st_mtime_ns for path in self.path.parent.glob("images-*")}
            for old in sorted(names, key=lambda name: names[name], reverse=True)[_KEPT:]:
                for path in self.path.parent.glob(f"{old}.*"):
                    path.unlink()

    def close(self) -> None:
        """Let others write to the store; of one that holds nothing, nothing is left."""
        if self._handles is None:
            return
        if len(self.missing()) == self.shape[0]:
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.records_path.unlink()
                self.path.parent.rmdir()
        for handle in self._handles:
            os.close(handle)
        self._handles = None


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Where runs of consecutive rows begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return pairwise(edges) if len(rows) else iter(())


class StoreReader:
    """The rows of a store, for any number of threads."""

    def __init__(self, store: ImageStore) -> None:
        self.path, self.records_path, self.shape, self.width = store.path, store.records_path, store.shape, store.width
        self.checksums = store.records[:-1].astype(np.uint32)  # what the store itself knows may go
        self.checked = np.zeros(len(self.checksums), bool)
        self.handle = open_plain(store.path, links=False)
        weakref.finalize(self, os.close, self.handle)

    def read(self, rows: Rows, out: NDArray[np.uint8]) -> list[int]:
        """Fill `out` with these rows. Returns those that are damaged."""
        damaged = []
        for start, stop in _runs(rows):
            read_at(self.handle, _bytes(out[start:stop]), int(rows[start]) * self.width)
        for i, row in enumerate(rows.tolist()):
            if not self.checked[row]:
                if _checksum(row, _bytes(out[i])) ^ _THERE != self.checksums[row]:
                    damaged.append(row)
                self.checked[row] = True
        return damaged

    def cross_out(self, rows: Sequence[int]) -> None:
        """Have the next run decode these rows anew."""
        with contextlib.suppress(OSError, UserError):
            handle = open_plain(self.records_path, False, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                for row in rows:
                    write_at(handle, bytes(8), 8 * row)
            finally:
                os.close(handle)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers(), "images")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_readers.cache_clear)


def _read(
    reader: StoreReader, rows: Rows, out: NDArray[np.uint8] | None = None, places: Rows | None = None
) -> list[int]:
    """Read rows on all cores into `out`, at `places` if they are not to lie one after the other; without it they are
    only compared with their checksums. Returns those that are damaged."""
    part = max(1, _PART // reader.width)

    def read(start: int) -> list[int]:
        at = rows[start : start + part]
        if out is not None and places is None:
            return reader.read(at, out[start : start + part])
        buffer = np.empty((len(at), *reader.shape[1:]), np.uint8)
        damaged = reader.read(at, buffer)
        if out is not None and places is not None:
            out[places[start : start + part]] = buffer
        return damaged

    if len(rows) <= part or workers() == 1:
        return [row for start in range(0, len(rows), part) for row in read(start)]
    part = min(part, -(-len(rows) // workers()))
    return [row for found in _readers().map(read, range(0, len(rows), part)) for row in found]


class StoredImages:
    """Images [n, c, h, w] that stay on disk, in the place of an array. A part of it is another such object;
    `np.asarray` reads it into memory."""

    ndim, dtype = 4, np.dtype(np.uint8)

    def __init__(self, reader: StoreReader, rows: range | Rows) -> None:
        self._reader, self._rows = reader, rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._reader.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, key: Any) -> Any:
        """One image in memory, or a part that stays on disk."""
        if isinstance(key, int | np.integer):
            return self.read(np.array([key]))[0]
        return StoredImages(self._reader, self._rows[key] if isinstance(key, slice) else self._rows_at(key))

    def _rows_at(self, key: Any) -> Rows:
        if isinstance(self._rows, range) and not isinstance(key, slice):  # without a list of all
            at = np.asarray(key)
            at = np.flatnonzero(at) if at.dtype == bool else at
            if len(at) and not (-len(self) <= at.min() and at.max() < len(self)):
                raise IndexError(f"there are {len(self)} images")
            return np.asarray(self._rows.start + self._rows.step * np.where(at < 0, at + len(self), at), np.int64)
        return np.asarray(self._rows[key], np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        check_bytes(self.nbytes, f"{len(self):,} images", self._reader.path)
        found = self.read(slice(None))
        return found if dtype is None else found.astype(dtype, copy=False)

    def read(self, key: Any, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Some of the images, in a new array or in `out`; UserError where one is damaged."""
        rows = self._rows_at(key)
        if out is None:
            out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        try:
            damaged = _read(self._reader, rows, out)
        except OSError as error:
            raise UserError(f"{self._reader.path}: cannot be read ({error.strerror or error})") from None
        if damaged:
            self._reader.cross_out(damaged)
            raise UserError(
                f"{self._reader.path}: image {damaged[0]} is damaged on the disk; run the command again, with --resume "
                "if it was training: such images are decoded anew"
            )
        return out

    def summary(self, header: bytes) -> tuple[str, NDArray[np.int64]]:
        """SHA-256 of the header and all pixels, and how often each channel has each value [c, 256]: found once, kept
        beside the store."""
        key = hashlib.sha256(header + repr(self._rows if isinstance(self._rows, range) else len(self)).encode())
        key.update(self._reader.checksums.data)
        if not isinstance(self._rows, range):
            key.update(np.ascontiguousarray(self._rows).data)
        path, name = self._reader.path.with_suffix(".json"), key.hexdigest()
        kept = _load_summaries(path, self.shape[1])
        if name not in kept:
            if self.nbytes > 1 << 33:
                logger.info(f"reading {gib(self.nbytes)} of images once, for their fingerprint and mean")
            digest, counts = self._summarise(header)
            kept = dict(list(kept.items())[-3:]) | {name: (digest, counts.tolist())}
            body = json.dumps(kept)
            with contextlib.suppress(UserError, OSError):
                atomic_write(path, json.dumps({"crc32": zlib.crc32(body.encode()), "summaries": body}), durable=False)
        digest, found = kept[name]
        return digest, np.array(found, np.int64)

    def _summarise(self, header: bytes) -> tuple[str, NDArray[np.int64]]:
        digest, counts = hashlib.sha256(header), np.zeros((self.shape[1], 256), np.int64)
        with ThreadPoolExecutor(1) as pool:
            for _, pixels in chunks(self, max(1, _PART // self._reader.width)):
                counted = pool.submit(channel_counts, pixels)
                digest.update(_bytes(pixels))
                counts += counted.result()
        return digest.hexdigest(), counts


def _load_summaries(path: Path, channels: int) -> dict[str, tuple[str, list[list[int]]]]:
    try:
        found = load_json(read_file(path, _MOST_SUMMARY, links=False).decode())
        if zlib.crc32(found["summaries"].encode()) != found["crc32"]:
            return {}
        kept = {name: (str(digest), counts) for name, (digest, counts) in load_json(found["summaries"]).items()}
        if any(np.array(counts).shape != (channels, 256) for _, counts in kept.values()):
            return {}
    except (UserError, OSError, ValueError, TypeError, KeyError, AttributeError):  # not there, or damaged
        return {}
    return kept


def channel_counts(x: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each channel of images [n, c, h, w] has each value, [c, 256]."""
    found = np.zeros((x.shape[1], 256), np.int64)
    for channel, counts in enumerate(found):
        values = np.ascontiguousarray(x[:, channel]).reshape(-1)
        even = len(values) // 2 * 2
        pairs = np.bincount(values[:even].view(np.uint16), minlength=1 << 16).reshape(256, 256)  # half the steps
        counts += pairs.sum(axis=0) + pairs.sum(axis=1) + np.bincount(values[even:], minlength=256)
    return found


Examples = NDArray[Any] | StoredImages  # in memory or on disk: both can be sliced and gathered from


def chunks(x: Examples, size: int, rows: range | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
    """(start, examples) of an array, part by part; of stored images the next part is read while one is used."""
    rows = range(len(x)) if rows is None else rows
    starts = rows[::size]
    if not isinstance(x, StoredImages):
        yield from ((start, x[start : min(rows.stop, start + size)]) for start in starts)
        return
    with ThreadPoolExecutor(1) as pool:
        parts = [slice(start, min(rows.stop, start + size)) for start in starts]
        coming = pool.submit(x.read, parts[0]) if parts else None
        for at, start in enumerate(starts):
            assert coming is not None
            part = coming.result()
            coming = pool.submit(x.read, parts[at + 1]) if at + 1 < len(parts) else None
            yield start, part
