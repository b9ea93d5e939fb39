"""What a user may say about how data are read; `--set data.image_size=64` on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from pydantic import Field, PrivateAttr

from crosel.data.embeddings import Embedder
from crosel.utils.settings import Settings

OnImages = Callable[[int, int], None]  # called with how many images are decoded, of how many

MAX_SIDE = 2048  # of images that are decoded from files; arrays may have larger ones

TableKind = Literal["auto", "table", "votes", "wide-votes", "scores"]


class DataSettings(Settings):
    """How files become a dataset. For digits, cifar10, cifar100 and svhn, only the settings for test sets apply."""

    image_size: int = Field(
        32, ge=1, le=MAX_SIDE, description="height and width to which images are resized, in pixels"
    )
    resize: Literal["crop", "stretch"] = Field(
        "crop", description="image files that are not square: cut out the middle, or stretch all of it"
    )
    image_mode: Literal["RGB", "L"] = Field("RGB", description="RGB for colour, L for greyscale")
    image_root: str | None = Field(
        None, description="folder that image paths are relative to; default: the folder of the file"
    )
    inputs: str | None = Field(None, description="file or folder with the inputs of votes or scores, joined by id")
    classes: tuple[str, ...] | None = Field(
        None, description="names of the classes, in order; default: those found in the data"
    )
    format: TableKind = Field("auto", description="what a csv file contains, if its header does not show it")
    annotators: tuple[str, ...] | None = Field(
        None,
        description="columns of a csv file with votes, one for each annotator; default: recognised by name or content",
    )
    separator: str = Field("|", min_length=1, max_length=8, description="separator between the labels in a csv cell")
    choices: str | None = Field(
        None, description="Label Studio: name of the choices tag with the labels, if there are several"
    )
    skip_bad: bool = Field(
        False,
        description="leave out and count rows that cannot be used, instead of stopping: an unreadable image, a missing "
        "input, an empty set, a repeated path, id or vote",
    )
    own_test: bool = Field(
        True, description="use the data's own test set; false: do not, for example while you choose settings"
    )
    test_share: float = Field(
        0, ge=0, lt=1, description="share of the examples to hold out for testing, for data without a test set"
    )
    split_seed: int = Field(0, ge=0, lt=2**63, description="seed that picks the held-out examples")
    cache: bool = Field(True, description="keep decoded images in .crosel-cache beside the file")

    # What turns images or texts into rows of numbers: not a setting, but it decides what readers make of a file.
    _embedder: Embedder | None = PrivateAttr(None)
    _sets_alone: bool = PrivateAttr(False)

    @property
    def embedder(self) -> Embedder | None:
        return self._embedder

    @property
    def takes_texts(self) -> bool:
        """Whether inputs are texts, for an embedder."""
        return self._embedder is not None and self._embedder.takes_texts

    def embedding(self, embedder: Embedder | None) -> DataSettings:
        """The same settings for readers that embed what they read."""
        copy = self.model_copy()
        copy._embedder = embedder
        return copy

    @property
    def sets_alone(self) -> bool:
        """Whether votes, scores and tasks are read without what they are about."""
        return self._sets_alone

    def for_sets_alone(self) -> DataSettings:
        copy = self.model_copy()
        copy._sets_alone = True
        return copy

    def with_full_paths(self) -> DataSettings:
        """Name files so that a run can be resumed from any working folder."""
        paths = {"image_root": self.image_root, "inputs": self.inputs}
        return self.model_copy(update={name: os.path.abspath(path) for name, path in paths.items() if path})
