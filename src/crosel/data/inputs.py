"""Inputs on their own: what votes, scores and tasks are about, joined to them by id."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import Array, Dataset, make_dataset, only_rows
from crosel.data.images import OR_SKIP, bad_inputs_note, read_usable_images
from crosel.data.settings import DataSettings, OnImages
from crosel.data.store import Examples
from crosel.data.table import image_path, image_root
from crosel.data.texts import NEEDS_BACKBONE, embed_texts
from crosel.data.vocabulary import Vocabulary
from crosel.errors import UserError
from crosel.utils.text import quoted

NOT_READ = ("inputs not read",)  # in place of the names of features


@dataclass(frozen=True)
class Inputs:
    """Examples in the form that `make_dataset` takes: features [n, d] or images [n, h, w, c]."""

    x: Examples
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    x_test: Examples | None = None
    labels_test: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None  # names of the features, where a table gives them
    bad: Mapping[int, str] = field(default_factory=dict)  # rows to be left out, and why


def join_inputs(
    names: Sequence[str],
    place: Callable[[int], str],
    path: Path,
    settings: DataSettings,
    progress: OnImages | None,
    features: Array | None = None,
    image_cells: Sequence[Any] | None = None,
    texts: Sequence[Any] | None = None,
    columns: tuple[str, ...] | None = None,  # names of the features
) -> Inputs:
    """Inputs for examples known by name: from `data.inputs`, else texts if the network takes them, else features
    beside, else the images they name."""
    if settings.sets_alone and features is None:
        return Inputs(np.zeros((len(names), 1), np.float32), tuple(names), columns=NOT_READ)
    if settings.inputs is not None:
        return _joined(names, place, Path(settings.inputs), settings, progress)
    if settings.takes_texts:
        if texts is None:
            raise UserError(f"{path}: there is no column 'text', and the network takes texts; add it")
        x, bad = embed_texts(texts, place, settings, path, progress)
        return Inputs(x, tuple(names), bad=bad)
    if features is not None:
        return Inputs(features, tuple(names), columns=columns)
    if texts is not None and image_cells is None:
        raise UserError(f"{path}: to learn from column 'text', choose a network for texts: {NEEDS_BACKBONE}")
    root = image_root(settings, path)
    paths = []
    for row, cell in enumerate(image_cells or names):
        try:
            paths.append(image_path(cell, root))
        except ValueError as error:
            raise UserError(f"{place(row)}: {error}") from None
    if paths and not paths[0].exists() and not settings.skip_bad:
        raise UserError(
            f"{place(0)}: {quoted(str(paths[0]))} is not an image file; if paths are relative to another folder: "
            "--set data.image_root=FOLDER; if these are ids, give the file with their inputs: --set data.inputs=FILE"
        )
    images, bad = read_usable_images(paths, settings, [place(r) for r in range(len(paths))], path, progress)
    return Inputs(images, tuple(names), bad=bad)


def annotated(
    inputs: Inputs,
    vocabulary: Vocabulary,
    path: Path,
    settings: DataSettings,
    truth: Sequence[str] | None,
    notes: Sequence[str],
    **annotation: Array,
) -> Dataset:
    """Inputs with their votes or scores, without the examples whose inputs cannot be used; a note counts these."""
    labels, labels_test = inputs.labels if truth is None else truth, inputs.labels_test
    place = f"{settings.inputs or path}: label"
    data = make_dataset(
        inputs.x, y=None if labels is None else vocabulary.indices(labels, place), x_test=inputs.x_test,
        y_test=None if labels_test is None else vocabulary.indices(labels_test, place), classes=vocabulary.classes,
        ids=inputs.ids, columns=inputs.columns, notes=(*notes, *bad_inputs_note(inputs.bad)), place=str(path),
        **annotation,
    )  # fmt: skip
    return only_rows(data, np.setdiff1d(np.arange(data.n), list(inputs.bad))) if inputs.bad else data


def _joined(
    names: Sequence[str], place: Callable[[int], str], path: Path, settings: DataSettings, progress: OnImages | None
) -> Inputs:
    from crosel.data.sources import read_inputs  # which knows the formats, and they this module

    inputs = read_inputs(path, settings, progress)
    index = {name: row for row, name in enumerate(inputs.ids)}
    if len(index) != len(inputs.ids):
        twice, _ = Counter(inputs.ids).most_common(1)[0]
        raise UserError(f"{path}: id {quoted(twice)} appears twice, so inputs cannot be joined by id; rename one")
    if path.is_dir():  # images may be known without their ending, where that is clear
        stems = [os.path.splitext(name)[0] for name in inputs.ids]
        times = Counter(stems)
        index = {stem: row for row, stem in enumerate(stems) if times[stem] == 1} | index
    rows = []
    bad: dict[int, str] = {}
    for at, name in enumerate(names):
        if name not in index:
            bad[at] = f"{place(at)}: {path} has no inputs for id {quoted(name)}"
            if not settings.skip_bad:
                raise UserError(bad[at] + OR_SKIP)
            if len(bad) == len(names):
                raise UserError(bad[0])
        rows.append(index.get(name, 0))  # a bad one is left out in the end
    chosen = np.array(rows, dtype=np.int64)
    labels = None if inputs.labels is None else tuple(inputs.labels[row] for row in rows)
    return Inputs(inputs.x[chosen], tuple(names), labels, inputs.x_test, inputs.labels_test, inputs.columns, bad)
