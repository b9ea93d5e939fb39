"""Image files of any size and mode -> uint8 images [n, h, w, c], decoded on all cores and kept beside their list.

In memory and on disk channels come first, as networks want them: an array that is returned is a view. Images that are
too many for the memory stay on disk (`StoredImages`, [n, c, h, w]).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from crosel.data.embeddings import FOLDER, OR_SKIP, Embedder, ahead
from crosel.data.settings import DataSettings, OnImages
from crosel.data.store import Examples, ImageStore, fits_in_memory
from crosel.errors import UserError
from crosel.utils.reading import is_plain, read_file
from crosel.utils.system import check_bytes, memory_limit, workers
from crosel.utils.text import has_control_characters, one_line

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
THUMBNAIL = 256  # pixels of the longer side of an image that people look at
_CACHE_VERSION = 4  # raise it when the same files give other pixels, or the cache is written in another way
_BATCH = 16  # images to a task: enough that handing them out costs nothing
_BATCH_BYTES = 1 << 24  # that they may take, where images are large


@dataclass(frozen=True, repr=False)
class StoredImage:
    """An image file that lies in another file, as in a column of parquet; read when it is needed."""

    name: str
    where: str  # what tells it from all others: its file, that file's size and time of change, its row
    read: Callable[[], bytes | memoryview]

    @property
    def content(self) -> bytes | memoryview:
        return self.read()

    def exists(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.name or "image"

    __repr__ = __str__


ImageSource = Path | StoredImage


# What Pillow may take a file for, whatever its name: EPS would start Ghostscript, others are rarely tried.
_FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "WEBP", "TIFF", "PPM")  # JPEG with MPO
_BYTES_PER_PIXEL = 20  # while an image is decoded, turned and laid on white
_LARGE = threading.Lock()


@contextlib.contextmanager
def _in_turn(image: Any) -> Iterator[None]:
    """Large images are decoded one at a time; ValueError where not even one of them fits into memory."""
    needed, bound = image.width * image.height * _BYTES_PER_PIXEL, memory_limit()
    if image.format in ("JPEG", "MPO"):  # decoded at a fraction of its size
        needed //= 4
    if needed > bound:
        raise ValueError(f"{image.width} x {image.height} pixels, more than the memory limit (CROSEL_MEMORY_GB) allows")
    with _LARGE if needed > bound // (4 * workers()) else contextlib.nullcontext():
        yield


def ends_as_image(text: str) -> bool:
    """Whether a text ends as the paths of images do. Only its end is looked at: it may be long, and no path at all."""
    return Path(text[-10:]).suffix.lower() in SUFFIXES


_AT_ONCE = 1 << 20  # pixels


def _flatten(image: Any) -> Any:
    """Modes whose conversion by Pillow would lose the picture: 16 bits and floats are clipped, alpha is ignored."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        top = float(values.max(initial=0))
        scale = 255.0 if 0 < top <= 1 and image.mode == "F" else 1.0 if top <= 255 else 1 / 257
        grey = np.empty(values.size, np.uint8)
        for start in range(0, values.size, _AT_ONCE):  # all of it as float64 would be many times the file
            part = values.reshape(-1)[start : start + _AT_ONCE].astype(np.float64)
            grey[start : start + _AT_ONCE] = np.clip(np.nan_to_num(part * scale), 0, 255)
        return Image.fromarray(grey.reshape(values.shape))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image)
    return image


def decode(source: ImageSource, settings: DataSettings) -> NDArray[np.uint8]:
    """One image, upright, on white, resized. ValueError or OSError if it cannot be."""
    side = settings.image_size

    def resized(image: Any) -> NDArray[np.uint8]:
        if image.size != (side, side):
            short, (width, height) = min(image.size), image.size
            left, top = (width - short) / 2, (height - short) / 2
            box = (left, top, left + short, top + short) if settings.resize == "crop" else None
            image = image.resize((side, side), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
        return np.array(image, dtype=np.uint8).reshape(side, side, -1)

    _check_regular(source)
    return _opened(_file_of(source), settings.image_mode, side, resized)


def _file_of(source: ImageSource) -> Path | IO[bytes]:
    return source if isinstance(source, Path) else io.BytesIO(source.content)


def _check_regular(source: ImageSource) -> None:
    if isinstance(source, StoredImage):
        return
    if not is_plain(os.stat(source).st_mode):
        raise ValueError("not a plain file")  # a pipe would keep us waiting for ever


def _opened(
    source: Path | IO[bytes], mode: str, side: int, use: Callable[[Any], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """What `use` makes of an image, which it gets upright, on white and in this mode; a large JPEG at a fraction of its
    size, with sides of at least twice `side`. ValueError or OSError if it cannot be read."""
    try:
        with Image.open(source, formats=_FORMATS) as image, _in_turn(image):
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or 2**62):
                raise ValueError(f"{image.width} x {image.height} pixels, more than Pillow's limit")
            image.draft(mode, (2 * side, 2 * side))
            if "exif" in image.info:
                ImageOps.exif_transpose(image, in_place=True)
            flat = _flatten(image)
            return use(flat if flat.mode == mode else flat.convert(mode))
    except Image.DecompressionBombError:
        raise ValueError("more pixels than Pillow's limit") from None
    except MemoryError:
        raise ValueError("too large for the memory") from None
    except (ValueError, OSError):
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything: SyntaxError, IndexError, struct.error
        raise ValueError(f"damaged ({one_line(error)})") from None


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such image file"
    if isinstance(error, IsADirectoryError | PermissionError):
        return f"cannot be read ({error.strerror})"
    text = one_line(error)
    return "not an image that Pillow can read" if "cannot identify image" in text else f"image cannot be read ({text})"


def read_images(
    paths: Sequence[ImageSource],
    settings: DataSettings,
    places: Sequence[str] | None = None,
    cache_beside: Path | None = None,
) -> Examples:
    """Decode images in order, or embed them; `places[i]` (file and line) is named with a path that cannot be read."""
    pixels, bad = ImageReader(paths, settings, places, cache_beside).read()
    if bad:
        raise UserError(f"{bad[min(bad)]}; replace it, or leave it out")
    return pixels


def read_usable_images(
    paths: Sequence[ImageSource],
    settings: DataSettings,
    places: Sequence[str] | None = None,
    cache_beside: Path | None = None,
    progress: OnImages | None = None,
) -> tuple[Examples, dict[int, str]]:
    """The same for training data, of which `data.skip_bad` leaves out what cannot be read: also such rows, each with
    its place and reason. There are no pixels in these."""
    pixels, bad = ImageReader(paths, settings, places, cache_beside, progress, settings.skip_bad).read()
    if bad and not settings.skip_bad:
        raise UserError(bad[min(bad)] + OR_SKIP)
    if bad and len(bad) == len(paths):
        raise UserError(bad[min(bad)])
    return pixels, bad


Failed = dict[int, Exception]  # what cannot be read, by row
Keep = Callable[[list[int], NDArray[np.uint8]], None]  # called with rows and their images [m, c, h, w], on any thread


@dataclass(frozen=True)
class ImageReader:
    """Image files that are to be read, in order. Unless `to_the_end`, the first that cannot be read ends it."""

    paths: Sequence[ImageSource]
    settings: DataSettings
    places: Sequence[str] | None = None
    cache_beside: Path | None = None
    progress: OnImages | None = None
    to_the_end: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        side = self.settings.image_size
        return (len(self.paths), 3 if self.settings.image_mode == "RGB" else 1, side, side)

    def read(self) -> tuple[Examples, dict[int, str]]:
        """Images or their embeddings, and a line about each file that cannot be read, by row."""
        embedder, beside = self.settings.embedder, self.cache_beside if self.settings.cache else None
        images: Examples
        if embedder is not None and embedder.takes_files(self.paths):
            images, failed = self._embed(embedder, beside)
        else:
            store = None if beside is None else self._store(beside)
            on_disk = store is not None and not fits_in_memory(math.prod(self.shape))
            images, failed = self._read_to_disk(store) if store and on_disk else self._read_to_memory(store)
        bad: dict[int, str] = {}
        for row, error in failed.items():
            place = f"{self.places[row]}: " if self.places and self.places[row] else ""
            name = str(self.paths[row])
            bad[row] = f"{place}{repr(name) if has_control_characters(name) else name}: {_why_unreadable(error)}"
        return images, bad

    def _usable(self, failed: Failed) -> bool:
        return not failed or (self.to_the_end and len(failed) < len(self.paths))

    def _read_to_memory(self, store: ImageStore | None) -> tuple[Examples, Failed]:
        check_bytes(2 * math.prod(self.shape), f"{len(self.paths):,} images", self.cache_beside or "images")
        out = np.zeros(self.shape, dtype=np.uint8)
        # What was bad before may be readable by now: with other permissions, say, or another Pillow.
        rows = store.read_into(out) if store is not None else list(range(len(self.paths)))
        failed = self.decode(rows, out.__setitem__) if rows else {}
        if store is not None and self._usable(failed) and len(failed) < len(rows):
            _keep(store, out, [row for row in rows if row not in failed])
        return out.transpose(0, 2, 3, 1), failed

    def _read_to_disk(self, store: ImageStore) -> tuple[Examples, Failed]:
        """Images that stay on disk, decoded as far as they are not there yet."""
        failed: Failed = {}
        with closing(store):
            if not store.is_complete:
                store.begin()
            if rows := store.missing():
                failed = self.decode(rows, store.put)
            if usable := self._usable(failed):
                store.finish()
        return store.images() if usable else np.empty((0, 1, 1, 1), np.uint8), failed

    def _embed(self, embedder: Embedder, beside: Path | None) -> tuple[Examples, Failed]:
        side = embedder.encoder.size

        def read(row: int) -> bytes:
            source = self.paths[row]
            _check_regular(source)
            return read_file(source, memory_limit() // 8) if isinstance(source, Path) else bytes(source.content)

        def prepare(content: bytes) -> NDArray[np.uint8]:
            return _opened(io.BytesIO(content), "RGB", side, embedder.encoder.prepare)

        Image.init()
        found, failed = embedder.embed(len(self.paths), read, prepare, beside, self.progress, self.to_the_end)
        embedder.remember(found, self.paths)
        return found, failed

    def decode(self, rows: Sequence[int], keep: Keep) -> Failed:
        """Decode these rows on all cores and hand them to `keep`, a few at a time."""
        failed: Failed = {}
        stop = threading.Event()
        image = self.shape[1:]
        batch = max(1, min(_BATCH, _BATCH_BYTES // math.prod(image)))

        def work(start: int) -> int:
            mine, good = rows[start : start + batch], list[int]()
            pixels = np.empty((len(mine), *image), np.uint8)
            for row in mine:
                if stop.is_set():
                    break
                try:
                    pixels[len(good)] = decode(self.paths[row], self.settings).transpose(2, 0, 1)
                except (ValueError, OSError) as error:
                    failed[row] = error
                    if not self.to_the_end:
                        break
                else:
                    good.append(row)
            if good:
                keep(good, pixels[: len(good)])
            return len(mine)

        done = 0
        Image.init()  # registers the formats once, before threads race to do it
        with warnings.catch_warnings(), ThreadPoolExecutor(workers()) as pool:
            warnings.simplefilter("ignore")  # of Pillow, about odd files: they are read, or refused
            try:
                for task in ahead(pool, work, range(0, len(rows), batch), 4 * workers()):
                    done += task.result()
                    if failed and not self.to_the_end:
                        break
                    if self.progress is not None:
                        self.progress(done, len(rows))
            finally:  # also on Ctrl-C
                stop.set()
                pool.shutdown(cancel_futures=True)
        return failed

    def _store(self, beside: Path) -> ImageStore:
        """Decoded images, kept beside their list so that the second run starts at once.

        Its name covers every path with its size and time of change, and the settings that decide the pixels: a store
        is never stale, only unused. Images that could not be read (`data.skip_bad`) are tried again each time: why they
        are bad may not show in the file itself.
        """
        settings, root = self.settings, beside if beside.is_dir() else beside.parent
        inside = os.path.join(os.path.abspath(root), "")
        key = f"{_CACHE_VERSION} {settings.image_size} {settings.image_mode} {settings.resize}"
        digest = hashlib.sha256(key.encode())
        for path in self.paths:
            if isinstance(path, StoredImage):
                digest.update(f"\0{path.where.removeprefix(inside)}".encode("utf-8", "surrogatepass"))
                continue
            try:
                found = os.stat(path)  # a folder that is moved as a whole keeps its store
                text = f"\0{os.path.abspath(path).removeprefix(inside)}\0{found.st_size}\0{found.st_mtime_ns}"
            except (OSError, ValueError):
                text = f"\0{path}\0missing"  # decoding will say so
            digest.update(text.encode("utf-8", "surrogatepass"))
        return ImageStore(root / FOLDER, f"images-{digest.hexdigest()[:32]}", self.shape)


def _keep(store: ImageStore, images: NDArray[np.uint8], rows: Sequence[int]) -> None:
    """Best effort: images in memory that cannot be kept are no error."""
    with contextlib.suppress(UserError, OSError), closing(store):
        store.begin(wait=False)
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            store.put(part, images[part])
        store.finish()


class ImageFiles:
    """Images that stay in their files: they are decoded when they are looked at, small and in their own aspect."""

    ndim = 4  # as the arrays of images that it stands for

    def __init__(self, paths: Sequence[ImageSource | None]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> ImageFiles:
        return ImageFiles([self.paths[int(row)] for row in rows])

    def __getitem__(self, row: int) -> NDArray[np.uint8]:
        return self.at(row, THUMBNAIL)

    def at(self, row: int, side: int) -> NDArray[np.uint8]:
        """Pixels [3, h, w], the longer side of at most so many; a grey square for a file that is gone or can no longer
        be read."""

        def thumbnail(image: Any) -> NDArray[np.uint8]:
            image.thumbnail((side, side))
            pixels: NDArray[np.uint8] = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
            return pixels

        path = self.paths[row]
        try:
            if path is not None:
                _check_regular(path)
                return _opened(_file_of(path), "RGB", side, thumbnail)
        except (ValueError, OSError):
            pass
        return np.full((3, 32, 32), 127, np.uint8)


def typical_size(paths: Sequence[ImageSource]) -> tuple[int, int]:
    """Width and height of the image in the middle of a few, by their short sides; (0, 0) where none can be read."""
    sizes = []
    for path in paths[:: max(1, len(paths) // 9)]:
        with contextlib.suppress(ValueError, OSError, Image.DecompressionBombError):
            _check_regular(path)
            with Image.open(_file_of(path), formats=_FORMATS) as image:
                sizes.append(image.size)
    return sorted(sizes, key=min)[len(sizes) // 2] if sizes else (0, 0)


def embed_arrays(
    x: Examples, embedder: Embedder, cache_beside: Path | None, progress: OnImages | None = None
) -> NDArray[np.float32]:
    """Embeddings [n, d] of images in memory, [n, c, h, w]."""
    _, channels, height, width = x.shape

    def prepare(content: bytes) -> NDArray[np.uint8]:
        pixels = np.frombuffer(content, np.uint8)[16:].reshape(channels, height, width).transpose(1, 2, 0)
        image = Image.fromarray(pixels[:, :, 0] if channels in (1, 2) else pixels[:, :, :3])
        prepared: NDArray[np.uint8] = embedder.encoder.prepare(image.convert("RGB"))
        return prepared

    shape = f"{channels} {height} {width}".ljust(16).encode()  # two shapes may have the same bytes
    return embedder.embed(len(x), lambda row: shape + x[row].tobytes(), prepare, cache_beside, progress)[0]


def bad_inputs_note(bad: Mapping[int, str]) -> list[str]:
    return [f"inputs that cannot be read, left out: {len(bad)} ({bad[min(bad)]})"] if bad else []
