"""The formats that crosel reads, one file each. The first that recognises a source reads it."""

from __future__ import annotations

from pathlib import Path

from crosel.data.formats.arrow import Arrow, SavedDataset
from crosel.data.formats.base import Chunk, Format, InputSpec, array_chunks
from crosel.data.formats.cifar import Cifar
from crosel.data.formats.csv import Csv
from crosel.data.formats.digits import Digits
from crosel.data.formats.image_folder import ImageFile, ImageFolder
from crosel.data.formats.jsonl import Jsonl
from crosel.data.formats.label_studio import LabelStudio
from crosel.data.formats.mat import Mat
from crosel.data.formats.npz import Npz
from crosel.errors import UserError
from crosel.utils.reading import check_plain

__all__ = ["FORMATS", "Chunk", "Format", "InputSpec", "array_chunks", "find_format", "published_formats"]

FORMATS: list[Format] = [
    Digits(), Cifar(), ImageFile(), SavedDataset(), ImageFolder(), Csv(), Jsonl(), Arrow(), Npz(), Mat(), LabelStudio()
]  # fmt: skip


def published_formats() -> dict[str, Format]:
    """The published datasets by name, each with the format that reads it."""
    return {name: format for format in FORMATS for name in format.published}


def find_format(path: Path, task: str, what: str = "", or_else: str = "") -> Format:
    """The format of a file or folder, which must be able to do this: `read`, `read_inputs` or `read_chunks`."""
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path}: no such file")
        check_plain(path)
    able = [format for format in FORMATS if format.can(task)]
    for format in able:
        if format.recognises(path):
            return format
    *titles, last = [format.title for format in able if format.title]
    raise UserError(f"{path}: cannot read {what}'{path.suffix}'; give {', '.join(titles)} or {last}{or_else}")
