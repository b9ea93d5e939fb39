"""Drawing on a terminal by rich, which only those import who draw."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.live import Live


class _Terminal(Console):
    def show_cursor(self, show: bool = True) -> bool:
        return False  # it is never hidden: a killed run could not bring it back


def live_display(stream: Any) -> Live:
    """What is drawn there goes away at the end. It is drawn when it is updated, not by a thread."""
    terminal = _Terminal(file=stream, force_terminal=True, force_jupyter=False, markup=False, emoji=False)
    display = Live(
        console=terminal, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )  # fmt: skip
    display.start()
    return display
