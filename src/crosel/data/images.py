"""Image files of any size and mode -> one uint8 array [n, h, w, c], decoded on all cores.

In memory and in the cache channels come first, as networks want them: what is returned is a view.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from crosel.data.embeddings import Embedder, content_digest
from crosel.data.settings import DataSettings, OnImages
from crosel.errors import UserError
from crosel.utils.files import atomic_write_with, check_own_folder, make_own_folder
from crosel.utils.limits import check_bytes, memory_limit
from crosel.utils.reading import ArraySpec, read_arrays
from crosel.utils.system import workers
from crosel.utils.text import has_control_characters, one_line

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
THUMBNAIL = 256  # pixels of the longer side of an image that people look at
OR_SKIP = "; fix it, or leave out what cannot be used: --set data.skip_bad=true"
_CACHE = ".crosel-cache"
_CACHE_VERSION = 3  # raise it when the same files give other pixels, or the cache is written in another way
_CACHED = {"images": ArraySpec("u", "nchw"), "bad": ArraySpec("i", "b", 0, "n")}
_CACHES_KEPT = 8
_BATCH = 64  # images to a task: enough that handing them out costs nothing


@dataclass(frozen=True, repr=False)
class StoredImage:
    """An image file that lies in another file, as in a column of parquet."""

    name: str
    content: bytes | memoryview

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


def _flatten(image: Any) -> Any:
    """Modes whose conversion by Pillow would lose the picture: 16 bits and floats are clipped, alpha is ignored."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        top = float(values.max(initial=0))
        scale = 255.0 if 0 < top <= 1 and image.mode == "F" else 1.0 if top <= 255 else 1 / 257
        grey = np.empty(values.shape, np.uint8)
        for row, line in enumerate(values):  # a row at a time: all of it as float64 would be many times the file
            grey[row] = np.clip(np.nan_to_num(line.astype(np.float64) * scale), 0, 255)
        return Image.fromarray(grey)
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
    mode = os.stat(source).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
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


def _reason(error: Exception) -> str:
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
) -> NDArray[Any]:
    """Decode images in order, or embed them; `places[i]` (file and line) is named with a path that cannot be read."""
    pixels, bad = _decode_or_recall(paths, settings, places, cache_beside, None, to_the_end=False)
    if bad:
        raise UserError(f"{bad[min(bad)]}; replace it, or leave it out")
    return pixels


def read_usable_images(
    paths: Sequence[ImageSource],
    settings: DataSettings,
    places: Sequence[str] | None = None,
    cache_beside: Path | None = None,
    progress: OnImages | None = None,
) -> tuple[NDArray[Any], dict[int, str]]:
    """The same for training data, of which `data.skip_bad` leaves out what cannot be read: also such rows, each with
    its place and reason. There are no pixels in these."""
    pixels, bad = _decode_or_recall(paths, settings, places, cache_beside, progress, to_the_end=settings.skip_bad)
    if bad and not settings.skip_bad:
        raise UserError(bad[min(bad)] + OR_SKIP)
    if bad and len(bad) == len(paths):
        raise UserError(bad[min(bad)])
    return pixels, bad


def _decode_or_recall(
    paths: Sequence[ImageSource],
    settings: DataSettings,
    places: Sequence[str] | None,
    cache_beside: Path | None,
    progress: OnImages | None,
    to_the_end: bool,
) -> tuple[NDArray[Any], dict[int, str]]:
    if settings.embedder is not None and settings.embedder.takes_files(paths):
        beside = cache_beside if settings.cache else None
        embeddings, failed = embed_images(paths, settings.embedder, beside, progress, to_the_end)
        return embeddings, _unreadable(failed, paths, places)
    side, channels = settings.image_size, 3 if settings.image_mode == "RGB" else 1
    shape = (len(paths), channels, side, side)
    check_bytes(2 * len(paths) * side * side * channels, f"{len(paths):,} images", cache_beside or "images")
    cache = _ImageCache(cache_beside, paths, settings) if settings.cache and cache_beside is not None else None
    found = cache.read(shape) if cache is not None else None
    # What was bad before may be readable by now: with other permissions, say, or another Pillow.
    out, rows = found or (np.zeros(shape, dtype=np.uint8), range(len(paths)))
    failed = _decode_all(paths, rows, settings, out, progress, to_the_end) if rows else {}
    complete = not failed or (to_the_end and len(failed) < len(paths))
    if cache is not None and complete and (found is None or len(failed) < len(rows)):
        cache.write(out, sorted(failed))
    return out.transpose(0, 2, 3, 1), _unreadable(failed, paths, places)


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
        """Pixels [3, h, w]; a grey square for a file that is gone or can no longer be read."""
        path = self.paths[row]
        try:
            if path is not None:
                _check_regular(path)
                return _opened(_file_of(path), "RGB", THUMBNAIL, _thumbnail)
        except (ValueError, OSError):
            pass
        return np.full((3, 32, 32), 127, np.uint8)


def _thumbnail(image: Any) -> NDArray[np.uint8]:
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    pixels: NDArray[np.uint8] = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
    return pixels


def typical_size(paths: Sequence[ImageSource]) -> tuple[int, int]:
    """Width and height of the image in the middle of a few, by their short sides; (0, 0) where none can be read."""
    sizes = []
    for path in paths[:: max(1, len(paths) // 9)]:
        with contextlib.suppress(ValueError, OSError, Image.DecompressionBombError):
            _check_regular(path)
            with Image.open(_file_of(path), formats=_FORMATS) as image:
                sizes.append(image.size)
    return sorted(sizes, key=min)[len(sizes) // 2] if sizes else (0, 0)


def embed_images(
    paths: Sequence[ImageSource],
    embedder: Embedder,
    cache_beside: Path | None,
    progress: OnImages | None,
    to_the_end: bool,
) -> tuple[NDArray[np.float32], dict[int, Exception]]:
    """Embeddings of image files, [n, d]; and what cannot be read."""
    side = embedder.encoder.size

    def read(row: int) -> bytes:
        source = paths[row]
        _check_regular(source)
        return source.read_bytes() if isinstance(source, Path) else bytes(source.content)

    def prepare(content: bytes) -> NDArray[np.uint8]:
        return _opened(io.BytesIO(content), "RGB", side, embedder.encoder.prepare)

    Image.init()
    found, failed = embedder.embed(len(paths), read, prepare, cache_beside, progress, to_the_end)
    embedder.remember(found, paths)
    return found, failed


def embed_arrays(
    x: NDArray[np.uint8], embedder: Embedder, cache_beside: Path | None, progress: OnImages | None = None
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


def _unreadable(
    failed: Mapping[int, Exception], paths: Sequence[ImageSource], places: Sequence[str] | None
) -> dict[int, str]:
    """A line about each file that cannot be read, by row."""
    bad: dict[int, str] = {}
    for row, error in failed.items():
        place = f"{places[row]}: " if places and places[row] else ""
        name = str(paths[row])
        bad[row] = f"{place}{repr(name) if has_control_characters(name) else name}: {_reason(error)}"
    return bad


def bad_inputs_note(bad: Mapping[int, str]) -> list[str]:
    return [f"inputs that cannot be read, left out: {len(bad)} ({bad[min(bad)]})"] if bad else []


def _decode_all(
    paths: Sequence[ImageSource],
    rows: Sequence[int],
    settings: DataSettings,
    out: NDArray[np.uint8],
    progress: OnImages | None,
    to_the_end: bool,
) -> dict[int, Exception]:
    """Fill these rows of `out` on all cores. Returns what cannot be read, by row; unless `to_the_end`, ends soon after
    the first."""
    failed: dict[int, Exception] = {}
    stop = threading.Event()

    def work(start: int) -> int:
        mine = rows[start : start + _BATCH]
        for done, row in enumerate(mine):
            if stop.is_set():
                return done
            try:
                out[row] = decode(paths[row], settings).transpose(2, 0, 1)
            except (ValueError, OSError) as error:
                failed[row] = error
                if not to_the_end:
                    return done
        return len(mine)

    done = 0
    Image.init()  # registers the formats once, before threads race to do it
    with warnings.catch_warnings(), ThreadPoolExecutor(workers()) as pool:
        warnings.simplefilter("ignore")  # of Pillow, about odd files: they are read, or refused
        tasks = [pool.submit(work, start) for start in range(0, len(rows), _BATCH)]
        try:
            for task in as_completed(tasks):
                done += task.result()
                if failed and not to_the_end:
                    break
                if progress is not None:
                    progress(done, len(rows))
        finally:  # also on Ctrl-C
            stop.set()
            pool.shutdown(cancel_futures=True)
    return failed


class _ImageCache:
    """Decoded images kept beside their list, so that the second run starts at once.

    The key covers every path with its size and time of change, and the settings that decide the pixels: a cache is
    never stale, only unused. Images that could not be read (`data.skip_bad`) are named in it, to be tried again each
    time: why they are bad may not show in the file itself. Where the folder cannot be written to, there is no cache.
    """

    def __init__(self, beside: Path, paths: Sequence[ImageSource], settings: DataSettings) -> None:
        key = f"{_CACHE_VERSION} {settings.image_size} {settings.image_mode} {settings.resize}"
        digest = hashlib.sha256(key.encode())
        for path in paths:
            if isinstance(path, StoredImage):
                digest.update(b"\0" + content_digest(path.content))
                continue
            try:
                found = os.stat(path)
                text = f"\0{os.path.abspath(path)}\0{found.st_size}\0{found.st_mtime_ns}"
            except (OSError, ValueError):
                text = f"\0{path}\0missing"  # decoding will say so
            digest.update(text.encode("utf-8", "surrogatepass"))
        root = beside if beside.is_dir() else beside.parent
        self.path = root / _CACHE / f"images-{digest.hexdigest()[:32]}.npz"

    def read(self, shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], list[int]] | None:
        """The images, and the rows of those that could not be read."""
        try:
            check_own_folder(self.path.parent)
            found = read_arrays(self.path, _CACHED)
            images, bad = found["images"], found["bad"].tolist()
        except Exception:  # not there, or damaged: the images themselves are
            return None
        fits = images.shape == shape and images.dtype == np.uint8 and all(0 <= row < len(images) for row in bad)
        return (images, bad) if fits else None

    def write(self, images: NDArray[np.uint8], bad: Sequence[int]) -> None:
        """Best effort: a cache that cannot be written is no error."""
        with contextlib.suppress(UserError, OSError):
            make_own_folder(self.path.parent)
            atomic_write_with(self.path, lambda stream: np.savez(stream, images=images, bad=np.array(bad, np.int64)))
            kept = sorted(self.path.parent.glob("images-*.npz"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
            for old in kept[_CACHES_KEPT:]:
                old.unlink()
