"""Words and numbers as people read them: counts, names, sizes, values in error messages."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02d} min"


def gib(count: float) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.1f} MiB"


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


def quoted(value: object) -> str:
    """A value for an error message: quoted, on one line, not too long."""
    return repr(_cut(value if isinstance(value, str) else repr(value), 60))


def has_control_characters(text: str) -> bool:
    """Whether a text holds line breaks, other control characters or half characters."""
    return not text.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def one_line(error: object) -> str:
    """What another library or a server says, as a part of one of our lines."""
    return _cut(" ".join(str(error).split()) or type(error).__name__, 200)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
