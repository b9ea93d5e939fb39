"""The command line's view of what the package logs: plain lines on standard error. Modules log to a logger of their
own below "crosel": `info` for what a person wants to know, `warning` for what they should look at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from crosel.utils.console import Screen

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
