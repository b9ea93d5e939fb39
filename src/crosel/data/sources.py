"""From a SOURCE on the command line to a Dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crosel.data.dataset import Dataset, hold_out
from crosel.data.settings import DataSettings, OnImages
from crosel.errors import UserError, did_you_mean, tell
from crosel.utils.limits import check_plain, one_line, spoils_lines

# What is published under a name: a folder, or files.
_PUBLISHED = {
    "cifar10": ("cifar-10-batches-py",), "cifar100": ("cifar-100-python",), "cifar100-coarse": ("cifar-100-python",),
    "svhn": ("train_32x32.mat", "test_32x32.mat"),
}  # fmt: skip
NAMED = ("digits", *_PUBLISHED)
_ENDINGS = ".csv, .tsv, .jsonl, .json (Label Studio), .npz, .mat or a folder for each class"


def _published(name: str, data_dir: Path | None) -> list[Path]:
    return [(data_dir or Path()) / part for part in _PUBLISHED.get(name, ())]


def locate(source: str, data_dir: Path | None) -> str:
    """Where a source is: a file that is not there as named may lie in the folder that holds the data.

    A run knows its source by the full path. If that has moved, its name alone is looked for.
    """
    if data_dir is None or source in NAMED or "\0" in source or Path(source).exists():
        return source
    there = data_dir / (Path(source).name if Path(source).is_absolute() else source)
    return str(there) if there.exists() else source


def check_there(source: str, data_dir: Path | None) -> None:
    """Refuse a source that is not there, in one line; nothing of it is read."""
    if source in NAMED:
        for path in _published(source, data_dir):
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
        known = f"{', '.join(NAMED)}{did_you_mean(source, NAMED)}"
        raise UserError(f"source '{source}' is neither a file{searched} nor one of {known}")


def _near_file(path: Path) -> str:
    """Return ` (did you mean 'x'?)` for the file beside this one with the nearest name, or nothing."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.is_file() and not spoils_lines(file.name)]
    except OSError:
        return ""
    near = [name for name in names if did_you_mean(path.stem, [Path(name).stem])]  # endings make all names alike
    return did_you_mean(str(path), [str(path.with_name(name)) for name in near])


def load(
    source: str,
    data_dir: Path | None = None,
    settings: DataSettings | None = None,
    progress: OnImages | None = None,
) -> Dataset:
    """Read a named dataset, a file or a folder. Bad input raises UserError, never anything else."""
    settings = settings or DataSettings()
    named, source = source, locate(source, data_dir)
    if source != named and Path(named).is_absolute():  # another file may have the same name
        tell(f"{named} is not there; {source} is read instead")
    try:
        check_there(source, data_dir)
        data = _read_named(source, data_dir) if source in NAMED else _read(source, settings, progress)
        if not settings.own_test:
            data = replace(data, x_test=None, y_test=None)
        return hold_out(data, settings.test_share, settings.split_seed) if settings.test_share else data
    except OSError as error:
        what = error.strerror or one_line(error)
        raise UserError(f"{error.filename or source}: {what[:1].lower()}{what[1:]}") from None
    except MemoryError:
        raise UserError(f"{source}: too large for this machine's memory") from None


def _read_named(name: str, data_dir: Path | None) -> Dataset:
    if name == "digits":
        from crosel.data.digits import read_digits

        return read_digits()
    paths = _published(name, data_dir)
    if name == "svhn":
        from crosel.data.matfile import read_svhn

        return read_svhn(*paths)
    from crosel.data import cifar

    if name == "cifar10":
        return cifar.read_cifar10(paths[0])
    return cifar.read_cifar100(paths[0], coarse=name == "cifar100-coarse")


def _read(source: str, settings: DataSettings, progress: OnImages | None) -> Dataset:
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, settings, progress)
    check_plain(path)
    suffix = path.suffix.lower()
    if suffix == ".npz":
        from crosel.data.npz import read_npz

        return read_npz(path, settings, progress)
    if suffix in (".csv", ".tsv"):
        from crosel.data.csvfile import read_csv

        return read_csv(path, settings, progress)
    if suffix in (".jsonl", ".ndjson"):
        from crosel.data.jsonl import read_jsonl

        return read_jsonl(path, settings, progress)
    if suffix == ".json":
        from crosel.data.labelstudio import read_label_studio

        return read_label_studio(path, settings, progress)
    if suffix == ".mat":
        from crosel.data.matfile import read_mat

        return read_mat(path)
    if suffix == ".npy":
        raise UserError(
            f"{path}: an array without a name; save it with its inputs as npz: np.savez('mine.npz', x=x, scores=s)"
        )
    raise UserError(f"{path}: cannot read '{path.suffix}'; give {_ENDINGS}, or one of {', '.join(NAMED)}")


def _read_folder(path: Path, settings: DataSettings, progress: OnImages | None) -> Dataset:
    from crosel.data import cifar
    from crosel.data.folder import read_folder
    from crosel.data.inputs import refuse_run_folder

    if (path / "data_batch_1").is_file():
        return cifar.read_cifar10(path)
    if (path / "train").is_file() and (path / "meta").is_file():
        return cifar.read_cifar100(path)
    refuse_run_folder(path, f"to continue it: crosel train --resume --out {path}")
    return read_folder(path, settings, progress)
