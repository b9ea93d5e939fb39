"""Embeddings of images and texts, computed once and kept beside the data.

The store only grows: rows of numbers in one file, and in another the digest of the content that each row belongs to.
A row counts once its digest is written, so after a kill the next run goes on where this one was. It is named after the
backbone's weights and preparation: other weights, another store. An image that is renamed or moved keeps its row.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosel.errors import UserError
from crosel.utils.files import wait_for_lock
from crosel.utils.reading import STORE, open_plain
from crosel.utils.system import check_bytes, read_at, workers

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from crosel.data.settings import DataSettings

FOLDER = ".crosel-cache"
OR_SKIP = "; fix it, or leave out what cannot be used: --set data.skip_bad=true"
_DIGEST = 16  # bytes of the digest of an example's content
_BYTES_PER_KEY = 200  # in memory
_BATCH = 64  # examples that pass through the backbone at once
_TOGETHER = 4096  # embeddings that are read at once


Progress = Callable[[int, int], None]  # called with how many examples are there, of how many


class Encoder(Protocol):
    """What turns images or texts into rows of numbers."""

    name: str
    takes: str  # "images" or "texts"
    digest: str  # of the weights and the preparation
    dimensions: int
    size: int  # pixels of the side of a prepared image; 0 for texts

    def prepare(self, example: Any) -> Any:
        """An image in RGB, ready for `encode`: [size, size, 3]. A text as it is."""

    def encode(self, examples: Any) -> NDArray[np.float32]:
        """Embeddings [m, d] of prepared examples, images as one array."""


def content_digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


ChooseEncoder = Callable[[Sequence[Any]], Encoder | None]  # by the images: files, or what lies in one


class EmbeddingStore:
    """Rows by content digest, on disk if the folder can be written to, else in memory for this run."""

    def __init__(self, folder: Path | None, encoder: Encoder) -> None:
        self.dimensions = encoder.dimensions
        self._known: dict[bytes, int] = {}
        self._more: list[NDArray[np.float32]] = []
        self._files: tuple[int, int] | None = None
        if folder is not None:
            self._open(folder / f"embeddings-{encoder.digest}.f32", folder / f"embeddings-{encoder.digest}.keys")

    def _open(self, rows_path: Path, keys_path: Path) -> None:
        if rows_path.parent.is_symlink():  # it may lead anywhere
            return
        with contextlib.suppress(OSError, UserError):  # no place to write, or no store: rows stay in memory
            rows_path.parent.mkdir(exist_ok=True)
            keys = open_plain(keys_path, links=False, flags=STORE)
            try:
                wait_for_lock(keys, f"computing embeddings for the same store ({keys_path})")
                rows = open_plain(rows_path, links=False, flags=STORE)
            except (OSError, UserError):
                os.close(keys)
                raise
            width = 4 * self.dimensions
            count = min(os.fstat(rows).st_size // width, os.fstat(keys).st_size // _DIGEST)
            try:
                check_bytes(count * _BYTES_PER_KEY, "its keys", keys_path)
                os.ftruncate(rows, count * width)  # what a kill left half written
                os.ftruncate(keys, count * _DIGEST)
                found = bytearray(count * _DIGEST)
                read_at(keys, memoryview(found), 0)
            except (OSError, UserError):
                os.close(keys)
                os.close(rows)
                raise
            self._files = rows, keys
            self._known = {bytes(found[i * _DIGEST : (i + 1) * _DIGEST]): i for i in range(count)}

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def add(self, keys: Sequence[bytes], rows: NDArray[np.float32]) -> None:
        """Keep rows of contents that are not known yet, none of them twice."""
        for key in keys:
            self._known[key] = len(self._known)
        if self._files is None:
            self._more.append(rows)
            return
        out, names = self._files
        _append(out, np.ascontiguousarray(rows, dtype=np.float32).tobytes())
        os.fsync(out)  # a digest is only written when its row is there
        _append(names, b"".join(keys))

    def rows(self, keys: Sequence[bytes]) -> NDArray[np.float32]:
        """The embeddings of these contents, in their order."""
        places = [self._known[key] for key in keys]
        if self._files is None:
            self._more = [np.concatenate(self._more)]
            return self._more[0][places]
        with mmap.mmap(self._files[0], 0, access=mmap.ACCESS_READ) as content:
            table = np.frombuffer(content, np.float32).reshape(-1, self.dimensions)
            found = table[places]
            del table  # or the map cannot be closed
        return found

    def close(self) -> None:
        for handle in self._files or ():
            os.close(handle)
        self._files = None


def _append(handle: int, data: bytes) -> None:
    os.lseek(handle, 0, os.SEEK_END)
    while data:
        data = data[os.write(handle, data) :]


class Embedder:
    """Embeds what readers find: each example once, whatever file it comes from."""

    def __init__(self, encoder: Encoder | ChooseEncoder) -> None:
        """`encoder` may be a function that chooses one by the images that are found, or none."""
        self._encoder = None if callable(encoder) else encoder
        self._choose = encoder if callable(encoder) else None
        self.used = False
        self._origin: dict[bytes, Any] = {}  # of an embedding, by its digest

    def remember(self, rows: NDArray[np.float32], origins: Sequence[Any]) -> None:
        """Keep in mind what was embedded, so that people can be shown it."""
        self._origin.update({content_digest(row.tobytes()): origin for row, origin in zip(rows, origins, strict=True)})

    def origins(self, rows: NDArray[np.float32]) -> list[Any]:
        """What these rows are the embeddings of, whatever order readers have brought them into; None where unknown."""
        return [self._origin.get(content_digest(row.tobytes())) for row in rows]

    @property
    def encoder(self) -> Encoder:
        assert self._encoder is not None
        return self._encoder

    def takes_files(self, paths: Sequence[Any]) -> bool:
        """Whether image files are to be embedded, and not decoded."""
        if self._encoder is None and self._choose is not None and paths:
            self._encoder, self._choose = self._choose(paths), None
        return self._encoder is not None and self._encoder.takes == "images"

    @property
    def takes_texts(self) -> bool:
        return self._encoder is not None and self._encoder.takes == "texts"

    def embed(
        self,
        count: int,
        read: Callable[[int], bytes],
        prepare: Callable[[bytes], Any],
        beside: Path | None,
        progress: Progress | None = None,
        to_the_end: bool = False,
    ) -> tuple[NDArray[np.float32], dict[int, Exception]]:
        """Embeddings [n, d] of `count` examples: those that the store beside the data has, and the others from the
        backbone.

        `read` gives the content of an example, `prepare` what the encoder takes; both run on threads, a few batches
        ahead of the encoder, so memory does not grow with `count`. Also what could not be read, by row; its embedding
        is 0. Unless `to_the_end`, the first such row ends it.
        """
        self.used = True
        root = None if beside is None else beside if beside.is_dir() else beside.parent
        keys: dict[int, bytes] = {}
        failed: dict[int, Exception] = {}
        waiting: dict[bytes, Any] = {}
        store = EmbeddingStore(root and root / FOLDER, self.encoder)

        def load(row: int) -> tuple[bytes, Any]:
            content = read(row)
            key = content_digest(content)
            return key, None if key in store or key in waiting else prepare(content)

        def flush() -> None:
            if waiting:
                examples: Any = list(waiting.values())
                together = np.stack(examples) if isinstance(examples[0], np.ndarray) else examples
                store.add(list(waiting), self.encoder.encode(together))
                waiting.clear()

        with closing(store), ThreadPoolExecutor(workers()) as pool, _kept(root):
            for row, outcome in enumerate(ahead(pool, load, range(count), 4 * _BATCH)):
                try:
                    key, example = outcome.result()
                except (ValueError, OSError) as error:
                    failed[row] = error
                    if not to_the_end:
                        break
                    continue
                keys[row] = key
                if example is not None and key not in store:
                    waiting.setdefault(key, example)
                if len(waiting) >= _BATCH:
                    flush()
                if progress is not None:
                    progress(row + 1, count)
            flush()
            out = np.zeros((count, self.encoder.dimensions), np.float32)
            there = list(keys)
            for start in range(0, len(there), _TOGETHER):
                part = there[start : start + _TOGETHER]
                out[part] = store.rows([keys[row] for row in part])
        return out, failed


@contextmanager
def _kept(root: Path | None) -> Iterator[None]:
    """Say, if Ctrl-C ends it, that the work so far is not lost."""
    try:
        yield
    except KeyboardInterrupt:
        if root is not None:
            logger.info("the embeddings so far are kept: the same command goes on from there")
        raise


def ahead(pool: Executor, work: Callable[[int], Any], rows: Iterable[int], most: int) -> Iterator[Future[Any]]:
    """Outcomes in order, with at most so many tasks under way."""
    under_way: deque[Future[Any]] = deque()
    try:
        for row in rows:
            under_way.append(pool.submit(work, row))
            if len(under_way) >= most:
                yield under_way.popleft()
        while under_way:
            yield under_way.popleft()
    finally:  # the caller has seen enough, or Ctrl-C
        for task in under_way:
            task.cancel()


# --- texts ----------------------------------------------------------------------------------------------------------

NEEDS_BACKBONE = "--set network.name=text/all-MiniLM-L6-v2 (it needs pip install 'crosel[text]')"


def embed_texts(
    cells: Sequence[Any],
    place: Callable[[int], str],
    settings: DataSettings,
    beside: Path | None,
    progress: Progress | None = None,
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
