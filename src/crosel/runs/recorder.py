"""What is recorded while a run trains: checkpoints, and a line of metrics.jsonl for each epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from crosel.errors import UserError
from crosel.training import checkpoint
from crosel.training.callbacks import Row, check_row
from crosel.training.session import Session
from crosel.utils.files import atomic_write, disk_errors
from crosel.utils.out_of_memory import OutOfMemoryAdvice
from crosel.utils.reading import APPEND, load_json, open_plain, read_run_text

# The copy is in host memory, whatever the device.
_SAVING = OutOfMemoryAdvice(
    torch.device("cpu"),
    "for a checkpoint",
    "earlier checkpoints are intact; free some memory and continue with --resume",
)


def writes_behind(device: torch.device) -> bool:
    """Whether training goes on while a checkpoint is written. On a CPU both would compete for the cores."""
    return device.type == "cuda"


class Recorder:
    """A callback of the training loop. An epoch gets into the metrics only when its checkpoint is on the disk."""

    def __init__(self, run: Path) -> None:
        self.checkpoints = run / "checkpoints"
        self.metrics = run / "metrics.jsonl"
        self._writer = checkpoint.AsyncWriter()
        self._rows: list[Row] = []  # of an epoch whose checkpoint is under way

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        pass

    def on_checkpoint(self, session: Session) -> None:
        self.wait()
        tensors, state = session.state()
        state["config"] = session.config.model_dump(mode="json")
        save = self._writer.save if writes_behind(session.device) else checkpoint.save
        with _SAVING:
            save(self.checkpoints, tensors, state, session.config.train.keep_checkpoints)

    def on_epoch(self, session: Session, row: Row) -> None:
        self._rows.append(row)
        if not writes_behind(session.device):
            self.wait()

    def wait(self) -> None:
        """Return when the last state, and its epoch's metrics, are on the disk."""
        try:
            with _SAVING:
                self._writer.wait()
        except Exception:
            self._rows.clear()
            raise
        while self._rows:
            row = self._rows.pop(0)
            with disk_errors(self.metrics), open(open_plain(self.metrics, False, APPEND), "ab") as stream:
                stream.write(_line(row).encode())


def read_metrics(path: Path) -> list[Row]:
    """Rows of metrics.jsonl; a last line cut in half by a crash is left out."""
    rows: list[Row] = []
    try:
        lines = read_run_text(path).splitlines()
    except FileNotFoundError:
        return rows
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        try:
            rows.append(check_row(load_json(line)))
        except json.JSONDecodeError:
            break
        except ValueError:  # pydantic's, too
            raise UserError(
                f"{path}, line {number}: not a row of metrics; it is written anew by: crosel train --resume --out RUN"
            ) from None
    return rows


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    atomic_write(path, "".join(map(_line, rows)))


def _line(row: Row) -> str:
    # Significant digits, not decimals: a small learning rate must not become 0.
    return json.dumps({key: float(f"{v:.7g}") if isinstance(v, float) else v for key, v in row.items()}) + "\n"
