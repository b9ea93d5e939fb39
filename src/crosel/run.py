"""The run folder: everything a run leaves behind, and all that is needed to go on with it or to use it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crosel
from crosel import checkpoint
from crosel.config import RunConfig, check_config, read_yaml
from crosel.data import Dataset, load
from crosel.errors import UserError
from crosel.files import atomic_write, atomic_write_with, disk_errors, make_folder, remove_stray
from crosel.nets import InputShape, network_factory
from crosel.session import Session, build_session, load_tensors
from crosel.train import Row


class RunFolder:
    """Paths and files of one run. As a watcher of the loop it saves checkpoints and appends metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        return (self / "config.yaml").is_file()

    @property
    def is_done(self) -> bool:
        return (self / "done").is_file()

    # --- making and opening -----------------------------------------------------------------------------------

    def create(self, config: RunConfig, data: Dataset, command: list[str]) -> None:
        """Lay out a new run. The config comes last: a folder without it is not a run yet."""
        make_folder(self.checkpoints)
        self.write_candidates(data)
        atomic_write(self / "environment.json", json.dumps(environment(command), indent=1) + "\n")
        atomic_write(self / "metrics.jsonl", "")
        atomic_write(self / "config.yaml", config.to_yaml())

    def read_config(self) -> RunConfig:
        if not self.path.exists():
            raise UserError(f"{self.path}: no such run folder")
        if not self.exists:
            raise UserError(f"{self.path} is not a run folder (it has no config.yaml)")
        return check_config(read_yaml(self / "config.yaml"), place=f"{self / 'config.yaml'}: ")

    def check_same_config(self, config: RunConfig) -> None:
        """Refuse to go on with other settings than the run was started with."""
        ours, theirs = _flat(config.model_dump(mode="json")), _flat(self.read_config().model_dump(mode="json"))
        ignored = {"data_dir", "train.log_every", "train.keep_checkpoints", "train.cuda_graphs"}
        for name in sorted((ours.keys() | theirs.keys()) - ignored):
            if ours.get(name) != theirs.get(name):
                raise UserError(
                    f"{self.path} was made with another config: {name} was {theirs.get(name)!r}, "
                    f"now {ours.get(name)!r}; take the old value, or another --out"
                )

    def lock(self) -> None:
        """Claim the folder for this process; the claim ends with the process, however it ends."""
        make_folder(self.path)
        with disk_errors(self.path):
            handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise UserError(f"{self.path} is in use by another process; wait for it or choose another --out") from None
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- candidate sets ---------------------------------------------------------------------------------------

    def write_candidates(self, data: Dataset) -> None:
        """The drawn sets are part of the run: they are saved once and read back ever after."""
        arrays: dict[str, Any] = {"candidates": data.candidates, "classes": np.array(data.classes)}
        if data.y is not None:
            arrays["y"] = data.y
        if data.ids is not None:
            arrays["ids"] = np.array(data.ids)
        atomic_write_with(self / "candidates.npz", lambda stream: np.savez_compressed(stream, **arrays))

    def read_candidates(self) -> dict[str, Any]:
        try:
            with np.load(self / "candidates.npz", allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except Exception as error:  # zip, zlib and numpy each have their own errors for a damaged file
            raise UserError(f"{self / 'candidates.npz'}: cannot be read ({error}); the run cannot go on") from None

    def with_candidates(self, data: Dataset) -> Dataset:
        sets = self.read_candidates()["candidates"]
        if sets.shape != (data.n, len(data.classes)):
            raise UserError(
                f"{self.path}: its candidate sets are {sets.shape[0]} x {sets.shape[1]}, "
                f"but the data has {data.n} examples and {len(data.classes)} classes"
            )
        return replace(data, candidates=sets)

    # --- going on ---------------------------------------------------------------------------------------------

    def restore(self, session: Session) -> list[str]:
        """Load the newest good checkpoint into the session; return lines about what was found."""
        remove_stray(self.path)
        found = checkpoint.load_newest(self.checkpoints)
        lines = [f"checkpoint {path.name} is damaged; it is left aside" for path in found.damaged]
        for path in found.damaged:
            path.rename(path.with_suffix(".damaged"))
        if found.checkpoint is not None:
            session.restore(found.checkpoint)
            p = session.progress
            lines.append(f"going on after epoch {p.epoch}" + (f", step {p.step}" if p.step else ""))
        else:
            lines.append("no checkpoint yet: starting from the beginning")
        atomic_write(self / "metrics.jsonl", "".join(map(_line, session.progress.rows)))
        return lines

    # --- watching the loop ------------------------------------------------------------------------------------

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        pass

    def on_state(self, session: Session) -> None:
        p = session.progress
        tensors, state = session.state()
        checkpoint.save(self.checkpoints, p.epoch, p.step, tensors, state, session.config.train.keep_checkpoints)

    def on_epoch(self, session: Session, row: Row) -> None:
        with disk_errors(self / "metrics.jsonl"), open(self / "metrics.jsonl", "a", encoding="utf-8") as stream:
            stream.write(_line(row))

    def read_metrics(self) -> list[Row]:
        """Rows of metrics.jsonl; a last line cut in half by a crash is left out."""
        rows = []
        path = self / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def finish(self) -> None:
        atomic_write(self / "done", time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()))


def load_run(
    path: Path, device: torch.device, trust_code: bool = False, source: str | None = None, data_dir: Path | None = None
) -> Session:
    """Open a run for use: its data (or another source of the same shape), its networks, its newest checkpoint."""
    folder = RunFolder(path)
    config = folder.read_config()
    where = data_dir or (Path(config.data_dir) if config.data_dir else None)
    data = folder.with_candidates(load(config.source, where))
    factory = network_factory(config.network, InputShape(data.shape), len(data.classes), trust_code)
    session = build_session(config, data, device, factory)
    found = checkpoint.load_newest(folder.checkpoints)
    if found.checkpoint is None:
        raise UserError(f"{path}: there is no checkpoint to use yet; train it first: crosel train … --out {path}")
    load_tensors(session.method, checkpoint.without_prefix("method", found.checkpoint.tensors))
    load_tensors(session.normalise, checkpoint.without_prefix("normalise", found.checkpoint.tensors))
    session.progress.epoch = found.checkpoint.state["epoch"]
    session.progress.rows = found.checkpoint.state["rows"]
    return session


def environment(command: list[str]) -> dict[str, Any]:
    """Where and by what the run was made."""
    out: dict[str, Any] = {
        "crosel": crosel.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": np.__version__, "platform": platform.platform(), "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(), "command": command, "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    if torch.cuda.is_available():
        out |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return out


def _commit() -> str | None:
    """The commit of the source tree this package runs from, with a mark if it has been changed."""
    here = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("CROSEL_COMMIT")
    return result.stdout.strip()


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _line(row: Row) -> str:
    return json.dumps({key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}) + "\n"


def command_line() -> list[str]:
    return ["crosel", *sys.argv[1:]]
