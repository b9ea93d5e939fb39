"""A run that is longer than a lease of its machine, in legs: its exact state travels in parts through a narrow door.

    python benchmarks/relay.py leg RUN --seconds 500 -- cifar10 --data DIR --preset paper/cifar10-crosel …   # the first
    python benchmarks/relay.py pack RUN --to parts            # what the next machine needs to go on
    python benchmarks/relay.py send parts --to DOOR --call 1  # as many parts as fit through at once, the first of them
    python benchmarks/relay.py unpack parts --to RUN          # elsewhere, with all parts in one folder and those below
    python benchmarks/relay.py leg RUN --seconds 500          # goes on; the data must be where they were

`leg` trains until the time is over or the run ends, and notes the leg in RUN/legs.jsonl: commit, card, seconds, from
where to where. It stops between two steps, with a checkpoint.

The state is everything that `crosel train --resume` reads: settings, environment, metrics, candidate sets and the
newest checkpoint, whose name has its hash. A part's name has its number, how many there are, the hash of the whole and
its own: parts may travel in any order and any number of calls. Unpacking names the parts that are missing or damaged,
and writes nothing until all are there. Weights and momentum are packed without loss into 84 % of their bytes: see
`squeeze`.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from record import Arguments, add, count, end_with, origin, positive

from crosel.errors import UserError
from crosel.runs.folder import RunFolder
from crosel.training.checkpoint import load_newest
from crosel.utils.files import atomic_write, disk_errors, make_folder

LEGS = "legs.jsonl"
_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "candidates.npz", LEGS)
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
    content = squeeze(buffer.getvalue())
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
    with tarfile.open(fileobj=io.BytesIO(unsqueeze(content))) as archive, disk_errors(run):
        archive.extractall(run, filter="data")
    return stands(run)


def stands(run: Path) -> str:
    newest = load_newest(run / "checkpoints").checkpoint
    if newest is None:
        raise UserError(f"{run}: it has no checkpoint that can be read")
    return f"epoch {newest.state['epoch']}, step {newest.state['step']}"


def squeeze(content: bytes) -> bytes:
    """Without loss: of four bytes that are a float, the one with the exponent takes a third of its room.

    Turned by one bit, so that the sign goes last, a float begins with its exponent. Those of a layer are nearly all
    the same; the digits behind them are noise. What is no float comes out as it went in, too."""
    if len(content) % 4:
        raise ValueError(f"{len(content)} bytes are no whole number of four")
    numbers = np.frombuffer(content, "<u4")
    planes = (numbers << 1 | numbers >> 31).astype("<u4").view(np.uint8).reshape(-1, 4)
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    exponents = packer.compress(planes[:, 3].tobytes()) + packer.flush()
    return b"".join([len(exponents).to_bytes(8, "little"), exponents, planes[:, :3].tobytes()])


def unsqueeze(content: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    exponents = np.frombuffer(zlib.decompress(content[8:end]), np.uint8)
    planes = np.empty((len(exponents), 4), np.uint8)
    planes[:, 3], planes[:, :3] = exponents, np.frombuffer(content, np.uint8, offset=end).reshape(-1, 3)
    numbers = planes.view("<u4").ravel()
    return (numbers >> 1 | numbers << 31).astype("<u4").tobytes()


def send(parts: Path, to: Path, call: int, most_bytes: int, most_files: int = 8) -> tuple[list[Path], int]:
    """Copy the parts that go with a call, and say how many calls there are."""
    calls: list[list[Path]] = [[]]
    for path in sorted(parts.glob("*.part")):
        if calls[-1] and (
            len(calls[-1]) == most_files or sum(other.stat().st_size for other in [*calls[-1], path]) > most_bytes
        ):
            calls.append([])
        calls[-1].append(path)
    if not calls[0]:
        raise UserError(f"{parts}: there are no parts here")
    if call > len(calls):
        raise UserError(f"--call {call}: all parts of {parts} are sent in {len(calls)} calls")
    make_folder(to)
    with disk_errors(to):
        return [Path(shutil.copy(path, to)) for path in calls[call - 1]], len(calls)


def leg(run: Path, arguments: Sequence[str], enough: Callable[[], bool]) -> str:
    """Train on, or from the start with these arguments of `crosel train`, until it is enough; how the leg ended."""
    goes_on = RunFolder(run).exists
    if goes_on and arguments:
        raise UserError(f"{run} is there already and goes on with its own settings; leave out what is behind --")
    if not goes_on and not arguments:
        raise UserError(f"{run}: no such run folder; the first leg needs the arguments of `crosel train` behind --")
    begun, start = origin("gpu", "cuda"), time.monotonic()
    here = stands(run) if goes_on else "epoch 0, step 0"
    words = ["--resume"] if goes_on else list(arguments)
    process = subprocess.Popen([sys.executable, "-m", "crosel", "train", *words, "--out", str(run)])
    try:
        while process.poll() is None and not enough():
            time.sleep(0.1)
        process.terminate()  # which does nothing to one that has ended
        code = process.wait()
    finally:
        process.kill()
    if code not in (0, 130):
        raise UserError(f"{run}: training ended with exit code {code}; see above")
    ended = "the end" if (run / "done").is_file() else stands(run)
    add({**begun, "seconds": round(time.monotonic() - start, 1), "from": here, "to": ended}, run / LEGS)
    return ended


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments(__doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="a run's state to parts")
    packing.add_argument("run", type=Path)
    packing.add_argument("--to", type=Path, required=True)
    packing.add_argument("--part-mib", type=count, default=10, help="size of a part")
    sending = commands.add_parser("send", help="copy the parts of one call")
    sending.add_argument("parts", type=Path)
    sending.add_argument("--to", type=Path, required=True)
    sending.add_argument("--call", type=count, required=True)
    sending.add_argument("--call-mib", type=count, default=60, help="size of what goes in a call")
    unpacking = commands.add_parser("unpack", help="parts to a run folder")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("--to", type=Path, required=True)
    training = commands.add_parser(
        "leg", help="train for a while; behind --, for the first leg: arguments of crosel train"
    )
    training.add_argument("run", type=Path)
    training.add_argument("--seconds", type=positive, required=True)
    words = list(sys.argv[1:] if argv is None else argv)
    own = words.index("--") if "--" in words else len(words)  # argparse loses it where there are commands
    given = parser.parse_args(words[:own])
    arguments = words[own + 1 :]
    if arguments and given.command != "leg":
        raise UserError("only leg takes arguments of `crosel train`, behind --")
    if given.command == "pack":
        paths = pack(given.run, given.to, given.part_mib << 20)
        print(f"{len(paths)} parts of {given.run} in {given.to}")
    elif given.command == "send":
        paths, calls = send(given.parts, given.to, given.call, given.call_mib << 20)
        print(f"call {given.call} of {calls}: {len(paths)} parts in {given.to}")
    elif given.command == "unpack":
        print(f"{given.to} stands after {unpack(given.parts, given.to)}")
    else:
        end = time.monotonic() + given.seconds
        print(f"{given.run} stands after {leg(given.run, arguments, lambda: time.monotonic() > end)}")


if __name__ == "__main__":
    end_with(main)
