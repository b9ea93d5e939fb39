"""Checkpoints: one safetensors file each, whose name carries the hash of its content.

The file holds every tensor of the run and, as JSON in its header, everything else. It is written to a temporary
name, flushed and renamed. A file that does not match the hash in its name is damaged, wherever the damage is, and
the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from crosel.files import atomic_write, disk_errors

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint, if any, and the damaged files that were passed over."""

    checkpoint: Checkpoint | None
    damaged: list[Path]


def save(
    folder: Path, epoch: int, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int
) -> Path:
    """Write the state after `epoch` whole epochs and `step` steps of the next; keep the newest `keep` files."""
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    content = safetensors.torch.save(plain, metadata={"state": json.dumps(state)})
    path = folder / f"epoch-{epoch:05d}-step-{step:06d}-{_digest(content)}.safetensors"
    atomic_write(path, content)
    prune(folder, keep)
    return path


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    with disk_errors(folder):
        for _, old in _in_order(folder)[keep:]:
            old.unlink(missing_ok=True)


def load_newest(folder: Path) -> Found:
    """Return the newest checkpoint whose content matches its name. Changes nothing, so a run may be under way."""
    while True:
        damaged: list[Path] = []
        vanished = False
        for digest, path in _in_order(folder):
            try:
                content = path.read_bytes()
                if _digest(content) == digest:
                    return Found(_parse(content), damaged)
                damaged.append(path)
            except FileNotFoundError:  # the run that is under way has replaced it by a newer one since we looked
                vanished = True
            except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
                damaged.append(path)
        if not vanished:
            return Found(None, damaged)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _in_order(folder: Path) -> list[tuple[str, Path]]:
    """(digest, path) of every checkpoint, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            try:
                age = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            found.append(((int(match[1]), int(match[2]), age), match[3], path))
    return [(digest, path) for _, digest, path in sorted(found, reverse=True)]


def _parse(content: bytes) -> Checkpoint:
    header = int.from_bytes(content[:8], "little")
    state = json.loads(json.loads(content[8 : 8 + header])["__metadata__"]["state"])
    return Checkpoint(safetensors.torch.load(content), state)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}


def momentum(optimiser: torch.optim.Optimizer, module: torch.nn.Module) -> dict[str, Tensor]:
    """The optimiser's momentum, by parameter name: independent of how torch numbers its state."""
    return {
        name: buffer
        for name, p in module.named_parameters()
        if (buffer := optimiser.state.get(p, {}).get("momentum_buffer")) is not None
    }


def restore_momentum(optimiser: torch.optim.Optimizer, module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, p in module.named_parameters():
        if name in tensors:
            optimiser.state[p]["momentum_buffer"] = (
                tensors[name].to(p.device).clone(memory_format=torch.preserve_format)
            )
