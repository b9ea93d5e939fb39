"""From a SOURCE on the command line to its examples: whole (train, eval), in chunks (predict), or inputs alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from crosel.data.dataset import Dataset, hold_out
from crosel.data.embeddings import ChooseEncoder, Embedder, Encoder
from crosel.data.formats import Chunk, Format, InputSpec, find_format, published_formats
from crosel.data.images import ImageFiles, embed_arrays
from crosel.data.settings import DataSettings, OnImages
from crosel.data.votes import Inputs
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, has_control_characters, one_line

logger = logging.getLogger(__name__)


def load(
    source: str,
    data_dir: Path | None = None,
    settings: DataSettings | None = None,
    progress: OnImages | None = None,
    encoder: Encoder | ChooseEncoder | None = None,
) -> Dataset:
    """Read a named dataset, a file or a folder. Bad input raises UserError, never anything else.

    With an `encoder` the inputs are its embeddings of the images or texts; a function may choose it by the image files.
    """
    embedder = Embedder(encoder) if encoder is not None else None
    settings = (settings or DataSettings()).embedding(embedder)
    named, source = source, locate(source, data_dir)
    if source != named and Path(named).is_absolute():  # another file may have the same name
        logger.warning(f"{named} is not there; {source} is read instead")
    try:
        check_there(source, data_dir)
        if source in published_formats():
            data = published_formats()[source].read_published(source, _published_files(source, data_dir))
        else:
            path = Path(source)
            data = _format_of(path).read(path, settings, progress)
        if embedder is not None and (embedder.used or not callable(encoder)):
            data = _embedded(data, embedder, source, settings, progress)
        if not settings.own_test:
            data = replace(data, x_test=None, y_test=None)
        return hold_out(data, settings.test_share, settings.split_seed) if settings.test_share else data
    except OSError as error:
        what = error.strerror or one_line(error)
        raise UserError(f"{error.filename or source}: {what[:1].lower()}{what[1:]}") from None
    except MemoryError:
        raise UserError(f"{source}: too large for this machine's memory") from None


def _embedded(
    data: Dataset, embedder: Embedder, source: str, settings: DataSettings, progress: OnImages | None
) -> Dataset:
    """The data with embeddings as inputs, where the reader has not made them of files already."""
    encoder = embedder.encoder
    if not embedder.used:
        if not data.is_image or encoder.takes != "images":
            found, other = ("images", "auto") if data.is_image else ("rows of numbers", "mlp")
            what = f"network '{encoder.name}' takes {encoder.takes}, but there are {found}"
            raise UserError(f"{source}: {what}; use another network, such as --set network.name={other}")
        beside = Path(source) if settings.cache and source not in published_formats() else None
        x = embed_arrays(data.x, embedder, beside, progress)
        test = None if data.x_test is None else embed_arrays(data.x_test, embedder, beside, progress)
        return replace(
            data, x=x, x_test=test, mean=None, std=None, originals=data.x, embedded_by=(encoder.name, encoder.digest)
        )
    origins = embedder.origins(np.asarray(data.x))
    shown = ImageFiles(origins) if encoder.takes == "images" else np.array(origins, dtype=object)
    return replace(data, originals=shown, embedded_by=(encoder.name, encoder.digest))


def settings_to_evaluate(source: str, data_dir: Path | None, settings: DataSettings, spec: InputSpec) -> DataSettings:
    """The settings of a run, adapted to another source with true labels that it is to be evaluated on. Errors in the
    source are left to `load`."""
    path = Path(locate(source, data_dir))
    if source in published_formats() or "\0" in source or not path.exists():
        return settings
    try:
        return _format_of(path).settings_to_evaluate(path, settings, spec)
    except OSError:
        return settings


def open_inputs(path: Path, spec: InputSpec) -> Iterator[Chunk]:
    """Read what is to be predicted, chunk by chunk; anything wrong with it is a UserError."""
    try:
        yield from find_format(path, "read_chunks").read_chunks(path, spec)
    except OSError as error:  # must not be taken for trouble with the file that is written
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None


def read_inputs(path: Path, settings: DataSettings | None = None, progress: OnImages | None = None) -> Inputs:
    """Read examples that votes or scores are about; labels are optional."""
    return find_format(path, "read_inputs", "inputs from ").read_inputs(path, settings or DataSettings(), progress)


def _format_of(path: Path) -> Format:
    return find_format(path, "read", or_else=f", or one of {', '.join(published_formats())}")


def locate(source: str, data_dir: Path | None) -> str:
    """Where a source is: a file that is not there as named may lie in the folder that holds the data.

    A run knows its source by the full path. If that has moved, its name alone is looked for.
    """
    if data_dir is None or source in published_formats() or "\0" in source or Path(source).exists():
        return source
    there = data_dir / (Path(source).name if Path(source).is_absolute() else source)
    return str(there) if there.exists() else source


def _published_files(name: str, data_dir: Path | None) -> list[Path]:
    return [(data_dir or Path()) / part for part in published_formats()[name].published[name]]


def check_there(source: str, data_dir: Path | None) -> None:
    """Refuse a source that is not there, in one line; nothing of it is read."""
    if source in published_formats():
        for path in _published_files(source, data_dir):
            if not (path.is_file() if path.suffix else path.is_dir()):
                raise UserError(
                    f"{path} does not exist; give the folder of the published files: --data DIR, "
                    f"or download them first: crosel data get {source.removesuffix('-coarse')} --to DIR"
                )
        return
    source = locate(source, data_dir)
    path = Path(source)
    if "\0" not in source and path.is_absolute() and not path.exists():
        near = _near_file(path)
        raise UserError(f"{source}: no such file or folder{near}; if it has moved, give its folder: --data DIR")
    if not source.strip() or "\0" in source or not path.exists():  # Path("") is the folder we are in
        if "\0" not in source and path.suffix:
            near = _near_file(path) or (_near_file(data_dir / path) if data_dir else "")
            elsewhere = f", also not in {data_dir}{near}" if data_dir else f"{near}; if it lies elsewhere: --data DIR"
            raise UserError(f"source '{source}': no such file{elsewhere}")
        searched = f" (also looked for in {data_dir})" if data_dir else ""
        known = f"{', '.join(published_formats())}{did_you_mean(source, published_formats())}"
        raise UserError(f"source '{source}' is neither a file{searched} nor one of {known}")


def _near_file(path: Path) -> str:
    """Return ` (did you mean 'x'?)` for the file beside this one with the nearest name, or nothing."""
    try:
        names = [
            file.name for file in path.parent.iterdir() if file.is_file() and not has_control_characters(file.name)
        ]
    except OSError:
        return ""
    near = [name for name in names if did_you_mean(path.stem, [Path(name).stem])]  # endings make all names alike
    return did_you_mean(str(path), [str(path.with_name(name)) for name in near])
