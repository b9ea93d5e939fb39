"""What a person sees in a notebook while a run works: one block below the cell, drawn anew as the run goes on."""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

from crosel.utils.console import Console, epoch_cells

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from crosel.training.callbacks import Row
    from crosel.training.session import Session

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
            *([_epochs(self._rows[-SHOWN_ROWS:])] if self._rows else []),
        ):
            block.add_row(part)
        self._handle.update(block)

    def on_epoch(self, session: Session, row: Row) -> None:
        self._rows.append(row)
        epochs, steps = session.config.train.epochs, session.steps
        self.draw(self._progress(f"epoch {row['epoch']}/{epochs}", row["epoch"] * steps, epochs * steps))


def _epochs(rows: list[Row]) -> Table:
    from rich.table import Table

    cells = [epoch_cells(row) for row in rows]
    table = Table(*dict.fromkeys(name for row in cells for name in row), box=None)
    for row in cells:
        table.add_row(*(row.get(str(column.header), "–") for column in table.columns))
    return table
