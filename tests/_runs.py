"""What the integration tests share: processes by fork, and comparison of run folders."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

TIMINGS = ("seconds", "images_per_second", "peak_memory_mib")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_DIGEST = re.compile(r"-[0-9a-f]{16}(?=\.safetensors$)")


class Child:
    """A crosel process made by the fork server."""

    def __init__(self, server: ForkServer, pid: int, stdout: Path, stderr: Path) -> None:
        self.server, self.pid, self.stdout, self.stderr = server, pid, stdout, stderr
        self.peak = 0  # bytes of memory at the most, once it has been waited for

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 120.0) -> int:
        """The exit code; -9 after SIGKILL, -1000 if it hung."""
        answer = self.server.ask({"wait": self.pid, "seconds": seconds})
        self.peak = int(answer["peak"])
        return int(answer["code"])

    @property
    def err(self) -> str:
        return self.stderr.read_text(encoding="utf-8")

    @property
    def out(self) -> str:
        return self.stdout.read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Let the child work until something has happened."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen within {seconds} s; the child said: {self.err}"
            time.sleep(0.001)


class ForkServer:
    """Starts crosel processes in milliseconds. See `_forkserver.py`."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.numbers = folder, itertools.count()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_forkserver.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**ENVIRONMENT, **environment},
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the fork server has died"
        return dict(json.loads(answer))

    def start(self, *argv: object, trap: dict[str, Any] | None = None, behind: float | None = None) -> Child:
        number = next(self.numbers)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        out.touch()
        err.touch()
        request = {"argv": list(map(str, argv)), "stdout": str(out), "stderr": str(err), "trap": trap, "behind": behind}
        return Child(self, self.ask(request)["pid"], out, err)

    def run(
        self, *argv: object, trap: dict[str, Any] | None = None, behind: float | None = None
    ) -> tuple[int, str, str]:
        child = self.start(*argv, trap=trap, behind=behind)
        code = child.wait()
        return code, child.out, child.err

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def untimed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics without the timings, which no two runs share."""
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows]


def metrics(run: Path) -> list[dict[str, Any]]:
    return untimed(map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))


def checkpoints(run: Path) -> list[Path]:
    """Oldest first: the names sort by epoch and step."""
    return sorted((run / "checkpoints").glob("*.safetensors"))


def tensors(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, as dtype, shape and bytes."""
    return {
        name: f"{value.dtype}{value.shape}".encode() + value.tobytes()
        for name, value in load_file(checkpoints(run)[-1]).items()
    }


def tree(run: Path) -> set[str]:
    """All files of a run; checkpoints without the hash in their names, which covers timings too."""
    return {_DIGEST.sub("", str(p.relative_to(run))) for p in run.rglob("*") if p.is_file()}


def arrays(path: Path) -> dict[str, tuple[str, list[Any]]]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: (str(archive[name].dtype), archive[name].tolist()) for name in archive.files}


def assert_same_run(run: Path, unbroken: Path, same_files: bool = True) -> None:
    """Same metrics (timings apart), same bits in the last checkpoint, same sets, labels and selection."""
    assert metrics(run) == metrics(unbroken)
    ours, theirs = tensors(run), tensors(unbroken)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert (run / "labels.csv").read_bytes() == (unbroken / "labels.csv").read_bytes()
    for name in ("candidates.npz", "selection.npz"):
        if (unbroken / name).exists():  # methods that do not select leave no selection
            assert arrays(run / name) == arrays(unbroken / name), name
    if same_files:
        assert tree(run) == tree(unbroken), sorted(tree(run) ^ tree(unbroken))
