"""A run that is longer than a lease of its machine: its exact state in parts that fit through a narrow door.

    python benchmarks/relay.py pack RUN --to parts [--part-mib 15]      # what the next machine needs to continue RUN
    python benchmarks/relay.py unpack parts --to RUN                    # then: crosel train --resume --out RUN

The state is everything that `crosel train --resume` reads: settings, environment, metrics, candidate sets and the
newest checkpoint, whose name has its hash. A part's name has its number, how many there are, the hash of the whole and
its own: parts may travel in any order and any number of calls. Unpacking names the parts that are missing or damaged,
and writes nothing until all are there.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from record import Arguments, count, end_with

from crosel.errors import UserError
from crosel.runs.folder import RunFolder
from crosel.training.checkpoint import load_newest
from crosel.utils.files import atomic_write, disk_errors, make_folder

_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "candidates.npz")
_PART = re.compile(r"state-(?P<whole>[0-9a-f]{16})-(?P<number>\d{3})-of-(?P<count>\d{3})-(?P<own>[0-9a-f]{16})\.part")


def pack(run: Path, to: Path, part_bytes: int) -> list[Path]:
    """Write the parts of a run's state, and return them in order."""
    if not RunFolder(run).exists:
        raise UserError(f"{run}: no such run folder")
    newest = load_newest(run / "checkpoints")  # checked by its hash
    if newest.checkpoint is None:
        raise UserError(f"{run}: it has no checkpoint that can be read; nothing to hand on")
    checkpoint = max(path for path in (run / "checkpoints").glob("*.safetensors") if path not in newest.damaged)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive, disk_errors(run):
        for path in (*(run / name for name in _FILES if (run / name).is_file()), checkpoint):
            archive.add(path, path.relative_to(run).as_posix())
    content = buffer.getvalue()
    pieces = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)]
    paths = []
    make_folder(to)
    for number, piece in enumerate(pieces, 1):
        name = f"state-{_digest(content)}-{number:03}-of-{len(pieces):03}-{_digest(piece)}.part"
        paths.append(to / name)
        atomic_write(paths[-1], piece)
    return paths


def unpack(parts: Path, run: Path) -> str:
    """Put a run together from its parts, after which epoch and step it stands."""
    if run.exists():
        raise UserError(f"{run} is there already; unpack to a new folder")
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in sorted(parts.rglob("*.part")):
        if match := _PART.fullmatch(path.name):
            found.setdefault((match["whole"], int(match["count"])), {})[int(match["number"])] = path
    if len(found) != 1:
        raise UserError(f"{parts}: parts of {len(found)} states; parts of one are needed")
    (whole, total), paths = next(iter(found.items()))
    good, lost = [], []
    for number in range(1, total + 1):
        piece = paths[number].read_bytes() if number in paths else b""
        good.append(piece)
        if number not in paths or f"-{_digest(piece)}." not in paths[number].name:
            lost.append(number)
    if lost:
        raise UserError(f"{parts}: of {total} parts, missing or damaged: {', '.join(map(str, lost))}; send them again")
    content = b"".join(good)
    if _digest(content) != whole:
        raise UserError(f"{parts}: each part is good, but together they are another state; send all again")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive, disk_errors(run):
        archive.extractall(run, filter="data")
    newest = load_newest(run / "checkpoints").checkpoint
    if newest is None:
        raise UserError(f"{run}: the checkpoint cannot be read")
    return f"epoch {newest.state['epoch']}, step {newest.state['step']}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments(__doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="a run's state to parts")
    packing.add_argument("run", type=Path)
    packing.add_argument("--to", type=Path, required=True)
    packing.add_argument("--part-mib", type=count, default=15, help="size of a part")
    unpacking = commands.add_parser("unpack", help="parts to a run folder")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("--to", type=Path, required=True)
    given = parser.parse_args(argv)
    if given.command == "pack":
        paths = pack(given.run, given.to, given.part_mib << 20)
        print(f"{len(paths)} parts of {given.run} in {given.to}")
    else:
        print(f"{given.to} stands after {unpack(given.parts, given.to)}")


if __name__ == "__main__":
    end_with(main)
