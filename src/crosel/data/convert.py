"""Any source -> one native file with candidate sets, and a summary of them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.candidates import draw_candidates, with_weights
from crosel.data.dataset import Dataset
from crosel.data.formats.npz import write_npz
from crosel.data.settings import DataSettings, OnImages
from crosel.data.sources import load
from crosel.data.vocabulary import misspelt
from crosel.data.votes import NOT_READ
from crosel.errors import UserError
from crosel.utils.files import new_folder, refuse_overwrite
from crosel.utils.text import counted, some_of


def convert(
    source: str,
    out: Path | None,
    rule: str | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
    settings: DataSettings | None = None,
    progress: OnImages | None = None,
) -> Summary:
    """Read a source, make its candidate sets by the rule, write it to `out` (npz), and return a summary of the sets.

    Without `out`, votes, scores and tasks may still lack their inputs.
    """
    if out is None:
        settings = (settings or DataSettings()).for_sets_alone()
        data = draw_candidates(load(source, data_dir, settings, progress), rule, seed)
        return replace(summarise(data), shape=()) if data.columns == NOT_READ else summarise(data)
    if out.suffix.lower() != ".npz":
        raise UserError(f"{out}: the output is an .npz file; use this ending")
    refuse_overwrite(out, source, settings.inputs if settings else None)
    data = draw_candidates(with_weights(load(source, data_dir, settings, progress), rule), rule, seed)
    summary = summarise(data)
    with new_folder(out.parent):
        write_npz(data, out)
    return summary


# --- what candidate sets look like, for people to read before they train on them ------------------------------------

_CELLS = 1 << 24  # looked at in one go: 16 MiB
_NAMED = 10  # names that a line lists before it counts


@dataclass(frozen=True)
class Summary:
    n: int
    k: int
    n_test: int
    shape: tuple[int, ...]
    mean_size: float
    sizes: dict[int, int]  # size -> how many sets have it
    singletons: int
    full: int
    never: tuple[str, ...]  # labels in no set
    together: tuple[tuple[str, ...], ...]  # labels that are in the same sets, always: nothing tells them apart
    missing: int | None  # sets without the true label; None: truth is not known
    misspelt: tuple[str, ...] = ()  # what may be
    in_both: int = 0  # test examples whose inputs are in the training set, too
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        what = describe_shape(self.shape)
        tests = f", {self.n_test:,} to test" * bool(self.n_test)
        out = [f"{counted(self.n, 'example')} ({what}), {counted(self.k, 'class')}{tests}"]
        out.append(f"candidates: {self.mean_size:.2f} on average; {_histogram(self.sizes)}")
        out.append(
            f"sets with one label: {_share(self.singletons, self.n)}; with all labels: {_share(self.full, self.n)}"
        )
        out += self.remarks()
        if self.missing is not None:
            out.append(f"sets without the true label: {_share(self.missing, self.n)}")
        return [*out, *self.notes]

    def remarks(self) -> list[str]:
        """What no method can learn from these sets; also said when a run begins."""
        out = ["there is only one class, so there is nothing to learn"] if self.k == 1 else []
        if self.never:
            out.append(f"labels in no set: {some_of(self.never, _NAMED)}")
        for group in self.together[:_NAMED]:
            out.append(f"always in the same sets, so nothing tells them apart: {some_of(group, _NAMED)}")
        if len(self.together) > _NAMED:
            out.append(f"… and {len(self.together) - _NAMED} more such groups")
        if self.in_both:
            out.append(
                f"test examples that are in the training set, too: {_share(self.in_both, self.n_test)}; "
                "accuracy on them says little"
            )
        return [*out, *self.misspelt]


def describe_shape(shape: tuple[int, ...]) -> str:
    """What an example is, for people."""
    if not shape:
        return "inputs not read"
    return counted(shape[0], "feature") if len(shape) == 1 else "images of {1} x {2} x {0}".format(*shape)


def _share(count: int, n: int) -> str:
    return f"{count:,} ({100 * count / n:.1f} %)"


def _histogram(sizes: dict[int, int]) -> str:
    """`1: 20, 2: 35`, or for many sizes their range."""
    if len(sizes) <= 12:
        return "sizes " + ", ".join(f"{size}: {count:,}" for size, count in sizes.items())
    return f"sizes from {min(sizes)} to {max(sizes)}, most often {max(sizes, key=lambda s: sizes[s])}"


def summarise(data: Dataset) -> Summary:
    """Go through the sets in blocks of rows: memory does not grow with their number."""
    sets = data.candidates
    assert sets is not None
    n, k = sets.shape
    rows = max(8, _CELLS // k // 8 * 8)  # whole bytes of packed bits in every block
    sizes, seen = np.zeros(k + 1, dtype=np.int64), np.zeros(k, dtype=np.int64)
    columns = [hashlib.blake2b(digest_size=16) for _ in range(k)]
    missing = 0
    for start in range(0, n, rows):
        block = sets[start : start + rows]
        sizes += np.bincount(block.sum(axis=1), minlength=k + 1)
        seen += block.sum(axis=0)
        for column, bits in zip(columns, np.ascontiguousarray(np.packbits(block, axis=0).T), strict=True):
            column.update(bits)
        if data.y is not None:
            missing += int((~block[np.arange(len(block)), data.y[start : start + rows]]).sum())
    groups: dict[bytes, list[str]] = {}
    for name, column, there in zip(data.classes, columns, seen, strict=True):
        if there:
            groups.setdefault(column.digest(), []).append(name)
    return Summary(
        n=n, k=k, n_test=0 if data.x_test is None else len(data.x_test), shape=data.shape,
        mean_size=float((sizes * np.arange(k + 1)).sum() / n),
        sizes={size: int(count) for size, count in enumerate(sizes) if count},
        singletons=int(sizes[1]), full=int(sizes[k]),
        never=tuple(name for name, there in zip(data.classes, seen, strict=True) if not there),
        together=tuple(tuple(names) for names in groups.values() if len(names) > 1),
        missing=missing if data.y is not None else None,
        misspelt=tuple(misspelt(dict(zip(data.classes, seen.tolist(), strict=True)))),
        in_both=_in_both(data), notes=data.notes,
    )  # fmt: skip


def _in_both(data: Dataset) -> int:
    """Test examples whose inputs, to the bit, are in the training set. Images that stay on disk are not compared."""
    if not isinstance(data.x, np.ndarray) or not isinstance(data.x_test, np.ndarray):
        return 0
    test = [hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest() for row in data.x_test]
    wanted = set(test)
    train = (hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest() for row in data.x)
    found = {digest for digest in train if digest in wanted}
    return sum(digest in found for digest in test)
