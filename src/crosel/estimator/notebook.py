"""What a person sees in a notebook while a run goes on: one block below the cell, written anew as the run goes."""

from __future__ import annotations

import importlib
import sys
import time
from html import escape
from typing import Any

from crosel.training.callbacks import Row
from crosel.training.session import Session
from crosel.utils.console import Console, epoch_cells

SHOWN_ROWS = 8


def in_notebook() -> bool:
    """Whether output goes to a notebook's cell. IPython on a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookConsole(Console):
    """A progress bar over all epochs and the last rows of metrics, in the notebook's own display."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        display = importlib.import_module("IPython.display")
        self._html = display.HTML
        self._handle: Any = display.display(self._html("<p>starting</p>"), display_id=True)
        self._rows: list[Row] = []
        self._said: list[str] = []
        self._line = ""

    def say(self, text: str) -> None:
        self._said.append(text)
        self._show()

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        if time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            epochs = session.config.train.epochs
            self._line = _bar((epoch - 1 + step / session.steps) / epochs) + (
                f"epoch {epoch} of {epochs}, step {step} of {session.steps}, loss {loss:.4f}"
            )
            self._show()

    def on_epoch(self, session: Session, row: Row) -> None:
        self._rows.append(row)
        epochs = session.config.train.epochs
        self._line = _bar(row["epoch"] / epochs) + f"epoch {row['epoch']} of {epochs}"
        self._show()

    def _show(self) -> None:
        said = "".join(f"<p>{escape(text)}</p>" for text in self._said)
        self._handle.update(self._html(f"<div>{said}<p>{self._line}</p>{_table(self._rows[-SHOWN_ROWS:])}</div>"))


def _bar(share: float) -> str:
    return f'<progress value="{share:.4f}" max="1" style="width:16em;vertical-align:middle"></progress> '


def _table(rows: list[Row]) -> str:
    if not rows:
        return ""
    cells = [epoch_cells(row) for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{row.get(n, chr(8211))}</td>' for n in names)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
