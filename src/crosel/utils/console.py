"""What a person sees while a run or another long command goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, ClassVar, TextIO

if TYPE_CHECKING:  # a download needs neither, nor torch
    from crosel.training.callbacks import Row
    from crosel.training.session import Session

_CLEAR = "\r\033[K"  # back to the start of the line, and empty it


def shows_live(stream: TextIO) -> bool:
    """Whether a line can be taken back there: on a terminal, unless it calls itself dumb (an editor's, say)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02d} min"


_SHARES = (
    ("test_accuracy", "accuracy"), ("selection_ratio", "S-ratio"), ("oracle_selection_accuracy", "S-acc"),
    ("covering_rate", "covering"),
)  # fmt: skip


def epoch_cells(row: Row) -> dict[str, str]:
    """What people see of one line of metrics.jsonl, by name."""
    shares = {name: percent(row[key]) for key, name in _SHARES if key in row}
    first = {"epoch": str(row["epoch"]), "phase": row["phase"], "loss": f"{row['loss']:.4f}"}
    return first | shares | {"time": f"{row['seconds']:.1f} s"}


def epoch_line(row: Row, epochs: int) -> str:
    """The console's view of one line of metrics.jsonl."""
    cells = epoch_cells(row)
    epoch, phase, seconds = (cells.pop(name) for name in ("epoch", "phase", "time"))
    parts = [f"{name} {value}" for name, value in cells.items()]
    return "  ".join([f"epoch {epoch:>{len(str(epochs))}}/{epochs}", f"{phase:<9}", *parts, seconds])


class Screen:
    """Where a person reads. `quiet` silences it, and so does a stream that takes nothing any more."""

    live_one: ClassVar[Screen | None] = None  # what is shown live now, and makes way for whole lines

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.live = not quiet and shows_live(self.stream)

    def put(self, text: str) -> None:
        if self.quiet:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # a log on a full disk, a reader that has gone: no reason to lose a run
            self.quiet, self.live = True, False

    def put_live(self, text: str) -> None:
        """Put what `say` and `close` take away again."""
        Screen.live_one = self
        self.put(text)

    def say(self, text: str) -> None:
        self.put(text + "\n")

    def close(self) -> None:
        if Screen.live_one is self:
            Screen.live_one = None


class Console(Screen):
    """A callback of the loop that prints."""

    _shown = 0.0  # when the live line was last written

    def say(self, text: str) -> None:
        self.put((_CLEAR if self.live else "") + text + "\n")

    def close(self) -> None:
        """Take the live line away, so that what comes next starts on a line of its own."""
        if self.live:
            self.put(_CLEAR)
        super().close()

    def show(self, text: str) -> None:
        """Put a text in the live line, at most ten times a second; nothing where there is no terminal."""
        if self.live and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self.put_live(_CLEAR + text)

    def on_images(self, done: int, total: int) -> None:
        self.show(f"reading images {done}/{total}")

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        total = session.config.train.epochs
        self.show(f"epoch {epoch}/{total}  step {step}/{session.steps}  loss {loss:.4f}")

    def on_checkpoint(self, session: Session) -> None:
        pass

    def on_epoch(self, session: Session, row: Row) -> None:
        self.say(epoch_line(row, session.config.train.epochs))
