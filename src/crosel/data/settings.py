"""What a user may say about how data are read; `--set data.image_size=64` on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from crosel.settings import Settings

OnImages = Callable[[int, int], None]  # called with how many images are decoded, of how many

Format = Literal["auto", "table", "votes", "wide-votes", "scores"]


class DataSettings(Settings):
    """How files become a dataset. For digits, cifar10, cifar100 and svhn, only what is said of test sets matters."""

    image_size: int = Field(32, ge=1, le=2048, description="images are resized to this many pixels each way")
    image_mode: Literal["RGB", "L"] = Field("RGB", description="colour, or L for one channel of grey")
    image_root: str | None = Field(None, description="folder that image paths start from; default: the file's own")
    inputs: str | None = Field(None, description="file with the inputs of votes or scores, joined by id")
    classes: tuple[str, ...] | None = Field(None, description="names and order of the classes; default: those found")
    format: Format = Field("auto", description="what a csv file holds, where its header does not tell")
    annotators: tuple[str, ...] | None = Field(
        None,
        description="columns of a csv file that hold votes, one for each annotator; default: as the file tells",
    )
    separator: str = Field("|", min_length=1, max_length=8, description="what stands between the labels of a csv cell")
    choices: str | None = Field(None, description="Label Studio: name of the choices that are the labels, of several")
    skip_bad: bool = Field(
        False,
        description="leave out rows with an image that cannot be read, an empty set, or an earlier row's path or id",
    )
    own_test: bool = Field(True, description="false: leave the data's own test set alone, as when choosing settings")
    test_share: float = Field(0, ge=0, lt=1, description="share held out for testing, for data without a test set")
    split_seed: int = Field(0, ge=0, lt=2**63, description="decides which examples are held out")
    cache: bool = Field(True, description="keep decoded images in .crosel-cache beside the file")

    def with_full_paths(self) -> DataSettings:
        """Name files so that a run can be resumed from any working folder."""
        paths = {"image_root": self.image_root, "inputs": self.inputs}
        return self.model_copy(update={name: os.path.abspath(path) for name, path in paths.items() if path})
