"""Limits on what a file may ask for."""

from __future__ import annotations

import os
from pathlib import Path

from crosel.errors import UserError
from crosel.utils.text import gib

MAX_LINE = 1 << 24  # bytes in a line of text; a longer one is no table
MAX_JSON = 1 << 30  # bytes in a JSON document, which is held as Python objects of about ten times the size


def memory_limit() -> int:
    """Bytes of memory that data may take: CROSEL_MEMORY_GB, or four fifths of this machine's memory."""
    given = os.environ.get("CROSEL_MEMORY_GB")
    if given:
        try:
            return int(float(given) * 2**30)
        except (ValueError, OverflowError):
            raise UserError(f"CROSEL_MEMORY_GB={given}: expected a number of GiB") from None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return 16 << 30


def check_bytes(count: int, what: str, place: object) -> None:
    """Refuse what would not fit into memory before it is allocated."""
    bound = memory_limit()
    if count > bound:
        raise UserError(
            f"{place}: {what} would take {gib(count)} of memory, more than the limit of {gib(bound)} "
            "(CROSEL_MEMORY_GB sets it)"
        )


def check_regular_file(path: Path) -> None:
    """Refuse pipes and devices, which may keep a reader waiting for ever or have no end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a plain file; pipes and devices are not read")
