"""What a person sees while a run or another long command works: progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TextIO, TypeVar

if TYPE_CHECKING:  # `--help` needs none of them, and rich is imported when it first draws
    from rich.console import RenderableType
    from rich.live import Live
    from rich.progress import Progress

    from crosel.training.callbacks import Row
    from crosel.training.session import Session

Self = TypeVar("Self", bound="Screen")


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


class _UnfailingStream:
    """Writes until the stream takes no more: a full disk, a reader who has gone. Neither is a reason to lose a run."""

    def __init__(self, stream: TextIO, silent: bool) -> None:
        self.stream, self.silent = stream, silent
        self.encoding = getattr(stream, "encoding", None) or "utf-8"  # rich asks for it

    def write(self, text: str) -> None:
        self._try(lambda: self.stream.write(text))

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if not self.silent:
            try:
                action()
            except OSError:
                self.silent = True

    def isatty(self) -> bool:
        return self.stream.isatty() and os.environ.get("TERM") != "dumb"  # as an editor's shell calls itself


class Screen:
    """Plain lines and, on a terminal, something below them that is drawn anew as work goes on."""

    current: ClassVar[Screen | None] = None  # the one that is drawing; whole lines go through it

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = _UnfailingStream(stream or sys.stderr, quiet)
        self.live = not quiet and self._stream.isatty()
        self._display: Live | None = None
        self._drawn = 0.0  # when

    def say(self, text: str) -> None:
        """A whole line, above what is drawn."""
        if self._display is not None:
            self._display.console.out(text, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def draw(self, content: RenderableType) -> None:
        """Draw this below the lines, instead of what is there."""
        from crosel.utils.live import live_display

        self._drawn = time.monotonic()
        if self._display is None:
            self._display = live_display(self._stream)
            Screen.current = self
        self._display.update(content, refresh=True)

    def close(self) -> None:
        """Take away what is drawn, so that what comes next starts on a line of its own."""
        if self._display is not None:
            self._display.update("")  # all of it, also what was too long for the terminal
            self._display.stop()
            self._display = Screen.current = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Console(Screen):
    """Shows how a run goes (as a callback of the training loop), a download, or other work with a known end."""

    _bar: Progress | None = None

    def show(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show a text, with a bar if the end is known; nothing where there is no terminal."""
        if self.live and time.monotonic() - self._drawn > 0.1:  # more often would only cost time
            self.draw(self._progress(text, done, total))

    def _progress(self, text: str, done: float | None, total: float | None) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None or self._bar.tasks[0].total != total:
            text_column = TextColumn("{task.description}", markup=False)
            bar = (BarColumn(24), TimeRemainingColumn(compact=True)) if total else ()
            self._bar = Progress(text_column, *bar)
            self._bar.add_task(text, total=total)
        self._bar.update(self._bar.task_ids[0], description=text, completed=done)
        return self._bar

    def on_images(self, done: int, total: int) -> None:
        self.show(f"reading images {done}/{total}", done, total)

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        epochs = session.config.train.epochs
        text = f"epoch {epoch}/{epochs}  step {step}/{session.steps}  loss {loss:.4f}"
        self.show(text, (epoch - 1) * session.steps + step, epochs * session.steps)

    def on_checkpoint(self, session: Session) -> None:
        pass

    def on_epoch(self, session: Session, row: Row) -> None:
        self.say(epoch_line(row, session.config.train.epochs))
