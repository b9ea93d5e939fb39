"""Image files: every mode, upright, resized, cached; damaged ones and bombs named with their place."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import numpy as np
import pytest
from _files import picture, png_bomb, put, read, refused
from PIL import Image

from crosel.data import DataSettings, load
from crosel.data import images as images_module
from crosel.data.images import decode, read_images, read_usable_images
from crosel.errors import UserError

SMALL = DataSettings(image_size=4)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGB", (200, 100, 50), (200, 100, 50)),
        ("L", 120, (120, 120, 120)),
        ("1", 1, (255, 255, 255)),
        ("P", 0, (0, 0, 0)),
        ("RGBA", (200, 100, 50, 255), (200, 100, 50)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("LA", (100, 255), (100, 100, 100)),
        ("I;16", 257 * 100, (100, 100, 100)),
    ],
)
def test_modes(tmp_path, mode, colour, expected):
    pixels = decode(picture(tmp_path / "a.png", colour, (9, 5), mode), SMALL)
    assert pixels.shape == (4, 4, 3)
    np.testing.assert_allclose(pixels, np.broadcast_to(expected, (4, 4, 3)), atol=2)


@pytest.mark.parametrize("name", ["a.jpg", "a.bmp", "a.webp", "a.tif", "a.gif", "a.ppm"])
def test_formats(tmp_path, name):
    np.testing.assert_allclose(decode(picture(tmp_path / name, (200, 100, 50)), SMALL)[2, 2], (200, 100, 50), atol=6)


def test_a_tall_image_of_16_bits_is_read_as_fast_as_a_wide_one(tmp_path):
    """Found by changed inputs: a PNG of 69 bytes with a million rows took ten seconds."""
    Image.new("I;16", (1, 1_000_000), 257 * 100).save(tmp_path / "tall.png")
    start = time.process_time()
    assert np.all(decode(tmp_path / "tall.png", DataSettings(image_size=2)) == 100)
    assert time.process_time() - start < 3


def test_floats_and_cmyk(tmp_path):
    Image.fromarray(np.full((6, 6), 0.5, np.float32)).save(tmp_path / "f.tif")
    assert decode(tmp_path / "f.tif", SMALL)[0, 0].tolist() == [127, 127, 127]
    picture(tmp_path / "c.jpg", (0, 0, 0, 0), (8, 8), "CMYK")
    np.testing.assert_allclose(decode(tmp_path / "c.jpg", SMALL), 255, atol=3)


def test_grey_setting(tmp_path):
    grey = decode(picture(tmp_path / "a.png", (90, 90, 90)), DataSettings(image_size=4, image_mode="L"))
    assert grey.shape == (4, 4, 1)
    assert (grey == 90).all()


def test_an_image_of_the_right_size_keeps_every_pixel(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png", SMALL), pixels)


def test_photographs_come_upright(tmp_path):
    """Cameras store how they were held (tag 274) beside the pixels."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255  # light above
    exif = Image.Exif()
    exif[274] = 3  # held upside down
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = decode(tmp_path / "a.jpg", SMALL)
    assert found[3].mean() > 240
    assert found[0].mean() < 15


def test_large_jpegs_are_reduced_and_still_the_same_picture(tmp_path):
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    large = coarse.resize((1024, 1024), Image.Resampling.BICUBIC)
    large.save(tmp_path / "a.jpg", quality=98)
    whole = np.asarray(large.resize((4, 4), Image.Resampling.BILINEAR)).astype(int)
    found = decode(tmp_path / "a.jpg", SMALL).astype(int)
    assert np.abs(found - whole).mean() < 4  # both steps of the reduction are approximate
    assert whole.std() > 20  # so that a grey picture would not pass


def test_order_is_kept_by_many_threads(tmp_path):
    paths = [picture(tmp_path / f"{i}.png", (i % 256, i // 256, 0), (4, 4)) for i in range(300)]
    seen = []
    found, _ = read_usable_images(paths, SMALL, progress=lambda done, total: seen.append((done, total)))
    assert [int(p[0, 0, 0]) + 256 * int(p[0, 0, 1]) for p in found] == list(range(300))
    assert seen[-1] == (300, 300)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- damaged ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_image_bombs(tmp_path, size):
    put(tmp_path / "bomb.png", png_bomb(*size))
    path = put(tmp_path / "d.csv", "path,label\nbomb.png,a\n")
    text = refused(path)
    assert text.startswith(f"{path}, line 2, column 'path': {tmp_path / 'bomb.png'}: ")
    assert "Pillow's limit" in text


def test_truncated_and_other_files(tmp_path):
    picture(tmp_path / "good.jpg", size=(64, 64))
    whole = (tmp_path / "good.jpg").read_bytes()
    put(tmp_path / "half.jpg", whole[: len(whole) // 2])
    put(tmp_path / "text.png", "no picture")
    put(tmp_path / "empty.png", b"")
    (tmp_path / "folder.png").mkdir()
    for name, says in {
        "half.jpg": "image cannot be read (",
        "text.png": "not an image that Pillow can read",
        "empty.png": "not an image that Pillow can read",
        "folder.png": "cannot be read (Is a directory)",
        "none.png": "no such image file",
    }.items():
        path = put(tmp_path / "d.csv", f"path,label\ngood.jpg,a\n\n{name},b\n")
        assert refused(path).startswith(f"{path}, line 4, column 'path': {tmp_path / name}: {says}")


def test_a_file_name_of_two_lines_is_told_on_one(tmp_path):
    put(tmp_path / "cat" / "a\nb.png", "no picture")
    assert "a\\nb.png': not an image that Pillow can read; fix it, or leave out" in refused(tmp_path)


def test_a_folder_without_its_bad_images(tmp_path):
    for name in ("train/cat/1.png", "train/dog/1.png", "test/cat/1.png"):
        picture(tmp_path / name)
    put(tmp_path / "train" / "cat" / "0.png", "no picture")
    put(tmp_path / "test" / "dog" / "0.png", "no picture")
    assert "0.png: not an image" in refused(tmp_path)
    data = read(tmp_path, skip_bad=True, image_size=2)
    assert data.ids == ("train/cat/1.png", "train/dog/1.png")
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1], [0])
    (note,) = data.notes
    assert note.startswith(f"inputs that cannot be read, left out: 2 ({tmp_path / 'train' / 'cat' / '0.png'}: ")


# --- a folder for each class ---------------------------------------------------------------------------------------


def test_folder_for_each_class(tmp_path):
    for name, colour in {"cat/1.png": 10, "cat/deep/2.png": 20, "dog/1.png": 30}.items():
        picture(tmp_path / name, (colour, 0, 0))
    (tmp_path / "empty").mkdir()
    data = load(str(tmp_path), None, SMALL)
    assert data.classes == ("cat", "dog")
    assert data.notes == ("folders without images, left out: empty",)
    assert data.y.tolist() == [0, 0, 1]
    assert data.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.ids == ("cat/1.png", "cat/deep/2.png", "dog/1.png")
    assert (tmp_path / ".crosel-cache").is_dir()
    again = load(str(tmp_path), None, SMALL)  # the cache is no class
    assert again.fingerprint == data.fingerprint
    assert refused(tmp_path, classes=("cat", "cow")).startswith(f"{tmp_path}: the folder 'dog' is not one of")


def test_folders_for_training_and_testing(tmp_path):
    for i, name in enumerate(["train/a", "train/b", "test/b"]):
        picture(tmp_path / name / "1.png", (10 * i, 0, 0))
    data = load(str(tmp_path), None, SMALL)
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1], [1])
    assert data.x_test[:, 0, 0, 0].tolist() == [20]


# --- the cache ----------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path):
    for i in range(3):
        picture(tmp_path / f"{i}.png", (i, 0, 0), (4, 4))
    return put(tmp_path / "d.csv", "path,label\n" + "".join(f"{i}.png,c{i}\n" for i in range(3)))


def decoded(monkeypatch) -> list[str]:
    """Names of the files that are decoded from now on."""
    names: list[str] = []
    real = images_module.decode
    monkeypatch.setattr(images_module, "decode", lambda path, s: (names.append(path.name), real(path, s))[1])
    return names


def test_images_are_decoded_once(listed, monkeypatch):
    names = decoded(monkeypatch)
    first = read(listed)
    assert sorted(names) == ["0.png", "1.png", "2.png"]
    assert read(listed).fingerprint == first.fingerprint
    assert len(names) == 3
    read(listed, image_size=5)
    assert len(names) == 6
    read(listed, cache=False)
    assert len(names) == 9


def test_a_changed_image_is_seen(listed, monkeypatch):
    read(listed)
    names = decoded(monkeypatch)
    picture(listed.parent / "1.png", (99, 0, 0), (4, 4))
    os.utime(listed.parent / "1.png", ns=(1, 1))
    assert read(listed).x[1, 0, 0, 0] == 99
    assert len(names) == 3


def test_images_that_cannot_be_read_are_tried_again_and_the_rest_are_decoded_once(listed, monkeypatch):
    bad = put(listed.parent / "0.png", b"no image")
    first = read(listed, skip_bad=True)
    assert first.notes == (f"inputs that cannot be read, left out: 1 ({listed}, line 2, column 'path': {bad}: "
                           "not an image that Pillow can read)",)  # fmt: skip
    names = decoded(monkeypatch)
    again = read(listed, skip_bad=True)
    assert (again.ids, again.notes) == (first.ids, first.notes)
    assert again.fingerprint == first.fingerprint
    assert names == ["0.png"]
    assert "0.png: not an image that Pillow can read; fix it" in refused(listed)  # without skip_bad it is not left out
    assert names == ["0.png", "0.png"]


def test_a_repaired_image_is_seen_even_with_the_size_and_time_it_had(listed, monkeypatch):
    path = listed.parent / "1.png"
    content, about = path.read_bytes(), path.stat()
    put(path, b"\0" * len(content))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert read(listed, skip_bad=True).ids == ("0.png", "2.png")
    put(path, content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    names = decoded(monkeypatch)
    for _ in range(2):  # the second time from the cache, which has it by now
        data = read(listed, skip_bad=True)
        assert (data.ids, data.notes) == (("0.png", "1.png", "2.png"), ())
        assert data.x[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert names == ["1.png"]
    assert read(listed).fingerprint == data.fingerprint


def test_what_stopped_at_a_bad_image_is_not_kept(listed, monkeypatch):
    put(listed.parent / "1.png", b"no image")
    refused(listed)
    assert not (listed.parent / ".crosel-cache").exists()


def test_a_damaged_cache_is_no_harm(listed, monkeypatch):
    first = read(listed)
    pixels, checksums = (next((listed.parent / ".crosel-cache").glob(f"*.{kind}")) for kind in ("u8", "crc"))
    names = decoded(monkeypatch)
    for path, content, again in (
        (pixels, flipped(pixels, 5), 1),  # the first image
        (checksums, flipped(checksums, 9), 1),
        (pixels, pixels.read_bytes()[:-1], 3),
        (checksums, checksums.read_bytes() + b"more", 3),
        (checksums, b"", 3),
    ):
        path.write_bytes(content)
        before = len(names)
        assert read(listed).fingerprint == first.fingerprint
        assert len(names) == before + again
        assert read(listed).fingerprint == first.fingerprint  # mended
        assert len(names) == before + again


def flipped(path: Path, at: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    return bytes(content)


def test_a_cache_is_not_written_through_a_link(listed, tmp_path):
    read(listed)
    other = put(tmp_path / "other", "precious")
    for path in (listed.parent / ".crosel-cache").glob("images-*"):
        path.unlink()
        path.symlink_to(other)
    assert read(listed).n == 3
    assert other.read_text() == "precious"


def test_a_folder_that_cannot_be_written_has_no_cache(listed):
    put(listed.parent / ".crosel-cache", "a file in the way")
    assert read(listed).n == 3


def test_old_entries_go_and_new_ones_stay(listed, monkeypatch):
    for size in range(3, 14):
        read(listed, image_size=size)
    assert len(list((listed.parent / ".crosel-cache").glob("*.u8"))) == 8
    names = decoded(monkeypatch)
    for size in range(8, 14):
        read(listed, image_size=size)
    assert names == []


def test_too_many_images_for_the_memory(listed, monkeypatch):
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.01")
    assert "3 images would take" in refused(listed, image_size=2048, cache=False)
    assert read(listed, image_size=2048).x.nbytes == 3 * 3 * 2048**2  # they stay on disk


def test_errors_of_decoders_are_never_raw(tmp_path):
    """Whatever bytes a decoder is given, it is an image or one clear line."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(stream, "PNG")
    whole = stream.getvalue()
    for at in range(0, len(whole), 11):
        path = put(tmp_path / "a.png", whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        outcome = image_or_line(path)
        assert outcome == "image" or ("\n" not in outcome and str(path) in outcome)


def image_or_line(path: Path) -> str:
    try:
        assert read_images([path], SMALL).shape == (1, 4, 4, 3)
    except UserError as error:
        return str(error)
    return "image"


@pytest.mark.parametrize(("resize", "sides"), [("crop", 0), ("stretch", 255)])
def test_a_wide_image_is_cut_or_stretched(resize, sides, tmp_path):
    """Black in the middle, white on both sides: a third each."""
    pixels = np.full((10, 30, 3), 255, np.uint8)
    pixels[:, 10:20] = 0
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    found = decode(tmp_path / "wide.png", DataSettings(image_size=9, resize=resize))
    np.testing.assert_allclose(found[:, [0, -1]].astype(int), sides, atol=20)
    assert not found[:, 4].any()
