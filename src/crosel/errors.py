"""The ways in which a command ends early, each with its exit code: `UserError` for everything a user can mend.
And the words that messages are made of, with `tell` for those that end nothing."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """Bad input, said in one or two plain lines that name the place and the remedy. Exit code 2."""


class Interrupted(Exception):  # noqa: N818  (not an error)
    """Ctrl-C or SIGTERM: the step was finished and the state saved. Exit code 130."""


class Diverged(RuntimeError):  # noqa: N818
    """The loss is no longer a finite number; the last checkpoint is good. Exit code 2."""

    ids: tuple[str, ...] = ()  # of the examples in the first bad batch


class RankLost(RuntimeError):  # noqa: N818
    """Another process of the same run has ended; the last checkpoint is good. Exit code 1."""


class RankZeroFailed(Exception):  # noqa: N818
    """The run ends because of what rank 0 has found and says; other ranks only take its exit code."""

    def __init__(self, code: int = 2) -> None:
        super().__init__(f"rank 0 ended the run with exit code {code}")
        self.code = code


def tell(text: str) -> None:
    """Say in a line what the user should know and what is no error. Going: modules log."""
    logging.getLogger("crosel").warning(text)


def counted(n: int, what: str) -> str:
    """1 class, 2 classes, 1,000 examples."""
    return f"{n:,} {what}{'' if n == 1 else 'es' if what.endswith('s') else 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """a, b, c and 5 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""


def choose_from(word: str, known: Iterable[str]) -> str:
    """Return what follows a word that is none of the known ones: the nearest of them, and all."""
    names = list(known)
    return f"{did_you_mean(word, names)}; choose from {', '.join(names)}"
