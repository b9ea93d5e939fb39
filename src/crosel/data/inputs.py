"""Inputs on their own: what votes, scores and tasks are about, joined to them by id."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from crosel.data.dataset import Array, Dataset, only_rows
from crosel.data.images import OR_SKIP, SUFFIXES, bad_inputs_note, read_usable_images
from crosel.data.settings import DataSettings, OnImages
from crosel.data.table import (
    Table,
    check_test_labels,
    image_path,
    image_root,
    optional_labels,
    own_ids,
    split_rows,
    table_inputs,
    with_truth,
)
from crosel.errors import UserError
from crosel.utils.files import is_run_folder
from crosel.utils.limits import check_plain, shown


@dataclass(frozen=True)
class Inputs:
    """Examples in the form that `make_dataset` takes: features [n, d] or images [n, h, w, c]."""

    x: Array
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    x_test: Array | None = None
    labels_test: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None  # names of the features, where a table gives them
    bad: Mapping[int, str] = field(default_factory=dict)  # rows to be left out, and why


def images_in(folder: Path) -> list[Path]:
    """The same as `list_images`, but there must be some."""
    refuse_run_folder(folder, "give the images themselves")
    images = list_images(folder)
    if not images:
        raise UserError(f"{folder}: there are no images in this folder; their names must end in .jpg, .png or the like")
    return images


def refuse_run_folder(folder: Path, remedy: str) -> None:
    """Its plots would pass for images."""
    if is_run_folder(folder):
        raise UserError(f"{folder} is a run folder, not data; {remedy}")


def list_images(folder: Path) -> list[Path]:
    """All images below a folder, in a fixed order; hidden files and folders are passed over."""
    found = []
    for root, folders, files in os.walk(folder):  # links to folders are not followed: they may run in circles
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(root) / name
            for name in sorted(files)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
        ]
    return found


def read_inputs(path: Path, settings: DataSettings | None = None, progress: OnImages | None = None) -> Inputs:
    """Read a folder of images, a csv, a jsonl or an npz file; labels are optional."""
    settings = settings or DataSettings()
    if path.is_dir():
        images = images_in(path)
        x, bad = read_usable_images(images, settings, None, path, progress)
        good = [row for row in range(len(images)) if row not in bad]
        ids = tuple(images[row].relative_to(path).as_posix() for row in good)
        return Inputs(x[good] if bad else x, ids)
    if not path.exists():
        raise UserError(f"{path}: no such file")
    check_plain(path)
    suffix = path.suffix.lower()
    if suffix == ".npz":
        from crosel.data.npz import read_npz_inputs

        return read_npz_inputs(path)
    if suffix in (".csv", ".tsv"):
        from crosel.data.csvfile import open_csv

        plain = DataSettings(format="table", classes=settings.classes)
        return _table_inputs(open_csv(path, plain, needs_ids=True)[0], settings, progress)
    if suffix in (".jsonl", ".ndjson"):
        from crosel.data.jsonl import open_jsonl

        return _table_inputs(open_jsonl(path), settings, progress)
    raise UserError(f"{path}: cannot read inputs from '{path.suffix}'; give a folder of images, csv, jsonl or npz")


def _table_inputs(table: Table, settings: DataSettings, progress: OnImages | None) -> Inputs:
    table = with_truth(table)
    own_ids(table)  # an id that is there twice is told of before images are decoded
    x, bad = table_inputs(table, settings, progress)
    if bad:
        good = [row for row in range(table.n) if row not in bad]
        table, x = table.take(good), x[good]
    ids = own_ids(table)
    train, test = split_rows(table)
    labels, cells = optional_labels(table, train)
    if not len(test):
        return Inputs(x, tuple(ids), None if labels is None else tuple(labels), columns=table.feature_names)
    check_test_labels(table, test, cells)
    return Inputs(
        x[train], tuple(ids[row] for row in train), None if labels is None else tuple(labels),
        x[test], tuple(str(cells[row]) for row in test), table.feature_names,
    )  # fmt: skip


def join_inputs(
    names: Sequence[str],
    place: Callable[[int], str],
    path: Path,
    settings: DataSettings,
    progress: OnImages | None,
    features: Array | None = None,
    image_cells: Sequence[str] | None = None,
    columns: tuple[str, ...] | None = None,  # names of the features
) -> Inputs:
    """Inputs for examples known by name: from `data.inputs`, else features beside, else the images they name."""
    if settings.inputs is not None:
        return _joined(names, place, Path(settings.inputs), settings, progress)
    if features is not None:
        return Inputs(features, tuple(names), columns=columns)
    root = image_root(settings, path)
    paths = []
    for row, cell in enumerate(image_cells or names):
        try:
            paths.append(image_path(cell, root))
        except ValueError as error:
            raise UserError(f"{place(row)}: {error}") from None
    if paths and not paths[0].exists() and not settings.skip_bad:
        raise UserError(
            f"{place(0)}: {shown(str(paths[0]))} is not an image file; if paths are relative to another folder: "
            "--set data.image_root=FOLDER; if these are ids, give the file with their inputs: --set data.inputs=FILE"
        )
    x, bad = read_usable_images(paths, settings, [place(r) for r in range(len(paths))], path, progress)
    return Inputs(x, tuple(names), bad=bad)


def without_bad(data: Dataset, inputs: Inputs) -> Dataset:
    """The data without the examples whose inputs are not there or cannot be read; a note counts them."""
    if not inputs.bad:
        return data
    good = np.array([row for row in range(data.n) if row not in inputs.bad])
    return replace(only_rows(data, good), notes=(*data.notes, *bad_inputs_note(inputs.bad)))


def _joined(
    names: Sequence[str], place: Callable[[int], str], path: Path, settings: DataSettings, progress: OnImages | None
) -> Inputs:
    inputs = read_inputs(path, settings, progress)
    index = {name: row for row, name in enumerate(inputs.ids)}
    if len(index) != len(inputs.ids):
        twice, _ = Counter(inputs.ids).most_common(1)[0]
        raise UserError(f"{path}: id {shown(twice)} appears twice, so inputs cannot be joined by id; rename one")
    if path.is_dir():  # images may be known without their ending, where that is clear
        stems = [os.path.splitext(name)[0] for name in inputs.ids]
        times = Counter(stems)
        index = {stem: row for row, stem in enumerate(stems) if times[stem] == 1} | index
    rows = []
    bad: dict[int, str] = {}
    for at, name in enumerate(names):
        if name not in index:
            bad[at] = f"{place(at)}: {path} has no inputs for id {shown(name)}"
            if not settings.skip_bad:
                raise UserError(bad[at] + OR_SKIP)
            if len(bad) == len(names):
                raise UserError(bad[0])
        rows.append(index.get(name, 0))  # a bad one is left out in the end
    chosen = np.array(rows, dtype=np.int64)
    labels = None if inputs.labels is None else tuple(inputs.labels[row] for row in rows)
    return Inputs(inputs.x[chosen], tuple(names), labels, inputs.x_test, inputs.labels_test, inputs.columns, bad)
