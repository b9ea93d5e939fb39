"""Images that stay on disk: the same as in memory, through kills, damage, full disks and several processes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from _files import put, read, refused
from PIL import Image

from crosel.data import images as images_module
from crosel.data import store as store_module
from crosel.data.dataset import brightest, only_rows
from crosel.data.store import ImageStore, StoredImages, chunks
from crosel.errors import UserError
from crosel.training.batches import Normaliser
from crosel.utils import files as files_module

N = 150


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A list of images of 8x8 pixels in two classes; every fifth is for testing."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i in range(N):
        pixels = rng.integers(0, 200, (8, 8, 3), dtype=np.uint8)
        pixels[:, :, i % 2] //= 4
        Image.fromarray(pixels).save(folder / f"{i}.png")
    lines = [f"{i}.png,{'ab'[i % 2]},{'test' if i % 5 == 0 else 'train'}" for i in range(N)]
    put(folder / "d.csv", "path,label,split\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def listed(pictures, tmp_path) -> Path:
    return Path(shutil.copytree(pictures, tmp_path / "pictures")) / "d.csv"


@pytest.fixture
def on_disk(monkeypatch) -> None:
    """From now on no images fit into memory, and little is read at once."""
    monkeypatch.setattr(store_module, "_IN_MEMORY", 1 << 60)
    monkeypatch.setattr(store_module, "_PART", 1000)
    monkeypatch.setattr(images_module, "_BATCH", 7)


def files(listed: Path) -> list[Path]:
    return [next((listed.parent / ".crosel-cache").glob(f"*.{kind}")) for kind in ("u8", "crc")]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(content)


def count_decoded(monkeypatch) -> list[str]:
    names: list[str] = []
    real = images_module.decode
    monkeypatch.setattr(images_module, "decode", lambda path, s: (names.append(path.name), real(path, s))[1])
    return names


# --- the same as in memory ----------------------------------------------------------------------------------------


def test_the_same_data_as_in_memory(listed, monkeypatch):
    whole = read(listed, image_size=8, cache=False)
    monkeypatch.setattr(store_module, "_IN_MEMORY", 1 << 60)
    for _ in range(2):  # decoded, and found again
        data = read(listed, image_size=8)
        assert isinstance(data.x, StoredImages)
        assert (data.shape, data.n, data.x.nbytes, data.ids) == (whole.shape, whole.n, whole.x.nbytes, whole.ids)
        assert data.fingerprint == whole.fingerprint
        assert (data.brightest, data.remarks()) == (whole.brightest, whole.remarks())
        for ours, theirs in ((data.x, whole.x), (data.x_test, whole.x_test)):
            assert np.array_equal(np.asarray(ours), theirs)
            assert brightest(ours) == brightest(theirs)
        stored, normal = Normaliser.of(data), Normaliser.of(whole)
        assert stored.mean.equal(normal.mean)
        assert stored.std.equal(normal.std)
    assert read(listed, image_size=8, test_share=0).fingerprint == whole.fingerprint
    part, same = (only_rows(d, np.array([7, 3, 50])) for d in (data, whole))
    assert part.fingerprint == same.fingerprint
    assert np.array_equal(np.asarray(part.x[[True, False, True]]), same.x[[True, False, True]])


def test_slices_and_rows_are_those_of_an_array(listed, on_disk):
    data = read(listed, image_size=8)
    whole = np.asarray(data.x)
    for key in (slice(5, 40), slice(None, None, 3), [4, -1, 4], np.arange(30) % 2 == 0):
        some = slice(0, 30) if isinstance(key, np.ndarray) else slice(None)
        assert np.array_equal(np.asarray(data.x[some][key]), whole[some][key])
        assert np.array_equal(np.asarray(data.x[::2][1:][:20][np.arange(20)]), whole[::2][1:][:20])
    assert np.array_equal(data.x[-2], whole[-2])
    assert len(data.x[[]]) == len(data.x[5:5]) == 0
    with pytest.raises(IndexError):
        data.x[len(whole)]
    for rows in (None, range(10, 90)):
        parts = list(chunks(data.x, 32, rows))
        assert [start for start, _ in parts] == list((rows or range(len(whole)))[::32])
        assert np.array_equal(np.concatenate([x for _, x in parts]), whole[rows.start : rows.stop] if rows else whole)


# --- building it --------------------------------------------------------------------------------------------------


def test_a_build_that_was_stopped_goes_on(listed, on_disk, monkeypatch):
    whole = read(listed, image_size=8, cache=False)
    real, names = images_module.decode, []

    def stops(path, settings):
        names.append(path.name)
        if len(names) > 60:
            raise KeyboardInterrupt
        return real(path, settings)

    monkeypatch.setattr(images_module, "decode", stops)
    with pytest.raises(KeyboardInterrupt):
        read(listed, image_size=8)
    monkeypatch.setattr(images_module, "decode", real)
    flip(files(listed)[0], 0)  # and the machine lost power
    names = count_decoded(monkeypatch)
    data = read(listed, image_size=8)
    assert data.fingerprint == whole.fingerprint
    assert 75 <= len(names) <= N - 40


def test_a_bad_image_does_not_cost_the_others(listed, on_disk, monkeypatch):
    good = (listed.parent / "77.png").read_bytes()
    about = (listed.parent / "77.png").stat()
    put(listed.parent / "77.png", b"\0" * len(good))
    os.utime(listed.parent / "77.png", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert "77.png: not an image that Pillow can read; fix it" in refused(listed, image_size=8)
    left_out = read(listed, image_size=8, skip_bad=True)
    assert left_out.n == N - N // 5 - 1
    names = count_decoded(monkeypatch)
    assert read(listed, image_size=8, skip_bad=True).fingerprint == left_out.fingerprint
    assert names == ["77.png"]
    put(listed.parent / "77.png", good)
    os.utime(listed.parent / "77.png", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert read(listed, image_size=8).n == N - N // 5
    assert names == ["77.png"] * 2


def test_nothing_but_bad_images_leaves_nothing(tmp_path, on_disk):
    path = put(tmp_path / "d.csv", "path,label\na.png,a\nb.png,b\n")
    put(tmp_path / "a.png", "no image")
    put(tmp_path / "b.png", "no image")
    assert "a.png: not an image" in refused(path, image_size=8, skip_bad=True)
    assert not (tmp_path / ".crosel-cache").exists()


def test_a_moved_folder_keeps_its_store(listed, on_disk, monkeypatch):
    first = read(listed, image_size=8)
    moved = listed.parent.rename(listed.parent.with_name("moved")) / "d.csv"
    names = count_decoded(monkeypatch)
    assert read(moved, image_size=8).fingerprint == first.fingerprint
    assert names == []


def test_a_full_disk_is_one_line_and_nothing_half_is_believed(listed, on_disk, monkeypatch):
    real, calls = store_module.write_at, []

    def full(handle, data, offset):
        calls.append(offset)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, data, offset)

    monkeypatch.setattr(store_module, "write_at", full)
    text = refused(listed, image_size=8)
    assert text.startswith(f"{files(listed)[0]}: no space left on the device; free some and try again")
    monkeypatch.setattr(store_module, "write_at", real)
    assert read(listed, image_size=8).fingerprint == read(listed, image_size=8, cache=False).fingerprint


def test_too_little_space_is_told_before_the_work(listed, on_disk, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    names = count_decoded(monkeypatch)
    assert "the decoded images need 0.0 MiB more on this disk, which has 0.0 MiB left" in refused(listed, image_size=8)
    assert names == []


def test_in_memory_a_full_disk_is_no_error(listed, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "write_at", full)
    assert read(listed, image_size=8).n == N - N // 5


def test_two_processes_decode_each_image_once(listed, on_disk, monkeypatch):
    names, lines = count_decoded(monkeypatch), []
    monkeypatch.setattr(files_module.logger, "info", lines.append)
    found = []
    threads = [threading.Thread(target=lambda: found.append(read(listed, image_size=8))) for _ in range(2)]
    for thread in threads:  # locks belong to open files, so threads stand for processes
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].fingerprint == found[1].fingerprint
    assert sorted(names) == sorted(f"{i}.png" for i in range(N))


def test_a_store_that_is_removed_while_another_process_waits_for_it(tmp_path, monkeypatch):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2)
    first, second = (ImageStore(tmp_path / "stores", "images-0", pixels.shape) for _ in range(2))
    first.begin()
    monkeypatch.setattr(files_module.time, "sleep", lambda seconds: first.close())  # stopped before the first image
    second.begin()
    second.put(range(3), pixels)
    second.finish()
    assert np.array_equal(np.asarray(second.images()), pixels)


# --- damage -------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_and_mended(listed, on_disk, monkeypatch):
    whole = read(listed, image_size=8, cache=False)
    read(listed, image_size=8).fingerprint  # noqa: B018
    pixels, checksums = files(listed)
    for path, at in ((pixels, 192 * 17 + 5), (checksums, 8 * 17)):  # of the 18th file, which is for training
        flip(path, at)
        data = read(listed, image_size=8)
        with pytest.raises(UserError, match="image 17 is damaged on the disk; run the command again") as caught:
            np.asarray(data.x)
        assert str(caught.value).startswith(str(pixels))
        names = count_decoded(monkeypatch)
        data = read(listed, image_size=8)
        assert np.array_equal(np.asarray(data.x), whole.x)
        assert names == ["17.png"]
        assert data.fingerprint == whole.fingerprint


def test_rows_that_changed_places_are_found(listed, on_disk):
    read(listed, image_size=8)
    pixels, checksums = files(listed)
    for path, width in ((pixels, 192), (checksums, 8)):
        content = path.read_bytes()
        first, second = content[:width], content[width : 2 * width]
        path.write_bytes(second + first + content[2 * width :])
    with pytest.raises(UserError, match="damaged"):
        np.asarray(read(listed, image_size=8).x)


def test_a_store_that_ends_too_early(listed, on_disk, monkeypatch):
    first = read(listed, image_size=8)
    pixels, _ = files(listed)
    with pixels.open("rb+") as stream:
        stream.truncate(1000)
    with pytest.raises(UserError, match="cannot be read"):  # while it is used
        np.asarray(first.x)
    assert len(read(listed, image_size=8).x) == N - N // 5


def test_a_damaged_summary_is_found_anew(listed, on_disk):
    first = read(listed, image_size=8).fingerprint
    summary = next((listed.parent / ".crosel-cache").glob("*.json"))
    for content in (b"", b"[]", b'{"crc32": 1, "summaries": "{}"}', summary.read_bytes().replace(b"0", b"1")):
        summary.write_bytes(content)
        assert read(listed, image_size=8).fingerprint == first
