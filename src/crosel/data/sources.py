"""From a SOURCE on the command line to a Dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crosel.data.dataset import Dataset
from crosel.errors import UserError, did_you_mean

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def _digits(data_dir: Path | None) -> Dataset:
    from crosel.data.digits import read_digits

    return read_digits()


def _cifar(name: str) -> Callable[[Path | None], Dataset]:
    def read(data_dir: Path | None) -> Dataset:
        from crosel.data import cifar

        folder = (data_dir or Path()) / FOLDERS[name]
        if not folder.is_dir():
            raise UserError(f"{folder} is not there; say where the published files are: --data DIR")
        return (cifar.read_cifar10 if name == "cifar10" else cifar.read_cifar100)(folder)

    return read


NAMED: dict[str, Callable[[Path | None], Dataset]] = {
    "digits": _digits,
    "cifar10": _cifar("cifar10"),
    "cifar100": _cifar("cifar100"),
}


def load(source: str, data_dir: Path | None = None) -> Dataset:
    """Read a named dataset, or a file by its ending."""
    if source in NAMED:
        return NAMED[source](data_dir)
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"source '{source}' is neither a file nor one of {', '.join(NAMED)}{did_you_mean(source, NAMED)}"
        )
    if path.suffix == ".npz":
        from crosel.data.npz import read_npz

        return read_npz(path)
    raise UserError(f"{path}: cannot read '{path.suffix or 'a folder'}'; give an npz file or one of {', '.join(NAMED)}")
