"""Images on disk: a folder for each class (also in `train` and `test`), any folder of images, or a single image."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from crosel.data.dataset import Dataset, make_dataset
from crosel.data.formats.base import Chunk, Format, InputSpec, image_chunks
from crosel.data.images import SUFFIXES, bad_inputs_note, ends_as_image, read_usable_images
from crosel.data.settings import DataSettings, OnImages
from crosel.data.vocabulary import Vocabulary, label_name
from crosel.data.votes import Inputs
from crosel.errors import UserError
from crosel.utils.files import is_run_folder
from crosel.utils.text import some_of


class ImageFile(Format):
    title, suffixes = "an image", tuple(SUFFIXES)

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        yield from image_chunks(iter([(path.name, path, "")]), spec, path)


class ImageFolder(Format):
    title = "a folder of images"

    def recognises(self, path: Path) -> bool:
        return path.is_dir()

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        _refuse_run_folder(path, f"to continue it: crosel train --resume --out {path}")
        classes = _folders_in(path)
        split = [folder.name for folder in classes] == ["test", "train"]
        classes = _folders_in(path / "train") if split else classes
        train, train_names = _labelled_images(classes)
        test, test_names = _labelled_images(_folders_in(path / "test")) if split else ([], [])
        if not train:
            raise UserError(
                f"{path}: cannot read a folder without a folder of images for each class inside; "
                "images with candidate sets are listed in a csv file: path,candidates"
            )
        vocabulary = Vocabulary({*train_names, *test_names}, settings.classes)
        y, y_test = (vocabulary.indices(names, f"{path}: the folder") for names in (train_names, test_names))
        filled = set(train_names)
        empty = [name for name in (label_name(folder.name) for folder in classes) if name not in filled]
        notes = [f"folders without images, left out: {some_of(empty, 8)}"] if empty else []
        x, bad = read_usable_images([*train, *test], settings, None, path, progress)
        n = len(y)
        keep = [row for row in range(n) if row not in bad]
        keep_test = [row for row in range(len(y_test)) if n + row not in bad]
        return make_dataset(
            x[:n][keep] if bad else x[:n], y=[y[row] for row in keep], x_test=x[n:][keep_test] if keep_test else None,
            y_test=[y_test[row] for row in keep_test] or None, classes=vocabulary.classes,
            ids=[train[row].relative_to(path).as_posix() for row in keep], place=str(path),
            notes=(*notes, *bad_inputs_note(bad)),
        )  # fmt: skip

    def read_inputs(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Inputs:
        images = _some_images(path)
        x, bad = read_usable_images(images, settings, None, path, progress)
        good = [row for row in range(len(images)) if row not in bad]
        return Inputs(x[good] if bad else x, tuple(images[row].relative_to(path).as_posix() for row in good))

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        spec.image_settings(path)  # refuses before the folder is walked through
        files = ((image.relative_to(path).as_posix(), image, "") for image in _some_images(path))
        yield from image_chunks(files, spec, path)


def _refuse_run_folder(folder: Path, remedy: str) -> None:
    """Its plots would pass for images."""
    if is_run_folder(folder):
        raise UserError(f"{folder} is a run folder, not data; {remedy}")


def _folders_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if e.is_dir() and not e.name.startswith("."))


def _labelled_images(folders: list[Path]) -> tuple[list[Path], list[str]]:
    """Images with the name of their class, which is that of their folder."""
    paths: list[Path] = []
    names: list[str] = []
    for folder in folders:
        found = _images_below(folder)
        try:
            names += [label_name(folder.name)] * len(found)
        except ValueError as error:
            raise UserError(f"{str(folder)!r}: {error}") from None
        paths += found
    return paths, names


def _some_images(folder: Path) -> list[Path]:
    _refuse_run_folder(folder, "give the images themselves")
    images = _images_below(folder)
    if not images:
        raise UserError(f"{folder}: there are no images in this folder; their names must end in .jpg, .png or the like")
    return images


def _images_below(folder: Path) -> list[Path]:
    """All images below a folder, in a fixed order; hidden files and folders are passed over."""
    found = []
    for root, folders, files in os.walk(folder):  # links to folders are not followed: they may run in circles
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in sorted(files) if not name.startswith(".") and ends_as_image(name)]
    return found
