"""What a person sees while a run or another long command works: progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeVar

from crosel.utils.text import duration, percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table

    from crosel.training.callbacks import Row
    from crosel.training.session import Session


Self = TypeVar("Self", bound="Screen")
MINUTE = 60.0  # seconds without a line, where there is no terminal
SOON, LONG = 2.0, 10.0  # seconds after which time can be estimated, and from which on it is worth a word


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
        self._said = time.monotonic()  # when there was a line, or none yet

    def say(self, text: str) -> None:
        """A whole line, above what is drawn."""
        self._said = time.monotonic()
        if self._display is not None:
            self._display.console.out(text, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def draw(self, content: RenderableType) -> None:
        """Draw this below the lines, instead of what is there."""
        self._drawn = time.monotonic()
        if self._display is None:
            self._display = self._start_display()
            Screen.current = self
        self._display.update(content, refresh=True)

    def _start_display(self) -> Live:
        from rich.console import Console as Terminal
        from rich.live import Live

        terminal = Terminal(file=self._stream, force_terminal=True, force_jupyter=False)  # type: ignore[arg-type]
        # The cursor is never hidden: a killed run could not bring it back.
        terminal.show_cursor = lambda show=True: False  # type: ignore[method-assign]
        # What is drawn goes away at the end. It is drawn when it is updated, not by a thread.
        display = Live(
            console=terminal, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        display.start()
        return display

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
    _since: tuple[float, int] | None = None  # when the first step was told, and which it was
    _told = False  # how long all will take

    def show(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show a text, with a bar if the end is known; where there is no terminal, as a line after a quiet minute."""
        if self.live and time.monotonic() - self._drawn > 0.1:  # more often would only cost time
            self.draw(self._progress(text, done, total))
        elif not self.live and time.monotonic() - self._said > MINUTE:
            self.say(text)

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
        epochs, done = session.config.train.epochs, (epoch - 1) * session.steps + step
        now, first = time.monotonic(), self._since
        if first is None:
            self._since = now, done
        elif not self._told and now - first[0] > SOON and done > first[1]:
            self._tell((now - first[0]) / (done - first[1]) * (epochs * session.steps - done), session)
        text = f"epoch {epoch}/{epochs}  step {step}/{session.steps}  loss {loss:.4f}"
        self.show(text, done, epochs * session.steps)

    def on_checkpoint(self, session: Session) -> None:
        pass

    def on_epoch(self, session: Session, row: Row) -> None:
        epochs = session.config.train.epochs
        left = row["seconds"] * (epochs - row["epoch"])
        if not self._told:
            self._tell(left, session)
        self.say(epoch_line(row, epochs) + (f"  {duration(left)} left" if left > LONG else ""))

    def _tell(self, left: float, session: Session) -> None:
        """How long it will take, once it can be known; folds train again, each with a part of the examples less."""
        train = session.config.train
        self._told, whole = True, left * train.epochs / max(1, train.epochs - session.progress.epoch)
        left += whole * max(0, (train.folds or 0) - 1)
        if left > LONG:
            self.say(f"this will take about {duration(left)}")


# --- what modules log ---------------------------------------------------------------------------------------------
# Each to a logger of its own below "crosel": `info` for what a person wants to know, `warning` for what to look at.

_PACKAGE = logging.getLogger("crosel")


class _Lines(logging.Handler):
    """Whole lines where progress is shown, which makes way for them; otherwise on standard error as it is now."""

    def emit(self, record: logging.LogRecord) -> None:
        (Screen.current or Screen()).say(self.format(record))


@contextmanager
def log_lines() -> Iterator[None]:
    """Show what is logged, for the length of a command."""
    handler, level, propagate = _Lines(), _PACKAGE.level, _PACKAGE.propagate
    _PACKAGE.addHandler(handler)
    _PACKAGE.setLevel(logging.INFO)
    _PACKAGE.propagate = False  # other packages add handlers to the root, which would say it a second time
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)
        _PACKAGE.setLevel(level)
        _PACKAGE.propagate = propagate


def mute() -> None:
    """For the rest of the command: another rank says it."""
    _PACKAGE.setLevel(logging.CRITICAL)


# --- in a notebook: one block below the cell, drawn anew as the run goes on -----------------------------------------

SHOWN_ROWS = 8


def in_notebook() -> bool:
    """Whether output goes to a notebook's cell. IPython on a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookConsole(Console):
    """Lines, a progress bar over all epochs, and the last rows of metrics.

    rich draws them, but IPython's display shows them: rich's own live display wants ipywidgets there.
    """

    def __init__(self) -> None:
        from rich.text import Text

        super().__init__(quiet=True)
        self.live = True
        self._handle: Any = importlib.import_module("IPython.display").display(Text("starting"), display_id=True)
        self._lines: list[str] = []
        self._rows: list[Row] = []
        self._progress_bar: RenderableType = ""

    def say(self, text: str) -> None:
        self._lines.append(text)
        self.draw(self._progress_bar)

    def draw(self, content: RenderableType) -> None:
        from rich.table import Table
        from rich.text import Text

        self._drawn, self._progress_bar = time.monotonic(), content
        block = Table.grid()
        for part in (
            *map(Text, self._lines),
            content,
            *([_epochs_table(self._rows[-SHOWN_ROWS:])] if self._rows else []),
        ):
            block.add_row(part)
        self._handle.update(block)

    def close(self) -> None:
        self.draw("")  # the bar goes, lines and rows stay

    def on_epoch(self, session: Session, row: Row) -> None:
        self._rows.append(row)
        epochs, steps = session.config.train.epochs, session.steps
        self.draw(self._progress(f"epoch {row['epoch']}/{epochs}", row["epoch"] * steps, epochs * steps))


def _epochs_table(rows: list[Row]) -> Table:
    from rich.table import Table

    cells = [epoch_cells(row) for row in rows]
    table = Table(*dict.fromkeys(name for row in cells for name in row), box=None)
    for row in cells:
        table.add_row(*(row.get(str(column.header), "–") for column in table.columns))
    return table
