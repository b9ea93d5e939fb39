"""Words and numbers as people read them: counts, names, sizes, values in error messages."""

from __future__ import annotations

import difflib
import re
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


# --- csv cells ------------------------------------------------------------------------------------------------------
# Cells of the csv files we write: quoted where necessary, and safe to open in a spreadsheet.
#
# A spreadsheet runs a cell that begins with = + - @ (or a tab or line break) as a formula, and names of labels and
# files come from outside. Such cells get an apostrophe in front, which marks text in a spreadsheet; numbers stay as
# they are. `unescape_formula` removes that apostrophe, and only that one.

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Cells that begin with apostrophes of their own get one more, so that reading removes only ours.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_GUARDED = re.compile(r"'+[=+\-@\t\r\n]")
_NAMES = re.compile(r"(?:[^\\|]|\\.)*", re.DOTALL)


def escape_formula(cell: str) -> str:
    """The cell as text that a spreadsheet does not run."""
    return "'" + cell if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def unescape_formula(cell: str) -> str:
    return cell[1:] if _GUARDED.match(cell) else cell


def csv_line(cells: Iterable[str]) -> bytes:
    """One row. Half characters (lone surrogates) have no UTF-8 and are written as \\udXXX."""
    # Not csv.writer: with "\n" as line end it does not quote "\r", which its own reader takes for a line end.
    safe = map(escape_formula, cells)
    quoted = ('"' + cell.replace('"', '""') + '"' if any(sign in cell for sign in ',"\r\n') else cell for cell in safe)
    return (",".join(quoted) + "\n").encode("utf-8", "backslashreplace")


def join_names(names: Sequence[str]) -> str:
    """cat|dog; a | or a backslash inside a name gets a backslash."""
    return "|".join(name.replace("\\", "\\\\").replace("|", "\\|") for name in names)


def split_names(cell: str) -> list[str]:
    if "\\" not in cell:  # nearly always, and a report reads a cell of each example
        return cell.split("|")
    names, at = [], 0
    while True:
        found = _NAMES.match(cell, at)
        assert found is not None  # it matches the empty string, too
        names.append(re.sub(r"\\(.)", r"\1", found.group(), flags=re.DOTALL))
        at = found.end() + 1
        if at > len(cell):
            return names


# --- without passwords, tokens and logins ---------------------------------------------------------------------------

HIDDEN = "***"
_SECRET = re.compile(r"token|secret|passw(or)?d|passphrase|api[-_]?key|credential|authorization", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def without_login(address: str) -> str:
    """https://name:password@host/ -> https://***@host/."""
    return _LOGIN.sub(f"{HIDDEN}@", address)


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """A command line whose values of --token X, --token=X, name.api_key=X and logins in addresses are hidden."""
    out: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = bool(_SECRET.search(name))
        if hide_next:
            out.append(HIDDEN)
        elif equals and secret:
            out.append(f"{name}={HIDDEN}")
        else:
            out.append(without_login(argument))
        hide_next = not hide_next and secret and not equals and argument.startswith("-")
    return out
