"""Run folders changed at random, and every command that reads one: what it may do, and what it must not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from _support import run_cli

SECONDS = 10
FILES = (
    "config.yaml", "metrics.jsonl", "environment.json", "candidates.npz", "selection.npz", "predictions.npz",
    "labels.csv", "review.jsonl", "done", "report.html", "plots", "checkpoints", "checkpoints/*",
)  # fmt: skip
_VALUES = [
    0, -1, 1.5, 1e308, 10**400, float("nan"), float("inf"), True, None, "", "x", "\ud800", "a\nb", "\x00", [], {},
    [[]], {"a": []}, "\u202e", 2**63, "9" * 5000,
]  # fmt: skip


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"it took more than {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Content and kind of all that lies in a folder, links not followed."""
    return {
        str(p.relative_to(folder)): (os.lstat(p).st_mode, p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))
    }


def outside(folder: Path) -> Path:
    """What a link may lead to: files that must stay as they are."""
    folder.mkdir()
    (folder / "profile").write_text("echo hello\n")
    for name in ("accuracy.svg", "old.svg", ".writing-1-x", "epoch-00001-step-000000-0123456789abcdef.safetensors"):
        (folder / name).write_text("mine")
    return folder


def mutate(run: Path, rng: random.Random, elsewhere: Path) -> str:
    """Change one thing of a run folder; return what."""
    name = rng.choice(FILES)
    path = run / name
    if name == "checkpoints/*":
        path = rng.choice(sorted((run / "checkpoints").glob("*")) or [run / "done"])
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 24:  # by an earlier change
        kind = rng.choice(("link", "link out", "pipe", "folder", "empty"))
    else:
        kinds = ["bytes", "cut", "gone", "link", "link out", "pipe", "folder", "sparse", "device", "zeros", "repeat"]
        special = {".npz": "array", ".json": "json", ".jsonl": "json", ".yaml": "yaml", ".csv": "csv"}
        # What is well-formed and wrong goes furthest.
        kinds += [special[path.suffix]] * 12 if path.suffix in special else []
        kind = rng.choice(kinds)
    content = path.read_bytes() if path.is_file() and path.stat().st_size <= 1 << 24 else b""
    said = f"{path.relative_to(run)}: {kind}"
    if kind in ("bytes", "cut", "zeros", "repeat", "sparse"):
        if kind == "bytes":
            changed = bytearray(content)
            for _ in range(rng.randint(1, 8)):
                if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
            content = bytes(changed)
        elif kind == "cut":
            content = content[: rng.randrange(len(content) + 1)]
        elif kind == "zeros":
            content = bytes(len(content))
        elif kind == "repeat":
            content *= rng.randint(2, 50)
        path.write_bytes(content)
        if kind == "sparse":
            os.truncate(path, 1 << 34)
        return said
    if kind in ("array", "json", "yaml", "csv"):
        return f"{said}, {_CONTENT[kind](path, rng)}"
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if not path.parent.is_dir():
        return said
    if kind == "link":
        path.symlink_to(elsewhere if path.suffix == "" else elsewhere / "profile")
    elif kind == "link out":
        path.symlink_to(elsewhere / "made")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    return said


def _array(path: Path, rng: random.Random) -> str:
    try:
        with np.load(path) as archive:
            arrays: dict[str, Any] = dict(archive)
    except (OSError, ValueError, zipfile.BadZipFile):
        return "not one any more"
    name = rng.choice(sorted(arrays))
    a = arrays[name]
    how = rng.choice(("gone", "more", "less", "flat", "text", "float", "big", "small", "nan", "bomb", "rank", "none"))
    if how == "gone":
        del arrays[name]
    elif how == "bomb":
        arrays[name] = np.zeros((1 << 27, *a.shape[2:]), np.int8)
    else:
        with np.errstate(all="ignore"):
            arrays[name] = {
                "more": lambda: np.concatenate([a, a]) if a.ndim else np.stack([a, a]),
                "less": lambda: a[: len(a) // 2] if a.ndim else a.reshape(1), "flat": lambda: a.ravel(),
                "text": lambda: np.full(a.shape, rng.choice(["", "\x00", "a\nb", "\ud800", "<script>", "=1+1"])),
                "float": lambda: np.zeros(a.shape), "rank": lambda: a[None], "none": lambda: a[:0] if a.ndim else a,
                "big": lambda: np.full_like(a, 120) if a.dtype.kind in "iufb" else a,
                "small": lambda: np.full_like(a, -7) if a.dtype.kind in "if" else a,
                "nan": lambda: np.full_like(a, np.nan) if a.dtype.kind == "f" else a,
            }[how]()  # fmt: skip
    try:
        np.savez_compressed(path, **arrays)
    except (ValueError, UnicodeError):
        return "cannot be written"
    return f"{name} {how}"


def _json(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or ["{}"]
    whole = path.suffix == ".json"
    at = 0 if whole else rng.randrange(len(lines))
    try:
        row = json.loads("\n".join(lines) if whole else lines[at])
    except ValueError:
        row = {}
    value = rng.choice(_VALUES)
    if isinstance(row, dict) and row and rng.random() < 0.8:
        key = rng.choice(list(row))
        if rng.random() < 0.3:
            del row[key]
        else:
            row[key] = value
    else:
        row = value
    text = json.dumps(row)
    path.write_text(text if whole else "\n".join([*lines[:at], text, *lines[at + 1 :]]) + "\n")
    return text[:80]


def _yaml(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    at = rng.randrange(len(lines))
    value = rng.choice([json.dumps(value) for value in _VALUES])
    lines[at] = rng.choice((f"{lines[at].partition(':')[0]}: {value}", "", lines[at] * 2, value))
    path.write_text("\n".join(lines) + "\n")
    return lines[at][:80]


def _csv(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    at = rng.randrange(len(lines))
    cells = lines[at].split(",")
    cells[rng.randrange(len(cells))] = rng.choice(
        ["", "nan", "inf", "1e400", "x" * 200_000, '"', "-1", "a\0b", "é", ","]
    )
    lines[at] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
    return lines[at][:80]


_CONTENT = {"array": _array, "json": _json, "yaml": _yaml, "csv": _csv}


def commands(run: Path, out: Path, source: Path) -> dict[str, list[object]]:
    return {
        "report": ["report", run, "--out", out / "r.html", "--plots", out / "plots"],
        "own report": ["report", run, "--out", run / "report.html", "--plots", run / "plots"],
        "tables": ["tables", run.parent],
        "labels": ["labels", run, "--out", out / "l.csv"],
        "corrections": ["labels", run, "--corrections", "--out", out / "c.csv"],
        "eval": ["eval", run],
        "predict": ["predict", run, source, "--out", out / "p.csv"],
        "resume": ["train", "--resume", "--out", run],
    }


def review(run: Path) -> None:
    from crosel.errors import UserError
    from crosel.review.app import build_app
    from crosel.review.cards import load_cards

    with suppress(UserError):
        build_app(load_cards(run), run / "review.jsonl", "token").state.log.close()


def attack(good: Path, work: Path, source: Path, seed: int, which: str | None = None) -> tuple[str, float]:
    """One changed folder read by one command; AssertionError where that did what it must not. What it was, seconds."""
    rng = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    elsewhere, run, out = outside(work / "elsewhere"), work / "runs" / "run", work / "out"
    shutil.copytree(good, run)
    out.mkdir()
    (run / "review.jsonl").touch()
    before = state_of(elsewhere)
    what = [mutate(run, rng, elsewhere) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    known = commands(run, out, source)
    name = which or rng.choice([*known, "review"])
    told = f"seed {seed}: {name} after {what}"
    began = time.monotonic()
    with limited():
        if name == "review":
            review(run)
        else:
            result = run_cli(*known[name])
            assert result.code in (0, 2), f"{told}\n{result.err}"
            assert "Traceback" not in result.err, f"{told}\n{result.err}"
            errors = [line for line in result.err.splitlines() if line.startswith("crosel: ")]
            assert result.code == 0 or errors, f"{told}\n{result.err}"
    assert state_of(elsewhere) == before, told
    return told, time.monotonic() - began
