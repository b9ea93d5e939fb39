"""Run folders changed at random, and every command that reads one: what it may do, and what it must not.

A stranger has sent the folder, perhaps with the data in it. Each changed folder is read by all commands, one after the
other, in a child process (`_confined`). Every command ends with exit code 0, or 2 and one line, within seconds and
within CROSEL_MEMORY_GB, and changes nothing but the run folder and what it was told to write.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import io
import json
import os
import random
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _confined import Late, Outcome, confined, time_limit
from _support import TINY, run_cli, small_arrays

SECONDS = 10.0  # for a command
MEMORY_GB = 0.25  # CROSEL_MEMORY_GB for all of them
_VALUES = [
    0, -1, 1.5, 1e308, 10**400, float("nan"), float("inf"), True, None, "", "x", "\ud800", "a\nb", "\x00", [], {},
    [[]], {"a": []}, "\u202e", 2**63, "9" * 5000, 10**4, 10**6, 10**9, "../../elsewhere/profile", "/dev/zero",
    "planted:build", "text/planted", "timm/planted", "tree:file=/dev/zero", "uniform:q=0.3", "digits", "é" * 300,
]  # fmt: skip
_CELLS = ["", "nan", "inf", "1e400", "x" * 200_000, '"', "-1", "a\0b", "é", ",", "=1+1", "\u2028", "3", "1.000"]
HAS_PAGE = all(map(importlib.util.find_spec, ("fastapi", "uvicorn")))
# A module of the stranger's, on the path of whoever opens the run: it must not be imported.
PLANTED = "open('ran', 'w')\ndef build(classes, shape):\n    open('ran', 'w')\n"


# --- the good folders -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A good run folder: where it lies (its config has the paths), and all files of the working folder."""

    sent: Path  # what the stranger sent: the run folder, or one that holds it beside its data
    run: Path
    source: Path
    suite: Path
    files: dict[str, bytes]
    peak: int = 0  # bytes of memory that all commands take, with nothing changed

    def restore(self, work: Path) -> None:
        """Everything as it was, whatever has been done to it."""
        shutil.rmtree(work, ignore_errors=True)
        for name, content in self.files.items():
            path = work / name
            try:
                path.write_bytes(content)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def differs(self, work: Path, path: Path) -> bool:
        """Whether a file, or any in a folder, is not as it was; what was added does not count."""
        return any(
            name.is_symlink()
            or not name.is_file()
            or name.stat().st_size != len(content)
            or name.read_bytes() != content
            for name, content in ((work / name, content) for name, content in self.files.items())
            if name == path or path in name.parents
        )


def make_bases(work: Path) -> list[Base]:
    """Runs on images with a method that selects; on features, judged by folds; on image files that come with it."""
    bases = [make_base(work, kind) for kind in ("images", "features", "files")]
    for base in bases:  # all is well with them; and what the commands import is there for every child
        base.restore(work)
        (work / "out").mkdir()
        for name, arguments in commands(base, work / "out").items():
            code, _, wrong = checked(name, arguments, base.run)
            assert not wrong, f"{name}: {wrong}"
            assert code == 0 or (name, base.run.name) == ("labels tasks", "proden-seed0"), name  # features are no tasks
    return [replace(base, peak=read_by_all(base, work).peak) for base in bases]


def make_base(work: Path, kind: str) -> Base:
    shutil.rmtree(work, ignore_errors=True)
    arrays = small_arrays(24, images=kind != "features", test=8)
    source = work / "data" / "mine.npz"
    settings: dict[str, Any] = {"train.epochs": 2, "train.batch_size": 16, "network.width": 4}
    method = "proden" if kind == "features" else "crosel"
    if kind == "features":
        settings = {"train.epochs": 2, "train.folds": 2}
    if kind == "images":
        settings = dict(item.split("=") for item in TINY[1::2])
    if kind == "files":
        source = work / "runs" / "data" / "mine.csv"
        settings |= {"method.warmup": 1, "method.bank_length": 1, "data.image_size": 8}
    source.parent.mkdir(parents=True)
    ids = np.array([f"id-{i}" for i in range(24)])
    if kind == "files":
        from PIL import Image

        lines = ["path,candidates"]
        for i, image in enumerate(arrays["x"]):
            Image.fromarray(image).save(source.parent / f"{i}.png")
            lines.append(f"{i}.png,{'|'.join('abcdefghij'[j] for j in np.flatnonzero(arrays['candidates'][i]))}")
        source.write_text("\n".join(lines) + "\n")
    else:
        np.savez(source, **arrays, ids=ids)
    suite = work / "suite.yaml"
    suite.write_text(yaml.safe_dump({"seeds": 1, "base": {"source": str(source), "method": method, **settings}}))
    from crosel.bench import expand, read_suite

    [asked] = expand(read_suite(str(suite)))
    run = work / "runs" / asked.name
    result = run_cli("train", *asked.arguments, "--out", run)
    assert result.code == 0, result.err
    from crosel.runs.corrections import Decision, DecisionLog
    from crosel.runs.folder import RunFolder

    examples = RunFolder(run).training_set()
    log = DecisionLog(run / "review.jsonl", examples.ids, examples.classes)
    log.decide(0, Decision("choose", 1))
    log.decide(1, Decision("skip"))
    log.close()
    assert run_cli("labels", run, "--out", run / "labels.npz").code == 0
    files = {str(p.relative_to(work)): p.read_bytes() for p in work.rglob("*") if p.is_file()}
    return Base(run.parents[1] if kind == "files" else run, run, source, suite, files)


def outside(folder: Path) -> Path:
    """What a link may lead to: files that must stay as they are."""
    folder.mkdir(parents=True)
    (folder / "profile").write_text("echo hello\n")
    (folder / "planted.py").write_text(PLANTED)
    for name in ("accuracy.svg", "old.svg", ".writing-1-x", "epoch-00001-step-000000-0123456789abcdef.safetensors"):
        (folder / name).write_text("mine")
    return folder


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Content and kind of all that lies in a folder, links not followed."""
    return {
        str(p.relative_to(folder)): (os.lstat(p).st_mode, p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))
    }


# --- changes ----------------------------------------------------------------------------------------------------------


def mutate(base: Base, rng: random.Random, elsewhere: Path) -> str:
    """Change one thing of what was sent; return what."""
    if rng.random() < 0.05:
        return _add(base.run, rng, elsewhere)
    paths = sorted(base.sent.rglob("*"))
    read = [path for path in paths if path.suffix in _CONTENT]
    path = rng.choice(read if read and rng.random() < 0.8 else paths or [base.run / "done"])
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 24:  # by an earlier change, or a folder
        kinds = ["pipe", "folder", "empty"]
        # Whoever names a path through a link has asked for what it leads to.
        kind = rng.choice(kinds if path in base.run.parents else [*kinds, "link", "link out", "link in"])
    else:
        kinds = ["bytes", "cut", "gone", "link", "link out", "link in", "pipe", "folder", "sparse", "device", "zeros",
                 "repeat", "insert", "socket"]  # fmt: skip
        # What is well-formed and wrong goes furthest.
        kinds += ["content"] * 24 if path.suffix in _CONTENT else []
        kind = rng.choice(kinds)
    said = f"{path.relative_to(base.sent)}: {kind}"
    if kind in ("bytes", "cut", "zeros", "repeat", "sparse", "insert"):
        path.write_bytes(_bytes(kind, path.read_bytes(), rng))
        if kind == "sparse":
            os.truncate(path, 1 << 34)
        return said
    if kind == "content":
        try:
            return f"{said}, {_CONTENT[path.suffix](path, rng)}"
        except (ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            return f"{said}, not one any more ({error!r})"  # changed before
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if path.parent.is_dir():
        _put(path, kind, elsewhere)
    return said


def _put(path: Path, kind: str, elsewhere: Path) -> None:
    if kind == "link":
        path.symlink_to(elsewhere if path.suffix == "" else elsewhere / "profile")
    elif kind == "link out":
        path.symlink_to(elsewhere / "made")
    elif kind == "link in":
        path.symlink_to("config.yaml")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()


def _add(run: Path, rng: random.Random, elsewhere: Path) -> str:
    """Something that was not there, under a name that crosel looks for or trips over."""
    name = rng.choice((
        "folds.npz", "label_error.json", "predictions.npz", ".writing-1-config.yaml", "checkpoints/x.safetensors",
        "checkpoints/epoch-99999-step-000000-0123456789abcdef.safetensors", "plots/x.svg", "a\nb", "é\u202e", "-rf",
        "x" * 250, os.fsdecode(b"\xff\xfe"), "inner/config.yaml", "planted.py", "sitecustomize.py", ".crosel-cache",
    ))  # fmt: skip
    path, kind = run / name, rng.choice(("link", "link out", "pipe", "folder", "empty", "device"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # an earlier change has put something else there
        return f"{name!a} not added"
    if not os.path.lexists(path):
        if path.suffix == ".py":
            path.write_text(PLANTED)
        else:
            _put(path, kind, elsewhere)
    return f"{name!a} added: {kind}"


def _bytes(kind: str, content: bytes, rng: random.Random) -> bytes:
    if kind == "bytes":
        changed = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == "cut":
        return content[: rng.randrange(len(content) + 1)]
    if kind == "zeros":
        return bytes(len(content))
    if kind == "repeat":
        return content * rng.randint(2, 50)
    if kind == "insert":
        at = rng.randrange(len(content) + 1)
        return content[:at] + rng.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"\r", b"\n\n", b"[" * 9999)) + content[at:]
    return content


# A zip file whose members may lie: numpy and zipfile make only honest ones.


def zip_of(members: dict[str, tuple[int, int, bytes]]) -> bytes:
    """From the name of each member, its size and checksum as they are told, and its content, deflated."""
    out, index = bytearray(), bytearray()
    for name, (size, crc, content) in members.items():
        raw, size = name.encode("utf-8", "surrogatepass"), min(size, 2**32 - 2)
        told = struct.pack("<HHHHHIIIH", 20, 0x800, 8, 0, 33, crc, len(content), size, len(raw))
        index += b"PK\x01\x02" + struct.pack("<H", 20) + told + bytes(2)
        index += struct.pack("<HHHII", 0, 0, 0, 0, len(out)) + raw
        out += b"PK\x03\x04" + told + bytes(2) + raw + content
    end = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(index), len(out), 0)
    return bytes(out + index + b"PK\x05\x06" + end)


@functools.lru_cache(64)
def unfolding(descr: str, shape: tuple[int, ...]) -> tuple[int, int, bytes]:
    """An array of zeros as a member of an npz file: it takes little room there, whatever its size."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    size = int(np.prod(shape, dtype=object)) * np.dtype(descr).itemsize
    packer, crc = zlib.compressobj(1, zlib.DEFLATED, -15), zlib.crc32(head.getvalue())
    parts, block, left = [packer.compress(head.getvalue())], bytes(1 << 20), size
    while left > 0:
        part = block[: min(left, len(block))]
        parts.append(packer.compress(part))
        crc, left = zlib.crc32(part, crc), left - len(part)
    return len(head.getvalue()) + size, crc, b"".join([*parts, packer.flush()])


def member(a: Any) -> tuple[int, int, bytes]:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(a), allow_pickle=False)
    content = stream.getvalue()
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    return len(content), zlib.crc32(content), packer.compress(content) + packer.flush()


def _array(path: Path, rng: random.Random) -> str:
    with np.load(path) as archive:
        arrays: dict[str, Any] = dict(archive)
    name = rng.choice(sorted(arrays))
    a = arrays[name]
    how = rng.choice(("gone", "more", "less", "flat", "text", "float", "big", "small", "nan", "bomb", "rank", "none",
                      "lie", "all longer", "wide", "one", "types"))  # fmt: skip
    packed = {f"{key}.npy": member(value) for key, value in arrays.items()}
    bound = int(MEMORY_GB * 2**30)
    if how == "gone":
        del packed[f"{name}.npy"]
    elif how == "bomb":  # one array that is far more than the limit, or a little less
        size = rng.choice((16 * bound, bound * 9 // 10, bound // 3))
        rows = max(1, size // max(1, a.dtype.itemsize * int(np.prod(a.shape[1:]))))
        packed[f"{name}.npy"] = unfolding(a.dtype.str, (rows, *a.shape[1:]))
    elif how == "lie":  # about its size
        size, crc, content = unfolding(a.dtype.str, (1 << 25, *a.shape[1:]) if a.size < 99 else a.shape)
        packed[f"{name}.npy"] = (rng.choice((100, size // 2, 2 * size)), crc, content)
    elif how == "all longer":  # they fit each other: as many examples as the limit just lets pass
        rows = bound // rng.choice((2, 4, 16)) // max(1, sum(v.dtype.itemsize * int(np.prod(v.shape[1:]))
                                                              for v in arrays.values() if v.ndim))  # fmt: skip
        n = (
            len(arrays["candidates"])
            if "candidates" in arrays
            else max(map(len, (v for v in arrays.values() if v.ndim)))
        )
        packed |= {f"{key}.npy": unfolding(v.dtype.str, tuple(rows if d == n else d for d in v.shape))
                   for key, v in arrays.items() if n in v.shape}  # fmt: skip
    elif how == "wide":  # a text of a mebibyte for each row
        packed[f"{name}.npy"] = unfolding("<U262144", a.shape)
    else:
        changed = _changed(how, a, rng)
        try:
            packed[f"{name}.npy"] = member(changed)
        except (ValueError, UnicodeError):
            return "cannot be written"
    path.write_bytes(zip_of(packed))
    return f"{name} {how}"


def _changed(how: str, a: Any, rng: random.Random) -> Any:
    with np.errstate(all="ignore"):
        return {
            "more": lambda: np.concatenate([a, a]) if a.ndim else np.stack([a, a]),
            "less": lambda: a[: len(a) // 2] if a.ndim else a.reshape(1), "flat": lambda: a.ravel(),
            "text": lambda: np.full(a.shape, rng.choice(["", "\x00", "a\nb", "\ud800", "<script>", "=1+1", "../x"])),
            "float": lambda: np.zeros(a.shape), "rank": lambda: a[None], "none": lambda: a[:0] if a.ndim else a,
            "big": lambda: np.full_like(a, 120) if a.dtype.kind in "iufb" else a,
            "small": lambda: np.full_like(a, -7) if a.dtype.kind in "if" else a,
            "nan": lambda: np.full_like(a, np.nan) if a.dtype.kind == "f" else a,
            "one": lambda: _with_one(a, rng),
            "types": lambda: a.astype(rng.choice(["f2", "f8", "i1", "u8", "c16", "S3", "U2", ">i4", "M8[s]", "?"])),
        }[how]()  # fmt: skip


def _with_one(a: Any, rng: random.Random) -> Any:
    """One value changed."""
    a = np.array(a)
    if a.size:
        value = rng.choice(["", "x" * 9]) if a.dtype.kind in "US" else rng.choice([0, 1, 2, 9, 127, -1])
        a.reshape(-1)[rng.randrange(a.size)] = np.array(value).astype(a.dtype)
    return a


def _json(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or ["{}"]
    whole = path.suffix == ".json"
    at = 0 if whole else rng.randrange(len(lines))
    row = json.loads("\n".join(lines) if whole else lines[at])
    text = json.dumps(_with_value(row, rng))
    if not whole and rng.random() < 0.05:  # many of them
        text = "\n".join([text] * rng.choice((1000, 30_000)))
    path.write_text(text if whole else "\n".join([*lines[:at], text, *lines[at + 1 :]]) + "\n")
    return text[:80]


def _with_value(row: Any, rng: random.Random) -> Any:
    """Some place of nested values, changed."""
    value = rng.choice(_VALUES)
    if not isinstance(row, dict | list) or not row or rng.random() < 0.1:
        return value
    key = rng.choice(list(row)) if isinstance(row, dict) else rng.randrange(len(row))
    if isinstance(row[key], dict | list) and row[key] and rng.random() < 0.8:
        row[key] = _with_value(row[key], rng)
    elif rng.random() < 0.2:
        del row[key]
    elif isinstance(row[key], int | float) and rng.random() < 0.5:  # of its own type
        row[key] = type(row[key])(rng.choice((0, 1, 2, 3, 7, 100, -1)))
    else:
        row[key] = value
    if isinstance(row, dict) and rng.random() < 0.1:
        row[rng.choice(("x", "", "\n", "test_accuracy", "<b>"))] = value
    return row


def _yaml(path: Path, rng: random.Random) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines() or [""]
    if rng.random() < 0.7:  # one setting
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
        changed = _with_value(content, rng)
        path.write_text(json.dumps(changed) if isinstance(changed, dict) else str(changed), errors="replace")
        return "one setting: " + " ".join(
            f"{key}={str(value)[:60]}" for key, value in changed.items() if value != yaml.safe_load(text).get(key)
        ) if isinstance(changed, dict) else str(changed)[:80]  # fmt: skip
    at = rng.randrange(len(lines))
    value = rng.choice([json.dumps(value) for value in _VALUES])
    lines[at] = rng.choice((f"{lines[at].partition(':')[0]}: {value}", "", lines[at] * 2, value, f"x: &a [{value}]"))
    path.write_text("\n".join(lines) + "\n")
    return lines[at][:80]


def _csv(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    at = rng.randrange(len(lines))
    if rng.random() < 0.2:
        lines = rng.choice((lines * 3, lines[:at], [*lines, lines[at]], lines * 500))
    else:
        cells = lines[at].split(",")
        cells[rng.randrange(len(cells))] = rng.choice(_CELLS)
        lines[at] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
    return lines[min(at, len(lines) - 1)][:80] if lines else "no lines"


def _checkpoint(path: Path, rng: random.Random) -> str:
    """A checkpoint that says something else, under the right hash."""
    import hashlib

    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    if rng.random() < 0.5:
        state = _with_value(json.loads(head["__metadata__"]["state"]), rng)
        head["__metadata__"]["state"] = json.dumps(state)
        said = "its state"
    else:
        said = rng.choice([name for name in head if name != "__metadata__"])
        place = head[said]
        how = rng.choice(("shape", "dtype", "offsets", "gone", "name", "values"))
        if how == "shape":
            place["shape"] = rng.choice(([], [0], [1], place["shape"][::-1], [*place["shape"], 1], [2**40]))
        elif how == "dtype":
            place["dtype"] = rng.choice(("F64", "F16", "I64", "BOOL", "U8", "BF16", "F8_E4M3", "X"))
        elif how == "offsets":
            place["data_offsets"] = rng.choice(([0, 4], [0, 2**40], [-1, 3], [8, 4]))
        elif how == "gone":
            del head[said]
        elif how == "name":
            head[rng.choice(("x", "", "é" * 99, said + "x"))] = head.pop(said)
        else:
            start, end = place["data_offsets"]
            body = body[:start] + rng.choice((b"\xff", b"\x7f", b"\0", b"\x01")) * (end - start) + body[end:]
        said += f" {how}"
    text = json.dumps(head).encode("utf-8", "backslashreplace")
    content = len(text).to_bytes(8, "little") + text + body
    path.unlink()
    stage = path.name.rpartition("-")[0]
    path.with_name(f"{stage}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors").write_bytes(content)
    return said


_CONTENT: dict[str, Callable[[Path, random.Random], str]] = {
    ".npz": _array, ".json": _json, ".jsonl": _json, ".yaml": _yaml, ".csv": _csv, ".safetensors": _checkpoint,
}  # fmt: skip


# --- reading ----------------------------------------------------------------------------------------------------------


def commands(base: Base, out: Path) -> dict[str, list[object]]:
    """Every command that reads a run; those that write into it come last."""
    run = base.run
    found: dict[str, list[object]] = {
        "report": ["report", run, "--out", out / "r.html"],
        "tables": ["tables", run.parents[1], "--out", out / "t.md"],
        "bench --list": ["bench", base.suite, "--out", run.parents[1], "--list"],
        "labels": ["labels", run, "--out", out / "l.csv"],
        "labels npz": ["labels", run, "--out", out / "l.npz", "--doubtful-first"],
        "labels tasks": ["labels", run, "--out", out / "l.json"],
        "eval": ["eval", run],
        "predict": ["predict", run, base.source, "--out", out / "p.csv"],
        "review --export": ["review", run, "--export", out / "c.csv"],
        "corrections": ["train", base.source, "--corrections", run / "review.jsonl", "--method", "cc", "--set",
                        "train.epochs=1", "--set", "train.folds=0", "--set", "data.image_size=8", "--out", out / "new"],
        "own report": ["report", run, "--plots", run / "plots"],
        "review": [],
        "resume": ["train", "--resume", "--out", run],
    }  # fmt: skip
    if not HAS_PAGE:
        del found["review"]
    return found


def review(run: Path) -> int:
    """The page's application, asked for all it shows. The exit code: 2 where the command ends with a UserError."""
    from crosel.errors import UserError
    from crosel.review.app import build_app
    from crosel.review.cards import load_cards

    try:
        app = build_app(load_cards(run), run / "review.jsonl", "token")
    except UserError:
        return 2
    asked: list[tuple[str, str, bytes]] = [
        ("GET", "/", b""), ("GET", "/api/run", b""), ("GET", "/image/0.png", b""), ("GET", "/api/examples", b""),
        ("GET", "/api/classes/0", b""), ("POST", "/api/decisions", b'{"row": 0, "label": 0}'),
        ("POST", "/api/decisions", b'{"row": 1, "label": null}'), ("POST", "/api/undo", b""),
        ("GET", "/corrections.csv", b""),
    ]  # fmt: skip
    try:
        for method, path, body in asked:
            status = asyncio.run(_answer(app, method, path, body))
            assert status < 500 or status == 507, f"{method} {path}: {status}"
    finally:
        app.state.log.close()
    return 0


async def _answer(app: Any, method: str, path: str, body: bytes) -> int:
    headers = [(b"host", b"127.0.0.1"), (b"x-crosel-token", b"token"), (b"content-type", b"application/json"),
               (b"content-length", str(len(body)).encode())]  # fmt: skip
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
             "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http",
             "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": ""}  # fmt: skip
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0]


def checked(name: str, arguments: list[object], run: Path, seconds: float = SECONDS) -> tuple[int, float, str]:
    """Run a command here: its exit code, how long it took, and what is wrong with how it ended, or ""."""
    began, code, wrong = time.monotonic(), 0, ""
    try:
        with time_limit(seconds):
            if name == "review":
                code = review(run)
            else:
                result = run_cli(*arguments)
                code = result.code
                said = [line for line in result.err.splitlines() if line.startswith("crosel: ")]
                if code not in (0, 2) or "Traceback" in result.err:
                    wrong = result.err[-2500:]
                elif code == 2 and (len(said) != 1 or not result.err.endswith(said[0] + "\n") or len(said[0]) > 4000):
                    wrong = f"not one line: {result.err[-2500:]}"
    except Late as late:
        import traceback

        wrong = f"{late}: " + traceback.format_exc()[-2500:]
    except Exception:
        import traceback

        wrong = traceback.format_exc()[-2500:]
    return code, time.monotonic() - began, wrong


def read_by_all(base: Base, work: Path, seed: int | None = None, only: tuple[str, ...] = ()) -> Outcome:
    """What every command does with the folder in a child: its name, exit code, seconds, what is wrong, bytes grown. The
    good folder, or one changed by a seed, whose changes come first."""
    rng = random.Random(seed)
    base.restore(work)
    elsewhere, out = outside(work / "elsewhere"), work / "out"
    out.mkdir()
    what: list[str] = []
    if seed is not None:  # in a child: a change may read what the one before it has blown up
        times = rng.choice((1, 1, 1, 2, 3))
        made = confined(lambda: [mutate(base, rng, elsewhere) for _ in range(times)], [work], 10 * SECONDS)
        what = made.value or [f"cut short: {made.died[-200:]}"]
    before, reading = state_of(elsewhere), commands(base, out)
    if seed is not None:  # in one of several ways, which do nearly the same
        draw = random.Random(seed)
        for name in (*draw.sample(["labels", "labels npz", "labels tasks"], 2), draw.choice(["report", "own report"])):
            del reading[name]
        if not base.differs(work, base.run / "review.jsonl") and not base.differs(work, base.source.parent):
            del reading["corrections"]  # which reads nothing else

    def read_all() -> list[Any]:
        from crosel.utils.system import peak_memory

        os.chdir(elsewhere)  # where the planted module lies
        rows = []
        for name, arguments in reading.items():
            if not only or name in only:
                start = peak_memory() or 0
                row = checked(name, arguments, base.run)
                rows.append([name, *row, (peak_memory() or 0) - start])
        return [what, rows]

    found = confined(read_all, [base.sent, out], 10 * SECONDS * len(reading))
    if state_of(elsewhere) != before:
        found.touched.append("something elsewhere")
    return replace(found, value=found.value or [what, []])


def attack(bases: list[Base], work: Path, seed: int, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """One changed folder read by every command: what each did, and what none of them may do, in `failed`."""
    base = bases[(0, 2, 0, 2, 1)[seed % 5]]  # features take longer
    outcome = read_by_all(base, work, seed, only)
    what, rows = outcome.value
    failed = [outcome.died] if outcome.died else []
    failed += [f"{name}: {wrong}" for name, _, _, wrong, _ in rows if wrong]
    failed += [f"touched {place}" for place in outcome.touched]
    grown = max(0, outcome.peak - base.peak)
    if grown > MEMORY_GB * 2**30:
        most = max(rows or [["?", 0, 0, "", 0]], key=lambda row: row[4])[0]
        failed.append(f"memory: {grown >> 20} MiB more than for the good folder, most of it in {most}")
    return {"seed": seed, "base": base.source.name, "changed": what, "failed": failed, "grown": grown,
            "rows": [[name, code, took] for name, code, took, _, _ in rows]}  # fmt: skip
