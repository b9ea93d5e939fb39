"""A folder for each class, with its images; or `train` and `test` with such folders inside."""

from __future__ import annotations

import os
from pathlib import Path

from crosel.data.dataset import Dataset, make_dataset
from crosel.data.images import bad_inputs_note, read_usable_images
from crosel.data.inputs import list_images
from crosel.data.settings import DataSettings, OnImages
from crosel.data.vocabulary import Vocabulary, label_name
from crosel.errors import UserError, some_of


def _classes(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if e.is_dir() and not e.name.startswith("."))


def _gather(folders: list[Path]) -> tuple[list[Path], list[str]]:
    paths: list[Path] = []
    names: list[str] = []
    for folder in folders:
        found = list_images(folder)
        try:
            names += [label_name(folder.name)] * len(found)
        except ValueError as error:
            raise UserError(f"{str(folder)!r}: {error}") from None
        paths += found
    return paths, names


def read_folder(folder: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
    classes = _classes(folder)
    split = [path.name for path in classes] == ["test", "train"]
    classes = _classes(folder / "train") if split else classes
    train = _gather(classes)
    test = _gather(_classes(folder / "test")) if split else ([], [])
    if not train[0]:
        raise UserError(
            f"{folder}: cannot read a folder without a folder of images for each class inside; "
            "images with candidate sets are listed in a csv file: path,candidates"
        )
    vocabulary = Vocabulary({*train[1], *test[1]}, settings.classes)
    try:
        y, y_test = ([vocabulary[name] for name in part[1]] for part in (train, test))
    except ValueError as error:
        raise UserError(f"{folder}: the folder {error}") from None
    filled = set(train[1])
    empty = [name for name in (label_name(path.name) for path in classes) if name not in filled]
    notes = [f"folders without images, left out: {some_of(empty, 8)}"] if empty else []
    x, bad = read_usable_images([*train[0], *test[0]], settings, None, folder, progress)
    n = len(y)
    keep = [row for row in range(n) if row not in bad]
    keep_test = [row for row in range(len(y_test)) if n + row not in bad]
    return make_dataset(
        x[:n][keep], y=[y[row] for row in keep], x_test=x[n:][keep_test] if keep_test else None,
        y_test=[y_test[row] for row in keep_test] or None, classes=vocabulary.classes,
        ids=[train[0][row].relative_to(folder).as_posix() for row in keep], place=str(folder),
        notes=(*notes, *bad_inputs_note(bad)),
    )  # fmt: skip
