"""Checkpoints: one safetensors file each, whose name carries the hash of its content.

The file holds every tensor of the run and, as JSON in its header, everything else. It is written to a temporary
name, flushed and renamed. A file that does not match the hash in its name is damaged, wherever the damage is, and
the one before it is used.

`AsyncWriter` writes while training goes on: hashing and writing two WRN-34-10 with their momentum takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from crosel.errors import UserError
from crosel.training.callbacks import check_row
from crosel.utils.files import atomic_write, check_own_folder, disk_errors
from crosel.utils.reading import open_file
from crosel.utils.system import check_bytes

_STATE: dict[str, Any] = {
    "epoch": int, "step": int, "rows": list, "seconds": (int, float), "device": str, "data": str, "candidates": str,
}  # fmt: skip
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class LoadResult:
    """The newest good checkpoint, if any, and the damaged files that were passed over."""

    checkpoint: Checkpoint | None
    damaged: list[Path]


def save(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int) -> Path:
    """Write a state, which says itself after how many epochs and steps of the next; keep the newest `keep` files."""
    return write(folder, *_snapshot(tensors, state), keep)


def _snapshot(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[str, dict[str, Tensor], str]:
    """All as it is now, in the host's memory: how far the run has come, the tensors, and the state as JSON."""
    stage, plain = f"epoch-{state['epoch']:05d}-step-{state['step']:06d}", torch.contiguous_format
    copies = {name: t.detach().to("cpu", copy=True, memory_format=plain) for name, t in tensors.items()}
    return stage, copies, json.dumps(state)


def write(folder: Path, stage: str, tensors: dict[str, Tensor], state: str, keep: int) -> Path:
    content = safetensors.torch.save(tensors, metadata={"state": state})
    path = folder / f"{stage}-{_content_digest(content)}.safetensors"
    atomic_write(path, content)
    prune(folder, keep)
    return path


class AsyncWriter:
    """Saves in a thread, one checkpoint after the other. Copies are made before `save` returns.

    A disk error is raised by the next `save` or by `wait`, whichever comes first. A `wait` that a second Ctrl-C ends
    does not count: the next one waits again.
    """

    def __init__(self) -> None:
        self._written: Event | None = None  # of what is under way; a `join` must not be interrupted before Python 3.13
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int) -> None:
        self.wait()  # never two copies in memory
        values = folder, *_snapshot(tensors, state), keep
        self._written = Event()
        # A thread and no pool of them: a pool takes no more work once the main thread has ended, and a run may be in
        # another. A daemon, so that a disk that hangs does not keep a process alive that has been told to end.
        self._thread = Thread(target=self._write, args=(self._written, *values), name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there may be no more threads: then it is written here
            self._thread = None
            self._write(self._written, *values)

    def _write(self, written: Event, *values: Any) -> None:
        try:
            write(*values)
        except BaseException as error:
            self._error = error
        finally:
            written.set()

    def wait(self) -> None:
        """Return when all that was given is on the disk."""
        if self._written is not None:
            self._written.wait()
        if self._thread is not None:
            self._thread.join()  # it only lets go of its tensors by now; a process that ends meanwhile would abort
            self._thread = None
        self._written, error, self._error = None, self._error, None
        if error is not None:
            raise error


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    with disk_errors(folder):
        for _, old in _newest_first(folder)[keep:]:
            old.unlink(missing_ok=True)


def load_newest(folder: Path) -> LoadResult:
    """Return the newest checkpoint whose content matches its name. Changes nothing, so a run may be under way."""
    while True:
        damaged: list[Path] = []
        vanished = False
        for digest, path in _newest_first(folder):
            try:
                content = _read_checkpoint(path)
                if _content_digest(content) == digest:
                    return LoadResult(_parse(content), damaged)
                damaged.append(path)
            except FileNotFoundError:  # the run that is under way has replaced it by a newer one since we looked
                vanished = True
            except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError):
                damaged.append(path)
        if not vanished:
            return LoadResult(None, damaged)


def _content_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _newest_first(folder: Path) -> list[tuple[str, Path]]:
    """(digest, path) of every checkpoint, newest first."""
    found = []
    check_own_folder(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            try:
                age = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            found.append(((int(match[1]), int(match[2]), age), match[3], path))
    return [(digest, path) for _, digest, path in sorted(found, reverse=True)]


def _read_checkpoint(path: Path) -> bytes:
    """The content, unless it is no plain file or more than the memory holds: the folder may come from a stranger."""
    with open_file(path, links=False) as stream:
        size = os.fstat(stream.fileno()).st_size
        check_bytes(2 * size, "its tensors", path)
        return stream.read(size)


def _parse(content: bytes) -> Checkpoint:
    header = int.from_bytes(content[:8], "little")
    state = json.loads(json.loads(content[8 : 8 + header])["__metadata__"]["state"])
    for name, kind in _STATE.items():
        if not isinstance(state[name], kind) or isinstance(state[name], bool):
            raise ValueError(f"{name} is not a {kind}")
    parts = state.get("parts", 1)
    if not isinstance(parts, int) or not 1 <= parts < 10**6:
        raise ValueError("its steps have no number of parts")
    if not (0 <= state["epoch"] < 10**6 and 0 <= state["step"] < 10**12 and 0 <= state["seconds"] < 1e12):
        raise ValueError("its progress is inconsistent")
    for row in state["rows"]:
        check_row(row)
    tensors = safetensors.torch.load(content)
    if "generator" not in tensors:
        raise ValueError("it has no random state")
    for name, tensor in tensors.items():
        # Weights that are not finite are never saved; only what a method keeps beside them may be.
        if ".networks." in f".{name}" and not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite")
    return Checkpoint(tensors, state)


def check_compatible(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse saved tensors with other names, shapes or kinds than are wanted; the first that differs is named."""
    for name in (*wanted, *sorted(saved)):
        if name not in saved:
            raise mismatch(f"{name} is missing")
        if name not in wanted:
            raise mismatch(f"they have {name}, and the networks do not")
        was, now = list(saved[name].shape), list(wanted[name].shape)
        if was != now:
            raise mismatch(f"{name} has shape {was}, but {now} is needed")
        if saved[name].is_floating_point() != wanted[name].is_floating_point():  # torch would round them
            raise mismatch(f"{name} holds {saved[name].dtype}, but {wanted[name].dtype} is needed")


def mismatch(what: str) -> UserError:
    return UserError(
        f"the saved weights do not fit the networks: {what}; use the version of crosel, and of your own network or "
        "method, that they were trained with"
    )


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
