"""What a format is: which sources are its own, and how they are read: whole to train on, in chunks to predict."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from crosel.data.dataset import Array, Dataset, as_inputs
from crosel.data.embeddings import Embedder, Encoder
from crosel.data.images import ImageSource, embed_arrays, read_images
from crosel.data.settings import DataSettings, OnImages
from crosel.data.votes import Inputs
from crosel.errors import UserError
from crosel.utils.text import counted, did_you_mean, quoted

logger = logging.getLogger(__name__)
_ROWS = 1024  # examples held at once
_BYTES = 1 << 26  # and how much they may take, where examples are large


@dataclass(frozen=True)
class Chunk:
    """Some examples in the form that networks take: uint8 [m, c, h, w] or float32 [m, d]."""

    ids: Sequence[str]
    x: Array


@dataclass(frozen=True)
class InputSpec:
    """What one example looks like to a run that was trained before."""

    shape: tuple[int, ...]
    columns: Sequence[str] | None = None  # names of the features, where they are known
    image_root: Path | None = None  # where the run's own image paths start from, unless beside their list
    resize: Literal["crop", "stretch"] = "crop"  # as the run's own images
    encoder: Encoder | None = None  # of a run that was trained on the embeddings of its images

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3 or (self.encoder is not None and self.encoder.takes == "images")

    @property
    def takes_texts(self) -> bool:
        return self.encoder is not None and self.encoder.takes == "texts"

    @property
    def rows(self) -> int:
        """Examples in a chunk."""
        return max(1, min(_ROWS, _BYTES // (math.prod(self.shape) * (1 if len(self.shape) == 3 else 4))))

    def image_settings(self, path: Path) -> DataSettings:
        """Settings that decode images to the run's own size and mode."""
        if self.takes_texts:
            raise UserError(f"{path}: the run was trained on texts, not on images; give csv, jsonl or parquet")
        if not self.is_image:
            raise UserError(
                f"{path}: the run was trained on {self.shape[0]} features per example, not on images; "
                "give csv, jsonl or npz"
            )
        if self.encoder is not None:
            return DataSettings(cache=False).embedding(Embedder(self.encoder))
        channels, height, width = self.shape
        if height != width or channels not in (1, 3):
            raise UserError(
                f"{path}: the run was trained on images of shape {self.shape}; only square images with 1 or 3 channels "
                "can be read from image files. Give an npz file with x"
            )
        mode: Literal["RGB", "L"] = "RGB" if channels == 3 else "L"
        return DataSettings(image_size=height, image_mode=mode, resize=self.resize, cache=False)

    def check_shape(self, shape: tuple[int, ...], path: Path) -> None:
        if shape != self.shape and not (self.encoder is not None and len(shape) == 3):
            raise UserError(
                f"{path}: examples of shape {shape}, but the run was trained on {self.shape}; give such examples"
            )

    def inputs(self, x: Array, place: str, first_row: int = 0) -> Array:
        """Images or features in the form that the run's networks take."""
        out = as_inputs(x, place, first_row)
        return out if self.encoder is None or out.ndim == 2 else embed_arrays(out, Embedder(self.encoder), None)

    def check_width(self, width: int, place: str) -> None:
        if self.is_image:
            raise UserError(
                f"{place}: there is no column 'path', and the run was trained on images; list them in this column"
            )
        if self.takes_texts and width != self.shape[0]:
            raise UserError(f"{place}: there is no column 'text', and the run was trained on texts; give them there")
        if width == 0:
            raise UserError(f"{place}: there are no columns of features; give a file with the columns of training")
        if width != self.shape[0]:
            raise UserError(
                f"{place}: {counted(width, 'feature')}, but the run was trained on {self.shape[0]}; give the same ones"
            )

    def order(self, there: Sequence[str], place: str) -> list[int]:
        """Where the features that the run was trained on are, by name; where all have other names, they are taken in
        their order, and a warning says so."""
        if self.columns is None:
            return list(range(len(there)))
        wanted, found = self.columns, there
        if not set(wanted) & set(found):  # all of them in capitals, say: still the same names
            wanted, found = _without_case(wanted), _without_case(found)
        if not set(wanted) & set(found):
            if len(wanted) == len(there):  # else one side is a list without names, or what follows refuses it
                logger.warning(
                    f"{place}: no column has a name that the run was trained on; columns are used in order, "
                    f"{quoted(there[0])} for {quoted(self.columns[0])} and so on"
                )
            return list(range(len(there)))
        at = {key: column for column, key in enumerate(found)}
        missing = [name for name, key in zip(self.columns, wanted, strict=True) if key not in at]
        if missing:
            near = did_you_mean(missing[0], [name for name, key in zip(there, found, strict=True) if key not in wanted])
            what = f"there is no column {quoted(missing[0])}, which the run was trained on{near}; add it"
            raise UserError(f"{place}: {what}")
        return [at[key] for key in wanted]


def _without_case(names: Sequence[str]) -> Sequence[str]:
    """The names in lower case, unless two would be the same."""
    lower = [name.casefold() for name in names]
    return lower if len(set(lower)) == len(lower) else names


class Format:
    """One kind of source. A format defines those of the four `read…` methods that make sense for it."""

    title: str = ""  # as errors list it
    suffixes: tuple[str, ...] = ()
    published: Mapping[str, tuple[str, ...]] = {}  # published datasets by name: their files below --data

    def recognises(self, path: Path) -> bool:
        """Whether a path that exists is of this format; its name, or a look into a folder, must be enough to tell."""
        return path.suffix.lower() in self.suffixes and not path.is_dir()

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        """Everything, to train on or to measure accuracy with. Readers end with `make_dataset`, which checks it."""
        raise NotImplementedError

    def read_published(self, name: str, paths: Sequence[Path]) -> Dataset:
        """One of the `published` datasets; its files are there."""
        raise NotImplementedError

    def read_inputs(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Inputs:
        """Examples with their ids, for votes and scores that are about them (`data.inputs`)."""
        raise NotImplementedError

    def read_chunks(self, path: Path, spec: InputSpec) -> Iterator[Chunk]:
        """Examples to predict, chunk by chunk: a long file costs no memory. They must look as `spec` says."""
        raise NotImplementedError

    def settings_to_evaluate(self, path: Path, settings: DataSettings, spec: InputSpec) -> DataSettings:
        """The run's settings, changed where its own data may have been annotated in a way that these need not be."""
        return settings

    def can(self, task: str) -> bool:
        """Whether the format defines this method."""
        return getattr(type(self), task) is not getattr(Format, task)


def image_chunks(files: Iterator[tuple[str, ImageSource, str]], spec: InputSpec, beside: Path) -> Iterator[Chunk]:
    """Images in files: (id, file, what to call its place in an error) of each."""
    settings = spec.image_settings(beside)
    while batch := list(islice(files, spec.rows)):
        pixels = read_images([file for _, file, _ in batch], settings, [place for _, _, place in batch], beside)
        yield Chunk([name for name, _, _ in batch], as_inputs(pixels, str(beside)))


def array_chunks(x: Array, spec: InputSpec, path: Path) -> Iterator[Chunk]:
    """Features [n, d] or images [n, h, w, c] that are in memory, known by their numbers."""
    spec.check_shape(x.shape[1:] if x.ndim == 2 else (x.shape[3], *x.shape[1:3]), path)
    for start in range(0, len(x), spec.rows):
        part = x[start : start + spec.rows]
        yield Chunk([str(start + row) for row in range(len(part))], spec.inputs(part, str(path), first_row=start))
